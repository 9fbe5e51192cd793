"""Rollouts: chance from the seed alone, the partner answers greedily, rewards fit their samples, empty groups drop."""

from typing import Any

import numpy as np
import pytest
import torch

from rl_reward_network.grpo.measure import mixed_precision
from rl_reward_network.grpo.rollouts.batch import region_cells
from rl_reward_network.grpo.rollouts.maker import RolloutMaker
from rl_reward_network.grpo.rollouts.rewards import Reward
from rl_reward_network.models.ema import EMA
from rl_reward_network.rewards.masks import iou
from tests.grpo.nano import config, nano, regions, rewards, shake


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> RolloutMaker:
    return RolloutMaker(*nano(), config(tmp_path_factory.mktemp("rollouts")), rewards())


def test_equal_seeds_give_equal_rollouts_and_others_do_not(maker: RolloutMaker) -> None:
    first, again, other = (maker.sample(regions()[:4], seed)[0] for seed in ((0, 1, 2), (0, 1, 2), (0, 1, 3)))
    assert [group.completions for group in first] == [group.completions for group in again]
    assert all(torch.equal(a.actions, b.actions) for a, b in zip(first, again, strict=True))
    assert [group.completions for group in first] != [group.completions for group in other]
    assert not torch.equal(first[0].actions, other[0].actions)


def test_columns_and_rewards_belong_to_each_other(maker: RolloutMaker) -> None:
    items = regions()[:4]
    groups, samples = maker.make(items, (0, 0, 0))
    loop1, loop2 = samples["loop1"], samples["loop2"]
    assert loop1.columns["captions"] == [item.caption for item in items for _ in range(4)]
    for number, item in enumerate(items):
        _, truth = item.load()
        for g in range(4):
            row = 4 * number + g
            drawn = loop1.columns["predicted_masks"][row]
            expected = 0.0 if drawn is None else iou(drawn[None], truth[None])[0]
            assert loop1.terms["iou"][number, g] == pytest.approx(expected)
            text = maker.processor.text(groups[number].completions[g]).removesuffix("<|im_end|>").strip()
            assert loop1.columns["completions"][row] == text
    assert loop2.terms["meteor"].shape == (4, 4)
    assert loop1.advantages.rewards == pytest.approx(loop1.terms["iou"])


def test_what_the_partner_says_of_a_mask_is_what_the_model_predicts(maker: RolloutMaker) -> None:
    """Greedy, and the same words as one plain prediction with that region."""
    item = regions()[0]
    _, samples = maker.make([item], (0, 0, 0))
    image, _ = item.load()
    for row in range(2):
        mask = samples["loop2"].columns["predicted_masks"][row]
        said = maker.model.predict_forward(
            image=image,
            text="<image>Please describe region1.",
            mask_prompts=[mask[None]],
            processor=maker.processor,
            max_new_tokens=16,
        )
        assert samples["loop2"].columns["completions"][row] == said["prediction"].removesuffix("<|im_end|>").strip()


def test_the_mean_action_is_the_mask_that_the_model_predicts(maker: RolloutMaker) -> None:
    item = regions()[1]
    image, _ = item.load()
    maker.controller.spread = 1e-6
    _, samples = maker.make([item], (0, 0, 0))
    maker.controller.spread = 0.3
    said = maker.model.predict_forward(image=image, text=f"<image>{item.question}", processor=maker.processor)
    differ = samples["loop2"].columns["predicted_masks"][0] ^ said["prediction_masks"][0][0]
    assert differ.mean() < 1e-3


def test_the_partner_has_the_averages_weights(tmp_path: Any) -> None:
    model, processor = nano()
    own = RolloutMaker(model, processor, config(tmp_path), rewards())
    own.ema = EMA(model)
    before = own.make(regions()[:2], (0, 0, 0))[1]["loop1"].columns
    shake(model, 0.3)
    own.ema = None
    captions = own.make(regions()[:2], (0, 0, 0))[1]["loop1"].columns
    assert captions["completions"] != before["completions"], "the policy itself has moved"
    own.ema = EMA(model)
    shake(model, -0.3)  # back, while the average stays
    mixed = own.make(regions()[:2], (0, 0, 0))[1]["loop1"].columns
    assert mixed["completions"] == before["completions"]
    pairs = zip(mixed["predicted_masks"], before["predicted_masks"], strict=True)
    assert any(a is None or b is None or (a != b).any() for a, b in pairs), "the partner's drawing has moved"


