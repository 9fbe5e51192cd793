"""GRPO on the Qwen-VL families: drawn regions, packed rows with positions of images, and a step of training."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_reward_network.grpo.measure import measure
from rl_reward_network.grpo.policy import prepare_model
from rl_reward_network.grpo.rollouts import Rollouts
from rl_reward_network.grpo.trainer import Sa2VAGRPOTrainer
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from tests.grpo.nano import config, regions, rewards, shake
from tests.qwen_vl import QWEN3, QWEN3_SAM3, QWEN25, write_tiny_qwen

PROMPTS = regions()[:4]


@pytest.fixture(scope="module", params=[QWEN3, QWEN25, QWEN3_SAM3])
def trainer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sa2VAGRPOTrainer:
    folder = tmp_path_factory.mktemp("qwen")
    torch.manual_seed(0)
    model, processor = load_sa2va_model(write_tiny_qwen(folder / "model", request.param))
    prepare_model(model, 4, 8)
    settings = config(folder / "run", per_device_train_batch_size=2, num_generations=2, num_mask_generations=2)
    made = Sa2VAGRPOTrainer(model, processor, settings, PROMPTS, rewards())
    made.reset_reference()
    shake(model, 0.004)  # more would change the answer
    return made


@pytest.fixture(scope="module")
def rollouts(trainer: Sa2VAGRPOTrainer) -> Rollouts:
    return trainer.rollout_generator.generate(PROMPTS, (0, 0, 0))


def alone(trainer: Any, features: Any, ids: list[int]) -> Any:
    """The model's output for one text by itself."""
    row = torch.tensor([ids])
    return trainer.sa2va(input_ids=row, attention_mask=torch.ones_like(row), vision_features=features.vision)


def log_probs(logits: Tensor, never: list[int], ids: list[int]) -> Tensor:
    logits = logits[0, -len(ids) - 1 : -1].clone()
    logits[:, never] = float("-inf")
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def test_log_probs_are_those_of_the_text_about_the_drawn_region(trainer: Any, rollouts: Rollouts) -> None:
    outputs, _ = trainer.policy(rollouts)
    never = trainer.rollout_generator.processor.never_sampled_ids
    for caption, rows in zip(rollouts.captions, outputs.log_probs, strict=True):
        question = caption.question
        assert question.region_cells is None
        assert len(question.drawn.sam.maps) == 0, "a drawn region is described, never segmented"
        for row, completion in zip(rows, caption.completion_ids, strict=True):
            text = question.prefix_ids + question.suffix_ids + completion
            expected = log_probs(alone(trainer, question.drawn, text).logits, never, completion)
            torch.testing.assert_close(row[: len(completion)], expected, atol=2e-4, rtol=1e-4)


def test_the_sampled_mask_belongs_to_the_state_before_or_behind_the_norm(trainer: Any, rollouts: Rollouts) -> None:
    """The `[SEG]` state of rollout and loss is what `text_hidden_fcs` reads in the plain forward pass."""
    outputs, _ = trainer.policy(rollouts)
    model = trainer.sa2va
    for answer, parameters in zip(rollouts.answers, outputs.parameters, strict=True):
        ids, features = answer.image.prefix_ids + answer.token_ids, answer.image.features
        embedding = model.text_hidden_fcs(alone(trainer, features, ids).last_hidden_state[0, -1][None])[0]
        expected = trainer.policy.mask_policy.parameters(model, features.sam, embedding)
        torch.testing.assert_close(parameters, expected, atol=1e-3, rtol=1e-3)


def test_what_the_family_trains_gets_a_gradient_and_nothing_else(trainer: Any, rollouts: Rollouts) -> None:
    outputs, anchor = trainer.policy(rollouts, with_masks=True)
    parts = [*outputs.log_probs, *outputs.parameters, *outputs.mask_logits, *outputs.answer_log_probs]
    (anchor + sum(part.float().sum() for part in parts)).backward()
    reached = {name for name, p in trainer.sa2va.named_parameters() if p.grad is not None and p.grad.any()}
    trainer.sa2va.zero_grad(set_to_none=True)
    assert {"lm_head.weight", "model.language_model.embed_tokens.weight"} <= reached
    assert any("lora_B" in name for name in reached)
    assert any("mask_decoder" in name for name in reached)
    assert not any(
        name.startswith("model.visual.") or "norm" in name.split(".")[-2] for name in reached if "grounding" not in name
    )


@pytest.mark.parametrize("how", ["outline", "crop"])
def test_both_ways_to_show_a_region_give_captions_and_metrics(trainer: Any, how: Any) -> None:
    cache = trainer.rollout_generator.cache
    cache.entries.clear()
    cache.processor.region_prompt = how
    measured = measure(trainer.sa2va, PROMPTS[:2], cache, 8, quiet=True)
    assert set(measured.values) >= {"cycle_iou", "meteor", "cycle_meteor", "dice"}
    assert all(measured.captions)
    assert len(cache.entries) >= 1 + 2, "the image, and each true region, which will be asked for again"
    cache.entries.clear()
    cache.processor.region_prompt = "outline"


def test_a_run_trains_and_is_saved(trainer: Any, tmp_path: Path) -> None:
    before = {name: p.detach().clone() for name, p in trainer.sa2va.named_parameters()}
    trainer.train()
    moved = {name for name, p in trainer.sa2va.named_parameters() if not torch.equal(p, before[name])}
    assert any("lora_" in name for name in moved)
    assert all(trainer.sa2va.get_parameter(name).requires_grad for name in moved)


def test_embeddings_and_head_can_be_frozen_for_smaller_gpus(trainer: Any, tmp_path: Path) -> None:
    folder = write_tiny_qwen(tmp_path / "model", trainer.sa2va.config.text_config.model_type)
    model, _ = load_sa2va_model(folder)
    prepare_model(model, 4, 8, freeze_embeddings=True)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    usual = {name for name, parameter in trainer.sa2va.named_parameters() if parameter.requires_grad}
    assert usual - trained == {"lm_head.weight", "model.language_model.embed_tokens.weight"}
    assert trained < usual


def test_the_image_encoder_of_sam3_does_not_train(tmp_path: Path) -> None:
    model, _ = load_sa2va_model(write_tiny_qwen(tmp_path / "model", QWEN3_SAM3))
    with pytest.raises(ValueError, match="--encoder lora: the image encoder of SAM 3 does not train"):
        prepare_model(model, 4, 8, encoder={"train": "lora", "lora_r": 16})


@pytest.mark.parametrize(("weight", "frozen"), [(1.0, False), (0.0, True)])
def test_the_head_is_frozen_where_no_loss_reads_words(tmp_path: Path, weight: float, frozen: bool) -> None:
    model, processor = load_sa2va_model(write_tiny_qwen(tmp_path / "model"))
    prepare_model(model, 4, 8)
    words = {"mask_to_caption_weight": 0.0, "seg_text_weight": weight, "mask_policy": "gaussian"}
    settings = config(tmp_path / "run", per_device_train_batch_size=2, num_generations=2, **words)
    made = Sa2VAGRPOTrainer(model, processor, settings, PROMPTS, rewards())
    assert ("lm_head.weight" in made.freeze_unreached(PROMPTS[:1])) == frozen
