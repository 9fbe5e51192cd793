"""Several paired comparisons at once: sign-flip max-t test over patients, with one error rate for the whole family.

Each row is a method less the same reference, image by image. A claim is made about the whole family: the chance that
any row without a true difference gets p <= 0.05 is at most 5 %, however many rows there are and however they depend on
each other. The best of many rows may therefore be picked by its p-value or among those with p <= 0.05.

Sources: Westfall and Young, Resampling-Based Multiple Testing, 1993 (step-down max-t); Romano and Wolf, Exact and
Approximate Stepdown Methods for Multiple Hypothesis Testing, JASA 2005.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np

from rl_reward_network.report.bootstrap import group_means

LEVEL = 0.05  # of every decision
FLIPS = 9999  # random sign flips; all of them, so that the test is exact, up to 13 patients: 2^13 is below
EQUAL = 1e-12  # root mean square of the differences below which a row equals its reference, but for rounding


@dataclass(frozen=True, eq=False)
class MaxT:
    """The result of `max_t` for m rows.

    Args:
        t: float64 (m,), one-sample t statistic of the patients' means; 0 where a row equals its reference, infinite
            where all patients have the same difference, NaN where a difference is missing.
        p: float64 (m,) in (0, 1], adjusted for all rows; NaN where a difference is missing.
        groups: number of patients G.
    """

    t: np.ndarray
    p: np.ndarray
    groups: int

    @property
    def signs(self) -> np.ndarray:
        """int (m,): 1 or -1 where a row differs at `LEVEL`; 0 where nothing can be told."""
        return np.where(self.p <= LEVEL, np.sign(self.t), 0).astype(int)


def max_t(differences: np.ndarray, groups: Sequence[str]) -> MaxT:
    """Two-sided step-down max-t test of every row's mean over patients against 0, adjusted for all rows.

    Under the null hypothesis, the differences of a patient are as likely the negative of what was measured, in all rows
    together. All sign flips of the patients are tried up to 13 patients, else `FLIPS` random ones of a fixed seed.

    Args:
        differences: float (m, N), of m rows on N images; m may be 0. A row with a NaN is not tested.
        groups: the patient of each image.

    Raises:
        ValueError: no images, or another number of groups or axes.

    >>> gains = np.array([[0.02, 0.03, 0.02, 0.01, 0.02, 0.03, 0.01], [0.0] * 7])  # a method, and one equal to the base
    >>> max_t(gains, list("abcdefg")).p.round(3).tolist()
    [0.016, 1.0]
    """
    differences = np.asarray(differences, dtype=np.float64)
    if differences.ndim != 2:
        raise ValueError(f"differences: got {differences.ndim} axes, expected (rows, images)")
    means = group_means(differences, groups)  # (m, G)
    count = means.shape[1]
    tested = np.flatnonzero(np.isfinite(means).all(axis=1))
    t, p = np.full((2, len(means)), np.nan)
    if len(tested):
        units = _units(means[tested])
        cosine, null = units.mean(axis=1), _flips(count) @ units.T / count
        t[tested] = _t_statistic(cosine, count)
        p[tested] = _step_down(np.abs(cosine), np.abs(null), exact=2**count <= FLIPS)
    return MaxT(t, p, count)


def _units(means: np.ndarray) -> np.ndarray:
    """float64 (m, G): each row divided so that its mean is the cosine between it and equal gains; zero rows stay 0.

    The t statistic is an increasing function of this cosine, the same one for all rows, since flips keep the length of
    a row. So the test on cosines is the test on t, without its 0 / 0 for a row that equals its reference.
    """
    length = np.sqrt((means**2).mean(axis=1, keepdims=True))
    return np.where(length > EQUAL, means / np.maximum(length, EQUAL), 0)


@lru_cache(maxsize=4)
def _flips(count: int) -> np.ndarray:
    """float64 (flips, count) of 1 and -1: all flips of `count` signs, or `FLIPS` random ones if there are more."""
    if 2**count > FLIPS:
        return np.random.default_rng(0).choice((1.0, -1.0), (FLIPS, count))
    return np.array(list(product((1.0, -1.0), repeat=count)))


def _t_statistic(cosine: np.ndarray, count: int) -> np.ndarray:
    """float64 (m,): mean / standard error of `count` patients, from the cosine."""
    with np.errstate(divide="ignore"):
        return cosine * np.sqrt((count - 1) / np.maximum(1 - cosine**2, 0)) if count > 1 else np.zeros_like(cosine)


def _step_down(observed: np.ndarray, null: np.ndarray, exact: bool) -> np.ndarray:
    """float64 (m,): adjusted p-values; each row is compared with the largest null value of it and all lesser rows."""
    order = np.argsort(-observed, kind="stable")
    largest = np.maximum.accumulate(null[:, order[::-1]], axis=1)[:, ::-1]
    reached = (largest >= observed[order] - 1e-9).sum(axis=0)
    p = np.empty(len(order))
    p[order] = np.maximum.accumulate(reached / len(null) if exact else (reached + 1) / (len(null) + 1))
    return p
