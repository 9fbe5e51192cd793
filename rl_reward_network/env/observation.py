"""Observation of the prompt policy: statistics of grey levels, edges and ridges, and pooled features of Sa2VA.

It contains no ground truth. The image is box-averaged to at most `SIDE` pixels first, so that the cost does not grow
with the image and the scales of the ridges are relative to the image size.
"""

import functools
from dataclasses import dataclass

import numpy as np
from PIL import Image
from skimage.feature import hessian_matrix, hessian_matrix_eigvals

SIDE = 256  # pixels of the longer side of the reduced image
SMALLEST = 8  # pixels; a shorter side has no edges and no ridges
RIDGE_SCALES = (1.0, 2.0, 4.0)  # standard deviations in pixels of the reduced image: thin, middle and wide vessels
STRONG_EDGE = 0.05  # grey levels per pixel


@dataclass(frozen=True)
class ObservationEntry:
    """One number of the observation: its index, name, unit and bounds (values are clipped)."""

    index: int
    name: str
    unit: str
    low: float
    high: float


_IMAGE = (
    # 16 image statistics; grey = mean of the three channels in [0, 1]
    ("grey_mean", "grey level", 0, 1),
    ("grey_std", "grey level", 0, 0.5),
    ("grey_p01", "grey level", 0, 1),
    ("grey_p10", "grey level", 0, 1),
    ("grey_p25", "grey level", 0, 1),
    ("grey_p50", "grey level", 0, 1),
    ("grey_p75", "grey level", 0, 1),
    ("grey_p90", "grey level", 0, 1),
    ("grey_p99", "grey level", 0, 1),
    ("grey_skewness", "1", -5, 5),
    ("grey_kurtosis", "1, 0 = normal", -3, 20),
    ("grey_entropy", "bits", 0, 8),
    ("red_minus_green", "grey level", -1, 1),
    ("blue_minus_green", "grey level", -1, 1),
    ("centre_minus_border", "grey level", -1, 1),
    ("black_share", "share of pixels below 0.05", 0, 1),
    # gradient features: first derivatives (edges), then second derivatives (ridges)
    ("edge_mean", "grey level / pixel", 0, 1),
    ("edge_p90", "grey level / pixel", 0, 1),
    ("edge_p99", "grey level / pixel", 0, 1),
    ("edge_share", f"share of pixels steeper than {STRONG_EDGE}", 0, 1),
    ("edge_coherence", "0 all directions, 1 one direction", 0, 1),
    ("edge_horizontal", "1 gradients along x, -1 along y", -1, 1),
    ("laplacian_std", "grey level / pixel^2", 0, 4),
    *((f"dark_ridge_{scale:g}px", "grey level, 99th percentile", 0, 1) for scale in RIDGE_SCALES),
    *((f"bright_ridge_{scale:g}px", "grey level, 99th percentile", 0, 1) for scale in RIDGE_SCALES),
    ("ridge_polarity", "1 dark ridges only, -1 bright ridges only", -1, 1),
)
# state of the episode, set by the environment
_EPISODE = (
    ("progress", "share of the episode's prompts used", 0, 1),
    ("best_score", "best score so far, 0 at the start and when the reward uses labels", 0, 1),
)
VISION_LIMIT = 100.0  # pooled activations of a working encoder are far below

IMAGE_FEATURES, EPISODE_FEATURES = len(_IMAGE), len(_EPISODE)


def observation_table(vision_features: int = 0) -> tuple[ObservationEntry, ...]:
    """The entries of an observation, in order.

    Args:
        vision_features: number of pooled features of Sa2VA's image encoder, 0 when they are not used.
    """
    vision = [
        (f"vision_{channel:03d}", "activation, mean over the image", -VISION_LIMIT, VISION_LIMIT)
        for channel in range(vision_features)
    ]
    fields = (*_IMAGE, *vision, *_EPISODE)
    return tuple(
        ObservationEntry(index, name, unit, float(low), float(high))
        for index, (name, unit, low, high) in enumerate(fields)
    )


