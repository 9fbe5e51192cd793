"""From rollouts to advantages, by hand: weighted terms, logged terms, and groups without spread."""

import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rl_reward_network.data.items import make_region
from rl_reward_network.data.masks import to_rle
from rl_reward_network.grpo import trainer as trainer_file
from rl_reward_network.grpo.image_context import PromptBatch
from rl_reward_network.grpo.prompts import region_prompt
from rl_reward_network.grpo.rewards import (
    FRAC_REWARD_ZERO_STD,
    MASK_IOU,
    Reward,
    Terms,
    advantage_statistics,
    check_weights,
    loop_rewards,
    median_pair_iou,
    rollout_statistics,
    score,
    step_advantages,
)
from rl_reward_network.grpo.rollouts import MaskRollout, MicroBatch, Rollouts, make_columns
from rl_reward_network.grpo.settings import GRPOPlan
from rl_reward_network.grpo.trainer import LONGEST_ALIKE, Sa2VAGRPOTrainer, with_advantages
from rl_reward_network.models.ema import copied
from rl_reward_network.models.sa2va.generation_sa2va import Answer
from rl_reward_network.rewards.combine import Advantages, ensemble_noise
from rl_reward_network.rewards.judge import Judge, JudgeConfig
from rl_reward_network.rewards.table import EnsembleScores, iou_reward
from tests.grpo.nano import NOTHING, captions_of, config, nano, regions
from tests.rewards.judge_server import SOON, Reply, judge_server
from tests.rewards.test_judge import REFERENCE, play


def gives(*values: float | None) -> Any:
    return lambda **_: list(values)


def rewarded(
    folder: Path, terms: dict[str, Reward], loop: str = "loop1", shuffled_by: Any = None, **settings: Any
) -> tuple[Terms, Advantages]:
    """Terms and advantages of two groups of three generations, rewarded by `terms`."""
    rollouts = Rollouts(2, [], [], columns={loop: {"prompts": ["?"] * 6}})
    scored = score(rollouts, {loop: terms}, shuffled_by)
    settings = {"multi_objective_aggregation": "sum_then_normalize"} | settings
    (advantages,) = step_advantages([scored], {loop: terms}, config(folder, **settings))
    return scored[loop], advantages[loop]


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


@pytest.mark.parametrize(
    ("terms", "rewards", "expected"),
    [
        ({"a": ((1, 2, 3, 0, 0, 6), 2.0)}, [[2, 4, 6], [0, 0, 12]], [[-1, 0, 1], [-0.577, -0.577, 1.155]]),
        (
            {"a": ((4, 4, 4, 1, 2, 3), 1.0), "b": ((9, 0, 0, 0, 0, 9), 0.0)},
            [[4, 4, 4], [1, 2, 3]],
            [[0, 0, 0], [-1, 0, 1]],
        ),
    ],
)
def test_advantages_are_the_centred_rewards_over_their_deviation(
    tmp_path: Path, terms: dict[str, Any], rewards: Any, expected: Any
) -> None:
    """A term of weight 0 is logged and does not count; a group without spread has advantages of 0."""
    paid = {name: Reward(gives(*values), weight) for name, (values, weight) in terms.items()}
    scored, advantages = rewarded(tmp_path, paid)
    for name, (values, _) in terms.items():
        assert scored.values[name].ravel().tolist() == list(values)
    assert advantages.rewards.tolist() == rewards
    np.testing.assert_allclose(advantages.values, expected, atol=5e-3)


def test_a_missing_value_is_neutral_and_no_0(tmp_path: Path) -> None:
    scored, advantages = rewarded(tmp_path, {"a": Reward(gives(1, None, 3, None, None, None), 1.0)})
    np.testing.assert_array_equal(scored.values["a"], [[1, np.nan, 3], [np.nan] * 3])
    assert advantages.values[0].tolist() == near([-1, 0, 1])
    assert advantages.values[1].tolist() == [0, 0, 0], "a group without any value has no advantages"


