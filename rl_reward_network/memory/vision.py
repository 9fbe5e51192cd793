"""The vision tower on the meta device: what it reads of one image, and what it makes of it.

An InternVL reads as many tiles as the settings allow. A Qwen-VL has no tiles: its tokens depend on the image's size.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from rl_reward_network.memory.settings import MemorySettings
from rl_reward_network.models.sa2va.configuration_sa2va import Sa2VAConfig
from rl_reward_network.models.sa2va.pixels_sa2va import resized_image

SIDE = 512  # pixels of the images that are assumed; masks have their size


def has_tiles(config: Sa2VAConfig) -> bool:
    """Whether images are cut into tiles."""
    return config.family.body == "internvl"


def tiles(config: Sa2VAConfig, settings: MemorySettings) -> int:
    """Tiles of one image, a thumbnail counted; a Qwen-VL reads the image as one."""
    return settings.max_dynamic_patch + (settings.max_dynamic_patch > 1) if has_tiles(config) else 1


def image_tokens(config: Sa2VAConfig, settings: MemorySettings) -> int:
    """Tokens of one image in the language model."""
    if has_tiles(config):
        return int(config.tokens_per_tile) * tiles(config, settings)
    rows, columns = patch_grid(config)
    return rows * columns // config.vision_config.spatial_merge_size**2


def patch_grid(config: Sa2VAConfig) -> tuple[int, int]:
    """Rows and columns of a Qwen-VL's patches of one image."""
    vision = config.vision_config
    blank = np.zeros((SIDE, SIDE, 3), dtype=np.uint8)
    _, height, width = resized_image(blank, vision.patch_size * vision.spatial_merge_size, "prediction").shape
    return height // vision.patch_size, width // vision.patch_size


def encoder(model: Any, settings: MemorySettings) -> Callable[[], list[Tensor]]:
    """The forward pass of the vision tower on one image; returns the features that training keeps."""
    if has_tiles(model.config):
        side = model.config.vision_config.image_size[0]
        pixels = _meta(model, tiles(model.config, settings), 3, side, side)
        return lambda: [model.model.get_vision_features(pixels)]
    return _qwen_vl_encoder(model)


def _qwen_vl_encoder(model: Any) -> Callable[[], list[Tensor]]:
    """With what depends on the values of the grid computed beforehand: the meta device has no values."""
    vision, (rows, columns) = model.config.vision_config, patch_grid(model.config)
    known = _of_grid(model.model.visual, torch.tensor([(1, rows, columns)]))
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = _meta(model, rows * columns, width)

    def encode() -> list[Tensor]:
        output = model.model.visual(pixels, grid_thw=None, return_dict=True, **known)
        return [output.pooler_output, *(getattr(output, "deepstack_features", None) or [])]

    return encode


def _of_grid(visual: Any, grid: Tensor) -> dict[str, Tensor]:
    """Arguments of a tower that are functions of the grid (1, 3); lengths stay on the CPU, as they split tensors."""
    merge = visual.config.spatial_merge_size
    indices, lengths = (
        {"position_ids": get_vision_position_ids(grid, merge)},
        {"cu_seqlens": get_vision_cu_seqlens(grid)},
    )
    if hasattr(visual, "window_size"):  # Qwen2.5-VL
        windows = get_vision_window_index(grid, merge, visual.window_size, visual.patch_size)
        indices["window_index"], lengths["cu_window_seqlens"] = windows
    else:
        places = get_vision_interpolation_indices_and_weights(grid, visual.num_grid_per_side, spatial_merge_size=merge)
        indices["interp_indices"], indices["interp_weights"] = places
    return {name: tensor.to("meta") for name, tensor in indices.items()} | lengths


def _meta(model: Any, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=model.dtype, device="meta")
