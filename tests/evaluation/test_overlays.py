import io

import numpy as np
from PIL import Image

from rl_reward_network.evaluation.overlays import CHOSEN, PANEL, draw_errors, draw_mask

IMAGE = np.full((90, 120, 3), 128, np.uint8)
MASK = np.zeros((90, 120), bool)
MASK[20:60, 30:50] = True


def opened(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)


def test_a_mask_is_outlined_in_its_colour_and_the_rest_is_left_alone():
    pixels = opened(draw_mask(IMAGE, MASK, CHOSEN))
    assert np.abs(pixels[20:60, 30] - CHOSEN).max() < 40
    assert np.abs(pixels[:10] - 128).max() < 6
    assert np.abs(opened(draw_mask(IMAGE, None, CHOSEN)) - 128).max() < 6


def test_a_thin_line_survives_the_shrinking():
    large, line = np.full((1000, 2000, 3), 128, np.uint8), np.zeros((1000, 2000), bool)
    line[500:502] = True
    pixels = opened(draw_mask(large, line, CHOSEN))
    assert max(pixels.shape) == PANEL
    assert (np.abs(pixels - CHOSEN).max(axis=2) < 60).any(axis=0).mean() > 0.9


def test_errors_glow_where_they_are_expected():
    pixels = opened(draw_errors(IMAGE, MASK * 0.8))
    inside, outside = pixels[30:50, 34:46].mean(axis=(0, 1)), pixels[70:].mean(axis=(0, 1))
    assert inside[0] > outside[0] + 80
    assert np.ptp(outside) < 3, "grey where nothing is expected"