@functools.cache  # called for every context and image
def bounds(vision_features: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper bounds of the observation, float32 (D,) each, read-only."""
    table = observation_table(vision_features)
    low, high = (np.array([getattr(entry, side) for entry in table], dtype=np.float32) for side in ("low", "high"))
    low.flags.writeable = high.flags.writeable = False
    return low, high


def observe_image(image: np.ndarray, vision_features: np.ndarray | None = None) -> np.ndarray:
    """The part of the observation that depends on the image only.

    Args:
        image: uint8 (H, W, 3), RGB in [0, 255], both sides at least `SMALLEST` pixels.
        vision_features: float (C,), pooled features of Sa2VA's image encoder; None omits them.

    Returns:
        float32 (F,), F = `IMAGE_FEATURES` + C, in the order and within the bounds of `observation_table(C)`; finite
        for any image.

    Raises:
        ValueError: another dtype or shape, or a side that is too short.
    """
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or min(image.shape[:2]) < SMALLEST:
        raise ValueError(
            f"image is {image.dtype} {image.shape}, expected uint8 (H, W, 3) RGB with sides >= {SMALLEST} pixels"
        )
    colours = _reduced(image)
    grey = colours.mean(axis=2)  # (h, w)
    values = [*_grey_statistics(grey), *_layout_statistics(grey, colours), *_edges(grey), *_ridges(grey)]
    vision = np.zeros(0) if vision_features is None else vision_features
    low, high = bounds(len(vision))
    return np.clip(
        np.concatenate([values, vision]).astype(np.float32), low[:-EPISODE_FEATURES], high[:-EPISODE_FEATURES]
    )


def _reduced(image: np.ndarray) -> np.ndarray:
    """float64 (h, w, 3) in [0, 1], box-averaged so that the longer side has at most `SIDE` pixels."""
    height, width = image.shape[:2]
    factor = min(-(-max(height, width) // SIDE), min(height, width) // SMALLEST)
    return np.asarray(Image.fromarray(image).reduce(factor), dtype=np.float64) / 255


def _grey_statistics(grey: np.ndarray) -> list[float]:
    """Moments, percentiles and entropy of the grey levels."""
    mean, std = float(grey.mean()), float(grey.std())
    # skewness and kurtosis of a constant image are defined as 0, not rounding noise over rounding noise
    centred = (grey - mean) / std if std > 1e-6 else np.zeros_like(grey)
    kurtosis = float((centred**4).mean() - 3) if std > 1e-6 else 0.0
    shares = np.bincount((grey * 255).round().astype(np.intp).ravel(), minlength=256) / grey.size
    entropy = float(-(shares[shares > 0] * np.log2(shares[shares > 0])).sum())
    percentiles = np.percentile(grey, (1, 10, 25, 50, 75, 90, 99)).tolist()
    return [mean, std, *percentiles, float((centred**3).mean()), kurtosis, entropy]


def _layout_statistics(grey: np.ndarray, colours: np.ndarray) -> list[float]:
    """Colour casts, the vignette, and the share of black (collimated) pixels."""
    red, green, blue = colours.mean(axis=(0, 1)).tolist()
    height, width = grey.shape
    inner = np.zeros(grey.shape, dtype=bool)
    inner[height // 4 : height - height // 4, width // 4 : width - width // 4] = True
    vignette = float(grey[inner].mean() - grey[~inner].mean())
    return [red - green, blue - green, vignette, float((grey < 0.05).mean())]


def _edges(grey: np.ndarray) -> list[float]:
    """Strength and direction of the grey-level gradient, and the spread of the Laplacian (low when blurred)."""
    along_y, along_x = np.gradient(grey)
    steepness = np.hypot(along_x, along_y)
    total = max(float(steepness.sum()), 1e-9)
    # doubled angles, so that the opposite gradients of the two sides of a line do not cancel: (x^2 - y^2, 2xy) / |g|
    safe = np.maximum(steepness, 1e-12)
    cosine = float(((along_x**2 - along_y**2) / safe).sum()) / total
    sine = float((2 * along_x * along_y / safe).sum()) / total
    laplacian = np.gradient(along_y, axis=0) + np.gradient(along_x, axis=1)
    strong = float((steepness > STRONG_EDGE).mean())
    percentiles = np.percentile(steepness, (90, 99)).tolist()
    coherence = float(np.hypot(cosine, sine))
    return [float(steepness.mean()), *percentiles, strong, coherence, cosine, float(laplacian.std())]


def _ridges(grey: np.ndarray) -> list[float]:
    """Strength of dark and bright lines at each scale (normalised second derivative across them), and their balance."""
    dark, bright = [], []
    for scale in RIDGE_SCALES:
        hessian = hessian_matrix(grey, sigma=scale, mode="nearest", order="rc", use_gaussian_derivatives=False)
        # vessels cover a few percent of the image; lower percentiles would measure their side lobes
        largest, smallest = hessian_matrix_eigvals(hessian) * scale**2
        dark.append(float(np.percentile(np.maximum(largest, 0), 99)))
        bright.append(float(np.percentile(np.maximum(-smallest, 0), 99)))
    polarity = (sum(dark) - sum(bright)) / max(sum(dark) + sum(bright), 1e-9)
    return [*dark, *bright, polarity]
