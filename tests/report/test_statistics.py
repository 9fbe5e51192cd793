"""Intervals and the max-t test: closed forms, brute force, and how often they are wrong."""

from itertools import product

import numpy as np
import pytest
from scipy import stats

from rl_reward_network.report import statistics
from rl_reward_network.report.statistics import (
    CHANGE,
    DRAWS,
    FLIPS,
    FREE,
    MIN_PATIENTS,
    UNIT,
    Estimate,
    few_patients_note,
    group_means,
    is_no_gap,
    max_t,
    mean_interval,
)

NAMES = [f"p{index:02d}" for index in range(60)]


def test_each_patient_has_the_same_weight():
    values, groups = np.array([1.0, 1.0, 1.0, 0.0]), ["a", "a", "a", "b"]
    assert group_means(values, groups).tolist() == [1, 0]
    assert group_means(np.stack([values, 2 * values]), groups).tolist() == [[1, 0], [2, 0]]
    assert mean_interval(values, groups).mean == 0.5
    assert group_means(np.array([1.0, 2, 3]), ["b", "a", "b"]).tolist() == [2, 2], "in sorted order of the names"


def test_an_interval_is_the_bootstrap_t_of_the_seed():
    values, groups = np.random.default_rng(1).gamma(2, size=30), NAMES[:30]
    weights = np.random.default_rng(5).multinomial(30, np.full(30, 1 / 30), 2000) / 30
    samples = [np.repeat(values, np.rint(30 * of).astype(int)) for of in weights]
    t = [(sample.mean() - values.mean()) / sample.std() for sample in samples]
    estimate = mean_interval(values, groups, seed=5)
    expected = values.mean() - values.std() * np.quantile(t, (0.975, 0.025))
    np.testing.assert_allclose([estimate.low, estimate.high], expected)
    assert estimate == mean_interval(values, groups, seed=5) != mean_interval(values, groups, seed=6)


def beta(rng, patients):
    return rng.beta(9.1, 0.9, patients)


WORLDS = {  # values of patients, their true mean, and the bounds
    "normal": (lambda rng, patients: rng.normal(size=patients), 0, FREE),
    "Dice": (beta, 0.91, UNIT),
    "Dice with zeros": (lambda rng, n: np.where(rng.random(n) < 0.3, 0, beta(rng, n)), 0.7 * 0.91, UNIT),
    "share": (lambda rng, n: (rng.random(n) < 0.9).astype(float), 0.9, UNIT),
    "lognormal losses": (lambda rng, n: 0.05 * (np.exp(0.5) - rng.lognormal(size=n)), 0, CHANGE),
    "pixels": (lambda rng, n: 10 * rng.lognormal(size=n), 10 * np.exp(0.5), (0, np.inf)),
}


@pytest.mark.parametrize("patients", [7, 12, 40])
@pytest.mark.parametrize("world", WORLDS)
def test_intervals_cover_the_mean_and_stay_within_bounds(world, patients, monkeypatch):
    draw, mean, bounds = WORLDS[world]
    monkeypatch.setattr(statistics, "RESAMPLES", 400)
    rng = np.random.default_rng(patients)
    found = [mean_interval(draw(rng, patients), NAMES[:patients], bounds=bounds) for _ in range(300)]
    assert np.mean([one.low <= mean <= one.high for one in found]) >= 0.84, "Student's t: from 46 %"
    assert all(bounds[0] <= one.low <= one.mean <= one.high <= bounds[1] for one in found)


def test_a_share_has_wilsons_interval():
    found = mean_interval(np.array([1.0] * 9 + [0.0]), NAMES[:10], bounds=UNIT)
    expected = stats.binomtest(9, 10).proportion_ci(method="wilson")
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-6)
    assert mean_interval(np.ones(8), NAMES[:8], bounds=UNIT).low < 0.7, "eight successes are not all"


