"""Predicted memory: exact where it can be counted, and in the right direction where it depends on settings."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.random_checkpoint import TINY_SAM2, official_config, write_random_checkpoint
from rl_reward_network.grpo.trainable import prepare_model
from rl_reward_network.memory import predict
from rl_reward_network.memory.advice import GIB, MemorySettings, Stage
from rl_reward_network.memory.predict import image_tokens, load_stage, merge_stage, segment_stage, training_stage
from rl_reward_network.models.ema import trainable_tensors
from rl_reward_network.models.sa2va.configuration_sa2va import HIERA_L, Sa2VAConfig, config_from_original
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from tests.conftest import smooth_image

CPU = MemorySettings(device="cpu").of_model(small=True)
GPU = replace(CPU, device="cuda")


@pytest.fixture
def config() -> Sa2VAConfig:
    return config_from_original(official_config("tiny"), TINY_SAM2, "config.json")


def training(config: Sa2VAConfig, settings: MemorySettings = GPU, **changes: Any) -> Stage:
    """The prediction, made once for equal settings."""
    return _training(config.to_json_string(), replace(settings, **changes))


@cache
def _training(config: str, settings: MemorySettings) -> Stage:
    return training_stage(Sa2VAConfig.from_dict(json.loads(config)), settings)


def test_weights_and_what_is_trained_are_counted_exactly(config: Sa2VAConfig) -> None:
    model = Sa2VAForConditionalGeneration(config)
    weights = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    assert load_stage(config, CPU).parts["weights"] == weights
    prepare_model(model, 16, 32)
    trainable = trainable_tensors(model)
    lora = sum(tensor.nbytes for name, tensor in trainable.items() if "lora_" in name)
    others = sum(tensor.nbytes for name, tensor in trainable.items() if "lora_" not in name)
    parts = training(config, CPU).parts
    assert (parts["weights"], parts["LoRA"], parts["reference"]) == (weights, lora, others)
    assert parts["moments of AdamW"] == 2 * (lora + others)
    assert parts["moving average"] == lora + others
    assert merge_stage(config, CPU).parts["LoRA"] == lora + others


def test_a_rotary_embedding_that_scales_needs_the_same_memory(config: Sa2VAConfig) -> None:
    """`rope_scaling` of Sa2VA-8B and of Sa2VA-InternVL3."""
    scaled = official_config("tiny")
    scaled["llm_config"]["rope_scaling"] = {"type": "dynamic", "factor": 2.0}
    dynamic = config_from_original(scaled, TINY_SAM2, "config.json")
    assert dynamic.text_config.rope_parameters["rope_type"] == "dynamic"
    assert training(dynamic).parts == training(config).parts
    assert segment_stage(dynamic, GPU).parts == segment_stage(config, GPU).parts


def test_what_is_trained_is_float32_beside_weights_of_16_bit(config: Sa2VAConfig) -> None:
    whole, half = training(config, dtype="float32").parts, training(config, dtype="bfloat16").parts
    assert half["weights"] < 0.6 * whole["weights"]  # buffers stay float32
    assert half["moments of AdamW"] == whole["moments of AdamW"]
    assert half["moving average"] == whole["moving average"]
    assert half["LoRA"] > whole["LoRA"], "the trained decoder is float32, too, twice the size that it was read with"


@pytest.mark.parametrize(
    "less",
    [
        {"activation_checkpointing": True},
        {"per_device_train_batch_size": 8},
        {"max_completion_length": 8},
        {"max_dynamic_patch": 1},
        {"lora_r": 2},
        {"ema_decay": 0.0},
    ],
)
def test_lower_settings_need_less(config: Sa2VAConfig, less: dict[str, Any]) -> None:
    usual = {"max_dynamic_patch": 6}
    assert training(config, **usual | less).gib < training(config, **usual).gib


@pytest.mark.parametrize(
    ("more", "trained"),
    [
        ({"side_network": True}, ("side_network.",)),
        ({"encoder": "lora"}, ("grounding_encoder.vision_encoder.backbone.blocks.0.attn.qkv.lora_A.default.weight",)),
        ({"encoder": "full"}, ("grounding_encoder.vision_encoder.backbone.",)),
    ],
)
def test_adapters_need_more(config: Sa2VAConfig, more: dict[str, Any], trained: tuple[str, ...]) -> None:
    """Their tensors twice for AdamW, and more than these for the activations of the images of a step."""
    settings = replace(GPU, objective="supervised")
    before, after = training(config, settings), training(config, settings, **more)
    assert after.parts["moments of AdamW"] > before.parts["moments of AdamW"]
    assert after.gib > before.gib
    model = predict.meta_model(config, settings)
    predict._add_lora(model, replace(settings, **more))
    assert [name for name in trainable_tensors(model) if name.startswith(trained)]


def test_segmenting_needs_less_in_smaller_batches_and_no_trained_tensors(config: Sa2VAConfig) -> None:
    large, small = (segment_stage(config, replace(GPU, segment_batch=batch)) for batch in (64, 1))
    assert small.gib < large.gib
    assert set(large.parts) <= {"weights", "answers", "masks", "encoders"}


def test_every_stage_needs_at_least_what_loading_does(config: Sa2VAConfig) -> None:
    loading = load_stage(config, CPU).gib
    for stage in (segment_stage, training_stage, merge_stage):
        assert stage(config, CPU).gib >= loading
    assert load_stage(config, GPU).parts.keys() == {"weights"}, "not the process in main memory"


def test_supervised_training_has_no_teacher(config: Sa2VAConfig) -> None:
    stage = training(config, objective="supervised")
    assert stage.name == "supervised step"
    assert stage.parts["moving average"] == 0


def test_images_of_a_step_stay_on_the_gpu_and_those_of_a_run_in_main_memory(config: Sa2VAConfig) -> None:
    one = training(config, per_device_train_batch_size=4).parts["image features"]
    four = training(config, per_device_train_batch_size=8, gradient_accumulation_steps=2).parts["image features"]
    assert (one > 0, four) == (True, 4 * one)
    assert training(config, CPU, images=7).parts["image features"] == 7 * one * 2, "float32, not bfloat16"
    assert training(config, CPU, images=10**9, feature_cache_gib=1.5).parts["image features"] == 1.5 * GIB


def test_validation_counts_where_a_step_needs_less(config: Sa2VAConfig) -> None:
    stage = training(config, per_device_train_batch_size=4, num_mask_generations=2)
    assert "validation" in stage.parts
    assert "loss and gradients" in training(config).parts


# Peak memory in GiB of a step in bfloat16, counted tensor by tensor on the meta device (version 0.12), and the parts
# that are kept; measured on a CPU in float32: docs/results.md.
STEPS = [
    ("1b", {}, 3.24),
    ("4b", {}, 9.78),
    ("8b", {}, 12.80),
    ("8b-internlm2", {}, 12.92),
    ("qwen3-vl-2b", {}, 13.17),
    ("qwen2.5-vl-3b", {}, 22.46),
    ("1b", {"objective": "supervised"}, 1.73),
    ("qwen3-vl-2b", {"objective": "supervised"}, 6.93),
    ("1b", {"activation_checkpointing": True}, 0.59),
    ("qwen3-vl-2b", {"activation_checkpointing": True}, 2.23),
]
MEASURED = {  # GiB of Sa2VA-1B
    load_stage: 7.08,
    segment_stage: 7.08,
    training_stage: 10.61,
    merge_stage: 7.24,
}
WITHIN = 0.2


@pytest.mark.parametrize(("size", "changes", "expected"), STEPS)
def test_a_training_step_is_predicted(
    size: Any, changes: dict[str, Any], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[float] = []
    real = predict._loss
    monkeypatch.setattr(predict, "_loss", lambda *given: found.append(real(*given)) or found[-1])
    settings = replace(MemorySettings(device="cuda").of_model(small=False), **changes)
    training_stage(config_from_original(official_config(size), HIERA_L, size), settings)
    assert found[0] / GIB == pytest.approx(expected, rel=WITHIN)


def test_the_measured_stages_of_a_billion_parameters_are_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "_validation", lambda *_: 0.0)  # the measured step had none
    settings = MemorySettings(device="cpu", max_completion_length=24, images=8).of_model(small=False)
    for stage, expected in MEASURED.items():
        found = stage(config_from_original(official_config("1b"), HIERA_L, "1b"), settings).gib
        assert found == pytest.approx(expected, rel=WITHIN), stage
    supervised = replace(settings, objective="supervised")
    found = training_stage(config_from_original(official_config("1b"), HIERA_L, "1b"), supervised).gib
    assert found == pytest.approx(9.12, rel=WITHIN)


@pytest.mark.parametrize("size", ["tiny-qwen3-vl", "tiny-qwen2.5-vl"])
def test_a_qwen_vl_has_no_tiles_and_trains_its_embeddings(size: Any) -> None:
    def qwen() -> Sa2VAConfig:
        return config_from_original(official_config(size), TINY_SAM2, "config.json")

    settings = replace(GPU, max_dynamic_patch=6)
    assert image_tokens(qwen(), settings) == image_tokens(qwen(), GPU) > 0
    whole, frozen = (training_stage(qwen(), replace(GPU, freeze_embeddings=freeze)) for freeze in (False, True))
    words = 2 * qwen().text_config.vocab_size * qwen().text_config.hidden_size * 4
    assert whole.parts["reference"] - frozen.parts["reference"] == words, "embeddings and head"


@pytest.mark.parametrize("size", ["tiny", "tiny-qwen3-vl", "tiny-qwen2.5-vl"])
def test_features_have_the_size_of_the_real_ones(size: Any, tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "model", size)
    model, processor = load_sa2va_model(tmp_path / "model")
    processor.max_tiles = 1
    image = smooth_image(predict.SIDE, predict.SIDE)
    inputs = processor(text=["<image>Segment it."], images=[image])
    assert int((inputs["input_ids"] == model.config.image_token_id).sum()) == image_tokens(model.config, CPU)
    maps = model.get_sam_features(processor.sam_pixel_values(image)).maps
    assert sum(level.nbytes for level in maps) == predict._maps(model)
