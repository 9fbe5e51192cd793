import io

import numpy as np
from PIL import Image
from skimage.segmentation import find_boundaries

from rl_reward_network.report.overlays import (
    BLUE,
    ORANGE,
    PANEL,
    draw_errors,
    draw_mask,
    paint_mask,
)

IMAGE = np.full((90, 120, 3), 128, np.uint8)
MASK = np.zeros((90, 120), bool)
MASK[20:60, 30:50] = True


def opened(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)


def test_a_mask_is_outlined_in_its_colour_and_the_rest_is_left_alone():
    pixels = opened(draw_mask(IMAGE, MASK, BLUE))
    assert np.abs(pixels[20:60, 29] - BLUE).max() < 40
    assert np.abs(pixels[:10] - 128).max() < 6
    assert np.abs(opened(draw_mask(IMAGE, None, BLUE)) - 128).max() < 6


def test_painting_tints_the_inside_draws_a_line_around_it_and_leaves_the_image_as_it_was():
    before = IMAGE.copy()
    painted = paint_mask(IMAGE, MASK, ORANGE, opacity=0.5)
    np.testing.assert_array_equal(IMAGE, before)
    inside = np.round((128 + np.array(ORANGE)) / 2)
    np.testing.assert_array_equal(painted[MASK], np.broadcast_to(inside, (MASK.sum(), 3)))
    outline = find_boundaries(MASK, mode="outer")
    np.testing.assert_array_equal(painted[outline], np.broadcast_to(ORANGE, (outline.sum(), 3)))
    np.testing.assert_array_equal(painted[~MASK & ~outline], IMAGE[~MASK & ~outline])
    np.testing.assert_array_equal(paint_mask(IMAGE, MASK, ORANGE, opacity=0)[MASK], IMAGE[MASK])


def test_a_mask_larger_than_the_image_is_shrunk_and_a_thin_line_survives():
    line = np.zeros((900, 1200), bool)
    line[455:458] = True
    painted = paint_mask(IMAGE, line, BLUE, opacity=1)
    assert (painted == BLUE).all(axis=2).any(axis=0).all()


def test_a_thin_line_survives_the_shrinking():
    large, line = np.full((1000, 2000, 3), 128, np.uint8), np.zeros((1000, 2000), bool)
    line[500:502] = True
    pixels = opened(draw_mask(large, line, BLUE))
    assert max(pixels.shape) == PANEL
    assert (np.abs(pixels - BLUE).max(axis=2) < 60).any(axis=0).mean() > 0.9


def test_errors_glow_where_they_are_expected():
    pixels = opened(draw_errors(IMAGE, MASK * 0.8))
    inside, outside = pixels[30:50, 34:46].mean(axis=(0, 1)), pixels[70:].mean(axis=(0, 1))
    assert inside[0] > outside[0] + 80
    assert np.ptp(outside) < 3, "grey where nothing is expected"
