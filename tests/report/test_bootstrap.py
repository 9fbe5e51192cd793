import numpy as np
import pytest
from scipy import stats

from rl_reward_network.report.statistics import (
    Estimate,
    few_patients_note,
    group_means,
    mean_interval,
    tail_probability,
    verdict_on,
)


def test_patients_count_the_same_however_many_images_they_have():
    values, groups = np.array([1.0, 1, 1, 1, 0]), ["a", "a", "a", "a", "b"]
    np.testing.assert_array_equal(group_means(values, groups), [1, 0])
    assert mean_interval(values, groups).mean == 0.5


def test_equal_seeds_give_equal_intervals():
    rng = np.random.default_rng(0)
    values, groups = rng.random(120), [str(index % 40) for index in range(120)]
    first, second, other = (mean_interval(values, groups, seed) for seed in (1, 1, 2))
    assert first == second != other
    assert first.low < first.mean < first.high
    assert first.groups == 40


def test_interval_equals_scipys_bootstrap_over_patients():
    values = np.random.default_rng(0).gamma(2, size=35)
    ours = mean_interval(values, [str(index) for index in range(35)], resamples=20000)
    level = 1 - 2 * tail_probability(35)
    theirs = stats.bootstrap(
        (values,), np.mean, n_resamples=20000, method="percentile", confidence_level=level, rng=1
    ).confidence_interval
    np.testing.assert_allclose([ours.low, ours.high], [theirs.low, theirs.high], rtol=0.02)


def test_the_interval_of_few_patients_is_students_t_without_a_seed():
    values = np.random.default_rng(0).gamma(2, size=29)
    groups = [str(index) for index in range(29)]
    ours = mean_interval(values, groups, seed=1)
    assert ours == mean_interval(values, groups, seed=2)
    theirs = stats.ttest_1samp(values, 0).confidence_interval()
    np.testing.assert_allclose([ours.low, ours.high], theirs)


@pytest.mark.parametrize("patients", [2, 3, 5, 6, 10, 29, 30, 40])
def test_intervals_cover_the_truth_about_95_times_in_100(patients):
    rng, covered = np.random.default_rng(0), 0
    groups = [str(patient) for patient in range(patients) for _ in range(5)]
    for trial in range(1000):
        # images of a patient share most of their value: an interval over images would be far too narrow
        values = np.repeat(rng.normal(0.7, 0.1, patients), 5) + rng.normal(0, 0.02, 5 * patients)
        estimate = mean_interval(values, groups, seed=trial)
        covered += estimate.low <= 0.7 <= estimate.high
    assert 0.93 <= covered / 1000 <= 0.97


def test_a_constant_paired_difference_is_certain():
    values, groups = np.random.default_rng(0).random(10), list("aabbccddee")
    estimate = mean_interval((values + 0.25) - values, groups)
    np.testing.assert_allclose([estimate.mean, estimate.low, estimate.high], 0.25)


def test_one_patient_has_no_interval():
    estimate = mean_interval(np.array([0.25, 0.75]), ["a", "a"])
    assert estimate == Estimate(0.5, None, None, 1)
    assert str(estimate) == "0.500"
    assert str(Estimate(0.5, 0.25, 0.75, 2)) == "0.500 [0.250, 0.750]"


def test_reports_say_that_intervals_of_few_patients_are_rough():
    assert few_patients_note(20) == ()
    assert few_patients_note(19) == ("19 test patients, fewer than 20: the intervals are rough.",)
    assert "fewer than 6 allow no verdict" in few_patients_note(5, "validation patients")[0]
    assert few_patients_note(1) == ("Fewer than 2 test patients: there are no intervals.",)


@pytest.mark.parametrize(("values", "groups"), [([], []), ([1.0], ["a", "b"]), ([1.0, float("nan")], ["a", "b"])])
def test_values_without_a_group_or_a_number_are_refused(values, groups):
    with pytest.raises(ValueError, match="values: got"):
        mean_interval(np.array(values), groups)


GAP, NO_GAP = Estimate(0.05, 0.03, 0.07, 9), Estimate(0.004, 0.002, 0.009, 9)
UP, DOWN = Estimate(0.03, 0.01, 0.05, 8), Estimate(-0.03, -0.05, -0.01, 8)
BOTH, SINGLE = Estimate(0.01, -0.01, 0.03, 8), Estimate(0.09, None, None, 1)


@pytest.mark.parametrize(
    ("difference", "val_gap", "label", "words"),
    [
        (UP, GAP, "better", "0.030 [0.010, 0.050]"),
        (DOWN, GAP, "worse", "-0.030 [-0.050, -0.010]"),
        (BOTH, GAP, "cannot tell", "contains 0"),
        (SINGLE, GAP, "cannot tell", "fewer than 6 test patients"),
        (DOWN, NO_GAP, "no gap", "one prompt is enough"),
        (SINGLE, NO_GAP, "no gap", "0.004 [0.002, 0.009]"),
        (Estimate(0.03, 0.01, 0.05, 5), GAP, "cannot tell", "fewer than 6 test patients"),
        (UP, Estimate(0.0, 0.0, 0.0, 5), "better", "8 test patients"),
        (UP, Estimate(0.0, None, None, 1), "better", "8 test patients"),
        (UP, Estimate(0.005, 0.001, 0.01, 9), "better", "8 test patients"),
        (UP, None, "better", "8 test patients"),
        (None, None, "unlabelled", "no verdict"),
        (None, NO_GAP, "unlabelled", "no verdict"),
    ],
)
def test_the_verdict_says_what_the_numbers_allow(difference, val_gap, label, words):
    verdict = verdict_on(difference, val_gap)
    assert verdict.label == label
    assert words in verdict.sentence


def test_a_policy_that_one_prompt_equals_is_not_praised_for_choosing():
    assert "choosing the prompt per image helps" in verdict_on(UP, GAP).sentence
    verdict = verdict_on(UP, GAP, "the prompt with index 5", "PPO, last weights")
    assert verdict.label == "cannot tell"
    assert (
        "it does not beat the prompt with index 5, one prompt for all images. PPO, last weights minus"
        in verdict.sentence
    )


@pytest.mark.parametrize(
    ("low", "high", "groups", "sign"),
    [(0.01, 0.05, 6, 1), (-0.05, -0.01, 6, -1), (-0.01, 0.05, 6, 0), (0.01, 0.05, 5, 0), (None, None, 1, 0)],
)
def test_a_sign_needs_an_interval_beside_0_from_enough_patients(
    low: float | None, high: float | None, groups: int, sign: int
) -> None:
    assert Estimate(0.0, low, high, groups).sign == sign
