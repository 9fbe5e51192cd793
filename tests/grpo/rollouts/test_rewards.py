"""From rollouts to advantages, by hand: weighted terms, logged terms, and groups without spread."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rl_reward_network.data.items import make_region
from rl_reward_network.data.masks import to_rle
from rl_reward_network.grpo.image_context import ImageFeatures, PromptBatch
from rl_reward_network.grpo.prompts import region_prompt
from rl_reward_network.grpo.rewards import (
    LoopRollouts,
    Reward,
    advantage_statistics,
    check_weights,
    loop_rewards,
    make_columns,
    reward_step,
    score_rollouts,
)
from rl_reward_network.grpo.rollouts import RolloutGroup
from rl_reward_network.grpo.settings import GRPOPlan
from rl_reward_network.models.sa2va.generation_sa2va import Answer
from rl_reward_network.models.sa2va.grounding_sa2va import Sam2Features
from rl_reward_network.rewards.combine import caption_reward, ensemble_noise
from rl_reward_network.rewards.functions import EnsembleScores, iou_reward
from rl_reward_network.rewards.judge import Judge
from rl_reward_network.rewards.judge_client import JudgeConfig
from tests.grpo.nano import config
from tests.rewards.judge_server import SOON, Reply, judge_server
from tests.rewards.test_judge import REFERENCE, play

NOTHING = ImageFeatures(torch.zeros(1, 1, 1), Sam2Features((torch.zeros(1),) * 3))


def groups(count: int = 2) -> list[RolloutGroup]:
    """Groups that take part in both loops."""
    return [RolloutGroup(str(number), NOTHING, [1], describe_ids=[2], segment_ids=[3]) for number in range(count)]


def gives(*values: float | None) -> Any:
    """A reward function that always returns these."""
    return lambda **_: list(values)


def rewarded(
    folder: Path, terms: dict[str, Reward], loop: str = "loop1", shuffled_by: Any = None, **settings: Any
) -> tuple[list[RolloutGroup], LoopRollouts]:
    """Two groups of three generations and their rollouts, rewarded by `terms`."""
    rollout_groups, rollouts = groups(), LoopRollouts({"prompts": ["?"] * 6})
    score_rollouts({loop: rollouts}, 2, {loop: terms}, shuffled_by)
    settings = {"multi_objective_aggregation": "sum_then_normalize"} | settings
    reward_step([(rollout_groups, {loop: rollouts})], {loop: terms}, config(folder, **settings))
    return rollout_groups, rollouts


def near(values: Any) -> Any:
    """Up to what TRL, and so we, add to a deviation."""
    return pytest.approx(list(values), abs=5e-3)


class Processor:
    """A processor whose token ids are letters, and 0 the end."""

    template = SimpleNamespace(stop_words=("!",))
    tokenizer = SimpleNamespace(eos_token="!")

    def text(self, token_ids: list[int]) -> str:
        return "".join(chr(token_id) if token_id else "!" for token_id in token_ids)


def test_columns_are_those_of_the_reward_functions() -> None:
    image, mask = np.zeros((2, 2, 3), np.uint8), np.array([[True, False], [False, False]])
    items = [
        region_prompt(make_region(text, to_rle(mask), text, "here", lambda: image)) for text in ("a circle", "a cross")
    ]
    cache: Any = SimpleNamespace(processor=Processor())
    batch = PromptBatch(items, [image, image + 1], [mask, ~mask], ["a", "b"], [0, 1], [NOTHING] * 2, cache)
    soft = np.array([[0.9, 0.5], [0.51, 0.1]], dtype=np.float32)
    answers = [Answer([ord("x"), 0]), Answer([ord("y")]), None]
    columns = make_columns(batch, [0, 1, 1], ["p", "q", "q"], answers, [soft, None, 1 - soft])
    assert {len(column) for column in columns.values()} == {3}
    assert (columns["prompts"], columns["completions"]) == (["p", "q", "q"], ["x", "y", ""])
    assert columns["completion_ids"] == [[ord("x"), 0], [ord("y")], []], "as they were generated"
    assert columns["captions"] == ["a circle", "a cross", "a cross"]
    assert [image.max() for image in columns["images"]] == [0, 1, 1]
    assert [truth.sum() for truth in columns["masks"]] == [1, 3, 3]
    assert columns["mask_probabilities"][0] is soft
    assert columns["predicted_masks"][0].tolist() == [[True, False], [True, False]], "0.5 itself is outside"
    assert columns["predicted_masks"][1] is columns["mask_probabilities"][1] is None
    assert columns["predicted_masks"][2].tolist() == [[False, False], [False, True]]


def test_advantages_are_the_centred_rewards_over_their_deviation(tmp_path: Path) -> None:
    terms = {"a": Reward(gives(1, 2, 3, 0, 0, 6), 2.0)}
    rollout_groups, samples = rewarded(tmp_path, terms)
    assert samples.terms["a"].tolist() == [[1, 2, 3], [0, 0, 6]]
    assert samples.advantages is not None
    assert samples.advantages.rewards.tolist() == [[2, 4, 6], [0, 0, 12]]
    assert rollout_groups[0].caption_advantages is not None
    assert rollout_groups[1].caption_advantages is not None
    assert rollout_groups[0].caption_advantages.dtype == torch.float32
    assert rollout_groups[0].caption_advantages.tolist() == near([-1, 0, 1])
    assert rollout_groups[1].caption_advantages.tolist() == near([-4 / 48**0.5, -4 / 48**0.5, 8 / 48**0.5])
    assert rollout_groups[0].mask_advantages is None, "loop 2 was not sampled"


def test_a_weight_of_0_is_noted_and_not_paid(tmp_path: Path) -> None:
    terms = {"a": Reward(gives(1, 2, 3, 3, 2, 1), 1.0), "b": Reward(gives(9, 0, 0, 0, 0, 9), 0.0)}
    rollout_groups, samples = rewarded(tmp_path, terms)
    assert samples.terms["b"].tolist() == [[9, 0, 0], [0, 0, 9]]
    assert samples.advantages is not None
    assert samples.advantages.rewards.tolist() == [[1, 2, 3], [3, 2, 1]]
    assert [group.caption_advantages.tolist() for group in rollout_groups if group.caption_advantages is not None] == [
        near([-1, 0, 1]),
        near([1, 0, -1]),
    ]


def test_a_missing_value_is_neutral_and_no_0(tmp_path: Path) -> None:
    rollout_groups, samples = rewarded(tmp_path, {"a": Reward(gives(1, None, 3, None, None, None), 1.0)})
    np.testing.assert_array_equal(samples.terms["a"], [[1, np.nan, 3], [np.nan] * 3])
    assert rollout_groups[0].caption_advantages is not None
    assert rollout_groups[0].caption_advantages.tolist() == near([-1, 0, 1])
    assert rollout_groups[1].caption_advantages is not None
    assert rollout_groups[1].caption_advantages.tolist() == [0, 0, 0], "a group without any value has no advantages"


@pytest.mark.parametrize("loop", ["loop1", "loop2"])
def test_a_group_without_spread_has_advantages_of_0_and_still_counts(tmp_path: Path, loop: str) -> None:
    rollout_groups, _ = rewarded(tmp_path, {"a": Reward(gives(4, 4, 4, 1, 2, 3), 1.0)}, loop)
    assert [(group.describe_ids, group.segment_ids) for group in rollout_groups] == [([2], [3])] * 2
    first, second = [group.caption_advantages if loop == "loop1" else group.mask_advantages for group in rollout_groups]
    assert first is not None
    assert second is not None
    assert first.tolist() == [0, 0, 0]
    assert second.tolist() == near([-1, 0, 1])


def test_settings_say_how_terms_are_put_together(tmp_path: Path) -> None:
    terms = {"a": Reward(gives(0, 0, 10, 0, 0, 10), 1.0), "b": Reward(gives(0.2, 0.1, 0, 0.2, 0.1, 0), 1.0)}

    def first(**settings: Any) -> Any:
        values = rewarded(tmp_path, terms, **settings)[0][0].caption_advantages
        assert values is not None
        return near(values.tolist())

    rewards = np.array([0.2, 0.1, 10]) - 10.3 / 3
    assert first(scale_rewards="none") == rewards.tolist()
    assert first() == (rewards / np.std([0.2, 0.1, 10], ddof=1)).tolist()
    assert first(reward_floor=100.0) == (rewards / 100).tolist()
    apart = np.array([-1, -1, 2]) / 3**0.5 + [1, 0, -1]
    apart /= np.std([*apart, *apart], ddof=1)
    assert first(multi_objective_aggregation="normalize_then_sum") == apart.tolist()


@pytest.mark.parametrize("how", ["sum_then_normalize", "normalize_then_sum"])
def test_advantages_do_not_depend_on_how_a_step_is_cut(tmp_path: Path, how: str) -> None:
    """The deviation of a batch is that of the whole optimisation step, not of a forward pass."""
    rng = np.random.default_rng(0)
    terms = {"loop2": {"a": Reward(gives(), 1.0), "b": Reward(gives(), 0.5), "c": Reward(gives(), 0.0)}}
    values = {name: scale * rng.random((6, 4)) for name, scale in (("a", 1.0), ("b", 0.1), ("c", 9.0))}
    settings = config(tmp_path, multi_objective_aggregation=how, scale_rewards="batch")

    def advantages(*parts: slice) -> np.ndarray:
        rollouts = [{"loop2": LoopRollouts({}, {name: v[part] for name, v in values.items()})} for part in parts]
        reward_step(
            [(groups(part.stop - part.start), one) for part, one in zip(parts, rollouts, strict=True)], terms, settings
        )
        return np.concatenate([one["loop2"].advantages.values for one in rollouts])

    whole = advantages(slice(0, 6))
    np.testing.assert_array_equal(advantages(slice(0, 1), slice(1, 4), slice(4, 6)), whole)
    assert np.abs(advantages(slice(0, 3)) - whole[:3]).max() > 0.01, "or nothing would be proved"


def test_the_control_deals_the_same_values_out_anew(tmp_path: Path) -> None:
    reward = {"a": Reward(gives(1, 2, 3, 4, 5, None), 1.0)}
    shuffled = [rewarded(tmp_path, reward, shuffled_by=seed)[1].terms["a"] for seed in ((0, 1), (0, 1), (0, 2))]
    np.testing.assert_array_equal(shuffled[0], shuffled[1])
    assert not np.array_equal(shuffled[0], shuffled[2], equal_nan=True)
    for values in shuffled:
        np.testing.assert_array_equal(np.sort(values.ravel()), [1, 2, 3, 4, 5, np.nan])
        assert not np.array_equal(values, [[1, 2, 3], [4, 5, np.nan]], equal_nan=True)


def test_the_noise_of_an_ensemble_shrinks_its_groups_and_is_counted(tmp_path: Path) -> None:
    """The members agree about the first group and contradict each other about the second."""
    members = np.array([[0.0, 0.1], [0.5, 0.6], [1.0, 1.1], [0.5, 0.3], [0.3, 0.5], [0.5, 0.45]])
    paid = {"a": Reward(lambda **_: EnsembleScores(members.mean(axis=1).tolist(), members), 1.0)}
    rollout_groups, samples = rewarded(tmp_path, paid)
    assert samples.noise["a"] == pytest.approx([0, ensemble_noise(members[None, 3:])[0]])
    assert samples.advantages is not None
    assert samples.advantages.below_noise.tolist() == [False, True]
    sizes = [float(group.caption_advantages.abs().max()) for group in rollout_groups]
    assert sizes[0] == pytest.approx(1, abs=1e-3)
    assert 0 < sizes[1] < 0.8
    assert advantage_statistics({"loop2": samples})["loop2/frac_below_noise"] == 0.5
    single = {"a": Reward(lambda **_: EnsembleScores(members[:, 0].tolist(), members[:, :1]), 1.0)}
    one = rewarded(tmp_path, single)[1]
    assert "loop2/frac_below_noise" not in advantage_statistics({"loop2": one}), "one member knows no noise"
    dealt = rewarded(tmp_path, paid, shuffled_by=(0, 1))[1]
    assert dealt.noise == {}


def test_a_reward_function_must_answer_for_every_generation(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\(4,\) values for 6 generations"):
        rewarded(tmp_path, {"a": Reward(gives(1, 2, 3, 4), 1.0)})


def test_an_infinite_reward_names_its_term(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reward 'depth' is infinite"):
        rewarded(tmp_path, {"depth": Reward(gives(1, 2, float("inf"), 4, 5, 6), 1.0)})


def test_both_loops_are_paid_by_their_own_terms(tmp_path: Path) -> None:
    rollout_groups = groups()
    settings = config(tmp_path, multi_objective_aggregation="sum_then_normalize")
    samples = {"loop1": LoopRollouts({"prompts": ["?"] * 4}), "loop2": LoopRollouts({"prompts": ["?"] * 6})}
    terms = {
        "loop1": {"a": Reward(gives(0, 1, 1, 0), 1.0)},
        "loop2": {"a": Reward(gives(1, 2, 3, 3, 2, 1), 1.0)},
    }
    score_rollouts(samples, 2, terms)
    reward_step([(rollout_groups, samples)], terms, settings)
    half = 0.5 / np.std([0, 1], ddof=1)
    assert rollout_groups[0].caption_advantages is not None
    assert rollout_groups[1].mask_advantages is not None
    assert rollout_groups[0].caption_advantages.tolist() == near([-half, half])
    assert rollout_groups[1].mask_advantages.tolist() == near([1, 0, -1])


def test_a_loop_that_counts_must_pay_something(tmp_path: Path) -> None:
    nothing = {"loop1": {"iou": Reward(iou_reward, 0.0)}, "loop2": {"iou": Reward(iou_reward, 0.0)}}
    with pytest.raises(ValueError, match=r"loop1: .*\(iou\) are all 0; .*mask_to_caption_weight"):
        check_weights(nothing, config(tmp_path))
    with pytest.raises(ValueError, match=r"loop2: .*\(iou\) are all 0"):
        check_weights(nothing, config(tmp_path, mask_to_caption_weight=0.0))
    check_weights(nothing, config(tmp_path, mask_to_caption_weight=0.0, pathwise_weight=1.0))


def test_a_term_may_be_made_of_others(tmp_path: Path) -> None:
    terms = {
        "both": Reward(lambda a, b: a - 10 * b, 2.0, of=("a", "b")),
        "b": Reward(gives(1, 0, 0, 0, 1, None), 0.0),
        "a": Reward(gives(1, 2, 3, 4, 5, 6), 0.0),
    }
    _, samples = rewarded(tmp_path, terms)
    np.testing.assert_array_equal(samples.terms["both"], [[-9, 2, 3], [4, -5, np.nan]])
    assert samples.advantages is not None
    assert samples.advantages.rewards[0].tolist() == [-18, 4, 6]


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply("rubbish"), "a reply that cannot be read: rubbish"),
        (Reply(body="<html>rubbish</html>"), "a reply that is no chat completion: <html>rubbish"),
        (Reply(body='{"choices": [{"mess'), 'a reply that is no chat completion: {"choices'),
        (Reply(""), "a reply without text"),
        (Reply(body=""), "a reply that is no chat completion: (empty)"),
        (Reply(status=429, body="slow down", headers=SOON), "HTTP 429: slow down"),
        (Reply(status=500, body="oops", headers=SOON), "HTTP 500: oops"),
    ],
)
def test_captions_are_paid_although_the_judge_fails(tmp_path: Path, reply: Reply, reason: str) -> None:
    """One caption of the first group has no score, no caption of the second has one."""
    plan = GRPOPlan("quick", judge={"loops": ["loop1"]})
    said = ["a dark vessel", "a dark thick vessel", "a broken dark vessel", "a nerve", "a thin nerve", "nothing"]
    columns: dict[str, Any] = {
        "prompts": ["?"] * 6,
        "completions": said,
        "captions": [REFERENCE] * 3 + ["A nerve."] * 3,
    }
    samples = LoopRollouts(columns | {"predicted_masks": [None] * 6, "masks": [np.ones((2, 2), dtype=bool)] * 6})
    with judge_server(lambda prompt: reply if "broken" in prompt or "A nerve." in prompt else play(prompt)) as server:
        judge = Judge(JudgeConfig(server.url, "m", max_retries=1))
        rollout_groups = groups()
        rewards = loop_rewards(plan, "regions", judge, None)
        score_rollouts({"loop1": samples}, 2, rewards)
        reward_step([(rollout_groups, {"loop1": samples})], rewards, config(tmp_path))
    meteor = samples.terms["meteor"]
    np.testing.assert_array_equal(samples.terms["judge"], [[0.5, 0.0, np.nan], [np.nan] * 3])
    np.testing.assert_allclose(samples.terms["caption"][0], 0.25 * meteor[0] + 0.75 * np.array([0.5, 0.0, 0.25]))
    np.testing.assert_array_equal(samples.terms["caption"][1], meteor[1])
    assert meteor[1, 0] > meteor[1, 1] > meteor[1, 2] == 0, "so that the group learns something"
    assert samples.advantages is not None
    assert samples.advantages.spread.tolist() == [True, True]
    assert {name: judge.counts[name] for name in ("imputed", "groups_paid_by_meteor")} == {
        "imputed": 1,
        "groups_paid_by_meteor": 1,
    }
    assert judge.counts["failures"] == 1 + 3, "three questions about one caption, one exam"
    assert judge.last_failure.startswith(reason)


def test_the_control_deals_out_what_the_judge_paid(tmp_path: Path) -> None:
    """Terms are combined before they are shuffled."""
    terms = {
        "meteor": Reward(gives(0.1, 0.2, 0.3, 0.4, 0.5, 0.6), 0.0),
        "judge": Reward(gives(1, None, 0, None, None, None), 0.0),
        "caption": Reward(caption_reward, 1.0, of=("meteor", "judge")),
    }
    plain, dealt = (rewarded(tmp_path, terms, shuffled_by=seed)[1].terms["caption"] for seed in (None, (0, 1)))
    assert dealt.tolist() != plain.tolist()
    assert sorted(dealt.ravel()) == sorted(plain.ravel())
