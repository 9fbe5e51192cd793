"""Advantages of groups from named rewards: imputation of missing rewards, weights, and scaling.

Axes: P groups (one prompt each), G generations of a prompt. The groups are those of a whole optimisation step, of all
its micro-batches and processes. Missing rewards are imputed with the group mean and logged as `missing/*`. A group
whose rewards are all equal has advantages of 0 and is counted.

Source: GRPO (DeepSeekMath, arXiv 2402.03300), GDPO (arXiv 2601.05242) for `normalize_then_sum`; option names are TRL's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

Scale = Literal["group", "batch", "none"]
Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]
NO_DIFFERENCE = 1e-6  # a smaller range of rewards is a rounding error
TINY = 1e-4  # added to a standard deviation, as in TRL
METEOR_SHARE, JUDGE_SHARE = 0.25, 0.75


@dataclass(frozen=True)
class Advantages:
    """Advantages of P groups of G generations."""

    values: np.ndarray
    """float64 (P, G); 0 in groups whose rewards do not differ."""
    rewards: np.ndarray
    """float64 (P, G), weighted sum of the terms; NaN in groups without any value of a term."""
    differ: np.ndarray
    """bool (P,), whether the rewards of the group differ."""
    below_noise: np.ndarray | None = None
    """bool (P,), whether they differ by less than their noise; None where no term has a known noise."""

    def of(self, groups: slice) -> "Advantages":
        """Those of some groups."""
        below = None if self.below_noise is None else self.below_noise[groups]
        return Advantages(self.values[groups], self.rewards[groups], self.differ[groups], below)


def caption_reward(meteor: np.ndarray, judge: np.ndarray) -> np.ndarray:
    """0.25 METEOR + 0.75 judge of P groups of G captions, each of one prompt: float (P, G) in [-0.75, 1].

    `meteor` is in [0, 1], `judge` in [-1, 1], NaN where missing: those are imputed with the mean of the group's other
    scores, and a group without any gets METEOR alone.
    """
    judged = _filled(judge)
    return np.where(np.isnan(judged), meteor, METEOR_SHARE * meteor + JUDGE_SHARE * judged)


def group_advantages(
    terms: Mapping[str, np.ndarray],
    weights: Mapping[str, float],
    how: Aggregation = "sum_then_normalize",
    scale: Scale = "group",
    floor: float = 0.05,
    noise: Mapping[str, np.ndarray] | None = None,
) -> Advantages:
    """Advantages of P groups of G generations.

    A missing value (NaN) is imputed with the mean of the group's other values. If a group has no value of a term, the
    term contributes 0 to its advantages, and the group is left out of the batch's standard deviation.

    Args:
        terms: name -> float (P, G), NaN where missing.
        weights: of the terms.
        how: "sum_then_normalize" centres and scales the weighted sum; "normalize_then_sum" divides each term by the
            deviation in its group first, so that a term with a small range counts as much, and then the sum by its
            deviation over all groups.
        scale: divisor of the centred sum of "sum_then_normalize": the standard deviation of its group, of all groups,
            or none.
        floor: smallest deviation of a group or of all groups' rewards, so that noise is not scaled up.
        noise: name -> float (P,), standard deviation of the errors of a term in each group (`ensemble_noise`), which is
            a floor for the group as well; None or no entry where it is unknown.

    Raises:
        ValueError: no term, shapes that differ, fewer than 2 generations, an infinite value, or a floor <= 0.
    """
    _check(terms, weights, floor)
    filled = {name: _filled(values) for name, values in terms.items()}
    weighted = [weights[name] * values for name, values in filled.items()]
    rewards, known = np.sum(weighted, axis=0), np.nansum(weighted, axis=0)
    errors = {name: (noise or {}).get(name, np.zeros(len(known))) for name in terms}
    error = np.sqrt(np.sum([(weights[name] * values) ** 2 for name, values in errors.items()], axis=0))
    if how == "sum_then_normalize":
        lowest, centred = np.maximum(floor, error)[:, None], known - known.mean(axis=1, keepdims=True)
        if scale == "group":
            centred = _scaled(known, lowest)
        elif scale == "batch":
            centred = centred / np.maximum(_deviation(known[whole_groups(rewards)]) + TINY, lowest)
        values = centred
    else:
        apart = {name: np.nan_to_num(values) for name, values in filled.items()}
        floors = {name: np.maximum(floor, values)[:, None] for name, values in errors.items()}
        full = np.sum([weights[name] * _scaled(values, 0.0) for name, values in apart.items()], axis=0)
        counted = np.any([whole_groups(values) for values in filled.values()], axis=0)
        centred = np.sum([weights[name] * _scaled(values, floors[name]) for name, values in apart.items()], axis=0)
        # without floors, or it would undo what they do to a group
        values = centred / (_deviation(full[counted]) + TINY)
    differ = np.ptp(centred, axis=1) > NO_DIFFERENCE
    below = known.std(axis=1, ddof=1) < error if noise else None
    return Advantages(np.where(differ[:, None], values, 0.0), rewards, differ, below)


def _scaled(values: np.ndarray, floor: float | np.ndarray) -> np.ndarray:
    """Values (P, G) minus their group's mean, divided by its deviation of at least `floor`, a number or (P, 1)."""
    deviation = values.std(axis=1, ddof=1, keepdims=True)
    return (values - values.mean(axis=1, keepdims=True)) / np.maximum(deviation + TINY, floor)


def _deviation(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if len(values) else 0.0


def _filled(values: np.ndarray) -> np.ndarray:
    """Values (P, G) with missing ones imputed by the mean of the group; a group without any value stays NaN."""
    present = ~np.isnan(values)
    count = present.sum(axis=1)
    means = np.where(present, values, 0.0).sum(axis=1) / np.where(count, count, np.nan)
    return np.where(present, values, means[:, None])


def ensemble_noise(members: np.ndarray) -> np.ndarray:
    """Standard deviation (P,) of the errors of rewards in each group, from those of K >= 2 members (P, G, K).

    It is that by which the members disagree on the differences within the group: what they have in common there, and
    that one of them gives all generations of the group more than another, does not count.
    """
    _, generations, count = members.shape
    apart = members - members.mean(axis=1, keepdims=True)
    apart = apart - apart.mean(axis=2, keepdims=True)
    return np.sqrt((apart**2).sum(axis=(1, 2)) / ((generations - 1) * (count - 1)))


def whole_groups(values: np.ndarray) -> np.ndarray:
    """bool (P,): groups of (P, G) values without a missing one."""
    return ~np.isnan(values).any(axis=1)


def _check(terms: Mapping[str, np.ndarray], weights: Mapping[str, float], floor: float) -> None:
    shapes = {values.shape for values in terms.values()}
    if len(shapes) != 1 or len(shape := shapes.pop()) != 2 or shape[1] < 2:
        raise ValueError(f"rewards: got shapes {[v.shape for v in terms.values()]}, expected one (P, G) with G >= 2")
    if floor <= 0:
        raise ValueError(f"reward floor is {floor}, expected more than 0")
    if unweighted := terms.keys() - weights.keys():
        raise ValueError(f"rewards {sorted(unweighted)} have no weight; give one for each")
    if infinite := [name for name, values in terms.items() if np.isinf(values).any()]:
        raise ValueError(f"reward {infinite[0]!r} is infinite; a reward must be a number, or NaN where it is missing")