def test_the_partner_has_the_averages_weights_in_bfloat16_as_well(tmp_path: Any) -> None:
    model, processor = nano(dtype=torch.bfloat16)
    own, items = RolloutMaker(model, processor, config(tmp_path), rewards()), regions()[:2]

    def described() -> list[str]:
        with mixed_precision(model):
            columns = own.sample(items, (0, 0, 0))[1]["loop2"].columns
        return [str(text) for text in columns["completions"]]

    without = described()
    own.ema = EMA(model)
    assert described() == without, "the average begins as the model"
    generator = torch.Generator().manual_seed(0)
    for tensor in own.ema.weights.values():
        tensor += 0.3 * torch.randn(tensor.shape, generator=generator)
    assert described() != without


def test_groups_without_spread_have_no_advantage(tmp_path: Any) -> None:
    def equal(**columns: Any) -> list[float | None]:
        return [0.5] * len(columns["prompts"])

    def by_place(**columns: Any) -> list[float | None]:
        return [float(row) for row in range(len(columns["prompts"]))]

    own = RolloutMaker(
        *nano(), config(tmp_path), {"loop1": {"a": Reward(equal, 1.0)}, "loop2": {"a": Reward(by_place, 1.0)}}
    )
    groups, samples = own.make(regions()[:3], (0, 0, 0))
    assert [group.token_advantages.tolist() for group in groups] == [[0, 0, 0, 0]] * 3
    assert all(group.describe_ids and group.segment_ids for group in groups), "they count in the averages"
    assert not samples["loop1"].advantages.spread.any()
    deviation = np.std([0, 1, 2, 3], ddof=1)
    assert groups[2].mask_advantages.tolist() == pytest.approx((np.array([-1.5, -0.5, 0.5, 1.5]) / deviation).tolist())


def test_a_missing_seg_is_a_true_0(maker: RolloutMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_reward_network.grpo.rollouts.generation import ImageContext

    monkeypatch.setattr(ImageContext, "segment", lambda self, questions, **_: [([], None) for _ in questions])
    groups, samples = maker.make(regions()[:2], (0, 0, 0))
    assert not samples["loop1"].terms["iou"].any()
    assert not samples["loop2"].terms["meteor"].any()
    assert not any(group.segment_ids for group in groups)


def test_shuffled_rewards_are_the_same_values_elsewhere(tmp_path: Any) -> None:
    model, processor = nano()
    plain, shuffled = (
        RolloutMaker(model, processor, config(tmp_path), rewards(), shuffle) for shuffle in (False, True)
    )
    own, dealt = (one.make(regions()[:6], (0, 0, 0))[1]["loop1"].terms["iou"] for one in (plain, shuffled))
    assert sorted(own.ravel()) == sorted(dealt.ravel())
    assert (own != dealt).any()


def test_a_reward_function_must_answer_for_every_generation(tmp_path: Any) -> None:
    wrong = {"loop1": {"a": Reward(lambda **_: [1.0], 1.0)}, "loop2": {"a": Reward(lambda **_: [1.0], 1.0)}}
    own = RolloutMaker(*nano(), config(tmp_path), wrong)
    with pytest.raises(ValueError, match=r"returned \(1,\) values for 8 generations"):
        own.make(regions()[:2], (0, 0, 0))


def test_captions_that_are_cut_off_do_not_count(tmp_path: Any) -> None:
    own = RolloutMaker(*nano(), config(tmp_path, max_completion_length=3), rewards())
    groups, _ = own.sample(regions()[:2], (0, 0, 0))
    assert not any(group.counts.any() for group in groups)
    whole = RolloutMaker(
        *nano(), config(tmp_path, max_completion_length=3, mask_truncated_completions=False), rewards()
    )
    assert all(group.counts.all() for group in whole.sample(regions()[:2], (0, 0, 0))[0])


def test_a_region_between_all_cells_gets_the_nearest(maker: RolloutMaker) -> None:
    mask = np.zeros((256, 256), dtype=bool)
    mask[5, 5] = True
    assert region_cells(maker.processor, mask).sum() == 1
    with pytest.raises(ValueError, match="region 1 has no pixel"):
        region_cells(maker.processor, np.zeros((256, 256), dtype=bool))
