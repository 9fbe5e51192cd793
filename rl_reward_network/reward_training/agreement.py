"""How far a reward network can be trusted: predicted against true Dice on test patients, beside rows it must beat."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rl_reward_network.evaluation.agreement import Row, agreement, coverage
from rl_reward_network.evaluation.overlays import expected_errors
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.reward_training.baseline import Predictor
from rl_reward_network.reward_training.calibration import CLIMBERS, dice_after_ascent, half_width, true_numbers_of
from rl_reward_network.reward_training.masks import SOURCES, UNSEEN, RewardExample, source_masks, true_dice
from rl_reward_network.reward_training.sheet import SheetRow
from rl_reward_network.rewards.learned import judge_masks, truth_map

NETWORK, MEMBER, CAUTIOUS = "network", "one member", "conservative"
MEAN, POOLED = "the mean", "pooled CNN"


def judge_agreement(
    network: RewardNetwork,
    examples: Iterable[RewardExample],
    pooled: Predictor,
    mean: float,
    masks: int,
    seed: Sequence[int],
) -> dict[str, Any]:
    """Tables by source of masks, the interval's coverage, the ascent, and how well the network itself segments.

    Args:
        network: the ensemble, with what validation chose.
        examples: test images.
        pooled: the predecessor's design.
        mean: what "predict the mean" predicts.
        masks: damaged masks of each kind per image.
        seed: of the damage.

    Returns:
        `tables`: source -> row -> column of `agreement`; `coverage`: source, or all masks -> share of true Dice in the
        90 % interval; `ascent`: share of masks of the unseen damage that ten steps up the score raise, and their mean
        Dice before and after; `own_dice`: mean Dice of the truth map itself, cut at 0.5; `masks`: source -> number.
    """
    judged, climbs, own = [], [], []
    for index, example in enumerate(examples):
        stacks = source_masks(example, np.random.default_rng([*seed, index]), masks)
        sizes = [len(stack) for stack in stacks.values()]
        columns = _judge(network, pooled, mean, example, np.concatenate(list(stacks.values())))
        judged.append(columns | {"image": np.full(sum(sizes), index), "source": np.repeat(list(stacks), sizes)})
        climbs.append(_climb(network, example, stacks[UNSEEN][:CLIMBERS]))
        own.append(true_dice(truth_map(network, example.image)[None] > 0.5, example.truth))
    table = {name: np.concatenate([columns[name] for columns in judged]) for name in judged[0]}
    parts = {source: {k: v[table["source"] == source] for k, v in table.items()} for source in SOURCES}
    return {
        "tables": {source: _rows(part) for source, part in parts.items()},
        "coverage": {name: _coverage(part) for name, part in {"all masks": table, **parts}.items()},
        "masks": {source: len(part["true"]) for source, part in parts.items()},
        "ascent": _ascent(*np.concatenate(climbs, axis=1)),
        "own_dice": float(np.mean(own)),
    }


def sheet_rows(network: RewardNetwork, examples: Iterable[RewardExample], seed: Sequence[int]) -> list[SheetRow]:
    """One mask of each example, its source in turn, as the network sees it."""
    rows = []
    for index, example in enumerate(examples):
        source = SOURCES[index % len(SOURCES)]
        masks = source_masks(example, np.random.default_rng([*seed, index]), 1, (source,))[source]
        mask = masks[index // len(SOURCES) % len(masks)]
        dice = judge_masks(network, example.image, mask[None].astype(np.float32))["members"][..., 0]
        truth = truth_map(network, example.image)
        rows.append(
            SheetRow(
                example.image,
                mask,
                expected_errors(mask, truth),
                mask ^ example.truth,
                source,
                float(dice.mean()),
                float(half_width(dice, network.config.interval)[0]),
                float(true_dice(mask[None], example.truth)[0]),
            )
        )
    return rows


def _judge(
    network: RewardNetwork, pooled: Predictor, mean: float, example: RewardExample, masks: np.ndarray
) -> dict[str, np.ndarray]:
    """True Dice and every row's prediction of it, the true and the conservative score, the half width of the interval:
    float (n,) each.
    """
    found = judge_masks(network, example.image, masks.astype(np.float32))
    dice, true = found["members"][..., 0], true_numbers_of(masks, example.truth)
    return {
        "true": true[:, 0],
        "true score": true @ network.config.score_weights,
        NETWORK: dice.mean(axis=1),
        MEMBER: dice[:, 0],
        CAUTIOUS: found["score"],
        MEAN: np.full(len(masks), mean),
        POOLED: pooled(example.image, masks),
        "half width": half_width(dice, network.config.interval),
    }


def _rows(part: dict[str, np.ndarray]) -> dict[str, Row]:
    """One row per predictor: all predict the Dice, but the reward the score, which is the Dice by default."""
    true = {CAUTIOUS: part["true score"]}
    return {
        row: agreement(part[row], true.get(row, part["true"]), part["image"])
        for row in (NETWORK, MEMBER, CAUTIOUS, POOLED, MEAN)
    }


def _coverage(part: dict[str, np.ndarray]) -> float:
    """Share of true Dice inside the network's interval."""
    return coverage(part[NETWORK], part["half width"], part["true"])


def _climb(network: RewardNetwork, example: RewardExample, masks: np.ndarray) -> np.ndarray:
    """True Dice of n masks before and after the ascent, float (2, n)."""
    after = dice_after_ascent(network, example, masks, network.config.ascent_step)
    return np.stack([true_dice(masks, example.truth), after])


def _ascent(before: np.ndarray, after: np.ndarray) -> dict[str, float | None]:
    """What the ascent gained; masks that were right before cannot rise and do not count."""
    wrong = before < 1
    if not wrong.any():
        return {"raised": None, "dice_before": None, "dice_after": None}
    before, after = before[wrong], after[wrong]
    return {
        "raised": float((after > before).mean()),
        "dice_before": float(before.mean()),
        "dice_after": float(after.mean()),
    }
