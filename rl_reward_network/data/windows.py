"""Random windows of images with their masks: the augmentation of everything that is trained on true masks.

Axes: B windows, S their side in pixels.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

WINDOW = 512  # largest side of a window in pixels of the original image
ON_OBJECT = 0.75  # share of windows centred on a pixel of the object, in images larger than the window
ROTATION = 20.0  # degrees, to either side
ZOOM = 1.3  # factor, to either side
CONTRAST, BRIGHTNESS = (0.8, 1.25), (-0.1, 0.1)
# Of strong views, for which a teacher that sees the weak view gives the mask:
STRONG_GAMMA, STRONG_BRIGHTNESS = 1.6, 0.15  # factor, to either side; share of the grey levels
BLUR, NOISE, HIDDEN = 1.5, 0.06, 0.3  # largest: width in pixels; share of the grey levels; side of the hidden square


class LabelledImages(NamedTuple):
    """N images, uint8 (H, W, 3) RGB, which may differ in size, their true masks, bool (H, W), and patients."""

    images: list[np.ndarray]
    truths: list[np.ndarray]
    groups: Sequence[str] = ()  # without, every image counts as one


def window_side(images: Iterable[np.ndarray], largest: int, multiple: int) -> int:
    """Side of the windows in pixels: that of the largest image, rounded up to a multiple, but at most `largest`."""
    side = max(max(image.shape[:2]) for image in images)
    return min(largest, -(-side // multiple) * multiple)


def draw_batch(
    data: LabelledImages, count: int, side: int, rng: np.random.Generator, mirror: bool = True
) -> tuple[Tensor, Tensor]:
    """B windows with random position, rotation, scale, reflection, contrast and brightness.

    No image is drawn twice while `count` is at most N; with `mirror`, half of the windows are mirrored. Gives images
    float32 (B, 3, S, S) in [0, 1] and truths float32 (B, 1, S, S) of 0 and 1.
    """
    total = len(data.images)
    picks = rng.choice(total, count, replace=total < count)
    pairs = ((data.images[pick], data.truths[pick][None]) for pick in picks)
    windows = torch.cat([_draw_window(image, truth, (side, side), rng, mirror) for image, truth in pairs])
    return _recoloured(windows, rng), (windows[:, 3:] > 0.5).float()


def _recoloured(windows: Tensor, rng: np.random.Generator) -> Tensor:
    """The images of B windows (B, 3 + K, h, w) with random contrast and brightness."""
    shape = (len(windows), 1, 1, 1)
    contrast, brightness = (torch.from_numpy(rng.uniform(*limits, shape)).float() for limits in (CONTRAST, BRIGHTNESS))
    image = windows[:, :3] * (contrast / 255)  # a change of contrast keeps middle grey
    return image.add_(0.5 - 0.5 * contrast + brightness).clamp_(0, 1)


def _draw_window(
    image: np.ndarray, truths: np.ndarray, shape: tuple[int, int], rng: np.random.Generator, mirror: bool
) -> Tensor:
    """float32 (1, 3 + K, *shape): a window in a random pose, RGB in [0, 255] and K interpolated maps in [0, 1].

    It is reflected beyond the image border.
    """
    zoom, angle = ZOOM ** rng.uniform(-1, 1), np.radians(rng.uniform(-ROTATION, ROTATION))
    size, window = np.array(image.shape[1::-1]), np.array(shape[::-1])  # (x, y)
    centre = _centre(np.any(truths > 0.5, axis=0), window / zoom, rng)
    side_of_x = rng.choice([-1, 1]) if mirror else 1
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]) @ np.diag([side_of_x, 1]) / zoom
    pose = np.column_stack([turn * window / size[:, None], 2 * centre / size - 1])  # in the units of affine_grid
    grid = F.affine_grid(torch.from_numpy(pose[None]).float(), [1, 1, *shape], align_corners=False)

    pixels = torch.cat([torch.from_numpy(array).float() for array in (image.transpose(2, 0, 1), truths)])
    return F.grid_sample(pixels[None], grid, padding_mode="reflection", align_corners=False)


def _centre(truth: np.ndarray, side: np.ndarray | float, rng: np.random.Generator) -> np.ndarray:
    """(x, y) of a random window of these sides, which reaches beyond the image only where the image is smaller."""
    size = np.array(truth.shape[::-1], dtype=float)
    margin = np.minimum(side, size) / 2
    pixels = np.flatnonzero(truth)
    if len(pixels) and rng.random() < ON_OBJECT:
        row, column = np.unravel_index(pixels[rng.integers(len(pixels))], truth.shape)
        return np.clip([column, row], margin, size - margin)
    return rng.uniform(margin, size - margin)


def augmented(
    image: np.ndarray, truths: np.ndarray, rng: np.random.Generator, mirror: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """A random view of about the whole image, uint8 (H, W, 3), of its own size, with its masks, bool (K, H, W).

    With `mirror`, half of the views are mirrored; not where left and right matter.
    """
    window = _draw_window(image, truths, truths.shape[1:], rng, mirror)
    return _pixels(_recoloured(window, rng)), (window[0, 3:] > 0.5).numpy()


def strongly_augmented(
    image: np.ndarray, probs: np.ndarray, rng: np.random.Generator, mirror: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """A random view as `augmented`, then `perturbed`; soft masks, float32 (K, H, W) in [0, 1], turn with it."""
    window = _draw_window(image, probs, probs.shape[1:], rng, mirror)
    return _pixels(perturbed(_recoloured(window, rng), rng)), window[0, 3:].numpy()


def perturbed(images: Tensor, rng: np.random.Generator) -> Tensor:
    """Images float32 (B, 3, h, w) in [0, 1] with random gamma, brightness, blur, noise and a hidden square each.

    The mask of an image stays right; under the square it follows from what is around.
    """
    return torch.stack([_perturbed(image, rng) for image in images])


def _perturbed(image: Tensor, rng: np.random.Generator) -> Tensor:
    height, width = image.shape[1:]
    gamma, shift = STRONG_GAMMA ** rng.uniform(-1, 1), rng.uniform(-STRONG_BRIGHTNESS, STRONG_BRIGHTNESS)
    pixels = image.clamp(0, 1).pow(gamma).add(shift).permute(1, 2, 0).contiguous().numpy()
    if rng.random() < 0.5:
        pixels = cv2.GaussianBlur(pixels, (0, 0), rng.uniform(0.1, BLUR))
    if rng.random() < 0.5:
        pixels = pixels + rng.uniform(0, NOISE) * rng.standard_normal((height, width, 1), dtype=np.float32)
    if rng.random() < 0.5:
        side = round(min(height, width) * rng.uniform(0, HIDDEN))
        top, left = rng.integers(height - side + 1), rng.integers(width - side + 1)
        pixels[top : top + side, left : left + side] = pixels.mean()
    return torch.from_numpy(pixels).permute(2, 0, 1).clamp(0, 1)


def _pixels(view: Tensor) -> np.ndarray:
    """uint8 (h, w, 3) of an image float32 (1, 3, h, w) in [0, 1]."""
    pixels: np.ndarray = (view[0].permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()
    return pixels
