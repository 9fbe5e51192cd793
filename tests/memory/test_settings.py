"""Settings of the prediction: presets by kind of model, and what is refused."""

from typing import Any

import pytest

from rl_reward_network.grpo.settings import GRPOSettings
from rl_reward_network.inputs.config import RegionConfig
from rl_reward_network.memory.settings import MemorySettings


def test_presets_are_those_of_grpo() -> None:
    large, small = MemorySettings().of_model(False), MemorySettings().of_model(True)
    assert (large.lora_r, large.per_device_train_batch_size, large.max_completion_length) == (128, 8, 128)
    assert (small.lora_r, small.per_device_train_batch_size, small.max_completion_length) == (16, 64, 24)
    assert MemorySettings(lora_r=5).of_model(False).lora_r == 5
    assert MemorySettings().on_device("cuda").device == "cuda"
    assert MemorySettings(device="cpu").on_device("cuda").device == "cpu"


def test_defaults_are_those_of_grpo() -> None:
    ours, theirs = MemorySettings(), GRPOSettings()
    shared = vars(ours).keys() & vars(theirs).keys()
    assert len(shared) >= 8
    assert {name: getattr(ours, name) for name in shared} == {name: getattr(theirs, name) for name in shared}
    regions = RegionConfig()
    assert (ours.max_dynamic_patch, ours.feature_cache_gib) == (regions.max_dynamic_patch, regions.feature_cache_gib)


def test_a_batch_below_a_group_is_a_whole_one_as_in_training() -> None:
    settings = MemorySettings(per_device_train_batch_size=2, gradient_accumulation_steps=4).of_model(True)
    assert (settings.per_device_train_batch_size, settings.gradient_accumulation_steps) == (4, 2)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"lora_r": 0}, "lora_r is 0, expected 1 or more"),
        ({"segment_batch": -1}, "segment_batch is -1"),
        ({"memory_gib": 0.0}, "memory_gib is 0.0, expected more than 0"),
        ({"memory_gib": float("nan")}, "memory_gib is nan, expected more than 0"),
        ({"feature_cache_gib": -1.0}, "feature_cache_gib is -1.0, expected 0 or more"),
        ({"max_dynamic_patch": 0}, "max_dynamic_patch is 0, expected 1 or more"),
        ({"per_device_train_batch_size": 10}, "not divisible by num_generations 4"),
        ({"num_generations": 1}, "num_generations is 1, expected 2 or more"),
        ({"gradient_accumulation_steps": -3}, "gradient_accumulation_steps is -3, expected 1 or more"),
        ({"ema_decay": 1.0}, "ema_decay is 1.0, expected 0 or more and less than 1"),
    ],
)
def test_what_cannot_be_is_refused(field: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MemorySettings(**field)
