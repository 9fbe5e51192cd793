from itertools import product

import numpy as np
import pytest
from scipy import stats

from rl_reward_network.evaluation.paired import holm, sign_flip_p


def brute_force(means):
    """Share of all sign flips whose mean is at least as far from 0."""
    flips = np.array(list(product((1, -1), repeat=len(means))))
    return np.mean(np.abs((flips * means).mean(axis=1)) >= abs(np.mean(means)) - 1e-12)


@pytest.mark.parametrize("patients", [2, 3, 6, 11])
def test_few_patients_are_tested_exactly(patients):
    rng = np.random.default_rng(patients)
    for shift in (0, 0.5, 2):
        means = rng.normal(shift, 1, patients)
        assert sign_flip_p(means, [f"p{index:02d}" for index in range(patients)]) == pytest.approx(brute_force(means))


def test_gains_of_one_sign_have_the_smallest_value():
    for patients in (2, 5, 6, 10):
        groups = list(range(patients))
        gains = np.linspace(0.1, 0.2, patients)
        assert sign_flip_p(gains, groups) == sign_flip_p(-gains, groups) == pytest.approx(2 / 2**patients)


def test_patients_are_flipped_not_images():
    values = np.array([0.3, 0.1, 0.2, -0.05, 0.4, 0.4, 0.4])
    groups = ["a", "a", "b", "c", "d", "d", "d"]
    assert sign_flip_p(values, groups) == pytest.approx(brute_force(np.array([0.2, 0.2, -0.05, 0.4])))
    assert sign_flip_p(np.full(9, 0.5), ["one"] * 9) == 1
    assert sign_flip_p(np.zeros(8), list("abcdefgh")) == 1


def test_many_patients_agree_with_the_t_test_and_are_repeatable():
    means = np.random.default_rng(3).normal(0.25, 1, 60)
    groups = list(range(60))
    p = sign_flip_p(means, groups)
    assert p == sign_flip_p(means, groups)
    assert p == pytest.approx(stats.ttest_1samp(means, 0).pvalue, abs=0.02)
    assert sign_flip_p(means + 5, groups) == pytest.approx(2 / 10_000)  # never 0


def test_what_is_no_difference_is_refused():
    for values, groups in (([], []), ([0.1, 0.2], ["a"]), ([0.1, np.nan], ["a", "b"])):
        with pytest.raises(ValueError, match=r"values|differences"):
            sign_flip_p(np.array(values), groups)


def test_holm_by_hand():
    np.testing.assert_allclose(holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    np.testing.assert_allclose(holm([0.5, 0.9, 0.02]), [1, 1, 0.06])
    np.testing.assert_allclose(holm([0.2]), [0.2])
    assert holm([]).shape == (0,)


def test_holm_rejects_what_the_step_down_procedure_rejects():
    rng = np.random.default_rng(0)
    for _ in range(50):
        p, alpha = rng.random(6) ** 4, rng.uniform(0.01, 0.3)
        rejected = np.zeros(6, dtype=bool)
        for step, index in enumerate(np.argsort(p)):
            if p[index] > alpha / (6 - step):
                break
            rejected[index] = True
        np.testing.assert_array_equal(holm(p) <= alpha, rejected)


def test_holm_refuses_what_is_no_probability():
    for bad in ([0.1, 1.2], [-0.1], [np.nan]):
        with pytest.raises(ValueError, match=r"p: got .* expected values in \[0, 1\]"):
            holm(bad)
