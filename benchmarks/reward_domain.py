"""A reward network as a judge: its own segmentation against the truth, other sizes of a picture, other data.

    python -m benchmarks.reward_domain NET ARCADE DCA1 STARE --images 30

NET is a folder best_reward_net. A folder of images with masks that the network was trained on gives its test patients,
others all images. Each row is one folder at one scale: images and masks are resized by the factor. "Inside" is the
share of the images in the network's domain; all other columns are of these. "Own" is the network's own segmentation,
"shifted" the true mask moved by a few pixels; "holds" is the share of the images whose 90 % interval, that of
the source of the mask, holds the true Dice ("-" where none can be given). The last line is of blank pictures.
"""

from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import tyro
from tqdm import tqdm

from benchmarks.common import show
from rl_reward_network.cli.app import run
from rl_reward_network.data.items import Sample, data_fingerprint
from rl_reward_network.data.splits import make_split, select, subsample
from rl_reward_network.inputs.loading import read_samples
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.reward_training.masks import OWN, SHIFTED, shift, true_dice, true_mask
from rl_reward_network.rewards.learned import ImageScorer

COLUMNS = ("inside", "own Dice", "predicted", "true mask predicted", "own above truth", "holds own", "holds shifted")


@dataclass(frozen=True)
class Args:
    """Measure a reward network on folders of images with masks."""

    reward_net: tyro.conf.Positional[Path]
    """Folder best_reward_net of step 1."""
    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of images with masks."""
    images: int = 30
    """At most this many of each."""
    scales: tuple[float, ...] = (1.0, 0.5, 2.0, 4.0)
    """Factors of the size."""


def main(args: Args) -> None:
    """Print the table in Markdown."""
    network = RewardNetwork.from_pretrained(args.reward_net)
    lines = []
    for folder in args.folders:
        samples = pick(network, folder, args.images)
        for scale in args.scales:
            rows = [measured(network, *resized(sample, scale)) for sample in tqdm(samples, f"{folder.name} x {scale}")]
            columns = np.array(rows, dtype=float).T  # over the images that have a value
            means = ("-" if np.isnan(column).all() else f"{np.nanmean(column):.3f}" for column in columns)
            lines.append((folder.name, f"{scale:g}", len(rows), *means))
    show(("images", "scale", "number", *COLUMNS), lines)
    side = network.config.domain.sides[1] if network.config.domain else 256
    blank = [ImageScorer(network, np.full((side, side, 3), grey, np.uint8)).outside for grey in range(0, 256, 51)]
    print(f"blank pictures outside the domain: {sum(map(bool, blank))} of {len(blank)}; {blank[-3]}")


def pick(network: RewardNetwork, folder: Path, count: int) -> list[Sample]:
    """Labelled samples: of test patients where the network was trained on the folder, else of all."""
    samples = [sample for sample in read_samples(folder) if sample.labelled]
    info = network.training_info
    if data_fingerprint(samples) == info.get("data_fingerprint"):
        samples = select(samples, make_split(samples, info["split_seed"]), "test")
    return subsample(samples, count, seed=0)


def resized(sample: Sample, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Image uint8 (H, W, 3) and true mask bool (H, W) of a sample at another size."""
    image, truth = sample.load_image(), true_mask(sample)
    if scale == 1:
        return image, truth
    size = round(truth.shape[1] * scale), round(truth.shape[0] * scale)
    how = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    return cv2.resize(image, size, interpolation=how), cv2.resize(truth.astype(np.float32), size) > 0.5


def measured(network: RewardNetwork, image: np.ndarray, truth: np.ndarray) -> list[float]:
    """`COLUMNS` of one image; NaN outside the domain."""
    scorer = ImageScorer(network, image)
    if scorer.outside:
        return [0.0, *[np.nan] * (len(COLUMNS) - 1)]
    masks = np.stack([scorer.own_mask, truth, shift(truth, np.random.default_rng(0))])
    quality, true = scorer.quality(masks.astype(np.float32)), true_dice(masks, truth)
    holds = []
    for source, place in ((OWN, 0), (SHIFTED, 2)):
        interval = network.config.intervals.get(source)
        if interval is None or interval.refusal:
            holds.append(np.nan)
            continue
        low, high = interval.around(quality["members"][[place], :, 0])[0]
        holds.append(float(low <= true[place] <= high))
    own, of_truth = quality["dice"][:2].tolist()
    return [1.0, float(true[0]), own, of_truth, float(own > of_truth), *holds]


if __name__ == "__main__":
    run(main, Args)
