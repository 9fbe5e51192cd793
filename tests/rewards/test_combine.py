"""Advantages by hand: scales, weights, missing values, groups without spread."""

import numpy as np
import pytest

from rl_reward_network.rewards.combine import caption_reward, group_advantages

A = np.array([[0.0, 1.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5]])
B = np.array([[0.0, 0.0, 0.02, 0.02], [0.2, 0.4, 0.2, 0.4]])


def test_group_scale_by_hand() -> None:
    result = group_advantages({"a": A}, {"a": 2.0})
    deviation = np.std([0, 2, 0, 2], ddof=1)
    np.testing.assert_allclose(result.values[0], np.array([-1, 1, -1, 1]) / deviation)
    np.testing.assert_allclose(result.rewards, 2 * A)
    assert result.values[1].tolist() == [0, 0, 0, 0]
    assert result.spread.tolist() == [True, False]


def test_equal_to_trl_where_the_spread_is_large() -> None:
    """TRL divides by the deviation + 1e-4."""
    rewards = np.random.default_rng(0).random((5, 4))
    theirs = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)
    np.testing.assert_allclose(group_advantages({"a": rewards}, {"a": 1.0}).values, theirs, atol=2e-3)


def test_a_spread_of_noise_is_not_blown_up() -> None:
    result = group_advantages({"b": B}, {"b": 1.0}, floor=0.05)
    np.testing.assert_allclose(result.values[0], np.array([-0.01, -0.01, 0.01, 0.01]) / 0.05)
    batch = group_advantages({"b": B}, {"b": 1.0}, scale="batch")
    np.testing.assert_allclose(batch.values[0], np.array([-0.01, -0.01, 0.01, 0.01]) / B.std(ddof=1))
    plain = group_advantages({"b": B}, {"b": 1.0}, scale="none")
    np.testing.assert_allclose(plain.values[1], [-0.1, 0.1, -0.1, 0.1])


def test_each_term_is_heard_when_it_is_scaled_first() -> None:
    small = {"a": A, "b": B}
    added = group_advantages(small, {"a": 1.0, "b": 1.0}, "sum_then_normalize", floor=1e-6)
    apart = group_advantages(small, {"a": 1.0, "b": 1.0}, "normalize_then_sum", floor=1e-6)
    assert abs(added.values[0, 2] - added.values[0, 0]) < 0.1, "0.02 of b hardly counts beside 1 of a"
    assert apart.values[0, 2] - apart.values[0, 0] == pytest.approx(2 * 0.01 / np.std([0, 0, 0.02, 0.02], ddof=1))


def test_a_missing_reward_is_the_mean_of_its_group_and_never_0() -> None:
    values = np.array([[0.8, np.nan, 0.6, 0.7], [np.nan] * 4])
    result = group_advantages({"judge": values}, {"judge": 1.0}, scale="none")
    np.testing.assert_allclose(result.values[0], [0.1, 0.0, -0.1, 0.0], atol=1e-12)
    assert result.spread.tolist() == [True, False]
    both = group_advantages({"judge": values, "iou": A}, {"judge": 1.0, "iou": 1.0}, scale="none")
    assert both.values[1].tolist() == [0, 0, 0, 0], "a term that a whole group misses says nothing about it"
    assert np.isnan(both.rewards[1]).all(), "and its sum is unknown"
    np.testing.assert_allclose(both.rewards[0], [0.8, 1.7, 0.6, 1.7])


@pytest.mark.parametrize("how", ["sum_then_normalize", "normalize_then_sum"])
def test_a_group_without_the_reward_says_nothing_about_the_spread_of_all(how: str) -> None:
    gone = np.vstack([A, [[np.nan] * 4]])
    result = group_advantages({"a": gone}, {"a": 2.0}, how, "batch")
    np.testing.assert_allclose(result.values[:2], group_advantages({"a": A}, {"a": 2.0}, how, "batch").values)
    assert result.values[2].tolist() == [0, 0, 0, 0]
    none = group_advantages({"a": np.full((2, 4), np.nan)}, {"a": 1.0}, how, "batch")
    assert not none.values.any()


def test_the_caption_reward_is_a_quarter_meteor_and_meteor_alone_where_no_judge_is() -> None:
    meteor = np.array([[0.4, 1.0, 0.0], [0.2, 0.6, 0.4]])
    judge = np.array([[0.8, np.nan, -0.2], [np.nan] * 3])
    result = caption_reward(meteor, judge)
    np.testing.assert_allclose(result[0], [0.25 * 0.4 + 0.75 * 0.8, 0.25 * 1.0 + 0.75 * 0.3, 0.75 * -0.2])
    np.testing.assert_array_equal(result[1], meteor[1])
    np.testing.assert_array_equal(judge, [[0.8, np.nan, -0.2], [np.nan] * 3], "the judge's own scores stay as they are")


@pytest.mark.parametrize(
    ("terms", "weights", "floor", "message"),
    [
        ({"a": A[:, :1]}, {"a": 1.0}, 0.05, "G >= 2"),
        ({"a": A, "b": B[:1]}, {"a": 1.0, "b": 1.0}, 0.05, "expected one"),
        ({"a": A}, {}, 0.05, "have no weight"),
        ({"a": A}, {"a": 1.0}, 0.0, "reward floor is 0.0"),
        ({"a": A + np.inf}, {"a": 1.0}, 0.05, "is infinite"),
    ],
)
def test_what_makes_no_sense_is_refused(terms: dict, weights: dict, floor: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_advantages(terms, weights, floor=floor)
