"""Pictures of single test images: the masks of truth, default prompt and policy, and where the reward sees errors."""

import io
from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps
from PIL import Image
from skimage.segmentation import find_boundaries

PANEL = 400  # pixels of the longer side of an overlay
TINT = 0.3  # opacity of a mask's inside
TRUTH, FIRST, CHOSEN = (0, 200, 90), (255, 160, 0), (60, 150, 255)  # contours: green, orange, blue


@dataclass(frozen=True, eq=False)
class Overlay:
    """One test image with the masks to draw on it.

    Args:
        title: why it is shown, such as "best".
        sample_id: hash that names the image.
        image: uint8 (H, W, 3), RGB.
        truth: bool (H, W), or None when unlabelled.
        default: bool (H, W), mask of the default prompt.
        policy: bool (H, W), mask of the prompt the policy chose.
        error_map: float (H, W) in [0, 1], how probable the reward network holds each pixel of `policy` to be wrong.
    """

    title: str
    sample_id: str
    image: np.ndarray
    truth: np.ndarray | None
    default: np.ndarray
    policy: np.ndarray
    error_map: np.ndarray


def draw_mask(image: np.ndarray, mask: np.ndarray | None, colour: tuple[int, int, int]) -> bytes:
    """JPEG of a uint8 (H, W, 3) image, at most `PANEL` pixels wide or high, with the mask tinted and outlined."""
    picture = Image.fromarray(image)
    picture.thumbnail((PANEL, PANEL))
    pixels = np.array(picture)
    if mask is not None:
        grey = Image.fromarray(np.where(mask, np.uint8(255), np.uint8(0)))
        small = np.asarray(grey.resize(picture.size, Image.Resampling.BOX)) > 64  # nearest would lose thin vessels
        pixels[small] = TINT * np.array(colour) + (1 - TINT) * pixels[small]  # shows a mask without an outline too
        pixels[find_boundaries(small, mode="inner")] = colour
    return _jpeg(pixels)


def draw_errors(image: np.ndarray, error_map: np.ndarray) -> bytes:
    """JPEG of the image in grey, with the expected errors (float (H, W) in [0, 1]) in red and yellow over it."""
    picture = Image.fromarray(image)
    picture.thumbnail((PANEL, PANEL))
    errors = Image.fromarray((error_map * 255).astype(np.uint8)).resize(picture.size, Image.Resampling.BOX)
    share = np.asarray(errors)[..., None] / 255
    grey = np.repeat(np.asarray(picture.convert("L"))[..., None], 3, axis=2) * 0.6
    heat = colormaps["hot"](np.sqrt(share[..., 0]) * 0.8)[..., :3] * 255
    opacity = np.minimum(1, 3 * share)
    return _jpeg((opacity * heat + (1 - opacity) * grey).astype(np.uint8))


def _jpeg(pixels: np.ndarray) -> bytes:
    """Full colour resolution: a contour one pixel wide would be washed out otherwise."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="JPEG", quality=90, subsampling=0)
    return file.getvalue()
