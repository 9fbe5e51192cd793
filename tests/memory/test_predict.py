"""Predicted memory: exact where it can be counted, and in the right direction where it depends on settings."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.random_checkpoint import TINY_SAM2, official_config
from rl_reward_network.grpo.trainable import prepare_model
from rl_reward_network.memory import predict
from rl_reward_network.memory.live import LiveMemory
from rl_reward_network.memory.predict import GIB, Stage, load_stage, merge_stage, segment_stage, training_stage
from rl_reward_network.memory.settings import MemorySettings
from rl_reward_network.models.ema import trainable_tensors
from rl_reward_network.models.sa2va.checkpoint_sa2va import open_checkpoint
from rl_reward_network.models.sa2va.configuration_sa2va import HIERA_L, Sa2VAConfig, config_from_original
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from tests.grpo.nano import make_trainer, regions

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


def test_segmenting_needs_less_in_smaller_batches_and_no_trained_tensors(config: Sa2VAConfig) -> None:
    large, small = (segment_stage(config, replace(GPU, segment_batch=batch)) for batch in (64, 1))
    assert small.gib < large.gib < training(config).gib
    assert set(large.parts) <= {"weights", "answers", "masks", "encoders"}


def test_every_stage_needs_at_least_what_loading_does(config: Sa2VAConfig) -> None:
    loading = load_stage(config, CPU).gib
    for stage in (segment_stage, training_stage, merge_stage):
        assert stage(config, CPU).gib >= loading
    assert load_stage(config, GPU).parts.keys() == {"weights"}, "not the process in main memory"


def test_supervised_training_has_no_partner(config: Sa2VAConfig) -> None:
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


def test_a_real_step_needs_no_more_than_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are fewer than those that are assumed; it does not validate."""
    monkeypatch.setattr(predict, "_validation", lambda *_: 0.0)
    trainer = make_trainer(tmp_path, regions(1), caption=1.0, loop2_iou=1.0, num_mask_generations=8)
    with LiveMemory([*trainer.sa2va.parameters(), *trainer.sa2va.buffers()]) as live:
        trainer.train()
    settings = replace(CPU, per_device_train_batch_size=8, max_completion_length=16, lora_r=4, images=1)
    predicted = training_stage(open_checkpoint("sa2va-nano").model_config(), settings).parts
    step = sum(predicted[name] for name in ("moments of AdamW", "image features", "loss and gradients"))
    assert 0.4 * step < live.peak < step


def test_real_sizes_are_predicted_without_weights() -> None:
    config = config_from_original(official_config("1b"), HIERA_L, "config.json")
    settings = MemorySettings(device="cuda").of_model(small=False)
    stage = training_stage(config, settings)
    assert stage.parts["weights"] / GIB == pytest.approx(1_163_665_458 * 2 / GIB, rel=0.01)
    assert 5 < stage.gib < 9
    assert training_stage(config, replace(settings, activation_checkpointing=True)).gib < stage.gib - 1
