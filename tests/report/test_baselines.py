import numpy as np
import pytest

from rl_reward_network.ppo.baselines import (
    BANDIT,
    DEFAULT,
    DEPLOYED,
    FIXED,
    LAST,
    NET,
    ORACLE,
    POLICY,
    RANDOM,
    RIDGE,
    compare,
    overlay_picks,
    ridge_per_prompt,
)
from rl_reward_network.report.deployment import Deployment
from rl_reward_network.report.metrics import SampleTable
from rl_reward_network.rewards.table import MASK_REWARDS


def tables(dices, scores=None, groups=None, labelled=True):
    """One table per row of `dices` (N, P); the other metrics repeat Dice, scores default to Dice."""
    dices = np.asarray(dices, dtype=np.float64)
    scores = dices if scores is None else np.asarray(scores, dtype=np.float64)
    groups = groups or [f"patient{index}" for index in range(len(dices))]
    metrics = [dict.fromkeys(MASK_REWARDS, row) if labelled else None for row in dices]
    return [
        SampleTable(f"s{index}", group, score, metric)
        for index, (group, score, metric) in enumerate(zip(groups, scores, metrics, strict=True))
    ]


TEST = tables([[0.3, 0.5, 0.9], [0.3, 0.5, 0.1]], scores=[[0.9, 0.1, 0.2], [0.1, 0.2, 0.9]])


def compared(val, test, chosen, ridge=None, choice="policy", best_fixed=0, bandit=None, last=None, **more):
    """`compare` with a deployment made by hand."""
    picks = {POLICY: np.asarray(chosen), RIDGE: np.asarray(chosen if ridge is None else ridge)}
    picks |= {name: np.asarray(picked) for name, picked in ((BANDIT, bandit), (LAST, last)) if picked is not None}
    return compare(
        val,
        test,
        picks,
        Deployment(choice, best_fixed, "somebody", 0, None, None, None, None, None, "why"),
        seed=0,
        **more,
    )


def means(comparison, column="dice"):
    return {row.name: row.means[column].mean for row in comparison.rows}


def test_every_row_has_its_closed_form():
    comparison = compared(TEST, TEST, [2, 0], ridge=[1, 2], best_fixed=1, max_steps=3)
    expected = {
        RANDOM: (1.7 / 3 + 0.9 / 3) / 2,
        DEFAULT: 0.3,
        FIXED: 0.5,
        NET: (0.3 + 0.1) / 2,
        RIDGE: (0.5 + 0.1) / 2,
        POLICY: (0.9 + 0.3) / 2,
        DEPLOYED: (0.9 + 0.3) / 2,
        ORACLE: (0.9 + 0.5) / 2,
    }
    assert means(comparison) == pytest.approx(expected)
    assert list(means(comparison)) == list(expected), "the order of the report"
    assert means(comparison, "score")[POLICY] == pytest.approx((0.2 + 0.1) / 2)
    closed = {row.name: row.gap_closed for row in comparison.rows}
    assert closed == pytest.approx({name: (mean - 0.5) / (0.7 - 0.5) for name, mean in expected.items()})
    assert [row.prompts_asked for row in comparison.rows] == [1, 1, 1, 3, 1, 3, 3, None]
    row = comparison.row(POLICY)
    assert (row.to_default.mean, row.to_fixed.mean) == (pytest.approx(0.3), pytest.approx(0.1))
    fixed = comparison.row(FIXED).to_fixed
    assert (fixed.low, fixed.high) == (0, 0), "a row less itself is certainly 0"


def test_what_is_deployed_is_what_validation_decided():
    comparison = compared(TEST, TEST, [2, 0], choice="fixed", best_fixed=1, max_steps=3)
    assert means(comparison)[DEPLOYED] == means(comparison)[FIXED] == pytest.approx(0.5)
    assert means(comparison)[POLICY] == pytest.approx(0.6), "the raw policy is always shown"
    assert comparison.row(DEPLOYED).prompts_asked == 1
    as_it_is = compared(TEST, TEST, [2, 0], choice="as it is", best_fixed=1, max_steps=3)
    assert means(as_it_is)[DEPLOYED] == means(as_it_is)[DEFAULT] == pytest.approx(0.3)
    assert as_it_is.row(DEPLOYED).prompts_asked == 1


