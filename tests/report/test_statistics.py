"""Intervals and the max-t test: closed forms, brute force, and how often they are wrong."""

from itertools import product

import numpy as np
import pytest
from scipy import stats

from rl_reward_network.report.statistics import (
    FLIPS,
    MIN_PATIENTS,
    RESAMPLED,
    Estimate,
    few_patients_note,
    group_means,
    is_no_gap,
    max_t,
    mean_interval,
    tail_probability,
)

NAMES = [f"p{index:02d}" for index in range(60)]


def test_each_patient_has_the_same_weight():
    values, groups = np.array([1.0, 1.0, 1.0, 0.0]), ["a", "a", "a", "b"]
    assert group_means(values, groups).tolist() == [1, 0]
    assert group_means(np.stack([values, 2 * values]), groups).tolist() == [[1, 0], [2, 0]]
    assert mean_interval(values, groups).mean == 0.5
    assert group_means(np.array([1.0, 2, 3]), ["b", "a", "b"]).tolist() == [2, 2], "in sorted order of the names"


def test_few_patients_have_students_interval():
    values = np.random.default_rng(0).normal(size=8)
    low, high = stats.t.interval(0.95, 7, values.mean(), values.std(ddof=1) / np.sqrt(8))
    estimate = mean_interval(values, NAMES[:8], seed=3)
    assert (estimate.low, estimate.high, estimate.groups) == (pytest.approx(low), pytest.approx(high), 8)


def test_many_patients_have_a_bootstrap_of_the_seed():
    values = np.random.default_rng(1).gamma(2, size=RESAMPLED)
    groups = NAMES[:RESAMPLED]
    tail = tail_probability(RESAMPLED)
    draws = np.random.default_rng(5).integers(RESAMPLED, size=(2000, RESAMPLED))
    expected = np.percentile(values[draws].mean(axis=1), (100 * tail, 100 - 100 * tail))
    estimate = mean_interval(values, groups, seed=5)
    np.testing.assert_allclose([estimate.low, estimate.high], expected)
    assert estimate == mean_interval(values, groups, seed=5) != mean_interval(values, groups, seed=6)
    assert tail == pytest.approx(
        stats.norm.cdf(stats.t.ppf(0.025, RESAMPLED - 1) * np.sqrt(RESAMPLED / (RESAMPLED - 1)))
    )


@pytest.mark.parametrize("patients", [7, 40])
def test_intervals_cover_the_mean_in_95_percent(patients):
    rng = np.random.default_rng(patients)
    found = [mean_interval(rng.normal(size=patients), NAMES[:patients], resamples=400) for _ in range(400)]
    assert np.mean([one.low <= 0 <= one.high for one in found]) == pytest.approx(0.95, abs=0.025)


def test_estimates_in_words():
    estimate = mean_interval(np.array([0.25, 0.75]), ["a", "a"])
    assert estimate == Estimate(0.5, None, None, 1)
    assert (str(estimate), estimate.signed) == ("0.500", "+0.500")
    assert str(Estimate(0.5, 0.25, 0.75, 2)) == "0.500 [0.250, 0.750]"
    assert Estimate(-0.5, -0.75, 0.25, 2).signed == "-0.500 [-0.750, +0.250]"


@pytest.mark.parametrize(
    ("low", "high", "groups", "sign"),
    [
        *((0.01, 0.05, 6, 1), (-0.05, -0.01, 6, -1), (-0.01, 0.05, 6, 0), (0.0, 0.2, 8, 0), (-0.2, 0.0, 8, 0)),
        *((0.01, 0.05, 5, 0), (None, None, 1, 0)),
    ],
)
def test_a_sign_needs_an_interval_beside_0_from_enough_patients(low, high, groups, sign):
    assert Estimate(0.0, low, high, groups).sign == sign


@pytest.mark.parametrize(
    ("gap", "none"),
    [
        (Estimate(0.004, 0.002, 0.009, 9), True),
        *((gap, False) for gap in (Estimate(0.005, 0.001, 0.01, 9), Estimate(0.0, 0.0, 0.0, 5), None)),
    ],
)
def test_no_gap_needs_a_limit_below_a_hundredth_from_enough_patients(gap, none):
    assert is_no_gap(gap) == none


