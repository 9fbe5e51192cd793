"""Calibration of a trained reward network on validation images: level, k, intervals, ascent's step size and domain."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize

from rl_reward_network.data.windows import LabelledImages
from rl_reward_network.models.domain import MOSTLY, Domain, Judged, fit_domain, map_statistics
from rl_reward_network.models.reward_network import (
    COVERAGE,
    MAX_HALF_WIDTH,
    MIDPOINTS,
    NUMBERS,
    STEEPEST,
    DiceInterval,
    LevelCurve,
    RewardNetwork,
    RewardNetworkConfig,
    interval_unit,
)
from rl_reward_network.report.metrics import agreement
from rl_reward_network.reward_training.masks import (
    DAMAGED,
    OWN,
    SEGMENTER,
    SOURCES,
    RewardExample,
    source_masks,
    true_dice,
)
from rl_reward_network.rewards.learned import ImageScorer
from rl_reward_network.rewards.table import MASK_REWARDS

KS = (0.5, 1.0, 2.0)  # of mean - k * std; all above 0: the reward is always conservative
EQUAL = 0.001  # differences of regret below this count as noise
ASCENT_STEPS = 10
CLIMBERS = 3  # masks per image for the gradient ascent
CLIMBING_IMAGES = 12  # of the validation images; they choose the ascent's step size, and their maps stay in memory
STEP_SIZES = (0.05, 0.1, 0.2, 0.4)
NEGATIVES = 60  # images of which the negatives are looked at
NEAR = 0.8  # Dice with the network's own segmentation from which a mask counts as one that shares its errors
NEAR_OWN = "the mask agrees with the network's own segmentation and shares its errors"
STARTS = ((1.0, 0.5), (4.0, 0.5), (4.0, 0.0), (1.0, -0.3), (1.0, 1.3))  # steepness and midpoint


class QualityTable(NamedTuple):
    """Numbers of N masks: `predicted` (N, K, 4) by each member and `true` (N, 4); image and source of each (N,)."""

    predicted: np.ndarray
    true: np.ndarray
    image_ids: np.ndarray
    sources: np.ndarray

    def where(self, rows: np.ndarray) -> "QualityTable":
        """The rows that are true in bool (N,)."""
        return QualityTable(*(column[rows] for column in self))


Climb = tuple[ImageScorer, np.ndarray, np.ndarray]  # an image, its truth (H, W), damaged masks bool (n, H, W) of it


def calibrated(
    network: RewardNetwork,
    examples: Iterable[RewardExample],
    groups: Sequence[str],
    masks: int,
    seed: Sequence[int],
    train_images: Sequence[np.ndarray] = (),
) -> RewardNetwork:
    """The same network with `level`, `caution`, `intervals`, `ascent_step` and `domain` fitted on validation images.

    The maps of each image are computed once. Masks of all sources take part, also of those that are not in training:
    masks that know the truth need a higher level than masks that do not, and one curve serves both. The network's own
    segmentation has an interval alone: it shares the network's errors, and no curve could correct that for it.

    The previous values of these fields are ignored. `groups` are the patients of the examples, `masks` the number of
    damaged masks per image and kind, beside the segmenter's. `train_images`, uint8 (H, W, 3), belong to the domain.
    """
    network = reconfigured(network, replace(network.config, level=(), intervals={}, domain=None))
    table, climbs, seen = measure(network, examples, masks, seed)
    level = fit_levels(table.where(table.sources != OWN))
    table = table._replace(predicted=levelled(level, table.predicted))
    others, weights = table.where(table.sources != OWN), network.config.score_weights
    k = choose_k(others.predicted @ weights, others.true @ weights, others.image_ids)
    intervals = fit_intervals(table, groups)
    network = reconfigured(network, replace(network.config, level=level, caution=k, intervals=intervals))
    domain = domain_of(network, [judged for _, judged in seen], [*(image for image, _ in seen), *train_images])
    return reconfigured(
        network, replace(network.config, ascent_step=choose_ascent_step(network, climbs), domain=domain)
    )


def domain_of(network: RewardNetwork, judged: Sequence[Judged], images: Sequence[np.ndarray]) -> Domain:
    """`fit_domain`, which looks at as many negatives of the images, uint8 (H, W, 3), as decide."""
    looked_at, negatives = images[:NEGATIVES], list[bool]()
    for one in looked_at:
        negatives.append(network.surer_of_negative(one, ImageScorer(network, one).probs))
        if sum(negatives) > (1 - MOSTLY) * len(looked_at):  # the rule is off, whatever the others are
            break
    return fit_domain(judged, images, negatives)


def with_own_domain(network: RewardNetwork, data: LabelledImages) -> RewardNetwork:
    """A segmenter with the domain of its training images, for one that no validation images have calibrated."""
    judged = []
    for image, truth in zip(data.images, data.truths, strict=True):
        probs = ImageScorer(network, image).probs
        judged.append(Judged(map_statistics(probs), float(probs.mean()), float(truth.mean())))
    return reconfigured(network, replace(network.config, domain=domain_of(network, judged, data.images)))


def measure(
    network: RewardNetwork, examples: Iterable[RewardExample], masks: int, seed: Sequence[int]
) -> tuple[QualityTable, list[Climb], list[tuple[np.ndarray, Judged]]]:
    """Numbers of the masks of every example, the first examples for the ascent, and what was seen in each image."""
    parts, climbs, seen = [], list[Climb](), []
    for index, example in enumerate(examples):
        scorer = ImageScorer(network, example.image)
        stacks = source_masks(example, np.random.default_rng([*seed, index]), masks, own=scorer.own_mask)
        stack = np.concatenate(list(stacks.values()))
        share = float(scorer.foreground_prob.mean())
        seen.append((example.image, Judged(map_statistics(scorer.probs), share, float(example.truth.mean()))))
        names = np.repeat(list(stacks), [len(found) for found in stacks.values()])
        predicted = scorer.quality(stack.astype(np.float32))["members"]
        true = true_numbers_of(stack, example.truth)
        parts.append(QualityTable(predicted, true, np.full(len(stack), index), names))
        if index < CLIMBING_IMAGES:
            climbs.append((scorer, example.truth, stacks[DAMAGED][:CLIMBERS]))
    return QualityTable(*(np.concatenate(column) for column in zip(*parts, strict=True))), climbs, seen


def fit_levels(table: QualityTable) -> tuple[LevelCurve, ...]:
    """The curves of the four numbers with the smallest absolute error; each source has the same weight."""
    counts = dict(zip(*np.unique(table.sources, return_counts=True), strict=True))
    weights = np.array([1 / counts[source] for source in table.sources])
    return tuple(fit_level(table.predicted[..., n], table.true[:, n], weights) for n in range(len(NUMBERS)))


def fit_level(predicted: np.ndarray, true: np.ndarray, weights: np.ndarray) -> LevelCurve:
    """The curve with the smallest weighted absolute error of the mean over members (N, K), each of them on the curve.

    Two parameters are fitted, so few masks suffice.
    """
    numbers = torch.from_numpy(predicted.astype(np.float64))

    def error(parameters: np.ndarray) -> float:
        return float((weights * np.abs(LevelCurve(*parameters)(numbers).mean(dim=1).numpy() - true)).sum())

    limits = ((0.05, STEEPEST), MIDPOINTS)
    fits = [minimize(error, start, method="Nelder-Mead", bounds=limits) for start in STARTS]
    return LevelCurve(*map(float, min(fits, key=lambda fit: fit.fun).x))


def levelled(level: Sequence[LevelCurve], predicted: np.ndarray) -> np.ndarray:
    """Predicted numbers (N, K, 4) at the level of these curves."""
    columns = [curve(torch.from_numpy(predicted[..., n])) for n, curve in enumerate(level)]
    return torch.stack(columns, dim=-1).numpy()


def fit_intervals(table: QualityTable, groups: Sequence[str]) -> dict[str, DiceInterval]:
    """The 90 % interval of the Dice of each source in the table; `groups` are the patients of its images."""
    patients = np.asarray(groups)[table.image_ids]
    return {
        source: fit_interval(table.predicted[rows, :, 0], table.true[rows, 0], patients[rows])
        for source in SOURCES
        if (rows := table.sources == source).any()
    }


def fit_interval(dice: np.ndarray, true: np.ndarray, patients: np.ndarray) -> DiceInterval:
    """The split conformal interval, by patient, of the true Dice (N,) for members' Dice (N, K).

    All patients have the same weight, and so has one more, whose error is unknown and counts as infinite. Below
    `MIN_PATIENTS` patients no finite interval follows; the largest error then stands for it, and it is not given out.

    The median error, like the level and the network's weights, is chosen on the same patients, so that the coverage
    of 90 % is not exact.

    Source: Lee, Barber and Willett, Distribution-free inference with hierarchical data, 2023.
    """
    _, index, counts = np.unique(patients, return_inverse=True, return_counts=True)
    errors, weights = (true - dice.mean(axis=1)) / interval_unit(dice), 1 / counts[index]

    def quantile(values: np.ndarray, share: float) -> float:
        return float(np.quantile(values, share, weights=weights, method="inverted_cdf"))

    middle = quantile(errors, 0.5)
    reach = quantile(np.abs(errors - middle), min(1.0, COVERAGE * (len(counts) + 1) / len(counts)))
    widest = DiceInterval(middle - reach, middle + reach, 0.5, len(counts))
    return replace(widest, half_width=float(np.median(np.diff(widest.around(dice))) / 2))


def given_interval(
    config: RewardNetworkConfig, scorer: ImageScorer, mask: np.ndarray, source: str = SEGMENTER
) -> tuple[float, float] | str:
    """Limits of the 90 % interval of the Dice of a mask bool (H, W) of a source, or why none can be given.

    A mask that agrees with the network's own segmentation shares its errors, whatever made it. Its interval contains
    that of the own segmentation, too.
    """
    if scorer.outside:
        return scorer.outside
    near = true_dice(mask[None], scorer.own_mask)[0] >= NEAR
    intervals = []
    for name in dict.fromkeys([source, OWN] if near else [source]):
        interval = config.intervals.get(name)
        if interval is None:
            return "none was fitted to masks of these weights, or to the network's own"
        if interval.refusal:
            return interval.refusal
        intervals.append(interval)
    dice = scorer.quality(mask[None].astype(np.float32))["members"][..., 0]
    limits = np.concatenate([interval.around(dice) for interval in intervals])
    low, high = float(limits[:, 0].min()), float(limits[:, 1].max())
    half_width = (high - low) / 2
    if len(intervals) > 1 and half_width > MAX_HALF_WIDTH:
        return f"{NEAR_OWN}: the half width would be {half_width:.3f}, more than {MAX_HALF_WIDTH} says too little"
    return low, high


def choose_k(scores: np.ndarray, true: np.ndarray, image_ids: np.ndarray) -> float:
    """The k with the lowest top-1 regret of the conservative score (N, K); of equal ones the largest."""
    regrets = [agreement(scores.mean(1) - k * scores.std(1), true, image_ids)["top1_regret"] or 0.0 for k in KS]
    return max(k for k, regret in zip(KS, regrets, strict=True) if regret <= min(regrets) + EQUAL)


def dice_after_ascent(scorer: ImageScorer, truth: np.ndarray, masks: np.ndarray, step_size: float) -> np.ndarray:
    """True Dice (n,) of masks bool (n, H, W) after ten steps of gradient ascent on the score."""
    *_, last = scorer.ascend(masks.astype(np.float32), step_size, ASCENT_STEPS)
    return true_dice(last > 0.5, truth)


def choose_ascent_step(network: RewardNetwork, climbs: Iterable[Climb]) -> float:
    """The step size that improves the Dice of the most damaged masks; of equal ones the one with the largest gain."""
    gains = []
    for scorer, truth, masks in climbs:
        before, scorer.network = true_dice(masks, truth), network  # its maps are those of the network when it was made
        gains.append([dice_after_ascent(scorer, truth, masks, size) - before for size in STEP_SIZES])
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
