"""Scores and metrics of each prompt's mask on an image: the data of PPO and of the evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from rl_reward_network.artefacts import read_json, write_json
from rl_reward_network.data.items import Sample
from rl_reward_network.env.actions import action_masks
from rl_reward_network.env.observation import observe_image
from rl_reward_network.env.sa2va_finetune_env import PromptContext, prompt_rewards
from rl_reward_network.inputs.loading import RunInputs
from rl_reward_network.report.baselines import ridge_per_prompt
from rl_reward_network.report.metrics import SampleTable, measure_sample
from rl_reward_network.rewards.learned import ForegroundMaps
from rl_reward_network.rewards.metrics import dice
from rl_reward_network.rewards.table import RewardName

TABLES = "tables.json"  # in the folder of a run


@dataclass(frozen=True, eq=False)
class PromptTable:
    """One image: its features for the policy, and the metrics of its masks for the evaluation.

    Args:
        features: float32 (F,), from `observe_image`.
        table: score and metrics of every prompt's mask.
        own_dice: Dice of the reward network's foreground probability, thresholded at 0.5; None when unlabelled, or the
            true mask is empty.
    """

    features: np.ndarray
    table: SampleTable
    own_dice: float | None = None

    @property
    def context(self) -> PromptContext:
        """The image as a context of the environment."""
        return PromptContext(self.table.sample_id, self.features, self.table.scores, self.table.metrics or {})


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
    """
    bar = tqdm(samples, desc=desc, unit="image")
    return [_prompt_table(inputs, sample, maps, vision_features) for sample in bar]


def _prompt_table(inputs: RunInputs, sample: Sample, maps: ForegroundMaps, vision_features: bool) -> PromptTable:
    image = sample.load_image()
    answer = inputs.bank.answer(image)
    masks = action_masks(inputs.prompts, inputs.segmenter.upsample(answer.mask_logits, image.shape[:2]) > 0.5)
    scorer, truth = maps.scorer(image), sample.load_mask()
    scores = scorer.quality(masks.astype(np.float32))["score"]
    table = measure_sample(sample.sample_id, sample.group_id, scores, masks, truth)
    own_dice = (
        None if truth is None or not truth.any() else float(dice(scorer.foreground_prob[None] > 0.5, truth[None])[0])
    )
    return PromptTable(observe_image(image, answer.vision_features if vision_features else None), table, own_dice)


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
    if len(entries) < 2:
        raise ValueError(f"--shuffle_rewards: got {len(entries)} training image, expected 2 or more; leave it out")
    order = np.random.default_rng(seed).permutation(len(entries))
    donors = dict(zip(order.tolist(), np.roll(order, 1).tolist(), strict=True))
    return [replace(entries[donors[index]], features=entry.features) for index, entry in enumerate(entries)]


def save_tables(path: Path, tables: dict[str, list[PromptTable]]) -> None:
    """Write features, scores and metrics of each prompt on each image, by split; ids are hashes."""
    write_json(path, {name: [_to_json(entry) for entry in entries] for name, entries in tables.items()})


def load_tables(path: Path) -> dict[str, list[PromptTable]]:
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
        "scores": table.scores.tolist(),
        "own_dice": entry.own_dice,
        "metrics": {name: values.tolist() for name, values in table.metrics.items()} if table.metrics else None,
    }


def _from_json(entry: dict[str, Any]) -> PromptTable:
    metrics = entry["metrics"]
    table = SampleTable(
        entry["sample_id"],
        entry["group_id"],
        np.array(entry["scores"], dtype=np.float32),
        {name: np.array(values) for name, values in metrics.items()} if metrics else None,
    )
    return PromptTable(np.array(entry["features"], dtype=np.float32), table, entry["own_dice"])
