"""Masks that look wrong from afar, and pictures that look like masks."""

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

from rl_reward_network.data.mask_checks import field_of_view, looks_like_mask, mask_shape
from tests.conftest import tube_image

ROWS, COLUMNS = np.mgrid[:60, :80]


def disc(radius: float, row: float = 30, column: float = 40) -> np.ndarray:
    return np.asarray(np.hypot(ROWS - row, COLUMNS - column) < radius)


def test_fields_of_view_are_noted_and_objects_are_not() -> None:
    fields = [mask_shape(disc(28 + number % 2)) for number in range(6)]
    assert field_of_view(fields).startswith("all 6 masks cover nearly the same 5")
    assert field_of_view(fields[:2]) == "", "too few"
    lungs = [mask_shape(disc(26, 24 + 3 * number, 30 + 5 * number)) for number in range(5)]
    vessels = [mask_shape(tube_image(48, number)[1] > 0) for number in range(6)]
    small = [mask_shape(disc(9))] * 6
    assert [field_of_view(shapes) for shapes in (lungs, vessels, small)] == [""] * 3


def soft(mask: np.ndarray) -> np.ndarray:
    return np.repeat((gaussian_filter(mask.astype(float), 0.7) * 255).round().astype(np.uint8)[..., None], 3, 2)


def test_pictures_that_look_like_masks() -> None:
    mask = disc(20)
    grey = np.repeat((mask * 255).astype(np.uint8)[..., None], 3, 2)
    for image in (grey, grey // 255, 255 - grey, grey * [1, 0, 0], soft(mask), mask * np.uint16(900)):
        assert looks_like_mask(image.astype(np.uint16 if image.ndim == 2 else np.uint8))
    noise = np.random.default_rng(0).integers(0, 256, (60, 80, 3)).astype(np.uint8)
    blank = np.zeros((60, 80, 3), np.uint8)
    for image in (noise, noise[..., 0], blank, blank + 255, tube_image(48, 0)[0]):
        assert not looks_like_mask(image)


@pytest.mark.parametrize("inverted", [False, True])
def test_a_background_looks_inverted(inverted: bool) -> None:
    assert mask_shape(disc(10) != inverted).inverted == inverted
