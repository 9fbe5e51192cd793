"""How far a reward network can be trusted: predicted against true Dice on test patients, beside rows it must beat."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rl_reward_network.evaluation.agreement import agreement, coverage
from rl_reward_network.evaluation.reward_sheet import SheetRow
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.rewards.learned import judge_masks, truth_map
from rl_reward_network.training.reward_baseline import Predictor
from rl_reward_network.training.reward_calibration import CLIMBERS, dice_after_ascent, half_width
from rl_reward_network.training.reward_masks import SOURCES, UNSEEN, RewardExample, source_masks, true_dice

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
        network: the calibrated ensemble.
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
    columns: dict[str, list[dict[str, np.ndarray]]] = {source: [] for source in SOURCES}
    climbs, own = [], []
    for index, example in enumerate(examples):
        stacks = source_masks(example, np.random.default_rng([*seed, index]), masks)
        for source, stack in stacks.items():
            columns[source].append(
                _judge(network, pooled, mean, example, stack) | {"image": np.full(len(stack), index)}
            )
        climbers = stacks[UNSEEN][:CLIMBERS]
        after = dice_after_ascent(network, example, climbers, network.config.ascent_step)
        climbs.append(np.stack([true_dice(climbers, example.truth), after]))
        own.append(_own_dice(network, example))
    joined = {
        source: {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        for source, parts in columns.items()
    }
    before, after = np.concatenate(climbs, axis=1)
    return {
        "tables": {source: _table(column) for source, column in joined.items()},
        "coverage": {"all masks": _coverage(list(joined.values()))} | {s: _coverage([c]) for s, c in joined.items()},
        "masks": {source: len(column["true"]) for source, column in joined.items()},
        "ascent": {
            "raised": float((after > before).mean()),
            "dice_before": float(before.mean()),
            "dice_after": float(after.mean()),
        },
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
                np.where(mask, 1 - truth, truth),
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
    """True Dice and every row's prediction of it, float (n,) each, and the half width of the interval."""
    dice = judge_masks(network, example.image, masks.astype(np.float32))["members"][..., 0]  # (n, K)
    return {
        "true": true_dice(masks, example.truth),
        NETWORK: dice.mean(axis=1),
        MEMBER: dice[:, 0],
        CAUTIOUS: dice.mean(axis=1) - network.config.caution * dice.std(axis=1),
        MEAN: np.full(len(masks), mean),
        POOLED: pooled(example.image, masks),
        "half_width": half_width(dice, network.config.interval),
    }


def _coverage(columns: list[dict[str, np.ndarray]]) -> float:
    """Share of true Dice inside the network's interval, over the masks of some sources."""
    predicted, half, true = (np.concatenate([c[key] for c in columns]) for key in (NETWORK, "half_width", "true"))
    return coverage(predicted, half, true)


def _table(column: dict[str, np.ndarray]) -> dict[str, Any]:
    """One row per predictor."""
    return {
        row: agreement(column[row], column["true"], column["image"])
        for row in (NETWORK, MEMBER, CAUTIOUS, POOLED, MEAN)
    }


def _own_dice(network: RewardNetwork, example: RewardExample) -> float:
    """Dice of the network's own idea of the object."""
    return float(true_dice(truth_map(network, example.image)[None] > 0.5, example.truth)[0])
