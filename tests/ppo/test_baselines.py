"""The rows beside a prompt policy, in closed form, and the verdict on it."""

import numpy as np
import pytest

from rl_reward_network.ppo.baselines import (
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
    prompt_verdict,
    ridge_per_prompt,
)
from rl_reward_network.report.deployment import Deployment
from rl_reward_network.report.metrics import SampleTable
from rl_reward_network.report.statistics import Estimate
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
TWO_KINDS = np.where(np.arange(30)[:, None] % 2 == np.arange(2), 0.8, 0.6)  # each prompt suits half of the images
NOISY = tables(TWO_KINDS + np.random.default_rng(0).normal(0, 0.01, (30, 2)).clip(-0.05, 0.05))
FLAT = tables(np.repeat(np.random.default_rng(0).uniform(0.5, 0.9, (30, 1)), 2, axis=1))
MANY_FLAT = tables(np.full((100, 2), 0.7))
RIGHT = np.arange(30) % 2


def compared(val, test, chosen, ridge=None, choice="policy", best_fixed=0, last=None, **more):
    picks = {POLICY: np.asarray(chosen), RIDGE: np.asarray(chosen if ridge is None else ridge)}
    picks |= {} if last is None else {LAST: np.asarray(last)}
    deployment = Deployment(choice, best_fixed, "somebody", 0, None, None, None, None, None, "why")
    return compare(val, test, picks, deployment, seed=0, **more)


def means(comparison, column="dice"):
    return {row.name: row.estimates[column].mean for row in comparison.results.rows}


def to_fixed(comparison, name=POLICY):
    return comparison.results.difference(comparison.results.row(name), FIXED)


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
    assert means(comparison, "reward_net_score")[POLICY] == pytest.approx((0.2 + 0.1) / 2)
    closed = {row.name: comparison.closed(row) for row in comparison.results.rows}
    assert closed == pytest.approx({name: (mean - 0.5) / (0.7 - 0.5) for name, mean in expected.items()})
    assert list(comparison.prompts_asked.values()) == [1, 1, 1, 3, 1, 3, 3, None]
    row = comparison.results.row(POLICY)
    assert comparison.results.difference(row, DEFAULT).mean == pytest.approx(0.3)
    assert to_fixed(comparison).mean == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("choice", "row", "asked"), [("policy", POLICY, 3), ("fixed", FIXED, 1), ("as it is", DEFAULT, 1)]
)
def test_what_is_deployed_was_decided_without_the_test_images(choice, row, asked):
    comparison = compared(TEST, TEST, [2, 0], choice=choice, best_fixed=1, max_steps=3)
    assert means(comparison)[DEPLOYED] == means(comparison)[row]
    assert means(comparison)[POLICY] == pytest.approx(0.6), "the raw policy is always shown"
    assert comparison.prompts_asked[DEPLOYED] == asked
    np.testing.assert_array_equal(comparison.prompts(DEPLOYED), comparison.prompts(row))


def test_ridge_finds_a_linear_rule_and_nothing_in_noise():
    rng = np.random.default_rng(0)
    features, new = rng.normal(3, 2, (60, 4)), rng.normal(3, 2, (200, 4))
    slopes, easy = rng.normal(size=(4, 3)), rng.random((60, 1))
    picks = ridge_per_prompt(features, features @ slopes / 20 + easy, new)
    best = ((new - features.mean(axis=0)) @ slopes + features.mean(axis=0) @ slopes).argmax(axis=1)
    assert (picks == best).mean() > 0.98
    one_better = rng.normal(0, 0.01, (60, 3)) + np.array([0, 0.2, 0])
    assert (ridge_per_prompt(features, one_better, new) == 1).all()
    assert ridge_per_prompt(np.ones((1, 3)), np.array([[0.2, 0.9, 0.4]]), np.zeros((4, 3))).tolist() == [1] * 4


@pytest.mark.parametrize(
    ("val", "chosen", "label"),
    [
        (NOISY, RIGHT, "better"),
        (NOISY, 1 - RIGHT, "worse"),
        (NOISY, 0 * RIGHT, "cannot tell"),
        (FLAT, 0 * RIGHT, "cannot tell"),  # of 30 patients, 3 in 30 may have a gap
        (MANY_FLAT, 0 * RIGHT, "no gap"),
        (MANY_FLAT, RIGHT, "better"),
        ([], RIGHT, "better"),
    ],
)
def test_verdicts_come_from_test_patients_and_the_gap_from_validation(val, chosen, label):
    assert compared(val, NOISY, chosen).verdict.label == label


def test_words_of_the_verdict():
    gain, gap = Estimate(0.03, 0.01, 0.05, 8), Estimate(0.004, 0.002, 0.009, 99)
    measured = "PPO minus best fixed prompt on 8 test patients: 0.03 [0.01, 0.05] Dice."
    better = prompt_verdict(gain, 0.01, None).sentence
    assert better.startswith(
        f"Better: choosing the prompt per image helps. {measured} A loss larger than any seen, in up"
    )
    assert prompt_verdict(gain, 0.06, gap).sentence == (
        "No gap: on validation, the best prompt of each image gains 0.004 [0.002, 0.009] Dice over one prompt for all, "
        f"so one prompt is enough. {measured}"
    )


