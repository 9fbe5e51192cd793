"""Statistics over patients: intervals of means, and a test of several paired comparisons at once.

Patients count, not images: those of one patient are similar. Intervals and tests are about further patients of the same
kind. They do not cover what another training of the same model would change: for that, train with several seeds.

`max_t` makes a claim about a whole family of rows, each of which is a method less the same reference, image by image:
the chance that any row without a true difference gets p <= 0.05 is at most 5 %, however many rows there are and however
they depend on each other. The best of many rows may therefore be picked by its p-value or among those with p <= 0.05.

Sources: Hesterberg, What Teachers Should Know about the Bootstrap, 2015 (expanded percentile interval); Westfall and
Young, Resampling-Based Multiple Testing, 1993 (step-down max-t); Romano and Wolf, Exact and Approximate Stepdown
Methods for Multiple Hypothesis Testing, JASA 2005.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np
from scipy import special

RESAMPLES = 2000
RESAMPLED = 30  # patients from which the bootstrap makes the interval; below, Student's t, since it would be too narrow
INTERVALS = "95 % intervals over patients, which do not cover what another training would change"
FEW_PATIENTS = 20  # below, reports say that the intervals are rough
NO_GAP = 0.01  # Dice; if the oracle's gain is significantly below this, a policy is not worth training
MIN_PATIENTS = 6  # with 5, all values are on one side of the true mean in 1 of 16 cases: too many for 95 %
LEVEL = 0.05  # of every decision
FLIPS = 9999  # random sign flips; all of them, so that the test is exact, up to 13 patients: 2^13 is below
EQUAL = 1e-12  # root mean square of the differences below which a row equals its reference, but for rounding


@dataclass(frozen=True)
class Estimate:
    """A mean over patients with its 95 % interval; no interval (None) from fewer than 2 patients."""

    mean: float
    low: float | None
    high: float | None
    groups: int

    def __str__(self) -> str:
        """Three decimals, `0.812 [0.790, 0.834]`, or the mean alone."""
        return f"{self.mean:.3f}" if self.low is None else f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"

    @property
    def signed(self) -> str:
        """A difference: as above, every number with its sign."""
        return f"{self.mean:+.3f}" if self.low is None else f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"

    @property
    def sign(self) -> int:
        """1 or -1 if the interval of at least `MIN_PATIENTS` patients is above or below 0; else 0."""
        if self.low is None or self.high is None or self.groups < MIN_PATIENTS:
            return 0
        return (self.low > 0) - (self.high < 0)


def group_means(values: np.ndarray, groups: Sequence[str]) -> np.ndarray:
    """float64 (..., G): the mean of the values (float (..., N)) of each group, in sorted order of the groups' names."""
    values = np.asarray(values, dtype=np.float64)
    count = values.shape[-1] if values.ndim else 0
    if not count or count != len(groups):
        raise ValueError(
            f"values: got {count} for {len(groups)} groups, expected one group per value, and at least one"
        )
    _, index, counts = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    order = np.argsort(index, kind="stable")
    return np.add.reduceat(values[..., order], np.cumsum(counts) - counts, axis=-1) / counts


def mean_interval(values: np.ndarray, groups: Sequence[str], seed: int = 0, resamples: int = RESAMPLES) -> Estimate:
    """The mean over patients, each patient with the same weight, and its 95 % interval.

    The interval is Student's t of the patients' means below `RESAMPLED` patients, else their bootstrap, whose
    percentiles are moved outwards as in Student's t. For a paired comparison, pass the differences per image.

    Args:
        values: float (N,), one value per image; finite.
        groups: N names of patients.
        seed: of the resampling; without effect on Student's t. Equal seeds resample the same patients.
        resamples: number of resamples of the patients, with replacement.

    Raises:
        ValueError: the lengths differ, or there are no values or values that are not finite.
    """
    if not np.isfinite(values).all():
        raise ValueError("values: got NaN or infinity, expected finite numbers; leave missing values out")
    means = group_means(values, groups)
    count, mean = len(means), float(means.mean())
    if count < 2:
        return Estimate(mean, None, None, count)
    if count < RESAMPLED:
        half_width = float(special.stdtrit(count - 1, 0.975) * means.std(ddof=1) / np.sqrt(count))
        return Estimate(mean, mean - half_width, mean + half_width, count)
    tail = 100 * tail_probability(count)
    low, high = np.percentile(_resamples(count, seed, resamples) @ means, (tail, 100 - tail)).tolist()
    return Estimate(mean, low, high, count)


@lru_cache(maxsize=2)
def _resamples(count: int, seed: int, resamples: int) -> np.ndarray:
    """float64 (resamples, count): the weight of each patient in each resample; the rows of a table share them."""
    draws = np.random.default_rng(seed).integers(count, size=(resamples, count))
    places = draws + count * np.arange(resamples)[:, None]
    return np.bincount(places.ravel(), minlength=resamples * count).reshape(resamples, count) / count


def tail_probability(count: int) -> float:
    """Tail probability at each end of the bootstrap means of `count` patients; below 0.025, which is its limit."""
    return float(special.ndtr(special.stdtrit(count - 1, 0.025) * np.sqrt(count / (count - 1))))


def few_patients_note(patients: int, whose: str = "test patients") -> tuple[str, ...]:
    """A note for reports with intervals from these patients; () if there are enough."""
    if patients >= FEW_PATIENTS:
        return ()
    if patients < 2:
        return (f"Fewer than 2 {whose}: there are no intervals.",)
    verdict = f", and fewer than {MIN_PATIENTS} allow no verdict" if patients < MIN_PATIENTS else ""
    return (f"{patients} {whose}, fewer than {FEW_PATIENTS}: the intervals are rough{verdict}.",)


def is_no_gap(gap: Estimate | None) -> bool:
    """Whether the oracle's gain over the best fixed prompt is significantly below `NO_GAP`.

    Args:
        gap: Dice of the oracle less Dice of the best fixed prompt on validation patients; None when unlabelled.
    """
    return gap is not None and gap.groups >= MIN_PATIENTS and gap.high is not None and gap.high < NO_GAP


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


def plain_segmenter(network: np.ndarray, other: np.ndarray, groups: Sequence[str], what: str, than: str) -> str:
    """A note for the report: whether the reward network, used as a segmenter, is better than Sa2VA.

    Args:
        network: float (N,), Dice of the reward network's segmentation of each image; NaN where the true mask is empty:
            finding nothing there says little about a segmenter.
        other: float (N,), Dice of `what` on the same images.
        groups: patient of each image.
        what, than: name of the other segmentation, for its Dice and for the advice.
    """
    known = ~np.isnan(network)
    if not known.any():
        return "No true mask of these images has foreground: whether a plain segmenter is better cannot be told."
    groups = [group for group, is_known in zip(groups, known, strict=True) if is_known]
    network, other = network[known], other[known]
    left_out = "" if known.all() else f" ({(~known).sum()} with an empty true mask are left out)"
    gain = mean_interval(network - other, groups)
    advice = ""
    if gain.mean > 0:
        advice = f": a plain segmenter {'serves' if gain.sign > 0 else 'may serve'} these images better than {than}"
    network_dice, other_dice = (mean_interval(values, groups) for values in (network, other))
    return (
        f"The reward network's own segmentation of these images has Dice {network_dice}, {what} {other_dice}{advice}"
        f"{left_out}."
    )