def test_a_micro_batch_gets_the_advantages_of_its_rollouts() -> None:
    values = np.arange(6.0).reshape(2, 3)
    one = Advantages(values, values, np.ones(2, dtype=bool))
    masks = [MaskRollout(1, torch.zeros(3, 1), torch.ones(()))]
    batch = with_advantages(MicroBatch(Rollouts(2, [], [], masks), [], []), {"loop1": one, "loop2": one})
    assert [row.tolist() for row in batch.caption_advantages] == values.tolist()
    assert batch.caption_advantages[0].dtype == torch.float32
    assert [row.tolist() for row in batch.mask_advantages] == [[3, 4, 5]], "none of the answer without [SEG]"


def test_settings_say_how_terms_are_put_together(tmp_path: Path) -> None:
    terms = {"a": Reward(gives(0, 0, 10, 0, 0, 10), 1.0), "b": Reward(gives(0.2, 0.1, 0, 0.2, 0.1, 0), 1.0)}

    def first(**settings: Any) -> Any:
        return near(rewarded(tmp_path, terms, **settings)[1].values[0])

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
        step = [{"loop2": Terms({name: v[part] for name, v in values.items()}, {})} for part in parts]
        return np.concatenate([one["loop2"].values for one in step_advantages(step, terms, settings)])

    whole = advantages(slice(0, 6))
    np.testing.assert_array_equal(advantages(slice(0, 1), slice(1, 4), slice(4, 6)), whole)
    assert np.abs(advantages(slice(0, 3)) - whole[:3]).max() > 0.01, "or nothing would be proved"


def test_the_control_deals_the_same_values_out_anew(tmp_path: Path) -> None:
    reward = {"a": Reward(gives(1, 2, 3, 4, 5, None), 1.0)}
    shuffled = [rewarded(tmp_path, reward, shuffled_by=seed)[0].values["a"] for seed in ((0, 1), (0, 1), (0, 2))]
    np.testing.assert_array_equal(shuffled[0], shuffled[1])
    assert not np.array_equal(shuffled[0], shuffled[2], equal_nan=True)
    for values in shuffled:
        np.testing.assert_array_equal(np.sort(values.ravel()), [1, 2, 3, 4, 5, np.nan])
        assert not np.array_equal(values, [[1, 2, 3], [4, 5, np.nan]], equal_nan=True)


