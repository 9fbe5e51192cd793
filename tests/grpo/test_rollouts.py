"""Rollouts: random numbers from the seed alone, a greedy teacher, references, answers without `[SEG]`."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rl_reward_network.grpo.image_context import ImageContext, PromptBatch, region_cells
from rl_reward_network.grpo.rewards import score, step_advantages
from rl_reward_network.grpo.rollouts import MicroBatch, RolloutGenerator
from rl_reward_network.grpo.trainer import with_advantages
from rl_reward_network.models.ema import EMA
from rl_reward_network.models.sa2va.generation_sa2va import Answer, _append
from rl_reward_network.models.sa2va.templates import TEMPLATES
from rl_reward_network.rewards.metrics import iou
from tests.grpo.nano import config, nano, regions, rewards, shake


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> RolloutGenerator:
    return RolloutGenerator(*nano(), config(tmp_path_factory.mktemp("rollouts")))


def test_equal_seeds_give_equal_rollouts_and_others_do_not(generator: RolloutGenerator) -> None:
    first, again, other = (generator.generate(regions()[:4], seed) for seed in ((0, 1, 2), (0, 1, 2), (0, 1, 3)))
    ids = [[caption.completion_ids for caption in rollouts.captions] for rollouts in (first, again, other)]
    assert ids[0] == ids[1] != ids[2]
    assert all(torch.equal(a.actions, b.actions) for a, b in zip(first.masks, again.masks, strict=True))
    assert not torch.equal(first.masks[0].actions, other.masks[0].actions)


def test_rewards_are_those_of_their_columns(generator: RolloutGenerator) -> None:
    prompts = regions()[:4]
    rollouts = generator.generate(prompts, (0, 0, 0))
    terms, columns = score(rollouts, rewards()), rollouts.columns["loop1"]
    assert columns["captions"] == [prompt.caption for prompt in prompts for _ in range(4)]
    for number, prompt in enumerate(prompts):
        _, truth = prompt.load()
        for g in range(4):
            row = 4 * number + g
            mask = columns["predicted_masks"][row]
            expected = 0.0 if mask is None else iou(mask[None], truth[None])[0]
            assert terms["loop1"].values["iou"][number, g] == pytest.approx(expected)
            ids = rollouts.captions[number].completion_ids[g]
            assert columns["completions"][row] == generator.processor.text(ids).removesuffix("<|im_end|>").strip()
    assert terms["loop2"].values["meteor"].shape == (4, 4)


def test_the_teachers_caption_of_a_mask_is_the_models_prediction(generator: RolloutGenerator) -> None:
    """Greedy, and the same words as one plain prediction with that region."""
    prompt = regions()[0]
    rollouts = generator.generate([prompt], (0, 0, 0))
    image, _ = prompt.load()
    for row in range(2):
        mask = rollouts.columns["loop2"]["predicted_masks"][row]
        prediction = generator.model.predict_forward(
            image=image,
            text="<image>Please describe region1.",
            mask_prompts=[mask[None]],
            processor=generator.processor,
            max_new_tokens=16,
        )
        assert (
            rollouts.columns["loop2"]["completions"][row] == prediction["prediction"].removesuffix("<|im_end|>").strip()
        )


def test_the_mean_action_is_the_models_prediction(generator: RolloutGenerator) -> None:
    prompt = regions()[1]
    image, _ = prompt.load()
    generator.sigma_controller.sigma = 1e-6
    rollouts = generator.generate([prompt], (0, 0, 0))
    generator.sigma_controller.sigma = 0.3
    prediction = generator.model.predict_forward(
        image=image, text=f"<image>{prompt.question}", processor=generator.processor
    )
    differ = rollouts.columns["loop2"]["predicted_masks"][0] ^ prediction["prediction_masks"][0][0]
    assert differ.mean() < 1e-3


def test_the_teacher_has_the_averaged_weights(tmp_path: Any) -> None:
    model, processor = nano()
    generator = RolloutGenerator(model, processor, config(tmp_path))
    generator.ema = EMA(model)
    before = generator.generate(regions()[:2], (0, 0, 0)).columns["loop1"]
    shake(model, 0.3)
    generator.ema = None
    captions = generator.generate(regions()[:2], (0, 0, 0)).columns["loop1"]
    assert captions["completions"] != before["completions"], "the policy has changed"
    generator.ema = EMA(model)
    shake(model, -0.3)  # undone, while the average stays
    mixed = generator.generate(regions()[:2], (0, 0, 0)).columns["loop1"]
    assert mixed["completions"] == before["completions"]
    pairs = zip(mixed["predicted_masks"], before["predicted_masks"], strict=True)
    assert any(a is None or b is None or (a != b).any() for a, b in pairs), "the teacher's masks have changed"


def test_a_missing_seg_is_a_true_0(generator: RolloutGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageContext, "segment", lambda self, questions, **_: [([], None) for _ in questions])
    rollouts = generator.generate(regions()[:2], (0, 0, 0))
    terms = score(rollouts, rewards())
    assert not terms["loop1"].values["iou"].any()
    assert not terms["loop2"].values["meteor"].any()
    (advantages,) = step_advantages([terms], rewards(), generator.config)
    batch = with_advantages(MicroBatch(rollouts, [], []), advantages)
    assert (batch.rollouts.masks, batch.mask_advantages) == ([], [])
    answers = [generator.processor.text(answer.answer_ids) for answer in rollouts.answers]
    assert answers == ["Sure, [SEG]"] * 2, "the reference answer is learned in place of the model's"


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_reference_caption_ends_as_generation_does(tmp_path: Any, template: str) -> None:
    model, processor = nano()
    processor.template = TEMPLATES[template]
    generator = RolloutGenerator(model, processor, config(tmp_path, objective="supervised"))
    (caption,) = generator.references(regions()[:1]).rollouts.captions
    (ids,) = caption.completion_ids
    answer = Answer()
    for number, token_id in enumerate(ids, start=1):
        assert not answer.stopped
        _append(answer, token_id, processor, 100)
        assert answer.stopped == (number == len(ids)), "at the last token, which is trained"
    assert PromptBatch.text(SimpleNamespace(processor=processor), answer) == regions()[0].caption


@pytest.mark.parametrize("masked", [True, False])
def test_truncated_captions_are_not_counted(tmp_path: Any, masked: bool) -> None:
    settings = config(tmp_path, max_completion_length=3, mask_truncated_completions=masked)
    captions = RolloutGenerator(*nano(), settings).generate(regions()[:2], (0, 0, 0)).captions
    assert [caption.counted.tolist() for caption in captions] == [[not masked] * 4] * 2


def test_a_region_between_all_cells_gets_the_nearest(generator: RolloutGenerator) -> None:
    mask = np.zeros((256, 256), dtype=bool)
    mask[5, 5] = True
    assert region_cells(generator.processor, mask).sum() == 1
    with pytest.raises(ValueError, match="region 1 has no pixel"):
        region_cells(generator.processor, np.zeros((256, 256), dtype=bool))
