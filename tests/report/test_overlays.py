"""Masks over images, as TensorBoard shows them."""

import io

import numpy as np
from PIL import Image

from rl_reward_network.report.overlays import SHEET_SIDE, class_colours, draw_classes, mask_sheet


def test_a_sheet_shows_image_true_mask_and_mask_of_now_beside_each_other() -> None:
    image, mask = np.full((40, 60, 3), 100, np.uint8), np.zeros((40, 60), dtype=bool)
    mask[10:30, 15:45] = True
    sheet = mask_sheet([(image, mask, None), (image, None, mask)])
    assert sheet is not None
    assert sheet.shape == (2 * SHEET_SIDE, 3 * SHEET_SIDE, 3)
    centres = sheet[SHEET_SIDE // 2 :: SHEET_SIDE, SHEET_SIDE // 2 :: SHEET_SIDE].astype(int) - 100
    marked = [[int(pixel.argmax()) if pixel.any() else None for pixel in row] for row in centres]
    assert marked == [[None, 2, None], [None, None, 0]], "blue and orange"
    assert mask_sheet([]) is None


def test_a_class_inside_another_keeps_its_colour() -> None:
    whole, part = np.zeros((2, 64, 64), bool)
    whole[8:56, 8:56] = part[24:40, 24:40] = True
    colours = class_colours(["part", "whole"])
    drawn = draw_classes(np.full((64, 64, 3), 200, np.uint8), {"whole": whole, "part": part, "absent": None}, colours)
    pixels = np.asarray(Image.open(io.BytesIO(drawn))).astype(float)
    for name, place in {"part": (32, 32), "whole": (16, 16)}.items():
        np.testing.assert_allclose(pixels[place], 0.3 * 200 + 0.7 * np.array(colours[name]), atol=6)
    np.testing.assert_allclose(pixels[2, 2], 200, atol=6)
    assert len(set(class_colours([str(number) for number in range(20)]).values())) == 20