def test_the_bandit_has_a_row_before_ppo_where_there_is_one():
    comparison = compared(TEST, TEST, [2, 0], best_fixed=1, bandit=[2, 1])
    assert [row.name for row in comparison.rows][-5:] == [RIDGE, BANDIT, POLICY, DEPLOYED, ORACLE]
    row = comparison.row(BANDIT)
    assert (row.means["dice"].mean, row.to_fixed.mean, row.gap_closed) == pytest.approx((0.7, 0.2, 1))
    assert (row.prompts_asked, comparison.row(POLICY).prompts_asked) == (1, 1)
    with pytest.raises(ValueError, match="chosen: bandit is"):
        compared([], TEST, [0, 0], bandit=[0])


def test_nobody_beats_the_oracle_and_random_is_the_mean():
    rng = np.random.default_rng(0)
    test = tables(rng.random((20, 5)), rng.random((20, 5)))
    comparison = compared(test, test, rng.integers(5, size=20))
    oracle = comparison.values(comparison.row(ORACLE), "dice")
    for row in comparison.rows:
        assert (comparison.values(row, "dice") <= oracle + 1e-12).all()
    random = comparison.values(comparison.row(RANDOM), "dice")
    np.testing.assert_allclose(random, [table.metrics["dice"].mean() for table in test])


def test_ridge_finds_a_linear_rule_and_nothing_in_noise():
    rng = np.random.default_rng(0)
    features, new = rng.normal(3, 2, (60, 4)), rng.normal(3, 2, (200, 4))
    slopes, easy = rng.normal(size=(4, 3)), rng.random((60, 1))
    picks = ridge_per_prompt(features, features @ slopes / 20 + easy, new)
    best = ((new - features.mean(axis=0)) @ slopes + features.mean(axis=0) @ slopes).argmax(axis=1)
    assert (picks == best).mean() > 0.98
    one_better = rng.normal(0, 0.01, (60, 3)) + np.array([0, 0.2, 0])
    assert (ridge_per_prompt(features, one_better, new) == 1).all()


def test_verdicts_come_from_test_patients_and_the_gap_from_validation():
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.01, (30, 2)).clip(-0.05, 0.05)
    dices = np.where(np.arange(30)[:, None] % 2 == np.arange(2), 0.8, 0.6) + noise
    test, right = tables(dices), np.arange(30) % 2
    flat = tables(np.repeat(rng.uniform(0.5, 0.9, (30, 1)), 2, axis=1))
    assert compared(test, test, right).verdict.label == "better"
    assert compared(test, test, 1 - right).verdict.label == "worse"
    assert compared(test, test, np.zeros(30, int)).verdict.label == "cannot tell"
    assert compared(flat, test, right).verdict.label == "no gap"
    assert compared(flat, flat, right).row(POLICY).gap_closed is None
    tiny = tables(np.where(np.arange(30)[:, None] % 2 == np.arange(2), 0.809, 0.8))
    assert compared(tiny, tiny, right).row(POLICY).gap_closed is None, "a share of next to nothing says nothing"


def test_a_useless_reward_network_is_never_better():
    """A policy that it has paid chooses at random, or one prompt for all images, and that by chance well.

    Against a prompt that was chosen on few labels, or by the network's own scores, it may look good.
    """
    rng = np.random.default_rng(0)
    dices = rng.normal(0.6, 0.02, (60, 4)) + np.array([0, 0.05, 0.1, 0.15])
    test = tables(dices.clip(0, 1))
    one, chance = np.full(60, 3), rng.integers(2, 4, 60)
    for chosen, rival in ((one, 3), (chance, 3)):
        comparison = compared(test, test, chosen, best_fixed=0)
        assert comparison.row(POLICY).to_fixed.low > 0.05, "it is better than the best fixed prompt"
        assert comparison.verdict.label == "cannot tell"
        assert f"it does not beat the prompt with index {rival} (PPO minus it: " in comparison.verdict.sentence


