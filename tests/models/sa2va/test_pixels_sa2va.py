import io
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from rl_reward_network.models.sa2va.pixels_sa2va import cut_tiles, sam_pixels, tile_grid, to_rgb, upsample_mask_logits


@pytest.mark.parametrize(
    ("width", "height", "grid"),
    [
        (420, 380, (1, 1)),
        (700, 640, (2, 2)),  # a near-square photo above 401,408 px
        (634, 633, (1, 1)),  # 401,322 px: just below
        (951, 951, (3, 3)),  # above 903,168 px
        (640, 480, (4, 3)),
        (1280, 720, (4, 2)),
        (100, 1200, (1, 12)),
        (999, 960, (3, 3)),
    ],
)
def test_tile_grid_follows_the_reference(width: int, height: int, grid: tuple[int, int]) -> None:
    assert tile_grid(width, height) == grid


def test_upsampling_goes_over_sam2s_square() -> None:
    logits = torch.randn(2, 32, 32)
    square = F.interpolate(logits[:, None], size=(128, 128), mode="bilinear")
    expected = F.interpolate(square, size=(70, 90), mode="bilinear")[:, 0]
    assert torch.equal(upsample_mask_logits(logits, (70, 90), sam_image_size=128), expected)


@pytest.mark.parametrize(
    "image",
    [
        *(Image.new(mode, (9, 9)) for mode in ("I;16", "I;16L", "I;16B", "I", "F")),
        np.zeros((9, 9), np.uint16),
        np.zeros((9, 9, 3), np.uint16),
        np.zeros((9, 9, 3), np.float32),
    ],
)
def test_more_than_8_bit_is_refused_with_the_remedy(image: Any) -> None:
    """Pillow would cut the values at 255."""
    for read in (to_rgb, lambda one: cut_tiles(one, 1, 8), lambda one: sam_pixels(one, 8)):
        with pytest.raises(ValueError, match=r"(uint8|8 bit).*; scale it to 0\.\.255, .*load_image"):
            read(image)


def test_an_opened_file_of_16_bit_colour_is_refused() -> None:
    file = io.BytesIO(cv2.imencode(".png", np.full((9, 9, 3), 3000, np.uint16))[1].tobytes())
    with pytest.raises(ValueError, match=r"8 bit per channel.*; scale it"):
        to_rgb(Image.open(file))


@pytest.mark.parametrize("image", [np.zeros((0, 0, 3), np.uint8), Image.new("RGB", (0, 5))])
def test_an_image_without_pixels_is_refused(image: Any) -> None:
    with pytest.raises(ValueError, match=r"an image must have pixels, got 0 x [05] \(width x height\)"):
        to_rgb(image)
