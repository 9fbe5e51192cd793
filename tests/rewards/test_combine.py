"""Advantages by hand: scales, weights, missing values, groups whose rewards do not differ."""

from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from rl_reward_network.rewards.combine import TINY, caption_reward, ensemble_noise, group_advantages

A = np.array([[0.0, 1.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5]])
both = pytest.mark.parametrize("how", ["sum_then_normalize", "normalize_then_sum"])
B = np.array([[0.0, 0.0, 0.02, 0.02], [0.2, 0.4, 0.2, 0.4]])


def test_group_scale_by_hand():
    result = group_advantages({"a": A}, {"a": 2.0})
    deviation = np.std([0, 2, 0, 2], ddof=1) + TINY
    np.testing.assert_allclose(result.values[0], np.array([-1, 1, -1, 1]) / deviation)
    np.testing.assert_allclose(result.rewards, 2 * A)
    assert result.values[1].tolist() == [0, 0, 0, 0]
    assert result.differ.tolist() == [True, False]


def trl_advantages(terms, weights, how, scale):
    """What TRL makes of the same rewards (P, G), with a stand-in for everything that is not the advantages."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    rewards = torch.from_numpy(np.stack([term.ravel() for term in terms.values()], axis=1))
    count, tokens = len(rewards), [[1]] * len(rewards)
    first = next(iter(terms.values()))
    stub = MagicMock(
        multi_objective_aggregation=how,
        scale_rewards=scale,
        reward_weights=torch.tensor(list(weights.values()), dtype=torch.float64),
        num_generations=first.shape[1],
        **{"reward_funcs": list(terms), "reward_func_names": list(terms), "beta": 0.0, "num_iterations": 1},
        **dict.fromkeys(("use_vllm", "mask_truncated_completions"), False),
        **dict.fromkeys(("pad_to_multiple_of", "environment_factories", "environments", "tools")),
    )
    stub.args = MagicMock(steps_per_generation=1, gradient_accumulation_steps=1, gradient_checkpointing_kwargs=None)
    stub.accelerator = MagicMock(device="cpu", process_index=0, gather=lambda values: values)
    stub._tokenizer.pad_token_id = 0
    stub._generate.return_value = (tokens, tokens, None, ["?"] * count, None, {}, None, None)
    stub._calculate_rewards.return_value = rewards
    stub._pending_extra_logs, stub._pending_metrics = {}, {}
    output = GRPOTrainer._generate_and_score_completions(stub, [{"prompt": "?"} for _ in range(count)])
    return output["advantages"].numpy().reshape(first.shape)


@pytest.mark.parametrize(
    ("how", "scale"),
    [("sum_then_normalize", scale) for scale in ("group", "batch", "none")]
    + [("normalize_then_sum", scale) for scale in ("group", "batch")],
)
@pytest.mark.parametrize("names", ["a", "ab", "abc"])
def test_advantages_are_those_of_trl(how, scale, names):
    """With groups whose rewards are all equal, and terms that a group lacks."""
    pytest.importorskip("trl", reason="trl is in the `test` extra")
    rng = np.random.default_rng(len(names))
    a, b = rng.random((2, 7, 4))
    a[1], a[2] = 0.25, [0, 1, 0, 0]
    b[1], b[3] = 0.1, 0.1
    terms = {name: term for name, term in {"a": a, "b": 0.01 * b, "c": 5 * rng.random((7, 4))}.items() if name in names}
    if how == "normalize_then_sum" and "c" in names:
        terms["c"][4] = np.nan
    weights = {"a": 1.0, "b": 0.5, "c": 2.0}
    weights = {name: weights[name] for name in terms}
    result = group_advantages(terms, weights, how, scale, floor=1e-9).values
    np.testing.assert_allclose(result, trl_advantages(terms, weights, how, scale), atol=1e-9)
    assert np.abs(result).max() > 0.1


def test_a_sum_of_scaled_terms_is_scaled_by_all_groups():
    """GDPO's last step; a floor that makes a group small is not undone by it."""
    whole = np.vstack([A, A])
    result = group_advantages({"a": whole}, {"a": 1.0}, "normalize_then_sum")
    assert result.values.std(ddof=1) == pytest.approx(1, abs=1e-3), "although half of the groups are all alike"
    noise = group_advantages({"a": whole / 1000}, {"a": 1.0}, "normalize_then_sum", floor=0.05)
    ratio = np.std([0, 1, 0, 1], ddof=1) / 1000 / 0.05
    np.testing.assert_allclose(noise.values, ratio * result.values, rtol=0.2)


def test_a_spread_of_noise_is_not_blown_up():
    result = group_advantages({"b": B}, {"b": 1.0}, floor=0.05)
    np.testing.assert_allclose(result.values[0], np.array([-0.01, -0.01, 0.01, 0.01]) / 0.05)
    batch = group_advantages({"b": B}, {"b": 1.0}, scale="batch")
    np.testing.assert_allclose(batch.values[0], np.array([-0.01, -0.01, 0.01, 0.01]) / (B.std(ddof=1) + TINY))
    plain = group_advantages({"b": B}, {"b": 1.0}, scale="none")
    np.testing.assert_allclose(plain.values[1], [-0.1, 0.1, -0.1, 0.1])


