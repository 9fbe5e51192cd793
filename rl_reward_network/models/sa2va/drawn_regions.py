"""Regions drawn into the image, for models whose text cannot refer to one."""

from typing import Literal

import cv2
import numpy as np

RegionPrompt = Literal["outline", "crop"]
QUESTIONS: dict[RegionPrompt, str] = {
    "outline": "Please describe the object that is outlined in red.",
    "crop": "Please describe the object in the middle of this picture.",
}
RED = (255, 0, 0)
WIDTH = 1 / 200  # of the outline, as a share of the image's shorter side
MARGIN = 0.25  # of a crop, on each side, as a share of the region's longer side
LEAST_MARGIN = 8  # pixels


def draw_region(image: np.ndarray, region: np.ndarray, how: RegionPrompt) -> np.ndarray:
    """A copy of the image that shows the region, uint8 (H, W, 3); smaller if it is a crop.

    Args:
        image: uint8 (H, W, 3).
        region: bool (H, W), not empty.
        how: "outline" draws a red line around the region, outside of it (inside only if it is the whole image), so that
            thin objects stay visible; "crop" cuts out its bounding box with a margin.

    Raises:
        ValueError: the region is not bool, the sizes differ, or it has no pixel.
    """
    if region.dtype != bool or region.shape != image.shape[:2] or not region.any():
        raise ValueError(
            f"the region has {int(region.sum())} pixels, type {region.dtype} and shape {region.shape}, expected 1 or"
            f" more, bool, and the image's shape {image.shape[:2]}"
        )
    return _outlined(image, region) if how == "outline" else _cropped(image, region)


def _outlined(image: np.ndarray, region: np.ndarray) -> np.ndarray:
    width = max(1, round(min(image.shape[:2]) * WIDTH))
    disc = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (2 * width + 1, 2 * width + 1))
    outline = cv2.dilate(region.astype(np.uint8), disc).astype(bool) & ~region
    if not outline.any():  # the region is the whole image
        outline = cv2.erode(region.astype(np.uint8), disc, borderType=cv2.BORDER_CONSTANT, borderValue=0) == 0
    result = image.copy()
    result[outline] = RED
    return result


def _cropped(image: np.ndarray, region: np.ndarray) -> np.ndarray:
    rows, columns = np.flatnonzero(region.any(axis=1)), np.flatnonzero(region.any(axis=0))
    longer = max(rows[-1] - rows[0], columns[-1] - columns[0]) + 1
    margin = max(LEAST_MARGIN, round(longer * MARGIN))
    top, left = max(0, rows[0] - margin), max(0, columns[0] - margin)
    return image[top : rows[-1] + 1 + margin, left : columns[-1] + 1 + margin].copy()
