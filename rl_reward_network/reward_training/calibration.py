"""Calibration of a trained reward network on validation images: caution k, interval width and ascent step size."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rl_reward_network.evaluation.agreement import agreement
from rl_reward_network.models.reward_network import NUMBERS, SPREAD_FLOOR, RewardNetwork, RewardNetworkConfig
from rl_reward_network.reward_training.masks import SEEN, SEGMENTER, RewardExample, source_masks, true_dice
from rl_reward_network.rewards.learned import ImageScorer, predict_mask_quality
from rl_reward_network.rewards.table import MASK_REWARDS

CAUTIONS = (0.5, 1.0, 2.0)  # all above 0: the reward is always conservative
EQUAL = 0.001  # differences of regret below this count as noise
ASCENT_STEPS = 10
CLIMBERS = 3  # masks per image for the gradient ascent
STEP_SIZES = (0.05, 0.1, 0.2, 0.4)
COVERAGE = 0.9


class QualityTable(NamedTuple):
    """Numbers of N masks: `predicted` (N, K, 4) by each member, `true` (N, 4), and the index of their image (N,)."""

    predicted: np.ndarray
    true: np.ndarray
    image_ids: np.ndarray


def calibrated(
    network: RewardNetwork,
    examples: Iterable[RewardExample],
    climbers: Iterable[RewardExample],
    masks: int,
    seed: Sequence[int],
) -> RewardNetwork:
    """The same network with `caution`, `interval` and `ascent_step` chosen on validation images.

    Args:
        network: an ensemble; its previous values of the three fields are ignored.
        examples: validation images, at least one.
        climbers: validation images for the step size of the ascent, at least one.
        masks: damaged masks per image, of the families seen in training, beside the segmenter's masks.
        seed: seed of the damage.
    """
    table, weights = quality_table(network, examples, masks, seed), network.config.score_weights
    caution = choose_caution(table.predicted @ weights, table.true @ weights, table.image_ids)
    interval = fit_interval(table.predicted[..., 0], table.true[:, 0])
    network = reconfigured(network, replace(network.config, caution=caution, interval=interval))
    return reconfigured(network, replace(network.config, ascent_step=choose_ascent_step(network, climbers, seed)))


def quality_table(
    network: RewardNetwork, examples: Iterable[RewardExample], masks: int, seed: Sequence[int]
) -> QualityTable:
    """Predicted and true numbers of the segmenter's and of damaged masks of every example."""
    parts = []
    for index, example in enumerate(examples):
        stacks = source_masks(example, np.random.default_rng([*seed, index]), masks, (SEGMENTER, SEEN))
        stack = np.concatenate(list(stacks.values()))
        predicted = predict_mask_quality(network, example.image, stack.astype(np.float32))["members"]
        parts.append(QualityTable(predicted, true_numbers_of(stack, example.truth), np.full(len(stack), index)))
    return QualityTable(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def choose_caution(scores: np.ndarray, true: np.ndarray, image_ids: np.ndarray) -> float:
    """The k with the lowest top-1 regret of the conservative score; of equal ones the largest.

    Args:
        scores: float (N, K), score (by default Dice) predicted by each member.
        true: float (N,), true score.
        image_ids: (N,), image of each mask.
    """
    regrets = [agreement(scores.mean(1) - k * scores.std(1), true, image_ids)["top1_regret"] or 0.0 for k in CAUTIONS]
    return max(k for k, regret in zip(CAUTIONS, regrets, strict=True) if regret <= min(regrets) + EQUAL)


def fit_interval(dice: np.ndarray, true: np.ndarray) -> float:
    """Half width, in standard deviations between members' Dice (N, K), that covers 90 % of the true Dice (N,)."""
    return float(np.quantile(np.abs(dice.mean(1) - true) / half_width(dice, 1.0), COVERAGE))


def half_width(dice: np.ndarray, interval: float) -> np.ndarray:
    """Half width (N,) of the interval around the mean of members' Dice (N, K); a deviation is at least 0.002."""
    return interval * np.maximum(dice.std(1), SPREAD_FLOOR)


def dice_after_ascent(scorer: ImageScorer, truth: np.ndarray, masks: np.ndarray, step_size: float) -> np.ndarray:
    """True Dice (n,) of masks bool (n, H, W) after ten steps of gradient ascent on the score."""
    *_, last = scorer.ascend(masks.astype(np.float32), step_size, ASCENT_STEPS)
    return true_dice(last > 0.5, truth)


def choose_ascent_step(network: RewardNetwork, examples: Iterable[RewardExample], seed: Sequence[int]) -> float:
    """The step size that improves the Dice of the most damaged masks; of equal ones the one with the largest gain."""
    gains = []
    for index, example in enumerate(examples):
        masks = source_masks(example, np.random.default_rng([*seed, index]), CLIMBERS, (SEEN,))[SEEN]
        before, scorer = true_dice(masks, example.truth), ImageScorer(network, example.image)
        gains.append([dice_after_ascent(scorer, example.truth, masks, size) - before for size in STEP_SIZES])
    gain = np.concatenate(gains, axis=1)  # (sizes, masks)
    ranks = list(zip((gain > 0).mean(axis=1), gain.mean(axis=1), STEP_SIZES, strict=True))
    return max(ranks)[-1]


def true_numbers_of(masks: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """True Dice, IoU, precision and recall of masks bool (n, H, W), float (n, 4)."""
    target = np.broadcast_to(truth, masks.shape)
    return np.stack([MASK_REWARDS[name](masks, target) for name in NUMBERS], axis=1)


def reconfigured(network: RewardNetwork, config: RewardNetworkConfig) -> RewardNetwork:
    """A network with the same weights and another config."""
    other = RewardNetwork(config, network.training_info)
    other.load_state_dict(network.state_dict())
    return other.to(next(network.parameters()).device).eval().requires_grad_(False)
