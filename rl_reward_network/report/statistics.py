"""Statistics over patients: intervals of means, and the one test behind every verdict and every choice.

Patients count, not images: those of one patient are similar. Intervals and tests are about further patients of the same
kind. They do not cover what another training of the same model would change: for that, train with several seeds.

`max_t` makes a claim about a whole family of rows, each of which is a method less the same reference, image by image:
the chance that any row without a true difference gets p <= 0.05 is about 5 %, however many rows there are and however
they depend on each other. The best of many rows may therefore be picked by its p-value or among those with p <= 0.05.
Sign flips alone are wrong too often where few patients lose much, so p is the larger of theirs and of a bootstrap's.

Sources: Hesterberg, What Teachers Should Know about the Bootstrap, 2015 (bootstrap-t); Wilson, Probable Inference, JASA
1927 (shares); Westfall and Young, Resampling-Based Multiple Testing, 1993 (step-down max-t); Romano and Wolf, Exact and
Approximate Stepdown Methods for Multiple Hypothesis Testing, JASA 2005; Hanley and Lippman-Hand, JAMA 1983 (rule of
three).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress, product

import numpy as np

RESAMPLES = 2000  # of an interval
INTERVALS = "95 % intervals over patients, which do not cover what another training would change"
FEW_PATIENTS = 20  # below, reports say that the intervals are rough, and numbers have two decimals
NO_GAP = 0.01  # Dice; a smaller difference is negligible
RARE_GAP = 0.3  # Dice; a gap of a patient who is not among those seen
MIN_PATIENTS = 6  # with 5, all values are on one side of the true mean in 1 of 16 cases: too many for 95 %
LEVEL = 0.05  # of every decision
FLIPS = 9999  # random sign flips; all of them, so that the test is exact, up to 13 patients: 2^13 is below
DRAWS = 4999  # resamples of the test
EQUAL = 1e-12  # root mean square of the differences below which a row equals its reference, but for rounding
MOST_ERRORS = 5.0  # half width of an interval in standard errors; a Poisson mean of one event seen is within 4.6
Z = 1.959964  # 97.5 % of a normal distribution are below
FREE, UNIT, CHANGE = (-np.inf, np.inf), (0.0, 1.0), (-1.0, 1.0)  # of any mean, of Dice, of a difference of Dice


@dataclass(frozen=True)
class Estimate:
    """A mean over patients with its 95 % interval; no interval (None) from fewer than `MIN_PATIENTS` patients."""

    mean: float
    low: float | None
    high: float | None
    groups: int

    def __str__(self) -> str:
        """`0.812 [0.790, 0.834]`, or `0.81 [0.77, 0.85]` of few patients, or the mean alone: see `rounded`."""
        return self._words("")

    def point(self, sign: str = "") -> str:
        """The mean alone; `sign` is "+" or ""."""
        return rounded(self.mean, self.groups, sign)

    @property
    def signed(self) -> str:
        """A difference: as above, every number with its sign."""
        return self._words("+")

    def _words(self, sign: str) -> str:
        limits = [rounded(limit, self.groups, sign) for limit in (self.low, self.high) if limit is not None]
        return f"{self.point(sign)} [{', '.join(limits)}]" if limits else self.point(sign)


def rounded(value: float, patients: int, sign: str = "") -> str:
    """A mean over patients in words: with three decimals, or two below `FEW_PATIENTS`, who do not know a third one."""
    return f"{value:{sign}.{2 if patients < FEW_PATIENTS else 3}f}"


def group_means(values: np.ndarray, groups: Sequence[str]) -> np.ndarray:
    """float64 (..., G): means of values, float (..., N), by group in sorted order; NaN only if a group has no other."""
    values = np.asarray(values, dtype=np.float64)
    count = values.shape[-1] if values.ndim else 0
    if not count or count != len(groups):
        raise ValueError(
            f"values: got {count} for {len(groups)} groups, expected one group per value, and at least one"
        )
    _, index, counts = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    ordered = values[..., np.argsort(index, kind="stable")]
    known, starts = ~np.isnan(ordered), np.cumsum(counts) - counts
    sums = np.add.reduceat(np.where(known, ordered, 0), starts, axis=-1)
    numbers = np.add.reduceat(known.astype(float), starts, axis=-1)
    return np.divide(sums, numbers, out=np.full_like(sums, np.nan), where=numbers > 0)


def known_means(values: Sequence[float] | np.ndarray, groups: Sequence[str]) -> list[float]:
    """The means of the patients who have values, by whose mean weights are chosen; NaN are left out."""
    means = group_means(np.asarray(values), groups)
    return means[~np.isnan(means)].tolist()


def mean_interval(
    values: np.ndarray, groups: Sequence[str], seed: int = 0, bounds: tuple[float, float] = FREE
) -> Estimate:
    """The mean over patients, each patient with the same weight, and its 95 % interval.

    The interval is the bootstrap-t of the patients' means, within the bounds; Wilson's where all values are 0 or 1. For
    a paired comparison, pass the differences per image.

    `values` are finite, float (N,). Equal seeds resample the same patients. `bounds` are of any mean, such as `UNIT`
    for Dice and `CHANGE` for a difference.
    """
    values = np.asarray(values, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError("values: got NaN or infinity, expected finite numbers; leave missing values out")
    means = group_means(values, groups)
    if bounds == UNIT and np.isin(values, UNIT).all():
        return share_interval(float(means.mean()), len(means), len(means))
    return interval_of(means, seed, bounds)


def share_interval(share: float, groups: int, independent: float) -> Estimate:
    """A share of patients with Wilson's interval, as of so many independent patients."""
    if groups < MIN_PATIENTS:
        return Estimate(share, None, None, groups)
    middle = (share + Z**2 / (2 * independent)) / (1 + Z**2 / independent)
    half = Z * np.sqrt(share * (1 - share) / independent + (Z / (2 * independent)) ** 2) / (1 + Z**2 / independent)
    return Estimate(share, float(np.clip(middle - half, 0, share)), float(np.clip(middle + half, share, 1)), groups)