def test_the_noise_of_an_ensemble_shrinks_its_groups_and_is_counted(tmp_path: Path) -> None:
    """The members agree about the first group and contradict each other about the second."""
    members = np.array([[0.0, 0.1], [0.5, 0.6], [1.0, 1.1], [0.5, 0.3], [0.3, 0.5], [0.5, 0.45]])
    paid = {"a": Reward(lambda **_: EnsembleScores(members.mean(axis=1).tolist(), members), 1.0)}
    scored, advantages = rewarded(tmp_path, paid)
    assert scored.noise["a"] == pytest.approx([0, ensemble_noise(members[None, 3:])[0]])
    assert advantages.below_noise.tolist() == [False, True]
    sizes = np.abs(advantages.values).max(axis=1)
    assert sizes[0] == pytest.approx(1, abs=1e-3)
    assert 0 < sizes[1] < 0.8
    assert advantage_statistics({"loop2": advantages})["loop2/frac_below_noise"] == 0.5
    single = {"a": Reward(lambda **_: EnsembleScores(members[:, 0].tolist(), members[:, :1]), 1.0)}
    one = rewarded(tmp_path, single)[1]
    assert "loop2/frac_below_noise" not in advantage_statistics({"loop2": one}), "one member knows no noise"
    assert rewarded(tmp_path, paid, shuffled_by=(0, 1))[0].noise == {}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((1, 2, 3, 4), r"reward depth: \(4,\) values for 6 generations"),
        ((1, 2, math.inf, 4, 5, 6), "'depth' is infinite"),
    ],
)
def test_a_reward_function_must_give_a_number_for_every_generation(tmp_path: Path, values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rewarded(tmp_path, {"depth": Reward(gives(*values), 1.0)})


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
    scored, advantages = rewarded(tmp_path, terms)
    np.testing.assert_array_equal(scored.values["both"], [[-9, 2, 3], [4, -5, np.nan]])
    assert advantages.rewards[0].tolist() == [-18, 4, 6]
    dealt = rewarded(tmp_path, terms, shuffled_by=(0, 1))[0].values["both"].ravel()
    assert not np.array_equal(dealt, scored.values["both"].ravel(), equal_nan=True)
    np.testing.assert_array_equal(np.sort(dealt), [-9, -5, 2, 3, 4, np.nan], "combined before they are shuffled")


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply("rubbish"), "a reply that cannot be read: rubbish"),
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
    columns |= {"predicted_masks": [None] * 6, "masks": [np.ones((2, 2), dtype=bool)] * 6}
    rollouts = Rollouts(2, [], [], columns={"loop1": columns})
    with judge_server(lambda prompt: reply if "broken" in prompt or "A nerve." in prompt else play(prompt)) as server:
        judge = Judge(JudgeConfig(server.url, "m", max_retries=1))
        rewards = loop_rewards(plan, "regions", judge, None)
        scored = score(rollouts, rewards)
        (advantages,) = step_advantages([scored], rewards, config(tmp_path))
    terms = scored["loop1"].values
    meteor = terms["meteor"]
    np.testing.assert_array_equal(terms["judge"], [[0.5, 0.0, np.nan], [np.nan] * 3])
    np.testing.assert_allclose(terms["caption"][0], 0.25 * meteor[0] + 0.75 * np.array([0.5, 0.0, 0.25]))
    np.testing.assert_array_equal(terms["caption"][1], meteor[1])
    assert meteor[1, 0] > meteor[1, 1] > meteor[1, 2] == 0, "so that the group learns something"
    assert advantages["loop1"].differ.tolist() == [True, True]
    assert [judge.counts[name] for name in ("imputed", "groups_paid_by_meteor")] == [1, 1]
    assert judge.counts["failures"] == 1 + 3, "three questions about one caption, one exam"
    assert judge.last_failure.startswith(reason)


LEFT, TOP, ALL = (np.zeros((2, 2), dtype=bool) for _ in range(3))
LEFT[:, 0], TOP[0], ALL[:] = True, True, True


def statistics(rollouts: Rollouts, terms: dict[str, Any], spread: list[bool], loop: str = "loop1") -> dict[str, float]:
    """Statistics of a loop whose reward is the first term."""
    rewards = np.array(next(iter(terms.values())), dtype=float)
    scored = {loop: Terms({name: np.array(term, dtype=float) for name, term in terms.items()}, {})}
    own = Advantages(np.zeros_like(rewards), rewards, np.array(spread))
    return rollout_statistics(rollouts, scored) | advantage_statistics({loop: own})


def test_rewards_by_loop_and_term() -> None:
    terms = {"iou": [[1, 3], [4, 4]], "judge": [[0.5, np.nan], [np.nan, 0.1]]}
    captions = [captions_of(0, [2, 4], [True, False]), captions_of(1, [5, 5])]
    values = statistics(Rollouts(2, captions, []), terms, [True, False])
    assert values["loop1/reward_mean"] == 3
    assert values["loop1/reward_std"] == pytest.approx((2**0.5 + 0) / 2), "inside each group, then the mean"
    assert values["loop1/frac_zero_std"] == 0.5
    assert values["loop1/reward/iou"] == 3
    assert (values["loop1/missing/iou"], values["loop1/missing/judge"]) == (0, 0.5)
    assert values["loop1/reward/judge"] == pytest.approx(0.3), "the mean of the known values"
    assert (values["loop1/completion_length"], values["loop1/frac_truncated"]) == (4, 0.25)
    assert not any(name.startswith("loop2") for name in values)


