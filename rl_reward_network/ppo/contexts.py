"""What the prompt policy learns from: each image with the scores of its masks, as tables of a run and as contexts.

`contexts_from_run`, `contexts_from_model` and `contexts_from_masks` make contexts for the environment.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from rl_reward_network.atomic_io import read_json, write_json
from rl_reward_network.data.items import Sample
from rl_reward_network.env.observation import observe_image
from rl_reward_network.env.sa2va_finetune_env import PromptContext, prompt_rewards
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.inputs.loading import RunInputs, open_inputs
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.ppo.baselines import ridge_per_prompt
from rl_reward_network.ppo.stage import donors
from rl_reward_network.report.metrics import SampleTable, measure_sample
from rl_reward_network.reward_training.stage import check_no_leak
from rl_reward_network.rewards.learned import ForegroundMaps, in_domain
from rl_reward_network.rewards.metrics import dice
from rl_reward_network.rewards.table import IMAGE_REWARDS, RewardName

TABLES = "tables.json"  # in the folder of a run
Tables = dict[str, list["PromptTable"]]  # split -> its images


@dataclass(frozen=True, eq=False)
class PromptTable:
    """One image: its features for the policy, and the metrics of its masks for the evaluation.

    Args:
        features: float32 (F,), from `observe_image`.
        table: score and metrics of every prompt's mask.
        own_dice: Dice of the reward network's foreground probability, thresholded at 0.5; None when unlabelled, or the
            true mask is empty.
        image_rewards: name in `IMAGE_REWARDS` -> float64 (P,) in [0, 1], for each prompt's mask.
    """

    features: np.ndarray
    table: SampleTable
    own_dice: float | None = None
    image_rewards: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def context(self) -> PromptContext:
        """The image as a context of the environment."""
        rewards = {**self.image_rewards, **(self.table.metrics or {})}
        return PromptContext(self.table.sample_id, self.features, self.table.scores, rewards, self.table.group_id)


def prompt_tables(
    inputs: RunInputs, samples: list[Sample], maps: ForegroundMaps, desc: str, vision_features: bool
) -> list[PromptTable]:
    """Score the mask of each prompt on each sample by the reward network and, where labelled, by all metrics.

    Masks are binary, as in deployment.

    Args:
        inputs: prompts, frozen model and mask bank.
        samples: N samples.
        maps: of the reward network.
        desc: name of the progress bar.
        vision_features: whether the features include Sa2VA's pooled features.

    Raises:
        ValueError: no answer has a mask.
    """
    bar = tqdm(samples, desc=desc, unit="image")
    tables = [_prompt_table(inputs, sample, maps, vision_features) for sample in bar]
    inputs.bank.check_masks()
    return tables


def _prompt_table(inputs: RunInputs, sample: Sample, maps: ForegroundMaps, vision_features: bool) -> PromptTable:
    image = sample.load_image()
    answer = inputs.bank.answer(image)
    masks = inputs.segmenter.upsample(answer.mask_logits, image.shape[:2]) > 0.5
    scorer, truth = maps.scorer(image), sample.load_mask()
    scores = scorer.quality(masks.astype(np.float32))["score"]
    table = measure_sample(sample.sample_id, sample.group_id, scores, masks, truth)
    own_dice = None if truth is None or not truth.any() else float(dice(scorer.own_mask[None], truth[None])[0])
    features = observe_image(image, answer.vision_features if vision_features else None)
    return PromptTable(features, table, own_dice, {name: of(masks, image) for name, of in IMAGE_REWARDS.items()})


def ridge_choices(train: Sequence[PromptTable], new: Sequence[PromptTable], reward: RewardName) -> np.ndarray:
    """int64 (M,): `ridge_per_prompt` on `new`, fitted to the images, observations and rewards of PPO's training."""
    rewards = np.stack([prompt_rewards(entry.context, reward) for entry in train])
    features, new_features = (np.stack([entry.features for entry in part]) for part in (train, new))
    return ridge_per_prompt(features, rewards, new_features)


def exchange_rewards(entries: Sequence[PromptTable], seed: int) -> list[PromptTable]:
    """The same features, each with scores, metrics and `own_dice` of another image: a control, nothing can be learned.

    The mean reward of each prompt over all images stays the same.

    Args:
        entries: N images.
        seed: of the exchange.

    Raises:
        ValueError: there are fewer than 2 images.
    """
    pairs = zip(entries, donors(len(entries), seed), strict=True)
    return [replace(entries[donor], features=entry.features) for entry, donor in pairs]


def save_tables(path: Path, tables: Tables) -> None:
    """Write features, scores and metrics of each prompt on each image, by split; ids are hashes."""
    write_json(path, {name: [_to_json(entry) for entry in entries] for name, entries in tables.items()})