def interval_of(means: np.ndarray, seed: int = 0, bounds: tuple[float, float] = FREE) -> Estimate:
    """The bootstrap-t interval of the mean of one value per patient, float64 (G,); as in `mean_interval`.

    It reaches at most `MOST_ERRORS` standard errors: a resample may lack the one patient who differs.
    """
    count, mean = len(means), float(means.mean())
    if count < MIN_PATIENTS:
        return Estimate(mean, None, None, count)
    spread, t = _studentised(means[None], _resamples(count, seed, RESAMPLES))
    most = MOST_ERRORS / np.sqrt(count - 1)
    below, above = spread[0] * np.quantile(np.clip(t[:, 0], -most, most), (0.975, 0.025))
    low, high = max(mean - below, bounds[0]), min(mean - above, bounds[1])
    return Estimate(mean, float(min(low, mean)), float(max(high, mean)), count)


@lru_cache(maxsize=4)
def _resamples(count: int, seed: int, resamples: int) -> np.ndarray:
    """float64 (resamples, count): the share of each patient in each resample; the rows of a table share them."""
    return np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), resamples) / count


def _studentised(values: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of rows (m, G), NaN where unknown: their standard deviations, and the t of resamples about the observed means.

    With weights float64 (R, G) of `_resamples`: float64 (m,), and float64 (R, m), (mean of the resample - mean) /
    standard deviation of the resample, infinite where a resample repeats one value that is not the mean.
    """
    known = ~np.isnan(values)
    counts = known.sum(axis=1, keepdims=True)
    values = np.where(known, values, 0)
    offsets = np.where(known, values - values.sum(axis=1, keepdims=True) / counts, 0)
    offsets[np.abs(offsets) <= EQUAL * np.abs(values).max(axis=1, keepdims=True)] = 0  # rounding
    with np.errstate(divide="ignore", invalid="ignore"):
        share = weights @ known.T
        moved = weights @ offsets.T / share
        variance = weights @ (offsets**2).T / share - moved**2
        t = moved / np.sqrt(np.where(variance > EQUAL * moved**2, variance, 0))
    return np.sqrt((offsets**2).sum(axis=1) / counts[:, 0]), np.nan_to_num(t, nan=0.0, posinf=np.inf, neginf=-np.inf)


def few_patients_note(patients: int, whose: str = "test patients") -> tuple[str, ...]:
    """A note for reports on the means of these patients; () if there are enough for every interval."""
    if patients >= FEW_PATIENTS:
        return ()
    if patients < MIN_PATIENTS:
        return (f"{patients} {whose}, fewer than {MIN_PATIENTS}: there are no intervals, and no verdict is possible.",)
    return (f"{patients} {whose}, fewer than {FEW_PATIENTS}: the intervals are rough.",)


def rare_loss(patients: int) -> str:
    """The rule of three, for a sentence beside "better": what so many patients cannot show."""
    return f"a loss larger than any seen, in up to 3/{patients} of the patients, cannot be excluded"


def is_no_gap(gap: Estimate | None) -> bool:
    """Whether the oracle's gain in Dice over the best fixed choice is surely negligible; None when unlabelled.

    The interval must end below `NO_GAP`, and so must what the patients cannot show: a gap of `RARE_GAP` in up to 3/n of
    the patients (rule of three). So at least 91 patients are needed.
    """
    return gap is not None and gap.high is not None and max(gap.high, 3 / gap.groups * RARE_GAP) < NO_GAP


@dataclass(frozen=True, eq=False)
class MaxT:
    """The result of `max_t` for m rows, NaN where a difference is missing."""

    t: np.ndarray  # float64 (m,), of the patients' means; 0 where equal to the reference, infinite where all are alike
    p: np.ndarray  # float64 (m,) in (0, 1], adjusted for all rows
    groups: int  # number of patients

    @property
    def signs(self) -> np.ndarray:
        """int (m,): 1 or -1 where a row differs at `LEVEL`; 0 where nothing can be told."""
        return np.where(self.p <= LEVEL, np.sign(self.t), 0).astype(int)


def max_t(differences: np.ndarray, groups: Sequence[str]) -> MaxT:
    """Two-sided step-down max-t test of every row's mean over patients against 0, adjusted for all rows.

    A p-value is the larger of two, each adjusted for all rows. Sign flips: a patient's difference is as likely its
    negative; all flips of the patients are tried up to 13 patients, else `FLIPS` random ones. Bootstrap-t with equal
    tails: how far means of `DRAWS` resamples lie from the observed ones, so that skew counts. Seeds are fixed.

    Args:
        differences: float (m, N), of m rows on N images; m may be 0. NaN: the row has no value of this image.

    >>> gains = np.array([[0.02, 0.03, 0.02, 0.01, 0.02, 0.03, 0.01], [0.0] * 7])  # a method, and one equal to the base
    >>> max_t(gains, list("abcdefg")).p.round(3).tolist()
    [0.016, 1.0]
    """
    differences = np.asarray(differences, dtype=np.float64)
    if differences.ndim != 2:
        raise ValueError(f"differences: got {differences.ndim} axes, expected (rows, images)")
    means = group_means(differences, groups)  # (m, G)
    count = means.shape[1]
    tested = np.flatnonzero((~np.isnan(means)).any(axis=1))
    t, p = np.full((2, len(means)), np.nan)
    if len(tested):
        units = _units(np.nan_to_num(means[tested]))
        cosine, null = units.mean(axis=1), _flips(count) @ units.T / count
        known = (~np.isnan(means[tested])).sum(axis=1)
        of_known = cosine * np.sqrt(count / known)
        with np.errstate(divide="ignore", invalid="ignore"):  # t: mean / standard error, from the cosine
            t[tested] = np.where(known > 1, of_known * np.sqrt((known - 1) / np.maximum(1 - of_known**2, 0)), 0)
        of_flips = _step_down(np.abs(cosine), np.abs(null), exact=2**count <= FLIPS)
        p[tested] = np.maximum(of_flips, _bootstrap(means[tested]))
    return MaxT(t, p, count)


def max_t_of(differences: Mapping[str, np.ndarray], groups: Sequence[str]) -> dict[str, float]:
    """Row -> p-value of `max_t`, of the differences by row, float (N,)."""
    rows = np.reshape(list(differences.values()), (len(differences), len(groups)))
    return dict(zip(differences, max_t(rows, groups).p.tolist(), strict=True))


def sign_of(difference: np.ndarray, groups: Sequence[str]) -> int:
    """1 or -1 where one difference, float (N,), that belongs to no family is above or below 0 by `max_t`; else 0."""
    return int(max_t(np.asarray(difference)[None], groups).signs[0])


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


def _bootstrap(means: np.ndarray) -> np.ndarray:
    """float64 (m,): adjusted p-values of the bootstrap of means (m, G), equal-tailed.

    Rows that fewer than `MIN_PATIENTS` patients change have 0 and take no part: flips alone never give them 0.05 or
    less, and resamples without these patients would hide what the other rows show.
    """
    p = np.zeros(len(means))
    joins = np.flatnonzero((np.abs(np.nan_to_num(means)) > EQUAL).sum(axis=1) >= MIN_PATIENTS)
    if not len(joins):
        return p
    spread, null = _studentised(means[joins], _resamples(means.shape[1], 0, DRAWS))
    with np.errstate(divide="ignore"):
        observed = np.nanmean(means[joins], axis=1) / spread
    order = np.argsort(np.abs(observed), kind="stable")  # the least first
    observed, null = observed[order], null[:, order]
    above = (np.maximum.accumulate(null, axis=1) >= observed - 1e-9).sum(axis=0)
    below = (np.minimum.accumulate(null, axis=1) <= observed + 1e-9).sum(axis=0)
    of_row = np.minimum(1, 2 * (np.minimum(above, below) + 1) / (len(null) + 1))
    p[joins[order]] = np.maximum.accumulate(of_row[::-1])[::-1]
    return p


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
        other: float (N,), Dice of the other segmentation, called `what` for its Dice and `than` for the advice.
    """
    known = ~np.isnan(network)
    if not known.any():
        return "No true mask of these images has foreground: whether a plain segmenter is better cannot be told."
    groups = list(compress(groups, known))
    network, other = network[known], other[known]
    left_out = "" if known.all() else f" ({(~known).sum()} with an empty true mask are left out)"
    network_dice, other_dice = (mean_interval(values, groups, bounds=UNIT) for values in (network, other))
    advice = ""
    if network_dice.mean > other_dice.mean:
        serves = "serves" if sign_of(network - other, groups) > 0 else "may serve"
        advice = f": a plain segmenter {serves} these images better than {than}"
    return (
        f"The reward network's own segmentation of these images has Dice {network_dice}, {what} {other_dice}{advice}"
        f"{left_out}."
    )
