"""Masks and expected errors drawn over images; the only place that paints masks."""

import io
from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps
from PIL import Image
from skimage.segmentation import find_boundaries

PANEL = 400  # pixels of the longer side of a picture in a report
TINT = 0.3  # default opacity of a mask's inside
GREEN, ORANGE, BLUE = (0, 200, 90), (255, 160, 0), (60, 150, 255)  # ground truth, baseline, what is evaluated
COVERED = 64  # of 255: the share of a pixel that a shrunk mask must cover; nearest neighbour would lose thin vessels


@dataclass(frozen=True, eq=False)
class Overlay:
    """One test image with the masks to draw on it.

    Args:
        title: why the image was selected, such as "best of the deployed choice, by Dice".
        sample_id: hash that names the image.
        image: uint8 (H, W, 3), RGB.
        truth: bool (H, W), or None when unlabelled.
        default: bool (H, W), mask of the default prompt.
        deployed: bool (H, W), mask of the prompt that the deployed choice selects.
        error_map: float (H, W) in [0, 1], predicted probability that each pixel of `deployed` is wrong.
    """

    title: str
    sample_id: str
    image: np.ndarray
    truth: np.ndarray | None
    default: np.ndarray
    deployed: np.ndarray
    error_map: np.ndarray


def paint_mask(image: np.ndarray, mask: np.ndarray, colour: tuple[int, int, int], opacity: float = TINT) -> np.ndarray:
    """The image with a mask in one colour: the inside tinted, and a line 1 pixel wide around it.

    Args:
        image: uint8 (h, w, 3) RGB; not changed.
        mask: bool (H, W), of the image's size or larger; it is resized to the image so that thin structures remain.
        colour: RGB, 0..255.
        opacity: of the inside, [0, 1]; 0 draws the line alone.

    Returns:
        uint8 (h, w, 3).
    """
    painted = image.astype(np.float32)
    if mask.shape != image.shape[:2]:
        grey = Image.fromarray(np.where(mask, np.uint8(255), np.uint8(0)))
        mask = np.asarray(grey.resize(image.shape[1::-1], Image.Resampling.BOX)) > COVERED
    painted[mask] += opacity * (np.array(colour) - painted[mask])
    painted[find_boundaries(mask, mode="outer")] = colour
    return painted.round().astype(np.uint8)


def draw_mask(image: np.ndarray, mask: np.ndarray | None, colour: tuple[int, int, int]) -> bytes:
    """JPEG of a uint8 (H, W, 3) image, at most `PANEL` pixels wide or high, with a bool (H, W) mask painted."""
    pixels = np.asarray(_panel(image))
    return _jpeg(pixels if mask is None else paint_mask(pixels, mask, colour))


def draw_errors(image: np.ndarray, error_map: np.ndarray) -> bytes:
    """JPEG of the image in grey, with the expected errors (float (H, W) in [0, 1]) in red and yellow over it."""
    picture = _panel(image)
    errors = Image.fromarray((error_map * 255).astype(np.uint8)).resize(picture.size, Image.Resampling.BOX)
    return _jpeg(paint_errors(np.asarray(picture.convert("L")), np.asarray(errors) / 255))


def paint_errors(grey: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """uint8 (h, w, 3): expected errors, float (h, w) in [0, 1], in colour over a darkened uint8 (h, w) image."""
    heat = colormaps["hot"](np.sqrt(errors) * 0.8)[..., :3] * 255
    opacity = np.minimum(1, 3 * errors[..., None])
    return (opacity * heat + (1 - opacity) * 0.6 * grey[..., None]).astype(np.uint8)


def _panel(image: np.ndarray) -> Image.Image:
    """The picture of a uint8 (H, W, 3) image, shrunk to at most `PANEL` pixels on its longer side."""
    picture = Image.fromarray(image)
    picture.thumbnail((PANEL, PANEL))
    return picture


def _jpeg(pixels: np.ndarray) -> bytes:
    """JPEG bytes with full colour resolution; chroma subsampling would wash out lines 1 pixel wide."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="JPEG", quality=90, subsampling=0)
    return file.getvalue()
