"""Predicted memory of a Qwen-VL: image tokens, the features of the vision tower, and what trains beside LoRA."""

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from benchmarks.random_checkpoint import TINY_SAM2, official_config
from benchmarks.random_qwen_vl import QwenVLSize, image_processor, is_tiny
from rl_reward_network.memory import predict
from rl_reward_network.memory.predict import GIB, load_stage, segment_stage, training_stage
from rl_reward_network.memory.settings import MemorySettings
from rl_reward_network.memory.vision import SIDE, encoder, image_tokens, patch_grid
from rl_reward_network.models.sa2va.configuration_sa2va import HIERA_L, Sa2VAConfig, config_from_original
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from rl_reward_network.models.sa2va.pixels_sa2va import patch_inputs

GPU = MemorySettings(device="cuda").of_model(small=True)
SIZES: tuple[QwenVLSize, ...] = get_args(QwenVLSize)
TINY = [size for size in SIZES if is_tiny(size)]
PUBLISHED = [size for size in SIZES if not is_tiny(size)]


def config_of(size: QwenVLSize) -> Sa2VAConfig:
    return config_from_original(official_config(size), TINY_SAM2 if is_tiny(size) else HIERA_L, "config.json")


@pytest.mark.parametrize("size", TINY)
def test_the_encoder_on_the_meta_device_has_the_real_ones_features(size: QwenVLSize) -> None:
    config, image = config_of(size), np.zeros((SIDE, SIDE, 3), dtype=np.uint8)
    inputs = patch_inputs([image], image_processor(size), "prediction")
    model: Any = Sa2VAForConditionalGeneration(config).eval()
    with torch.no_grad():
        real = model.model.get_vision_features(**inputs)
        predicted = encoder(model.to("meta"), GPU)()
    assert image_tokens(config, GPU) == len(real) == {"tiny-qwen3-vl": 400, "tiny-qwen2.5-vl": 529}[size]
    assert real.grids == (patch_grid(config),)
    assert [tuple(level.shape) for level in predicted] == [(len(real), 64)] * (1 + len(real.deepstack))
    assert len(real.deepstack) == {"tiny-qwen3-vl": 2, "tiny-qwen2.5-vl": 0}[size]


@pytest.mark.parametrize("size", TINY)
def test_tiles_have_no_effect(size: QwenVLSize) -> None:
    config = config_of(size)
    assert image_tokens(config, GPU) == image_tokens(config, replace(GPU, max_dynamic_patch=12))


@pytest.mark.parametrize("size", TINY)
def test_head_and_embeddings_are_part_of_what_trains(size: QwenVLSize) -> None:
    """Float32: 512 words x 64 in both; then 2 layers and their biases, and parts of SAM 2."""
    parts = training_stage(config_of(size), replace(GPU, per_device_train_batch_size=4)).parts
    model = Sa2VAForConditionalGeneration(config_of(size))
    others = [p for name, p in model.named_parameters() if name.startswith(model.config.family.trainable)]
    assert parts["reference"] == sum(4 * p.numel() for p in others) > 2 * 512 * 64 * 4
    assert parts["moments of AdamW"] > 2 * parts["reference"]


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_sizes_are_predicted_without_weights(size: QwenVLSize) -> None:
    config, settings = config_of(size), MemorySettings(device="cuda").of_model(small=False)
    weights = load_stage(config, settings).gib
    assert {"qwen3-vl-2b": 2.67, "qwen3-vl-4b": 5.06, "qwen2.5-vl-3b": 4.29, "qwen2.5-vl-7b": 8.53}[
        size
    ] * 2e9 / GIB == (pytest.approx(weights, rel=0.002))
    assert weights + 0.5 < segment_stage(config, settings).gib < weights + 3


def test_gradients_of_a_large_vocabulary_are_counted() -> None:
    """In bfloat16 gradients of both, their casts and float32 gradients: 12 bytes each on top of the rest."""
    config, settings = config_of("qwen3-vl-2b"), MemorySettings(device="cuda").of_model(small=False)
    words = 2 * 151_674 * 2048
    assert training_stage(config, settings).parts["loss and gradients"] > 8 * words


def test_a_drawn_region_is_one_more_row_and_one_more_picture_without_maps() -> None:
    """A Qwen-VL that could be shown regions would need half as many rows."""
    settings, config = replace(GPU, per_device_train_batch_size=16), config_of("tiny-qwen3-vl")
    drawn = training_stage(config, settings).parts
    family = replace(config.family, shows_regions=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sa2VAConfig, "family", property(lambda self: family))
        patch.setattr(predict, "_region_tokens", lambda config: 0)
        shown = training_stage(config_of("tiny-qwen3-vl"), settings).parts
    features = (1 + 2) * 400 * 64 * 2  # tokens and two levels of them, in bfloat16
    assert drawn["image features"] - shown["image features"] == 16 // settings.num_generations * features
    assert drawn["loss and gradients"] > max(shown.get("loss and gradients", 0), shown.get("rollouts", 0))