@pytest.mark.parametrize("chance", [False, True], ids=["one prompt for all", "at random"])
def test_a_useless_reward_network_is_never_better(chance):
    """Against a prompt that was chosen on few labels, or by the network's own scores, its policy may look good."""
    rng = np.random.default_rng(0)
    test = tables((rng.normal(0.6, 0.02, (60, 4)) + np.array([0, 0.05, 0.1, 0.15])).clip(0, 1))
    comparison = compared(test, test, rng.integers(2, 4, 60) if chance else np.full(60, 3), best_fixed=0)
    assert to_fixed(comparison).low > 0.05, "it is better than the best fixed prompt"
    assert comparison.verdict.label == "cannot tell"
    assert "it does not beat the prompt with index 3 (PPO minus it: " in comparison.verdict.sentence


def test_the_verdict_on_a_policy_whose_weights_labels_chose_is_on_its_last_weights():
    comparison = compared(NOISY, NOISY, RIGHT, last=0 * RIGHT, max_steps=2)
    assert list(comparison.weights)[-4:] == [LAST, POLICY, DEPLOYED, ORACLE]
    assert to_fixed(comparison).low > 0
    assert comparison.prompts_asked[LAST] == 2
    assert comparison.verdict.label == "cannot tell"
    assert "PPO, last weights minus best fixed prompt on 30 test patients: 0.000" in comparison.verdict.sentence
    assert compared(NOISY, NOISY, 1 - RIGHT, last=RIGHT).verdict.label == "better"


def test_unlabelled_images_have_scores_no_oracle_and_no_verdict():
    test = tables([[0.2, 0.4], [0.6, 0.4]], labelled=False)
    comparison = compared(test, test, [1, 0])
    assert (comparison.labelled, comparison.results.criterion) == (False, "reward_net_score")
    assert comparison.verdict.label == "unlabelled"
    assert list(comparison.weights) == [RANDOM, DEFAULT, FIXED, NET, RIDGE, POLICY, DEPLOYED]
    assert all(list(row.estimates) == ["reward_net_score"] for row in comparison.results.rows)
    row = comparison.results.row(POLICY)
    assert comparison.results.difference(row, DEFAULT).mean == pytest.approx(0.1)
    assert comparison.closed(row) is None
    assert any("unlabelled" in note for note in comparison.notes)


def test_notes_on_unlabelled_images_and_few_patients():
    test = [*tables([[0.1, 0.2]], labelled=False), *tables([[0.3, 0.5], [0.7, 0.5]])]
    comparison = compared([], test, [0, 1, 0])
    assert means(comparison)[POLICY] == pytest.approx((0.5 + 0.7) / 2)
    assert comparison.notes[0] == "1 of 3 test images are unlabelled and left out."
    assert comparison.notes[1] == "2 test patients, fewer than 6: there are no intervals, and no verdict is possible."
    one = compared([], TEST[:1], [2])
    assert (to_fixed(one).low, one.verdict.label) == (None, "cannot tell")


@pytest.mark.parametrize(
    ("test", "chosen", "message"),
    [
        ([], {"chosen": []}, "test: got no"),
        (TEST, {"chosen": [0]}, "chosen: PPO is"),
        (TEST, {"chosen": [0, 3]}, "chosen: PPO is"),
        (TEST, {"chosen": [0, -1]}, "chosen: PPO is"),
        (TEST, {"chosen": [0, 0], "ridge": [0]}, "chosen: ridge per prompt is"),
        (TEST, {"chosen": [0, 0], "last": [0]}, "chosen: PPO, last weights is"),
    ],
)
def test_input_that_does_not_fit_is_refused(test, chosen, message):
    with pytest.raises(ValueError, match=message):
        compared([], test, **chosen)


def test_an_image_without_a_score_keeps_its_dice_and_the_network_chooses_the_default_prompt_there():
    scores = np.array([[0.2, 0.1, 0.9], [np.nan] * 3])
    result = compared([], tables([[0.3, 0.5, 0.9], [0.3, 0.5, 0.1]], scores), [2, 1])
    assert result.prompts(NET).tolist() == [2, 0]
    assert means(result)[NET] == pytest.approx((0.9 + 0.3) / 2)
    assert means(result, "reward_net_score")[NET] == pytest.approx(0.9), "the mean of the images that have one"
    assert result.results.row(NET).estimates["reward_net_score"].groups == 1
    assert "1 of 2 test images are outside the reward network's domain: no score." in result.notes
    unlabelled = compared([], tables([[0.3, 0.5, 0.9]] * 2, scores, labelled=False), [2, 1])
    assert len(unlabelled.tables) == 1
    assert "1 of 2 test images are outside the reward network's domain and left out." in unlabelled.notes
    with pytest.raises(ValueError, match="none of 1 test images has a true mask or is in the reward network's domain"):
        compared([], tables([[0.3, 0.5, 0.9]], scores[1:], labelled=False), [2])
