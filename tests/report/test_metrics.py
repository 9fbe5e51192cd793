"""What is measured of masks: tables of prompts, and the agreement of scores with Dice, by hand."""

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score

from rl_reward_network.report.metrics import agreement, coverage, measure_sample
from rl_reward_network.rewards.table import MASK_REWARDS

MASKS = np.random.default_rng(0).random((3, 8, 9)) < 0.4


def test_a_table_holds_every_reward_of_every_mask():
    table = measure_sample("a", "g", np.array([0.25, 0.5, 1.0]), MASKS, MASKS[2])
    np.testing.assert_array_equal(table.column("reward_net_score"), [0.25, 0.5, 1.0])
    assert list(table.metrics) == list(MASK_REWARDS)
    for name, values in table.metrics.items():
        np.testing.assert_array_equal(values, MASK_REWARDS[name](MASKS, MASKS[[2, 2, 2]]))
    bare = measure_sample("a", "g", np.array([0.25, 0.5, 0.75]), MASKS, None)
    assert bare.metrics is None
    with pytest.raises(KeyError):
        bare.column("dice")


def test_agreement_by_hand():
    predicted = np.array([0.1, 0.2, 0.3, 0.9, 0.8, 0.7])
    true = np.array([0.2, 0.3, 0.4, 0.5, 0.6, 0.9])
    row = agreement(predicted, true, np.array(["a", "a", "a", "b", "b", "b"]))
    assert row["mae"] == pytest.approx((0.1 * 3 + 0.4 + 0.2 + 0.2) / 6)
    assert row["within_image_spearman"] == pytest.approx(0)  # +1 in a, -1 in b
    assert row["top1_regret"] == pytest.approx((0 + 0.4) / 2)
    assert row["pearson"] == pytest.approx(np.corrcoef(predicted, true)[0, 1])
    assert row["spearman"] == pytest.approx(stats.spearmanr(predicted, true)[0])
    order = np.random.default_rng(0).permutation(6)
    shuffled = agreement(predicted[order], true[order], np.array(list("aaabbb"))[order])
    assert row == {name: pytest.approx(value) for name, value in shuffled.items()}


def test_ranking_between_images_is_not_ranking_within_them():
    true = np.array([0.1, 0.2, 0.8, 0.9])
    row = agreement(np.array([0.2, 0.1, 0.9, 0.8]), true, np.array([0, 0, 1, 1]))
    assert row["spearman"] == pytest.approx(0.6)
    assert row["within_image_spearman"] == pytest.approx(-1)
    assert row["top1_regret"] == pytest.approx(0.1)


def test_constant_predictions_rank_nothing_and_choose_at_random():
    row = agreement(np.full(4, 0.5), np.array([0.2, 0.4, 0.9, 0.5]), np.array([0, 0, 1, 1]))
    assert (row["pearson"], row["spearman"], row["within_image_spearman"]) == (None, None, None)
    assert row["mae"] == pytest.approx(0.2)
    assert row["top1_regret"] == pytest.approx((0.1 + 0.2) / 2)


def test_one_image_ranked_by_equal_scores_counts_zero_and_one_without_a_choice_is_left_out():
    predicted = np.array([0.1, 0.2, 0.5, 0.5, 0.3, 0.9])
    true = np.array([0.1, 0.2, 0.3, 0.4, 0.7, 0.7])
    row = agreement(predicted, true, np.array([0, 0, 1, 1, 2, 2]))
    assert row["within_image_spearman"] == pytest.approx(0.5)
    assert agreement(predicted[:2], np.array([0.4, 0.4]), np.zeros(2))["within_image_spearman"] is None
    assert agreement(predicted[:2], true[:2], np.array([0, 1]))["within_image_spearman"] is None


def test_poor_masks_are_told_apart_as_often_as_scikit_learn_says():
    rng = np.random.default_rng(3)
    true = rng.random(200)
    predicted = (true + rng.normal(0, 0.3, 200)).clip(0, 1).round(1)  # with ties
    expected = roc_auc_score(true >= 0.7, predicted)
    assert agreement(predicted, true, np.zeros(200))["auroc_poor"] == pytest.approx(expected)
    assert agreement(predicted, np.full(200, 0.4), np.zeros(200))["auroc_poor"] is None


def test_the_middle_is_judged_by_itself_and_only_when_there_is_enough_of_it():
    true = np.concatenate([np.linspace(0.71, 0.89, 10), [0.1, 0.99]])
    predicted = np.concatenate([np.linspace(0.5, 0.6, 10)[::-1], [0.0, 1.0]])
    row = agreement(predicted, true, np.zeros(12))
    assert row["pearson_middle"] == pytest.approx(-1)
    assert row["pearson"] > 0.5
    assert agreement(predicted[1:], true[1:], np.zeros(11))["pearson_middle"] is None


def test_coverage_is_the_share_inside_the_interval():
    found = coverage(np.array([0.4, 0.4, 0.2]), np.array([0.6, 0.6, 0.8]), np.array([0.55, 0.7, 0.7]))
    assert found == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("measure", "arguments", "message"),
    [
        *(
            (measure_sample, ("sample7", "g", *arrays), r"sample7: (masks|target): got")
            for arrays in (
                (np.zeros(2), MASKS, MASKS[0]),
                (np.zeros(3), MASKS.astype(float), MASKS[0]),
                (np.zeros(3), MASKS, MASKS[0, :-1]),
                (np.zeros(3), MASKS, MASKS[0].astype(np.uint8)),
            )
        ),
        (agreement, (np.zeros(2), np.zeros(3), np.zeros(3)), r"one length \(N,\).*\(2,\), \(3,\)"),
        (agreement, (np.zeros(0), np.zeros(0), np.zeros(0)), "N >= 1"),
        (agreement, (np.array([0.1, np.nan]), np.zeros(2), np.zeros(2)), "predicted .*1 scores"),
    ],
)
def test_bad_input(measure, arguments, message):
    with pytest.raises(ValueError, match=message):
        measure(*arguments)
