"""Masks over images, as TensorBoard shows them."""

import numpy as np

from rl_reward_network.report.overlays import SHEET_SIDE, mask_sheet


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
