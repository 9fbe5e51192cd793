"""What validation chooses once the weights stand: the caution, the interval and the ascent's step size."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rl_reward_network.evaluation.agreement import agreement
from rl_reward_network.models.reward_network import NUMBERS, SPREAD_FLOOR, RewardNetwork, RewardNetworkConfig
from rl_reward_network.reward_training.masks import SEEN, SEGMENTER, RewardExample, source_masks, true_dice
from rl_reward_network.rewards import masks as true_numbers
from rl_reward_network.rewards.learned import ascend, judge_masks

CAUTIONS = (0.5, 1.0, 2.0)  # the reward is conservative in any case
EQUAL = 0.001  # score; differences of regret below it are noise
ASCENT_STEPS = 10
CLIMBERS = 3  # masks of an image that climb the score
STEP_SIZES = (0.05, 0.1, 0.2, 0.4)
COVERED = 0.9


class Judged(NamedTuple):
    """N validation masks: `predicted` (N, K, 4) and `true` (N, 4) numbers, and which image (N,) each belongs to."""

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
    """The same network with everything that validation chooses.

    Args:
        network: an ensemble; what was chosen for it before does not matter.
        examples: validation images, at least one.
        climbers: those that choose the ascent's step size, at least one.
        masks: damaged masks per image, of the seen families; the segmenter's are used besides.
        seed: of the damage.
    """
    judged, weights = judge_examples(network, examples, masks, seed), network.config.score_weights
    caution = choose_caution(judged.predicted @ weights, judged.true @ weights, judged.image_ids)
    interval = fit_interval(judged.predicted[..., 0], judged.true[:, 0])
    network = reconfigured(network, replace(network.config, caution=caution, interval=interval))
    return reconfigured(network, replace(network.config, ascent_step=choose_ascent_step(network, climbers, seed)))


def judge_examples(
    network: RewardNetwork, examples: Iterable[RewardExample], masks: int, seed: Sequence[int]
) -> Judged:
    """Predicted and true numbers of the segmenter's and the damaged masks of every example."""
    parts = []
    for index, example in enumerate(examples):
        stacks = source_masks(example, np.random.default_rng([*seed, index]), masks, (SEGMENTER, SEEN))
        stack = np.concatenate(list(stacks.values()))
        predicted = judge_masks(network, example.image, stack.astype(np.float32))["members"]
        parts.append(Judged(predicted, true_numbers_of(stack, example.truth), np.full(len(stack), index)))
    return Judged(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def choose_caution(scores: np.ndarray, true: np.ndarray, image_ids: np.ndarray) -> float:
    """The k whose conservative score loses least by taking its favourite mask of each image; of equals the largest.

    Args:
        scores: float (N, K), what each member predicts of the score, by default the Dice.
        true: float (N,), the true one.
        image_ids: (N,), which image each mask belongs to.
    """
    regrets = [agreement(scores.mean(1) - k * scores.std(1), true, image_ids)["top1_regret"] or 0.0 for k in CAUTIONS]
    return max(k for k, regret in zip(CAUTIONS, regrets, strict=True) if regret <= min(regrets) + EQUAL)


def fit_interval(dice: np.ndarray, true: np.ndarray) -> float:
    """Standard deviations between members' Dice (N, K) that hold 90 % of the true Dice (N,)."""
    return float(np.quantile(np.abs(dice.mean(1) - true) / half_width(dice, 1.0), COVERED))


def half_width(dice: np.ndarray, interval: float) -> np.ndarray:
    """Half width (N,) of the interval around the mean of members' Dice (N, K); a spread below 0.002 counts as that."""
    return interval * np.maximum(dice.std(1), SPREAD_FLOOR)


def dice_after_ascent(
    network: RewardNetwork, example: RewardExample, masks: np.ndarray, step_size: float
) -> np.ndarray:
    """True Dice (n,) of masks bool (n, H, W) after ten steps up the score."""
    *_, last = ascend(network, example.image, masks.astype(np.float32), step_size, ASCENT_STEPS)
    return true_dice(last > 0.5, example.truth)


def choose_ascent_step(network: RewardNetwork, examples: Iterable[RewardExample], seed: Sequence[int]) -> float:
    """The step size whose ten steps raise the most damaged masks, and of equals the one that raises them most."""
    gains = []
    for index, example in enumerate(examples):
        masks = source_masks(example, np.random.default_rng([*seed, index]), CLIMBERS, (SEEN,))[SEEN]
        before = true_dice(masks, example.truth)
        gains.append([dice_after_ascent(network, example, masks, size) - before for size in STEP_SIZES])
    gain = np.concatenate(gains, axis=1)  # (sizes, masks)
    ranks = list(zip((gain > 0).mean(axis=1), gain.mean(axis=1), STEP_SIZES, strict=True))
    return max(ranks)[-1]


def true_numbers_of(masks: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """The four true numbers of masks bool (n, H, W), float (n, 4)."""
    target = np.broadcast_to(truth, masks.shape)
    return np.stack([getattr(true_numbers, name)(masks, target) for name in NUMBERS], axis=1)


def reconfigured(network: RewardNetwork, config: RewardNetworkConfig) -> RewardNetwork:
    """The same weights under another config."""
    other = RewardNetwork(config, network.training_info)
    other.load_state_dict(network.state_dict())
    return other.to(next(network.parameters()).device).eval().requires_grad_(False)
