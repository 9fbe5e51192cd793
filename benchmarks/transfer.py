"""Trained models, a reward network's own segmentation and their fusion, on their own data and on other data.

    python -m benchmarks.transfer ARCADE --models RUN0/merged RUN1/merged --reward_net NET --others DCA1 STARE

ARCADE and the others are folders with images and masks. On ARCADE the weight of the fusion is the one with the best
mean Dice over the validation images, and the rows are of the test images; on the other folders nothing is chosen, and
the rows are of all images. Soft masks are fused as means of their logits. Sa2VA squashes every image to one size, and
the plain segmenter does not: on other data it also has a row for images of the height that it was trained on. Intervals
are over groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import tyro
from tqdm import tqdm

from benchmarks.common import show
from rl_reward_network.cli.app import run
from rl_reward_network.grpo.inputs import open_grpo_inputs, validation_prompts
from rl_reward_network.grpo.prompts import TrainingItem
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.inputs.segmenter import Sa2VASegmenter, load_segmenter
from rl_reward_network.methods.methods import FUSION_WEIGHTS, fusion
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.report.statistics import CHANGE, UNIT, mean_interval
from rl_reward_network.rewards.learned import foreground_prob
from rl_reward_network.rewards.metrics import cldice, dice

NETWORK, MEAN, RESIZED = "plain segmenter", "mean of the models", "plain segmenter, images resized"


@dataclass(frozen=True)
class Args:
    """Measure all rows."""

    data_root: tyro.conf.Positional[Path]
    """Folder that the models and the network were trained on."""
    models: tuple[Path, ...]
    """Checkpoints, as `sa2va-rl merge` writes them."""
    reward_net: Path
    """Folder best_reward_net of step 1, trained on the same split."""
    others: tuple[Path, ...] = ()
    """Folders that nothing was trained on."""
    split_seed: int = 0
    """Of the split that they were trained on."""
    images: int | None = None
    """At most this many images of each set; by default all."""


def main(args: Args) -> None:
    """Print a table for each set of images."""
    segmenters = {str(path): load_segmenter(path, "cpu") for path in args.models}
    network = RewardNetwork.from_pretrained(args.reward_net)
    inputs = open_grpo_inputs(RunConfig(data_root=args.data_root, split_seed=args.split_seed, gpu=-1))
    prompts = [prompt for prompt in validation_prompts(inputs) if prompt.labelled][: args.images]
    val, height = soft_masks(segmenters, network, prompts, "val"), len(prompts[0].load()[0])
    weight = best_weight(val)
    print(f"weight of the plain segmenter in the fusion, chosen on {len(val.truths)} validation images: {weight}")
    for root in (args.data_root, *args.others):
        if root != args.data_root:
            inputs = open_grpo_inputs(RunConfig(data_root=root, gpu=-1))
        prompts = inputs.pick("test") if root == args.data_root else inputs.prompts
        prompts = [prompt for prompt in prompts if prompt.labelled][: args.images]
        found = soft_masks(segmenters, network, prompts, root.name)
        if root != args.data_root:
            found.rows[RESIZED] = [resized_prob(network, prompt.load()[0], height) for prompt in prompts]
        show_rows(root.name, found, weight)


@dataclass(frozen=True)
class SoftMasks:
    """Soft masks of N images.

    Args:
        rows: name -> N masks, float16 (H, W) in [0, 1].
        truths: N masks, bool (H, W).
        groups: of the images.
    """

    rows: dict[str, list[np.ndarray]]
    truths: list[np.ndarray]
    groups: list[str]


def soft_masks(
    segmenters: dict[str, Sa2VASegmenter], network: RewardNetwork, prompts: Sequence[TrainingItem], desc: str
) -> SoftMasks:
    """Of every model, of their mean if there are several, and of the network."""
    found = SoftMasks({name: [] for name in segmenters}, [], [])
    if len(segmenters) > 1:
        found.rows[MEAN] = []
    found.rows[NETWORK] = []
    for prompt in tqdm(prompts, desc, unit="image"):
        image, truth = prompt.load()
        assert truth is not None
        masks = {
            name: segmenter.upsample(segmenter.segment(image, [prompt.question]).mask_logits, image.shape[:2])[0]
            for name, segmenter in segmenters.items()
        }
        if MEAN in found.rows:
            masks[MEAN] = mean_in_logits(list(masks.values()))
        masks[NETWORK] = foreground_prob(network, image)
        for name, mask in masks.items():
            found.rows[name].append(mask.astype(np.float16))
        found.truths.append(truth)
        found.groups.append(prompt.group_id)
    return found


def resized_prob(network: RewardNetwork, image: np.ndarray, height: int) -> np.ndarray:
    """float32 (H, W) in [0, 1]: the network's map of an image uint8 (H, W, 3) that is resized to this height."""
    size = image.shape[:2]
    width = round(size[1] * height / size[0])
    how = cv2.INTER_AREA if height < size[0] else cv2.INTER_LINEAR
    prob = foreground_prob(network, cv2.resize(image, (width, height), interpolation=how))
    return cv2.resize(prob, size[::-1], interpolation=cv2.INTER_LINEAR)


def mean_in_logits(masks: Sequence[np.ndarray]) -> np.ndarray:
    """float (H, W): `fusion` of several soft masks with equal weights."""
    mean = masks[0]
    for count, mask in enumerate(masks[1:], 2):
        mean = fusion(mean, mask, 1 / count)
    return mean


def fused_rows(found: SoftMasks, weight: float) -> list[np.ndarray]:
    """The mean of the models, or the only one, fused with the network."""
    first = found.rows[MEAN] if MEAN in found.rows else next(iter(found.rows.values()))
    return [fusion(one, own, weight) for one, own in zip(first, found.rows[NETWORK], strict=True)]


def best_weight(found: SoftMasks) -> float:
    """The least weight with the best mean Dice."""
    means = {weight: scores(fused_rows(found, weight), found.truths)[0].mean() for weight in FUSION_WEIGHTS}
    return max(means, key=lambda weight: (means[weight], -weight))


def scores(masks: Sequence[np.ndarray], truths: Sequence[np.ndarray], lines: bool = False) -> np.ndarray:
    """float64 (1 or 2, N): Dice of each soft mask at 0.5, with `lines` also clDice."""
    metrics = (dice, cldice) if lines else (dice,)
    pairs = [((mask > 0.5)[None], truth[None]) for mask, truth in zip(masks, truths, strict=True)]
    return np.array([[float(metric(*pair)[0]) for pair in pairs] for metric in metrics])


def show_rows(name: str, found: SoftMasks, weight: float) -> None:
    """Print a table: means over groups, and differences to the plain segmenter."""
    rows = {**found.rows, f"fusion, weight {weight}": fused_rows(found, weight)}
    values = {row: scores(masks, found.truths, lines=True) for row, masks in rows.items()}
    lines = []
    for row, columns in values.items():
        less = mean_interval(columns[0] - values[NETWORK][0], found.groups, bounds=CHANGE).signed
        means = (mean_interval(column, found.groups, bounds=UNIT) for column in columns)
        lines.append((row, *means, "-" if row == NETWORK else less))
    show(("row", "Dice", "clDice", f"Dice less {NETWORK}"), lines, f"{name}: {len(found.truths)} images")


if __name__ == "__main__":
    run(main, Args)
