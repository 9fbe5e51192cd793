"""From named rewards of groups to advantages: missing values, weights, and the spread inside a group.

Axes: P groups (one prompt each), G generations of a prompt. A group tells the policy something only where its rewards
differ, so groups without spread get no advantage at all and are counted.

Source: GRPO (DeepSeekMath, arXiv 2402.03300), GDPO (arXiv 2601.05242) for `normalize_then_sum`; option names are TRL's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

Scale = Literal["group", "batch", "none"]
Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]
NO_SPREAD = 1e-6  # rewards that differ by rounding are equal
METEOR_SHARE, JUDGE_SHARE = 0.25, 0.75


@dataclass(frozen=True)
class Advantages:
    """What the policy learns from.

    Args:
        values: float64 (P, G); 0 in groups without spread.
        rewards: float64 (P, G), weighted sum of the terms; NaN in groups that miss one of them altogether.
        spread: bool (P,), whether the group tells anything.
        missing: term -> how many of its values were missing.
    """

    values: np.ndarray
    rewards: np.ndarray
    spread: np.ndarray
    missing: dict[str, int]


def caption_reward(meteor: np.ndarray, judge: np.ndarray) -> np.ndarray:
    """0.25 METEOR + 0.75 judge of P groups of G captions, each of one prompt.

    A missing score of the judge gets the mean of its group's other scores, never a 0; a group without any is paid by
    METEOR alone.

    Args:
        meteor: float (P, G) in [0, 1].
        judge: float (P, G) in [-1, 1], NaN where missing.

    Returns:
        float (P, G) in [-0.75, 1].
    """
    judged = _filled(judge)
    return np.where(np.isnan(judged), meteor, METEOR_SHARE * meteor + JUDGE_SHARE * judged)


def group_advantages(
    terms: Mapping[str, np.ndarray],
    weights: Mapping[str, float],
    how: Aggregation = "sum_then_normalize",
    scale: Scale = "group",
    floor: float = 0.05,
) -> Advantages:
    """Advantages of P groups of G generations.

    A missing value (NaN) gets the mean of its group's other values, so it neither helps nor harms; where a whole group
    misses a term, the term says nothing about that group, and the group nothing about the spread of all.

    Args:
        terms: name -> float (P, G), NaN where missing.
        weights: name -> weight of each term, in any unit.
        how: weigh and add the rewards and then subtract the mean and scale; or scale each term by itself first, so that
            a term with small numbers is heard as well.
        scale: what centred rewards are divided by: the standard deviation of their group, of all, or nothing.
        floor: the least that is divided by, so that a spread of noise is not blown up to one.

    Raises:
        ValueError: no term, shapes that differ, fewer than 2 generations, an infinite value, or a floor that is not
            positive.
    """
    _check(terms, weights, floor)
    filled = {name: _filled(values) for name, values in terms.items()}
    weighted = [weights[name] * values for name, values in filled.items()]
    rewards = np.sum(weighted, axis=0)
    if how == "sum_then_normalize":
        centred = _scaled(np.nansum(weighted, axis=0), whole_groups(rewards), scale, floor)
    else:
        apart = {name: _scaled(np.nan_to_num(own), whole_groups(own), scale, floor) for name, own in filled.items()}
        centred = np.sum([weights[name] * values for name, values in apart.items()], axis=0)
    spread = np.ptp(centred, axis=1) > NO_SPREAD
    missing = {name: int(np.isnan(values).sum()) for name, values in terms.items()}
    return Advantages(np.where(spread[:, None], centred, 0.0), rewards, spread, missing)


def whole_groups(values: np.ndarray) -> np.ndarray:
    """bool (P,): groups of (P, G) values none of which is missing."""
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


def _filled(values: np.ndarray) -> np.ndarray:
    """Missing values replaced by the mean of their group's others; NaN everywhere in a group that has none."""
    present = ~np.isnan(values)
    count = present.sum(axis=1)
    means = np.where(present, values, 0.0).sum(axis=1) / np.where(count, count, np.nan)
    return np.where(present, values, means[:, None])


def _scaled(values: np.ndarray, whole: np.ndarray, scale: Scale, floor: float) -> np.ndarray:
    """Values (P, G) less their group's mean, divided by a standard deviation (of a sample, as in TRL).

    That of all is taken over the `whole` (P,) groups alone.
    """
    centred = values - values.mean(axis=1, keepdims=True)
    if scale == "none":
        return centred
    deviation = values.std(axis=1, ddof=1, keepdims=True) if scale == "group" else _spread(values[whole])
    return centred / np.maximum(deviation, floor)


def _spread(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if len(values) else 0.0