def load_tables(path: Path) -> Tables:
    """Read what `save_tables` wrote.

    Raises:
        ValueError: the file is missing or not of this form.
    """
    try:
        return {name: [_from_json(entry) for entry in entries] for name, entries in read_json(path).items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a table of scores ({error!r}); run step 2 again") from error


def _to_json(entry: PromptTable) -> dict[str, Any]:
    table = entry.table
    return {
        "sample_id": table.sample_id,
        "group_id": table.group_id,
        "features": entry.features.tolist(),
        "scores": [None if np.isnan(score) else score for score in table.scores.tolist()],
        "own_dice": entry.own_dice,
        "metrics": {name: values.tolist() for name, values in table.metrics.items()} if table.metrics else None,
        **{name: values.tolist() for name, values in entry.image_rewards.items()},
    }


def _from_json(entry: dict[str, Any]) -> PromptTable:
    metrics = entry["metrics"]
    table = SampleTable(
        entry["sample_id"],
        entry["group_id"],
        np.array(entry["scores"], dtype=np.float32),  # None is NaN
        {name: np.array(values) for name, values in metrics.items()} if metrics else None,
    )
    image_rewards = {name: np.array(entry[name]) for name in IMAGE_REWARDS if name in entry}  # runs before 0.15: none
    return PromptTable(np.array(entry["features"], dtype=np.float32), table, entry["own_dice"], image_rewards)


def contexts_from_model(config: RunConfig, reward_net: str | Path, images: int = 20) -> list[PromptContext]:
    """The contexts that step 2 would train on: Sa2VA's mask of each prompt, scored by a reward network.

    Images outside the network's domain are left out, with a warning.

    Masks and the network's maps are stored below the output folder, and read from there the next time.

    Args:
        config: model, data, output folder and device.
        reward_net: folder of a reward network that was trained on other patients of these data.
        images: most images of the split `policy`.

    Raises:
        ValueError: as `open_inputs`; the reward network is missing, or knows the patients.
    """
    inputs, network = open_inputs(config), RewardNetwork.from_pretrained(reward_net)
    check_no_leak(inputs.split, network, Path(reward_net), samples=inputs.samples)
    maps = ForegroundMaps.beside(config.output_dir / "contexts", network.to(config.device))
    samples = inputs.pick("policy", images)
    inside, check = in_domain(maps, (sample.load_image() for sample in samples))
    if check.outside:
        warnings.warn(check.sentence, stacklevel=2)
    samples = list(compress(samples, inside))
    return [entry.context for entry in prompt_tables(inputs, samples, maps, "scores", vision_features=True)]


def contexts_from_run(run_dir: str | Path, split: str = "policy") -> list[PromptContext]:
    """The contexts that a run of step 2 was trained (`policy`) or validated (`val`) on.

    Args:
        run_dir: run folder `sa2va_rl_finetune_<time>`; its tables.json is read, no model is loaded.
        split: `policy` or `val`.

    Raises:
        ValueError: tables.json is missing or damaged, or has no such split.
    """
    path = Path(run_dir) / TABLES
    tables = load_tables(path)
    if split not in tables:
        raise ValueError(f"split is {split!r}, expected one of {', '.join(tables)}, the splits in {path}")
    return [entry.context for entry in tables[split]]


def contexts_from_masks(
    images: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
    scores: Sequence[np.ndarray] | np.ndarray,
    truths: Sequence[np.ndarray | None] | None = None,
) -> list[PromptContext]:
    """Contexts of N images, each with P candidate masks, one per action.

    Args:
        images: N arrays uint8 (H, W, 3), RGB.
        masks: N arrays bool (P, H, W).
        scores: float (N, P) in [0, 1], the reward of each mask without labels.
        truths: N arrays bool (H, W), or None for an unlabelled image; without them all images are unlabelled.

    Returns:
        N contexts, whose `sample_id` are `image 0`, `image 1`, ...

    Raises:
        ValueError: shapes, dtypes or ranges do not fit; names the image.

    Example:
        >>> import gymnasium, numpy as np
        >>> from rl_reward_network.ppo.contexts import contexts_from_masks
        >>> rng = np.random.default_rng(0)
        >>> images = rng.integers(0, 256, (4, 64, 64, 3), dtype=np.uint8)
        >>> masks = rng.random((4, 3, 64, 64)) > 0.5  # of 3 prompts
        >>> contexts = contexts_from_masks(images, masks, scores=rng.random((4, 3)))
        >>> env = gymnasium.make("rl_reward_network/Sa2VAFinetune-v0", contexts=contexts)
        >>> observation, info = env.reset(seed=0)
        >>> observation, reward, terminated, truncated, info = env.step(2)
        >>> terminated, 0 <= reward <= 1
        (True, True)
    """
    truths = [None] * len(images) if truths is None else truths
    counts = {"images": len(images), "masks": len(masks), "scores": len(scores), "truths": len(truths)}
    if len(set(counts.values())) > 1:
        raise ValueError(f"lengths are {counts}, expected one mask array, score row and truth per image")
    names = [f"image {index}" for index in range(len(images))]
    for name, image, candidates in zip(names, images, masks, strict=True):
        if candidates.shape[1:] != image.shape[:2]:
            raise ValueError(
                f"{name}: masks: got {candidates.shape}; expected (P, H, W) of the image, {image.shape[:2]}"
            )
    contexts = []
    for name, image, candidates, row, truth in zip(names, images, masks, scores, truths, strict=True):
        table = measure_sample(name, name, np.asarray(row, dtype=np.float32), candidates, truth)
        contexts.append(replace(PromptTable(observe_image(image), table).context, image=image, masks=candidates))
    return contexts