def test_one_patient_who_differs_does_not_make_an_interval_endless():
    found = mean_interval(np.array([0.0] * 19 + [-0.5]), NAMES[:20])
    assert found.low == pytest.approx(-0.025 - 5 * 0.025), "five standard errors"


def test_estimates_in_words():
    estimate = mean_interval(np.array([0.25, 0.75]), ["a", "a"])
    assert estimate == Estimate(0.5, None, None, 1)
    assert (str(estimate), estimate.signed, estimate.point()) == ("0.50", "+0.50", "0.50")
    assert str(Estimate(0.5, 0.25, 0.75, 20)) == "0.500 [0.250, 0.750]"
    assert Estimate(-0.5, -0.75, 0.25, 20).signed == "-0.500 [-0.750, +0.250]"
    few = Estimate(0.0625, -0.004, 0.75, 19)
    assert (str(few), few.signed, few.point("+")) == ("0.06 [-0.00, 0.75]", "+0.06 [-0.00, +0.75]", "+0.06")
    assert mean_interval(np.linspace(0, 1, 5), NAMES[:5]).low is None, "five patients have no interval"


@pytest.mark.parametrize(
    ("gap", "none"),
    [
        (Estimate(0.004, 0.002, 0.009, 91), True),
        (Estimate(0.0, 0.0, 0.0, 90), False),  # 3 of 90 patients may have a gap of 0.3
        (Estimate(0.005, 0.001, 0.01, 200), False),
        *((gap, False) for gap in (Estimate(0.0, None, None, 5), None)),
    ],
)
def test_no_gap_needs_a_small_limit_and_patients_who_could_show_a_rare_gap(gap, none):
    assert is_no_gap(gap) == none


def test_notes_on_few_patients():
    assert few_patients_note(20) == ()
    assert few_patients_note(19) == ("19 test patients, fewer than 20: the intervals are rough.",)
    assert few_patients_note(5, "validation patients") == (
        "5 validation patients, fewer than 6: there are no intervals, and no verdict is possible.",
    )


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


def brute_force_bootstrap(means, draws=4999):
    """Equal-tailed step-down bootstrap-t, written from the definition, by resamples of the same seed."""
    count = means.shape[1]
    weights = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), draws)
    null = np.empty((draws, len(means)))
    for place, of in enumerate(weights):
        sample = np.repeat(means, of, axis=1)
        moved = sample.mean(axis=1) - means.mean(axis=1)
        with np.errstate(divide="ignore"):
            null[place] = moved / np.where(np.ptp(sample, axis=1) == 0, 0, sample.std(axis=1))
    observed = means.mean(axis=1) / means.std(axis=1)
    p, left, so_far = np.zeros(len(means)), list(range(len(means))), 0.0
    while left:
        top = max(left, key=lambda row: abs(observed[row]))
        tails = (null[:, left].max(axis=1) >= observed[top]).sum(), (null[:, left].min(axis=1) <= observed[top]).sum()
        so_far = max(so_far, min(1, 2 * (min(tails) + 1) / (draws + 1)))
        p[top] = so_far
        left.remove(top)
    return p


@pytest.mark.parametrize("patients", [2, 3, 6, 9])
def test_few_patients_are_tested_by_all_flips_and_the_bootstrap(patients):
    rng = np.random.default_rng(patients)
    means = rng.normal([[0.0], [0.8], [0.8], [-1.5]], 1, (4, patients))
    means[2] = means[1] + rng.normal(0, 0.1, patients)  # nearly the same method
    result = max_t(means, NAMES[:patients])
    bootstrap = brute_force_bootstrap(means) if patients >= MIN_PATIENTS else 0
    np.testing.assert_allclose(result.p, np.maximum(brute_force(means), bootstrap), atol=5e-4)
    np.testing.assert_allclose(result.t, t_values(means))
    assert result.groups == patients


