from itertools import product

import numpy as np
import pytest
from scipy import stats

from rl_reward_network.report.statistics import FLIPS, MIN_PATIENTS, max_t


def t_values(means):
    """t of each row of means (m, G), 0 for a row of zeros."""
    with np.errstate(invalid="ignore", divide="ignore"):
        t = means.mean(axis=1) / (means.std(axis=1, ddof=1) / np.sqrt(means.shape[1]))
    return np.where(np.abs(means).max(axis=1) == 0, 0, t)


def brute_force(means):
    """Step-down max-t by all sign flips, written from the definition."""
    observed = np.abs(t_values(means))
    null = [np.abs(t_values(means * np.array(flip))) for flip in product((1, -1), repeat=means.shape[1])]
    p, left, so_far = np.zeros(len(means)), list(range(len(means))), 0.0
    while left:
        top = max(left, key=lambda row: observed[row])
        so_far = max(so_far, np.mean([max(t[left]) >= observed[top] - 1e-9 for t in null]))
        p[top] = so_far
        left.remove(top)
    return p


@pytest.mark.parametrize("patients", [2, 3, 6, 9])
def test_few_patients_are_tested_exactly(patients):
    rng = np.random.default_rng(patients)
    means = rng.normal([[0.0], [0.8], [0.8], [-1.5]], 1, (4, patients))
    means[2] = means[1] + rng.normal(0, 0.1, patients)  # nearly the same method
    result = max_t(means, [f"p{index:02d}" for index in range(patients)])
    np.testing.assert_allclose(result.p, brute_force(means))
    np.testing.assert_allclose(result.t, t_values(means))
    assert result.groups == patients


def test_one_row_of_many_patients_agrees_with_the_t_test_and_is_repeatable():
    gains = np.random.default_rng(3).normal(0.25, 1, (1, 60))
    groups = list(range(60))
    p = max_t(gains, groups).p
    assert p == max_t(gains, groups).p == pytest.approx(stats.ttest_1samp(gains[0], 0).pvalue, abs=0.02)
    assert max_t(gains + 5, groups).p == pytest.approx(1 / (FLIPS + 1))  # never 0


def test_a_row_equal_to_its_reference_changes_nothing():
    gains = np.random.default_rng(1).normal(0.5, 0.5, (2, 8))
    with_equal = max_t(np.vstack([gains, np.zeros((1, 8)), np.full((1, 8), 1e-17)]), list("abcdefgh"))
    np.testing.assert_array_equal(with_equal.p[:2], max_t(gains, list("abcdefgh")).p)
    np.testing.assert_array_equal(with_equal.p[2:], 1)
    np.testing.assert_array_equal(with_equal.t[2:], 0)
    assert max_t(np.zeros((3, 20)), list("abcdefghijklmnopqrst")).p.tolist() == [1, 1, 1]


def test_equal_gains_of_all_patients_are_the_clearest():
    result = max_t(np.full((1, 7), 0.1), list("abcdefg"))
    assert result.p == 2 / 2**7
    assert result.t > 1e6


def test_a_row_with_a_missing_value_is_not_tested():
    gains = np.random.default_rng(2).normal(0.5, 0.5, (3, 9))
    expected = max_t(gains[::2], list("abcdefghi")).p
    gains[1, 4] = np.nan
    result = max_t(gains, list("abcdefghi"))
    np.testing.assert_array_equal(result.p, [expected[0], np.nan, expected[1]])
    assert np.isnan(result.t[1])
    assert result.signs[1] == 0


def test_patients_are_flipped_not_images():
    values = np.array([[0.3, 0.1, 0.2, -0.05, 0.4, 0.4, 0.4]])
    assert max_t(values, list("aabcddd")).p == brute_force(np.array([[0.2, 0.2, -0.05, 0.4]]))
    assert max_t(np.full((1, 9), 0.5), ["one"] * 9).p == 1
    assert max_t(np.empty((0, 3)), list("abc")).p.shape == (0,)


def test_nearly_equal_rows_cost_less_than_by_holm():
    rng = np.random.default_rng(0)
    gain = rng.normal(0.6, 0.5, 8)
    rows = np.stack([gain + rng.normal(0, 0.02, 8) for _ in range(5)])
    alone = min(max_t(row[None], list("abcdefgh")).p[0] for row in rows)
    assert max_t(rows, list("abcdefgh")).p.min() < 2 * alone < 5 * alone


def test_families_without_a_difference_are_rejected_in_five_percent():
    rng = np.random.default_rng(5)
    groups = list(range(20))
    worlds = [rng.standard_t(3, 20) * 0.7 + rng.standard_t(3, (12, 20)) for _ in range(300)]
    rejected = np.mean([max_t(world, groups).p.min() <= 0.05 for world in worlds])
    assert 0.02 <= rejected <= 0.085
    one_by_one = np.mean([min(max_t(row[None], groups).p[0] for row in world) <= 0.05 for world in worlds[:60]])
    assert one_by_one > 0.2


def test_too_few_patients_for_a_decision():
    for count, smallest in ((1, 1), (5, 1 / 16), (6, 1 / 32)):
        best = max_t(np.linspace(0.1, 0.2, count)[None], list(range(count)))
        assert best.p == smallest
        assert best.signs == [count >= MIN_PATIENTS]


def test_what_is_no_table_of_differences_is_refused():
    for values, groups in ((np.empty((1, 0)), []), (np.ones((1, 2)), ["a"]), (np.ones(2), ["a", "b"])):
        with pytest.raises(ValueError, match=r"values|differences"):
            max_t(values, groups)
