"""Tests of paired differences, patient by patient, and their correction for several comparisons."""

from collections.abc import Sequence

import numpy as np
from scipy import stats

from rl_reward_network.evaluation.bootstrap import group_means

FLIPS = 9999  # random sign flips; 2^13 is below, so that up to 13 patients are tested exactly


def sign_flip_p(differences: np.ndarray, groups: Sequence[str]) -> float:
    """Two-sided p-value of a sign-flip permutation test on the mean over patients.

    Under the null hypothesis the mean difference of each patient is as likely negative as positive. The test compares
    the mean over patients with its values under flipped signs: all of them for up to 13 patients, else 9,999 random
    ones of a fixed seed. The smallest possible value is 2 / 2^G, so that fewer than 6 patients never give p < 0.05.

    Args:
        differences: float (N,), one per image, such as a road's Dice less the base model's.
        groups: the patient of each image; G different ones.

    Returns:
        In (0, 1]; 1 for a single patient.

    Raises:
        ValueError: no differences, another number of groups, or a difference that is not finite.
    """
    means = group_means(differences, groups)
    if not np.isfinite(means).all():
        raise ValueError("differences: a value is not finite; leave out the images without a value in both roads")
    if len(means) == 1:
        return 1.0
    test = stats.permutation_test(
        (means,), np.mean, permutation_type="samples", n_resamples=FLIPS, vectorized=True, rng=np.random.default_rng(0)
    )
    return float(test.pvalue)


def holm(p: Sequence[float]) -> np.ndarray:
    """Holm-adjusted p-values: rejecting those below alpha keeps the chance of any false rejection below alpha.

    Args:
        p: m p-values in [0, 1]; may be empty.

    Returns:
        float64 (m,) in the order given: the largest of (m - k) p_(k), k = 0, 1, ..., over the p-values that are not
        larger, at most 1.

    Raises:
        ValueError: a value outside [0, 1].
    """
    values = np.asarray(p, dtype=np.float64)
    if not ((values >= 0) & (values <= 1)).all():
        raise ValueError(f"p: got {list(p)}; expected values in [0, 1]")
    order = np.argsort(values, kind="stable")
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(1, np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1)))
    return adjusted
