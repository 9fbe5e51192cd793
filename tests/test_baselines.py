import numpy as np
import pytest

from rl_reward_network.evaluation.baselines import (
    DEFAULT,
    FIXED,
    NET,
    ORACLE,
    POLICY,
    RANDOM,
    best_fixed_prompt,
    compare,
    overlay_picks,
)
from rl_reward_network.evaluation.metrics import METRICS, SampleTable


def tables(dices, scores=None, groups=None, labelled=True):
    """One table per row of `dices` (N, P); the other metrics repeat Dice, scores default to Dice."""
    dices = np.asarray(dices, dtype=np.float64)
    scores = dices if scores is None else np.asarray(scores, dtype=np.float64)
    groups = groups or [f"patient{index}" for index in range(len(dices))]
    metrics = [dict.fromkeys(METRICS, row) if labelled else None for row in dices]
    return [
        SampleTable(f"s{index}", group, score, metric)
        for index, (group, score, metric) in enumerate(zip(groups, scores, metrics, strict=True))
    ]


TRAIN = tables([[0.2, 0.6, 0.5], [0.2, 0.6, 0.5]])  # best fixed: prompt 1
TEST = tables([[0.3, 0.5, 0.9], [0.3, 0.5, 0.1]], scores=[[0.9, 0.1, 0.2], [0.1, 0.2, 0.9]])


def means(comparison, column="dice"):
    return {row.name: row.means[column].mean for row in comparison.rows}


def test_every_row_has_its_closed_form():
    comparison = compare(TRAIN, TRAIN, TEST, np.array([2, 0]), seed=0)
    assert comparison.best_fixed == 1
    expected = {
        RANDOM: (1.7 / 3 + 0.9 / 3) / 2,
        DEFAULT: 0.3,
        FIXED: 0.5,
        NET: (0.3 + 0.1) / 2,
        POLICY: (0.9 + 0.3) / 2,
        ORACLE: (0.9 + 0.5) / 2,
    }
    assert means(comparison) == pytest.approx(expected)
    assert list(means(comparison)) == list(expected), "the order of the report"
    assert means(comparison, "score")[POLICY] == pytest.approx((0.2 + 0.1) / 2)
    assert comparison.gap_closed == pytest.approx((0.6 - 0.5) / (0.7 - 0.5))
    row = comparison.row(POLICY)
    assert (row.to_default.mean, row.to_fixed.mean) == (pytest.approx(0.3), pytest.approx(0.1))
    fixed = comparison.row(FIXED).to_fixed
    assert (fixed.low, fixed.high) == (0, 0), "a row less itself is certainly 0"


def test_the_fixed_prompt_is_chosen_on_training_patients_not_images():
    # prompt 0 wins on most images, but they are all of one patient
    train = tables([[0.9, 0.5], [0.9, 0.5], [0.9, 0.5], [0.1, 0.8]], groups=["a", "a", "a", "b"])
    assert best_fixed_prompt(train) == 1
    assert best_fixed_prompt(train[:3]) == 0
    test = tables([[0.9, 0.5], [0.9, 0.5]])
    assert compare(train, [], test, np.zeros(2, int), seed=0).best_fixed == 1, "test images have no say"


def test_nobody_beats_the_oracle_and_random_is_the_mean():
    rng = np.random.default_rng(0)
    train, test = tables(rng.random((20, 5))), tables(rng.random((20, 5)), rng.random((20, 5)))
    comparison = compare(train, train, test, rng.integers(5, size=20), seed=0)
    oracle = comparison.values(comparison.row(ORACLE), "dice")
    for row in comparison.rows:
        assert (comparison.values(row, "dice") <= oracle + 1e-12).all()
    random = comparison.values(comparison.row(RANDOM), "dice")
    np.testing.assert_allclose(random, [table.metrics["dice"].mean() for table in test])


def test_verdicts_come_from_test_patients_and_the_gap_from_validation():
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.01, (30, 2)).clip(-0.05, 0.05)
    dices = np.where(np.arange(30)[:, None] % 2 == np.arange(2), 0.8, 0.6) + noise
    test, right = tables(dices), np.arange(30) % 2
    flat = tables(np.repeat(rng.uniform(0.5, 0.9, (30, 1)), 2, axis=1))
    assert compare(test, test, test, right, seed=0).verdict.label == "better"
    assert compare(test, test, test, 1 - right, seed=0).verdict.label == "worse"
    assert compare(test, test, test, np.zeros(30, int), seed=0).verdict.label == "cannot tell"
    assert compare(test, flat, test, right, seed=0).verdict.label == "no gap"
    comparison = compare(flat, flat, flat, right, seed=0)
    assert comparison.gap_closed is None


def test_unlabelled_images_have_scores_no_oracle_and_no_verdict():
    test = tables([[0.2, 0.4], [0.6, 0.4]], labelled=False)
    comparison = compare(test, test, test, np.array([1, 0]), seed=0)
    assert (comparison.labelled, comparison.criterion, comparison.verdict.label) == (False, "score", "unlabelled")
    assert [row.name for row in comparison.rows] == [RANDOM, DEFAULT, FIXED, NET, POLICY]
    assert all(list(row.means) == ["score"] for row in comparison.rows)
    assert comparison.row(POLICY).to_default.mean == pytest.approx(0.1)
    assert comparison.gap_closed is None
    assert any("unlabelled" in note for note in comparison.notes)


def test_unlabelled_images_among_others_are_left_out_and_counted():
    test = [*tables([[0.1, 0.2]], labelled=False), *tables([[0.3, 0.5], [0.7, 0.5]])]
    comparison = compare(tables([[0.1, 0.9]]), [], test, np.array([0, 1, 0]), seed=0)
    assert means(comparison)[POLICY] == pytest.approx((0.5 + 0.7) / 2)
    assert "1 of 3 test images are unlabelled and left out." in comparison.notes


def test_one_test_patient_has_no_interval_and_a_note():
    comparison = compare(TRAIN, [], TEST[:1], np.array([2]), seed=0)
    assert comparison.row(POLICY).to_fixed.low is None
    assert comparison.verdict.label == "cannot tell"
    assert "Fewer than 2 test patients: no interval can be given." in comparison.notes


def test_overlays_show_best_median_and_worst_of_the_policy():
    test = tables([[0.5], [0.9], [0.1], [0.7], [0.3]])
    comparison = compare(test, [], test, np.zeros(5, int), seed=0)
    assert overlay_picks(comparison) == {"best": 1, "median": 0, "worst": 2}


def test_input_that_does_not_fit_is_refused():
    for train, test, chosen in (
        ([], TEST, [0, 0]),
        (TRAIN, [], []),
        (TRAIN, TEST, [0]),
        (TRAIN, TEST, [0, 3]),
        (TRAIN, TEST, [0, -1]),
    ):
        with pytest.raises(ValueError, match=r"(tables|chosen): got"):
            compare(train, [], test, np.array(chosen), seed=0)