def test_one_row_of_many_patients_agrees_with_the_t_test_and_is_repeatable():
    gains = np.random.default_rng(3).normal(0.25, 1, (1, 60))
    p = max_t(gains, NAMES).p
    assert p == max_t(gains, NAMES).p == pytest.approx(stats.ttest_1samp(gains[0], 0).pvalue, abs=0.02)
    assert 1 / (FLIPS + 1) <= max_t(gains + 5, NAMES).p <= 2 / (DRAWS + 1)  # never 0


def test_a_row_equal_to_its_reference_changes_nothing():
    gains = np.random.default_rng(1).normal(0.5, 0.5, (2, 8))
    with_equal = max_t(np.vstack([gains, np.zeros((1, 8)), np.full((1, 8), 1e-17)]), NAMES[:8])
    np.testing.assert_array_equal(with_equal.p[:2], max_t(gains, NAMES[:8]).p)
    np.testing.assert_array_equal(with_equal.p[2:], 1)
    np.testing.assert_array_equal(with_equal.t[2:], 0)
    same = max_t(np.full((1, 7), 0.1), NAMES[:7])
    assert same.p == 2 / 2**7, "equal gains of all patients are the clearest"
    assert same.t > 1e6


def test_a_row_is_tested_on_the_patients_that_it_has():
    gains = np.random.default_rng(2).normal(0.7, 0.5, (1, 12))
    missing = np.append(gains, [[np.nan, np.nan]], axis=1)
    known, wider = max_t(gains, NAMES[:12]), max_t(missing, NAMES[:14])
    assert wider.t == pytest.approx(known.t)
    assert wider.p == pytest.approx(known.p, abs=0.01)
    nothing = max_t(np.vstack([missing, np.full((1, 14), np.nan)]), NAMES[:14])
    assert np.isnan(nothing.p[1])
    assert nothing.p[0] == wider.p


def test_a_row_that_few_patients_change_does_not_hide_the_others():
    gains = np.random.default_rng(4).normal(0.05, 0.03, (1, 20))
    few = np.zeros((1, 20))
    few[0, :3] = -0.4, -0.2, -0.3
    both = max_t(np.vstack([gains, few]), NAMES[:20])
    assert both.p[0] == max_t(gains, NAMES[:20]).p < 0.01
    assert both.p[1] > 0.2, "three patients decide nothing"


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


@pytest.mark.parametrize(
    ("noise", "patients"),
    [
        (lambda rng, shape: rng.standard_t(3, shape), 20),
        (lambda rng, shape: np.exp(0.5) - rng.lognormal(size=shape), 12),  # flips alone: 19 %
        (lambda rng, shape: 0.2 - (rng.random(shape) < 0.2) * rng.exponential(size=shape), 8),  # flips alone: 44 %
    ],
)
def test_families_without_a_difference_are_rejected_in_five_percent(noise, patients):
    rng = np.random.default_rng(5)
    families = [noise(rng, (1, patients)) * 0.7 + noise(rng, (11, patients)) for _ in range(150)]
    assert np.mean([max_t(family, NAMES[:patients]).p.min() <= 0.05 for family in families]) <= 0.085


@pytest.mark.parametrize(("count", "smallest"), [(1, 1), (5, 1 / 16), (6, 1 / 32)])
def test_too_few_patients_for_a_decision(count, smallest):
    best = max_t(np.linspace(0.1, 0.2, count)[None], NAMES[:count])
    assert best.p == smallest
    assert best.signs == [count >= MIN_PATIENTS]


@pytest.mark.parametrize(
    ("statistic", "values", "groups"),
    [
        (mean_interval, [], []),
        (mean_interval, [1.0], ["a", "b"]),
        (mean_interval, [1.0, float("nan")], ["a", "b"]),
        (max_t, np.empty((1, 0)), []),
        (max_t, np.ones((1, 2)), ["a"]),
        (max_t, np.ones(2), ["a", "b"]),
    ],
)
def test_values_without_a_group_or_a_number_are_refused(statistic, values, groups):
    with pytest.raises(ValueError, match=r"(values|differences): got"):
        statistic(np.array(values), groups)