@both
def test_a_rounding_error_is_no_spread(how):
    result = group_advantages({"a": 0.7 + 1e-9 * A}, {"a": 1.0}, how)
    assert not result.differ.any()
    assert not result.values.any()


def test_each_term_is_heard_when_it_is_scaled_first():
    small = {"a": A, "b": B}
    added = group_advantages(small, {"a": 1.0, "b": 1.0}, "sum_then_normalize", floor=1e-6)
    apart = group_advantages(small, {"a": 1.0, "b": 1.0}, "normalize_then_sum", floor=1e-6)
    assert abs(added.values[0, 2] - added.values[0, 0]) < 0.1, "0.02 of b hardly counts beside 1 of a"
    assert apart.values[0, 2] - apart.values[0, 0] > 1


def test_a_missing_reward_is_the_mean_of_its_group_and_never_0():
    values = np.array([[0.8, np.nan, 0.6, 0.7], [np.nan] * 4])
    result = group_advantages({"judge": values}, {"judge": 1.0}, scale="none")
    np.testing.assert_allclose(result.values[0], [0.1, 0.0, -0.1, 0.0], atol=1e-12)
    assert result.differ.tolist() == [True, False]
    both = group_advantages({"judge": values, "iou": A}, {"judge": 1.0, "iou": 1.0}, scale="none")
    assert both.values[1].tolist() == [0, 0, 0, 0], "a term that a whole group misses says nothing about it"
    assert np.isnan(both.rewards[1]).all(), "and its sum is unknown"
    np.testing.assert_allclose(both.rewards[0], [0.8, 1.7, 0.6, 1.7])


@both
def test_a_group_without_the_reward_says_nothing_about_the_spread_of_all(how):
    gone = np.vstack([A, [[np.nan] * 4]])
    result = group_advantages({"a": gone}, {"a": 2.0}, how, "batch")
    np.testing.assert_allclose(result.values[:2], group_advantages({"a": A}, {"a": 2.0}, how, "batch").values)
    assert result.values[2].tolist() == [0, 0, 0, 0]
    none = group_advantages({"a": np.full((2, 4), np.nan)}, {"a": 1.0}, how, "batch")
    assert not none.values.any()


def test_the_caption_reward_is_a_quarter_meteor_and_meteor_alone_where_no_judge_is():
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
def test_what_makes_no_sense_is_refused(terms, weights, floor, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(terms, weights, floor=floor)


def test_noise_is_how_members_disagree_about_differences_within_a_group():
    rng = np.random.default_rng(0)
    agreed, by_member, by_group = rng.random((500, 8, 1)), rng.random((500, 1, 3)), rng.random((500, 1, 1))
    assert ensemble_noise(agreed + by_member + by_group) == pytest.approx(np.zeros(500), abs=1e-12)
    noisy = ensemble_noise(agreed + by_member + 0.1 * rng.normal(size=(500, 8, 3)))
    assert np.sqrt((noisy**2).mean()) == pytest.approx(0.1, rel=0.03)


@both
def test_a_spread_below_the_noise_is_not_scaled_to_full_size(how):
    clear, faint = np.tile([0.0, 1.0], 4), np.tile([0.4, 0.5], 4)
    terms, weights = {"learned": np.stack([clear, faint, faint])}, {"learned": 2.0}
    noise = {"learned": np.array([0.2, 0.2, 0.01])}
    plain = group_advantages(terms, weights, how)
    assert plain.below_noise is None, "nothing is known about it"
    np.testing.assert_allclose(np.abs(plain.values), np.abs(plain.values[0, 0]), rtol=0.01)
    result = group_advantages(terms, weights, how, noise=noise)
    assert result.below_noise.tolist() == [False, True, False]
    ratio = faint.std(ddof=1) / 0.2
    np.testing.assert_allclose(result.values[1], ratio * plain.values[1], rtol=0.01)
    np.testing.assert_allclose(result.values[[0, 2]], plain.values[[0, 2]], rtol=1e-12)
    part = result.of(slice(1, 3))
    for name in ("values", "rewards", "differ", "below_noise"):
        np.testing.assert_array_equal(getattr(part, name), getattr(result, name)[1:3])


def test_a_term_with_noise_leaves_the_others_at_their_size():
    terms = {"learned": np.tile([[0.4, 0.5]], 4), "iou": np.array([[0.0, 0, 1, 1, 0, 0, 1, 1]])}
    weights, noise = {"learned": 1.0, "iou": 1.0}, {"learned": np.array([100.0])}
    result = group_advantages(terms, weights, "normalize_then_sum", noise=noise).values[0]
    assert np.corrcoef(result, terms["iou"][0])[0, 1] > 0.999
