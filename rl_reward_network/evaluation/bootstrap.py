"""How sure a mean is, and what it allows to say. Patients are drawn again, not images: one patient's are alike."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

RESAMPLES = 2000
NO_GAP = 0.01  # Dice; a gain of the oracle that is surely below this is not worth a policy
MIN_PATIENTS = 6  # the mean of 5 lies outside of all of them once in 16 times already: no 95 % interval from fewer


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


@dataclass(frozen=True)
class Verdict:
    """What the numbers allow to say: a label of a fixed list, and the sentence for the reader."""

    label: str  # better, worse, cannot tell, no gap, unlabelled
    sentence: str


def group_means(values: np.ndarray, groups: Sequence[str]) -> np.ndarray:
    """float64 (G,): the mean of the values (float (N,)) of each group, in sorted order of the groups' names."""
    if not len(values) or len(values) != len(groups):
        raise ValueError(f"values: got {len(values)} for {len(groups)} groups; give one group for each, at least one")
    _, index = np.unique(np.asarray(groups), return_inverse=True)
    return np.bincount(index, weights=values) / np.bincount(index)


def group_bootstrap(values: np.ndarray, groups: Sequence[str], seed: int = 0, resamples: int = RESAMPLES) -> Estimate:
    """The mean over patients, each patient with the same weight, and its 95 % bootstrap interval.

    The percentile bootstrap is too narrow for few patients; its percentiles are moved outwards as Student's t asks
    (Hesterberg, What Teachers Should Know about the Bootstrap, 2015: the expanded percentile interval).

    For a paired comparison give the differences, image by image. Equal seeds draw the same patients.

    Args:
        values: float (N,), one value per image; finite.
        groups: N names of patients.
        seed: of the resampling.
        resamples: how often the patients are drawn again, with replacement.

    Raises:
        ValueError: lengths that differ, no values, or values that are not finite.
    """
    if not np.isfinite(values).all():
        raise ValueError("values: got some that are not finite; a missing number must be left out, not averaged")
    means = group_means(values, groups)
    if len(means) < 2:
        return Estimate(float(means.mean()), None, None, len(means))
    draws = np.random.default_rng(seed).integers(len(means), size=(resamples, len(means)))
    tail = 100 * tail_probability(len(means))
    low, high = np.percentile(means[draws].mean(axis=1), (tail, 100 - tail)).tolist()
    return Estimate(float(means.mean()), low, high, len(means))


def tail_probability(count: int) -> float:
    """What to cut off at each end of the bootstrap means of `count` patients: below 0.025, and towards it for many."""
    return float(stats.norm.cdf(stats.t.ppf(0.025, count - 1) * np.sqrt(count / (count - 1))))


def is_no_gap(gap: Estimate | None) -> bool:
    """Whether the oracle's gain over the best fixed prompt is surely too small to be worth a policy.

    Args:
        gap: Dice of the oracle less Dice of the best fixed prompt on validation patients; None when unlabelled.
    """
    return gap is not None and gap.groups >= MIN_PATIENTS and gap.high is not None and gap.high < NO_GAP


def verdict_on(difference: Estimate | None, val_gap: Estimate | None, different_choices: int = 2) -> Verdict:
    """The verdict on a policy. Fewer than `MIN_PATIENTS` patients decide nothing: no resampling of them can.

    Args:
        difference: Dice of the policy less Dice of the best fixed prompt on test patients; None when unlabelled.
        val_gap: Dice of the oracle less Dice of the best fixed prompt on validation; None when that is unlabelled.
        different_choices: how many different prompts the policy chose on the test images.
    """
    if difference is None:
        return Verdict("unlabelled", "Unlabelled: no verdict. Without ground truth only the reward is known.")
    measured = f"PPO minus best fixed prompt on {difference.groups} test patients: {difference} Dice."
    if is_no_gap(val_gap):
        gap = f"on validation the best prompt for each image gains {val_gap} Dice over one prompt for all"
        return Verdict("no gap", f"No gap: {gap}, so one prompt is enough. {measured}")
    if difference.low is None or difference.high is None or difference.groups < MIN_PATIENTS:
        return Verdict("cannot tell", f"Cannot tell: fewer than {MIN_PATIENTS} test patients. {measured}")
    if difference.low > 0:
        how = "choosing the prompt per image helps"
        if different_choices == 1:
            how = "the one prompt this policy always chooses beats the one chosen on train"
        return Verdict("better", f"Better: {how}. {measured}")
    if difference.high < 0:
        return Verdict("worse", f"Worse: one prompt for all images is better than this policy. {measured}")
    return Verdict("cannot tell", f"Cannot tell: the interval holds 0. {measured}")


def plain_segmenter(own: np.ndarray, other: np.ndarray, groups: Sequence[str], what: str, than: str) -> str:
    """Whether the reward network's own segmentation would serve better: a note for the report.

    Args:
        own, other: Dice of N images, by the reward network itself and by `what`.
        groups: patient of each.
        what, than: how the other is called, beside its Dice and in the advice.
    """
    gain = group_bootstrap(own - other, groups, 0)
    advice = ""
    if gain.mean > 0:
        sure = gain.groups >= MIN_PATIENTS and gain.low is not None and gain.low > 0
        advice = f": a plain segmenter {'serves' if sure else 'may serve'} these images better than {than}"
    measured, others = (group_bootstrap(values, groups, 0) for values in (own, other))
    return f"The reward network's own segmentation of these images has Dice {measured}, {what} {others}{advice}."
