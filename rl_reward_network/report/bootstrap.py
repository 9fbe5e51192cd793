"""Confidence intervals of means over patients, and verdicts. Patients count, not images: those of one are similar.

The intervals are about further patients of the same kind. They do not cover what another training of the same model
would change: for that, train with several seeds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import special

RESAMPLES = 2000
RESAMPLED = 30  # patients from which the bootstrap makes the interval; below, Student's t, since it would be too narrow
INTERVALS = "95 % intervals over patients, which do not cover what another training would change"
FEW_PATIENTS = 20  # below, reports say that the intervals are rough
NO_GAP = 0.01  # Dice; if the oracle's gain is significantly below this, a policy is not worth training
MIN_PATIENTS = 6  # with 5, all values are on one side of the true mean in 1 of 16 cases: too many for 95 %


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


@dataclass(frozen=True)
class Verdict:
    """The conclusion from the numbers: a label of a fixed list, and a sentence."""

    label: str  # better, worse, cannot tell, no gap, unlabelled
    sentence: str


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

    Source: Hesterberg, What Teachers Should Know about the Bootstrap, 2015 (expanded percentile interval).

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


def verdict_on(difference: Estimate | None, val_gap: Estimate | None, rival: str = "", name: str = "PPO") -> Verdict:
    """The verdict on a policy: better only if it beats every single prompt on the test patients.

    Fewer than `MIN_PATIENTS` test patients are neither better nor worse.

    Args:
        difference: Dice of the policy less Dice of the best fixed prompt on test patients; None when unlabelled.
        val_gap: Dice of the oracle less Dice of the best fixed prompt on validation; None when that is unlabelled.
        rival: a single prompt that the policy does not beat on test patients, in words; empty if there is none.
        name: of the policy, in words.
    """
    if difference is None:
        return Verdict("unlabelled", "Unlabelled: no verdict. Without ground truth, only the reward is known.")
    measured = f"{name} minus best fixed prompt on {difference.groups} test patients: {difference} Dice."
    if is_no_gap(val_gap):
        gap = f"on validation, the best prompt of each image gains {val_gap} Dice over one prompt for all"
        return Verdict("no gap", f"No gap: {gap}, so one prompt is enough. {measured}")
    if difference.groups < MIN_PATIENTS:
        return Verdict("cannot tell", f"Cannot tell: fewer than {MIN_PATIENTS} test patients. {measured}")
    if difference.sign > 0 and rival:
        return Verdict("cannot tell", f"Cannot tell: it does not beat {rival}, one prompt for all images. {measured}")
    if difference.sign > 0:
        return Verdict("better", f"Better: choosing the prompt per image helps. {measured}")
    if difference.sign < 0:
        return Verdict("worse", f"Worse: one prompt for all images is better than this policy. {measured}")
    return Verdict("cannot tell", f"Cannot tell: the interval contains 0. {measured}")


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