def test_notes_on_few_patients():
    assert few_patients_note(20) == ()
    assert few_patients_note(19) == ("19 test patients, fewer than 20: the intervals are rough.",)
    assert "fewer than 6 allow no verdict" in few_patients_note(5, "validation patients")[0]
    assert few_patients_note(1) == ("Fewer than 2 test patients: there are no intervals.",)


@pytest.mark.parametrize(("values", "groups"), [([], []), ([1.0], ["a", "b"]), ([1.0, float("nan")], ["a", "b"])])
def test_values_without_a_group_or_a_number_are_refused(values, groups):
    with pytest.raises(ValueError, match="values: got"):
        mean_interval(np.array(values), groups)


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
    result = max_t(means, NAMES[:patients])
    np.testing.assert_allclose(result.p, brute_force(means))
    np.testing.assert_allclose(result.t, t_values(means))
    assert result.groups == patients


def test_one_row_of_many_patients_agrees_with_the_t_test_and_is_repeatable():
    gains = np.random.default_rng(3).normal(0.25, 1, (1, 60))
    p = max_t(gains, NAMES).p
    assert p == max_t(gains, NAMES).p == pytest.approx(stats.ttest_1samp(gains[0], 0).pvalue, abs=0.02)
    assert max_t(gains + 5, NAMES).p == pytest.approx(1 / (FLIPS + 1))  # never 0


def test_a_row_equal_to_its_reference_changes_nothing():
    gains = np.random.default_rng(1).normal(0.5, 0.5, (2, 8))
    with_equal = max_t(np.vstack([gains, np.zeros((1, 8)), np.full((1, 8), 1e-17)]), NAMES[:8])
    np.testing.assert_array_equal(with_equal.p[:2], max_t(gains, NAMES[:8]).p)
    np.testing.assert_array_equal(with_equal.p[2:], 1)
    np.testing.assert_array_equal(with_equal.t[2:], 0)
    same = max_t(np.full((1, 7), 0.1), NAMES[:7])
    assert same.p == 2 / 2**7, "equal gains of all patients are the clearest"
    assert same.t > 1e6


def test_a_row_with_a_missing_value_is_not_tested():
    gains = np.random.default_rng(2).normal(0.5, 0.5, (3, 9))
    expected = max_t(gains[::2], NAMES[:9]).p
    gains[1, 4] = np.nan
    result = max_t(gains, NAMES[:9])
    np.testing.assert_array_equal(result.p, [expected[0], np.nan, expected[1]])
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
    alone = min(max_t(row[None], NAMES[:8]).p[0] for row in rows)
    assert max_t(rows, NAMES[:8]).p.min() < 2 * alone < 5 * alone


def test_families_without_a_difference_are_rejected_in_five_percent():
    rng = np.random.default_rng(5)
    families = [rng.standard_t(3, 20) * 0.7 + rng.standard_t(3, (12, 20)) for _ in range(300)]
    rejected = np.mean([max_t(family, NAMES[:20]).p.min() <= 0.05 for family in families])
    assert 0.02 <= rejected <= 0.085
    one_by_one = [min(max_t(row[None], NAMES[:20]).p[0] for row in family) <= 0.05 for family in families[:60]]
    assert np.mean(one_by_one) > 0.2


@pytest.mark.parametrize(("count", "smallest"), [(1, 1), (5, 1 / 16), (6, 1 / 32)])
def test_too_few_patients_for_a_decision(count, smallest):
    best = max_t(np.linspace(0.1, 0.2, count)[None], NAMES[:count])
    assert best.p == smallest
    assert best.signs == [count >= MIN_PATIENTS]


@pytest.mark.parametrize(
    ("values", "groups"), [(np.empty((1, 0)), []), (np.ones((1, 2)), ["a"]), (np.ones(2), ["a", "b"])]
)
def test_what_is_no_table_of_differences_is_refused(values, groups):
    with pytest.raises(ValueError, match=r"values|differences"):
        max_t(values, groups)
