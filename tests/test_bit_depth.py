"""Pictures of more than 8 bit: which they are, and their levels."""

import io

import cv2
import numpy as np
import pytest
from PIL import Image

from rl_reward_network.bit_depth import Levels, grey_to_rgb, is_cut, is_deep, levels_of_bits, robust_levels


@pytest.mark.parametrize("black", [0, 500, 30_000, 61_000])
def test_contrast_is_full_wherever_the_values_begin(black: int) -> None:
    grey = np.linspace(black, black + 3500, 64 * 64).round().astype(np.uint16).reshape(64, 64)
    levels = robust_levels(np.bincount(grey.ravel()))
    shown = grey_to_rgb(grey, levels)[..., 0]
    assert (shown.min(), shown.max()) == (0, 255)
    assert 73 < shown.std() < 75, "as of an even ramp, 255 / sqrt(12)"


def test_hot_and_dead_pixels_move_no_level() -> None:
    grey = np.full(10_000, 2000)
    grey[::2], grey[:5], grey[-5:] = 3000, 65535, 0
    assert robust_levels(np.bincount(grey)) == Levels(2000, 3000)


def test_few_values_are_not_stretched() -> None:
    """Noise would become a picture."""
    assert robust_levels(np.bincount([90, 100, 140])) == Levels(0, 255)
    assert robust_levels(np.bincount([1000, 1003])) == Levels(1000, 1255)
    assert (grey_to_rgb(np.array([[1000, 1003]]), Levels(1000, 1255))[0, :, 0] == [0, 3]).all()


def test_a_bit_depth_is_its_full_range() -> None:
    assert [levels_of_bits(bits) for bits in (None, 8, 10, 12, 16)] == [
        None,
        *[(0, white) for white in (255, 1023, 4095, 65535)],
    ]
    for bits in (0, 7, 17):
        with pytest.raises(ValueError, match=f"bit_depth: got {bits}; give 8 to 16"):
            levels_of_bits(bits)


@pytest.mark.parametrize(
    ("pixels", "suffix", "deep", "cut"),
    [
        (np.zeros((9, 9), np.uint16), ".png", True, False),
        (np.zeros((9, 9), np.uint16), ".tif", True, False),
        (np.zeros((9, 9), np.float32), ".tif", True, False),
        (np.zeros((9, 9, 3), np.uint16), ".png", False, True),
        (np.zeros((9, 9, 4), np.uint16), ".png", False, True),
        (np.zeros((9, 9, 3), np.uint16), ".tif", False, True),
        (np.zeros((9, 9, 3), np.uint8), ".png", False, False),
        (np.zeros((9, 9), np.uint8), ".tif", False, False),
    ],
)
def test_the_depth_of_a_file(pixels: np.ndarray, suffix: str, deep: bool, cut: bool) -> None:
    image = Image.open(io.BytesIO(cv2.imencode(suffix, pixels)[1].tobytes()))
    assert (is_deep(image), is_cut(image)) == (deep, cut)


@pytest.mark.parametrize("mode", ["I;16", "I;16L", "I;16B", "I", "F"])
def test_the_depth_of_a_picture_in_memory(mode: str) -> None:
    assert is_deep(Image.new(mode, (9, 9)))
    assert not is_cut(Image.new(mode, (9, 9)))