def test_the_verdict_on_a_policy_whose_weights_labels_chose_is_on_its_last_weights():
    rng = np.random.default_rng(0)
    test = tables(np.where(np.arange(30)[:, None] % 2 == np.arange(2), 0.8, 0.6) + rng.normal(0, 0.01, (30, 2)))
    right = np.arange(30) % 2
    comparison = compared(test, test, right, last=np.zeros(30, int), max_steps=2)
    assert [row.name for row in comparison.rows][-4:] == [LAST, POLICY, DEPLOYED, ORACLE]
    assert comparison.row(POLICY).to_fixed.low > 0
    assert comparison.row(LAST).prompts_asked == 2
    assert comparison.verdict.label == "cannot tell"
    assert "PPO, last weights minus best fixed prompt on 30 test patients: 0.000" in comparison.verdict.sentence
    assert compared(test, test, 1 - right, last=right).verdict.label == "better"


def test_unlabelled_images_have_scores_no_oracle_and_no_verdict():
    test = tables([[0.2, 0.4], [0.6, 0.4]], labelled=False)
    comparison = compared(test, test, [1, 0])
    assert (comparison.labelled, comparison.criterion, comparison.verdict.label) == (False, "score", "unlabelled")
    assert [row.name for row in comparison.rows] == [RANDOM, DEFAULT, FIXED, NET, RIDGE, POLICY, DEPLOYED]
    assert all(list(row.means) == ["score"] for row in comparison.rows)
    assert comparison.row(POLICY).to_default.mean == pytest.approx(0.1)
    assert comparison.row(POLICY).gap_closed is None
    assert any("unlabelled" in note for note in comparison.notes)


def test_unlabelled_images_among_others_are_left_out_and_counted():
    test = [*tables([[0.1, 0.2]], labelled=False), *tables([[0.3, 0.5], [0.7, 0.5]])]
    comparison = compared([], test, [0, 1, 0])
    assert means(comparison)[POLICY] == pytest.approx((0.5 + 0.7) / 2)
    assert any("1 of 3 test images" in note for note in comparison.notes)


def test_one_test_patient_has_no_interval_and_a_note():
    assert any(
        "2 test patients, fewer than 20: the intervals are rough, and fewer than 6 allow" in note
        for note in compared([], TEST, [2, 2]).notes
    )
    comparison = compared([], TEST[:1], [2])
    assert comparison.row(POLICY).to_fixed.low is None
    assert comparison.verdict.label == "cannot tell"
    assert any("Fewer than 2 test patients" in note for note in comparison.notes)


def test_overlays_show_best_median_and_worst_of_the_deployed_choice():
    test = tables([[0.5, 0.2], [0.9, 0.3], [0.1, 0.4], [0.7, 0.6], [0.3, 0.5]])
    policy, fixed = (compared([], test, np.zeros(5, int), choice=what, best_fixed=1) for what in ("policy", "fixed"))
    assert overlay_picks(policy) == {"best": 1, "median": 0, "worst": 2}
    assert overlay_picks(fixed) == {"best": 3, "median": 2, "worst": 0}


def test_input_that_does_not_fit_is_refused():
    for test, chosen in (([], []), (TEST, [0]), (TEST, [0, 3]), (TEST, [0, -1])):
        with pytest.raises(ValueError, match=r"(test: got no|chosen: PPO is)"):
            compared([], test, np.array(chosen))
    with pytest.raises(ValueError, match="chosen: ridge per prompt is"):
        compared([], TEST, [0, 0], ridge=[0])


def test_ridge_from_a_single_image_takes_its_best_prompt():
    features, rewards = np.ones((1, 3)), np.array([[0.2, 0.9, 0.4]])
    assert ridge_per_prompt(features, rewards, np.zeros((4, 3))).tolist() == [1, 1, 1, 1]
