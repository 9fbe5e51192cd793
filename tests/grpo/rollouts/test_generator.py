"""Rollouts: chance from the seed alone, the partner answers greedily, rewards fit their rollouts, empty groups drop."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rl_reward_network.grpo.image_context import PromptBatch, region_cells
from rl_reward_network.grpo.measure import mixed_precision
from rl_reward_network.grpo.rewards import Reward, reward_step
from rl_reward_network.grpo.rollouts import RolloutGenerator
from rl_reward_network.models.ema import EMA
from rl_reward_network.models.sa2va.generation_sa2va import Answer, _append
from rl_reward_network.models.sa2va.templates import TEMPLATES
from rl_reward_network.rewards.metrics import iou
from tests.grpo.nano import config, nano, regions, rewards, shake


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> RolloutGenerator:
    return RolloutGenerator(*nano(), config(tmp_path_factory.mktemp("rollouts")), rewards())


def test_equal_seeds_give_equal_rollouts_and_others_do_not(generator: RolloutGenerator) -> None:
    first, again, other = (generator.generate(regions()[:4], seed)[0] for seed in ((0, 1, 2), (0, 1, 2), (0, 1, 3)))
    assert [group.completion_ids for group in first] == [group.completion_ids for group in again]
    assert all(torch.equal(a.actions, b.actions) for a, b in zip(first, again, strict=True))
    assert [group.completion_ids for group in first] != [group.completion_ids for group in other]
    assert not torch.equal(first[0].actions, other[0].actions)


def test_rewards_are_those_of_their_columns(generator: RolloutGenerator) -> None:
    prompts = regions()[:4]
    groups, rollouts = generator.generate_and_score(prompts, (0, 0, 0))
    loop1, loop2 = rollouts["loop1"], rollouts["loop2"]
    assert loop1.columns["captions"] == [prompt.caption for prompt in prompts for _ in range(4)]
    for number, prompt in enumerate(prompts):
        _, truth = prompt.load()
        for g in range(4):
            row = 4 * number + g
            drawn = loop1.columns["predicted_masks"][row]
            expected = 0.0 if drawn is None else iou(drawn[None], truth[None])[0]
            assert loop1.terms["iou"][number, g] == pytest.approx(expected)
            text = generator.processor.text(groups[number].completion_ids[g]).removesuffix("<|im_end|>").strip()
            assert loop1.columns["completions"][row] == text
    assert loop2.terms["meteor"].shape == (4, 4)
    reward_step([(groups, rollouts)], generator.rewards, generator.config)
    assert loop1.advantages.rewards == pytest.approx(loop1.terms["iou"])


def test_the_partners_caption_of_a_mask_is_the_models_prediction(generator: RolloutGenerator) -> None:
    """Greedy, and the same words as one plain prediction with that region."""
    prompt = regions()[0]
    _, rollouts = generator.generate_and_score([prompt], (0, 0, 0))
    image, _ = prompt.load()
    for row in range(2):
        mask = rollouts["loop2"].columns["predicted_masks"][row]
        prediction = generator.model.predict_forward(
            image=image,
            text="<image>Please describe region1.",
            mask_prompts=[mask[None]],
            processor=generator.processor,
            max_new_tokens=16,
        )
        assert (
            rollouts["loop2"].columns["completions"][row] == prediction["prediction"].removesuffix("<|im_end|>").strip()
        )


def test_the_mean_action_is_the_models_prediction(generator: RolloutGenerator) -> None:
    prompt = regions()[1]
    image, _ = prompt.load()
    generator.spread_controller.spread = 1e-6
    _, rollouts = generator.generate_and_score([prompt], (0, 0, 0))
    generator.spread_controller.spread = 0.3
    prediction = generator.model.predict_forward(
        image=image, text=f"<image>{prompt.question}", processor=generator.processor
    )
    differ = rollouts["loop2"].columns["predicted_masks"][0] ^ prediction["prediction_masks"][0][0]
    assert differ.mean() < 1e-3


def test_the_partner_has_the_averaged_weights(tmp_path: Any) -> None:
    model, processor = nano()
    generator = RolloutGenerator(model, processor, config(tmp_path), rewards())
    generator.ema = EMA(model)
    before = generator.generate_and_score(regions()[:2], (0, 0, 0))[1]["loop1"].columns
    shake(model, 0.3)
    generator.ema = None
    captions = generator.generate_and_score(regions()[:2], (0, 0, 0))[1]["loop1"].columns
    assert captions["completions"] != before["completions"], "the policy has changed"
    generator.ema = EMA(model)
    shake(model, -0.3)  # undone, while the average stays
    mixed = generator.generate_and_score(regions()[:2], (0, 0, 0))[1]["loop1"].columns
    assert mixed["completions"] == before["completions"]
    pairs = zip(mixed["predicted_masks"], before["predicted_masks"], strict=True)
    assert any(a is None or b is None or (a != b).any() for a, b in pairs), "the partner's masks have changed"


def test_the_partner_has_the_averaged_weights_in_bfloat16_as_well(tmp_path: Any) -> None:
    model, processor = nano(dtype=torch.bfloat16)
    generator, prompts = RolloutGenerator(model, processor, config(tmp_path), rewards()), regions()[:2]

    def described() -> list[str]:
        with mixed_precision(model):
            columns = generator.generate(prompts, (0, 0, 0))[1]["loop2"].columns
        return [str(text) for text in columns["completions"]]

    without = described()
    generator.ema = EMA(model)
    assert described() == without, "the average begins as the model"
    rng = torch.Generator().manual_seed(0)
    for tensor in generator.ema.weights.values():
        tensor += 0.3 * torch.randn(tensor.shape, generator=rng)
    assert described() != without


def test_groups_without_spread_have_no_advantage(tmp_path: Any) -> None:
    def equal(**columns: Any) -> list[float | None]:
        return [0.5] * len(columns["prompts"])

    def by_place(**columns: Any) -> list[float | None]:
        return [float(row) for row in range(len(columns["prompts"]))]

    generator = RolloutGenerator(
        *nano(), config(tmp_path), {"loop1": {"a": Reward(equal, 1.0)}, "loop2": {"a": Reward(by_place, 1.0)}}
    )
    groups, rollouts = generator.generate_and_score(regions()[:3], (0, 0, 0))
    reward_step([(groups, rollouts)], generator.rewards, generator.config)
    assert [group.caption_advantages.tolist() for group in groups] == [[0, 0, 0, 0]] * 3
    assert all(group.describe_ids and group.segment_ids for group in groups), "they enter the averages"
    assert not rollouts["loop1"].advantages.spread.any()
    equal_groups = np.tile([-1.5, -0.5, 0.5, 1.5], 3)
    expected = (equal_groups / equal_groups.std(ddof=1))[:4].tolist()
    assert groups[2].mask_advantages.tolist() == pytest.approx(expected, abs=1e-3)


def test_a_missing_seg_is_a_true_0(generator: RolloutGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_reward_network.grpo.image_context import ImageContext

    monkeypatch.setattr(ImageContext, "segment", lambda self, questions, **_: [([], None) for _ in questions])
    groups, rollouts = generator.generate_and_score(regions()[:2], (0, 0, 0))
    reward_step([(groups, rollouts)], generator.rewards, generator.config)
    assert not rollouts["loop1"].terms["iou"].any()
    assert not rollouts["loop2"].terms["meteor"].any()
    assert all(group.actions is None and not group.mask_advantages.any() for group in groups)
    answers = [generator.processor.text(group.segment_ids[-group.answer_length :]) for group in groups]
    assert answers == ["Sure, [SEG]"] * 2, "the reference answer is learned in place of the model's"


def test_shuffled_rewards_are_the_same_values_elsewhere(tmp_path: Any) -> None:
    model, processor = nano()
    plain, shuffled = (
        RolloutGenerator(model, processor, config(tmp_path), rewards(), shuffle) for shuffle in (False, True)
    )
    values, permuted = (
        generator.generate_and_score(regions()[:6], (0, 0, 0))[1]["loop1"].terms["iou"]
        for generator in (plain, shuffled)
    )
    assert sorted(values.ravel()) == sorted(permuted.ravel())
    assert (values != permuted).any()


def test_a_reward_function_must_return_one_value_per_generation(tmp_path: Any) -> None:
    wrong = {"loop1": {"a": Reward(lambda **_: [1.0], 1.0)}, "loop2": {"a": Reward(lambda **_: [1.0], 1.0)}}
    generator = RolloutGenerator(*nano(), config(tmp_path), wrong)
    with pytest.raises(ValueError, match=r"\(1,\) values for 8 generations"):
        generator.generate_and_score(regions()[:2], (0, 0, 0))


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_reference_caption_ends_as_generation_does(tmp_path: Any, template: str) -> None:
    model, processor = nano()
    processor.template = TEMPLATES[template]
    generator = RolloutGenerator(model, processor, config(tmp_path, objective="supervised"), rewards())
    (group,) = generator.groups_from_references(regions()[:1])
    (ids,) = group.completion_ids
    answer = Answer()
    for number, token_id in enumerate(ids, start=1):
        assert not answer.stopped
        _append(answer, token_id, processor, 100)
        assert answer.stopped == (number == len(ids)), "at the last token, which is trained"
    assert PromptBatch.text(SimpleNamespace(processor=processor), answer) == regions()[0].caption


def test_truncated_captions_are_not_counted(tmp_path: Any) -> None:
    generator = RolloutGenerator(*nano(), config(tmp_path, max_completion_length=3), rewards())
    groups, _ = generator.generate(regions()[:2], (0, 0, 0))
    assert not any(group.counted.any() for group in groups)
    whole = RolloutGenerator(
        *nano(), config(tmp_path, max_completion_length=3, mask_truncated_completions=False), rewards()
    )
    assert all(group.counted.all() for group in whole.generate(regions()[:2], (0, 0, 0))[0])


def test_a_region_between_all_cells_gets_the_nearest(generator: RolloutGenerator) -> None:
    mask = np.zeros((256, 256), dtype=bool)
    mask[5, 5] = True
    assert region_cells(generator.processor, mask).sum() == 1
    with pytest.raises(ValueError, match="region 1 has no pixel"):
        region_cells(generator.processor, np.zeros((256, 256), dtype=bool))
