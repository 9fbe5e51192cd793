"""What a GRPO run prints before its first step."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_reward_network.grpo import stage as startup
from rl_reward_network.grpo.settings import GRPOSettings, meanings, with_preset
from rl_reward_network.grpo.stage import load_model, startup_lines
from rl_reward_network.models.lora import freeze_parameters, setup_lora
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration

STEP = {
    "prompts_per_step": 2,
    "gradient_accumulation_steps": 3,
    "world_size": 4,
    "num_generations": 5,
    "num_mask_generations": 8,
    "mask_to_caption_weight": 1.0,
    "caption_to_mask_weight": 1.0,
    "objective": "grpo",
}


@pytest.fixture(scope="module")
def model() -> Sa2VAForConditionalGeneration:
    model, _ = load_sa2va_model("sa2va-nano")
    setup_lora(model, 4, 8, 0.0)
    freeze_parameters(model)
    return model


def said(model: Any, **changed: Any) -> list[str]:
    return startup_lines(SimpleNamespace(sa2va=model, args=SimpleNamespace(**{**STEP, **changed}), ood_check=None))


def test_regions_and_what_is_made_of_each(model: Any) -> None:
    assert said(model)[0] == "each step: 24 regions x 5 captions and 8 masks (4 processes x 3 forward passes x 2)"
    assert said(model, mask_to_caption_weight=0.0)[0].startswith("each step: 24 regions x 8 masks (")
    assert said(model, caption_to_mask_weight=0.0)[0].startswith("each step: 24 regions x 5 captions (")
    assert "x true captions and masks (" in said(model, objective="supervised")[0]
    assert "x true captions (" in said(model, objective="supervised", caption_to_mask_weight=0.0)[0]


def test_parameters_and_what_does_not_train(model: Any) -> None:
    counts = [(p.numel(), p.requires_grad) for p in model.parameters()]
    total, trained = sum(n for n, _ in counts), sum(n for n, trains in counts if trains)
    lines = said(model)
    assert lines[1] == f"parameters: {total:,}, of which {trained:,} train ({trained / total:.1%})"
    assert lines[2].startswith("not trained: vision tower, lm_head, SAM 2 image encoder (frozen, as in Sa2VA's")
    assert lines[3] == "not trained: language model (LoRA trains in its place)"
    assert not any("mask decoder" in line for line in lines)
    sam = model.grounding_encoder
    for part in (sam.prompt_encoder, sam.mask_decoder):  # two vectors of the first train with the second
        part.requires_grad_(False)
    both = "not trained: SAM 2 prompt encoder, SAM 2 mask decoder (no loss of this run goes past the [SEG] embedding; "
    assert any(line.startswith(both) for line in said(model))
    freeze_parameters(model)


def test_flags_that_mean_something_else_say_so() -> None:
    settings = GRPOSettings(per_device_train_batch_size=4)
    assert meanings(GRPOSettings(), settings) == []
    (line,) = meanings(settings, settings)
    assert line == "batch_size 4 counts captions, not regions: 1 x 4 captions per process and forward pass"
    small = GRPOSettings(per_device_train_batch_size=1, gradient_accumulation_steps=8)
    (line,) = meanings(small, with_preset(small, "quick", True))
    assert line == (
        "batch_size 1 counts captions, not regions: 1 x 4 captions per process and forward pass, since a group stays "
        "whole, and 2 passes per step"
    )
    lines = meanings(GRPOSettings(num_train_epochs=1.0, beta=0.1, epsilon=0.3), settings)
    assert [line.split(" ")[0] for line in lines] == ["num_epochs", "kl_coef", "clip_range"]


@pytest.mark.parametrize("given", [{"epsilon": 0.1}, {"epsilon": 0.3}, {"epsilon_high": 0.28}])
def test_a_clip_range_says_when_it_acts(given: dict[str, float]) -> None:
    for more, said in (
        ({}, "it acts from --num_iterations 2 on"),
        ({"num_iterations": 2}, None),
        ({"mask_to_caption_weight": 0.0, "num_iterations": 2}, "which this run leaves out"),
    ):
        (line,) = meanings(flags := GRPOSettings(**given, **more), flags)
        assert said is None or said in line
        assert (";" in line) == (said is not None)


def test_flash_attention_is_for_the_vision_tower_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "FLASH", "eager")  # any other than the default, where there is no GPU
    model, _ = load_model("sa2va-nano", "cpu", use_flash_attn=True)
    kinds = {part.config._attn_implementation for part in (model.model.language_model, model.grounding_encoder)}
    assert (model.model.vision_tower.config._attn_implementation, kinds) == ("eager", {"sdpa"})
    assert model.dtype == torch.float32