@pytest.mark.parametrize(
    ("masks", "similarity", "no_seg"),
    [([LEFT, TOP, ALL, ALL], (1 / 3 + 1) / 2, 0.0), ([None, None, ALL, ALL], 1.0, 0.5)],
)
def test_similarity_of_the_masks_of_a_group(masks: list[Any], similarity: float, no_seg: float) -> None:
    rollouts = Rollouts(2, [], [], columns={"loop2": {"predicted_masks": masks}})
    values = statistics(rollouts, {"meteor": [[0, 1], [0, 0]]}, [True, False], "loop2")
    assert (values[MASK_IOU], values["loop2/no_seg_share"]) == (pytest.approx(similarity), no_seg)
    assert values[FRAC_REWARD_ZERO_STD] == 0.5
    assert "loop1/completion_length" not in values


@pytest.mark.parametrize(
    ("masks", "prompts", "expected"),
    [
        ([LEFT, TOP, ALL], 1, (1 / 3 + 1 / 2 + 1 / 2) / 3),
        ([LEFT, None, TOP], 1, 1 / 3),  # answers without a mask are left out
        ([LEFT, TOP, LEFT, ALL, ALL, ALL], 3, 1 / 2),  # the median of 1/3, 1/2 and 1
        ([LEFT, ~LEFT, LEFT, TOP], 2, (0 + 1 / 3) / 2),
        ([LEFT, None, LEFT, TOP], 2, 1 / 3),  # a group with one mask has no pair
        ([LEFT, None, None, None], 2, 1.0),  # no group has a pair
        ([~ALL, ~ALL], 1, 1.0),
    ],
)
def test_median_over_groups_of_the_mean_iou_of_pairs(masks: list[Any], prompts: int, expected: float) -> None:
    assert median_pair_iou(masks, prompts) == pytest.approx(expected)


def alike_trainer(folder: Path, **settings: Any) -> Sa2VAGRPOTrainer:
    equal = {"a": Reward(lambda **columns: [0.5] * len(columns["prompts"]), 1.0)}
    return Sa2VAGRPOTrainer(*nano(), config(folder, **settings), regions(), {"loop1": equal, "loop2": equal})


def note(trainer: Any, **differ: bool) -> None:
    """A step in which the rewards of a loop differ or not."""
    nothing = np.zeros((1, 2))
    trainer._note_alike([{loop: Advantages(nothing, nothing, np.array([flag])) for loop, flag in differ.items()}])
    trainer.state.global_step += 1


def test_the_warning_of_alike_rewards_names_the_steps_and_the_remedy_once(tmp_path: Path) -> None:
    trainer = alike_trainer(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(5 + LONGEST_ALIKE - 1):
            note(trainer, loop1=True, loop2=step < 5)
    with pytest.warns(UserWarning, match="steps 6 to 25: the rewards of every group of loop2 .*num_mask_generations"):
        note(trainer, loop1=True, loop2=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        note(trainer, loop1=True, loop2=False)
    assert alike_trainer(tmp_path, caption_to_mask_weight=0.0).alike_steps == {"loop1": 0}, "loop 2 has no weight"


def test_a_run_warns_of_alike_rewards_while_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps on the same rollouts count, too; they are steps that change nothing."""
    monkeypatch.setattr(trainer_file, "LONGEST_ALIKE", 2)
    trainer = alike_trainer(tmp_path, num_iterations=2, per_device_train_batch_size=4, seg_text_weight=0.0)
    start = copied(trainer.sa2va)
    with pytest.warns(UserWarning, match="steps 1 to 2: the rewards of every group of loop1 .*temperature"):
        trainer.train()
    assert trainer.state.log_history[0]["loop1/frac_zero_std"] == 1
    assert all(torch.equal(tensor, start[name]) for name, tensor in copied(trainer.sa2va).items())
