"""What the policies observe: the image, in experiment 2 the mask on it, and the state of the episode.

Nothing contains ground truth. Images are reduced to `SIDE` pixels first: scales are relative to the size of an image.
"""

import functools
from dataclasses import dataclass

import cv2
import numpy as np
from PIL import Image
from skimage.feature import hessian_matrix, hessian_matrix_eigvals
from skimage.morphology import skeletonize

from rl_reward_network.data.images import ridge_strength

SIDE = 256  # pixels of the longer side of the reduced image
SMALLEST = 8  # pixels; a shorter side has no edges and no ridges
RIDGE_SCALES = (1.0, 2.0, 4.0)  # standard deviations in pixels of the reduced image: thin, middle and wide vessels
GREY_PERCENTILES = (1, 10, 25, 50, 75, 90, 99)
STRONG_EDGE = 0.05  # grey levels per pixel
VISION_LIMIT = 100.0  # pooled activations of a working encoder are far below
STRONG_PERCENTILE = 88  # of the tubeness in an image
TUBE_SCALES = (1.0, 2.0, 3.0)  # standard deviations in pixels of the reduced image


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
    *((f"grey_p{percentile:02d}", "grey level", 0, 1) for percentile in GREY_PERCENTILES),
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
_MASK = (
    ("mask_area", "share of the image", 0, 1),
    ("mask_area_loose", "share of the image above 0.2", 0, 1),
    ("mask_area_strict", "share of the image above 0.8", 0, 1),
    ("mask_components", "log(1 + number)", 0, 10),
    ("mask_small_components", "log(1 + number below a tenth of the largest)", 0, 10),
    ("mask_largest", "share of the mask in the largest component", 0, 1),
    ("mask_second", "area of the second component over that of the first", 0, 1),
    ("mask_holes", "log(1 + number)", 0, 10),
    ("mask_skeleton", "length over the longer side", 0, 100),
    ("mask_width", "area over skeleton length, over the longer side", 0, 1),
    ("mask_clarity", "mean of |2 p - 1| on mask and its surroundings", 0, 1),
    ("mask_contrast", "grey level inside less just outside", -1, 1),
    ("mask_dark_ridges", "share of the mask on dark ridges", 0, 1),
    ("mask_bright_ridges", "share of the mask on bright ridges", 0, 1),
    ("mask_dark_covered", "share of dark ridges in the mask", 0, 1),
    ("mask_bright_covered", "share of bright ridges in the mask", 0, 1),
    ("mask_grey_std", "grey level, inside", 0, 1),
    ("mask_border", "share of the border of the image in the mask", 0, 1),
)
IMAGE_FEATURES, EPISODE_FEATURES, MASK_FEATURES = len(_IMAGE), len(_EPISODE), len(_MASK)


def observation_table(vision_features: int = 0, mask: bool = False) -> tuple[ObservationEntry, ...]:
    """The entries of an observation, in order, with so many pooled features of Sa2VA; `mask`: of experiment 2."""
    vision = [
        (f"vision_{channel:03d}", "activation, mean over the image", -VISION_LIMIT, VISION_LIMIT)
        for channel in range(vision_features)
    ]
    fields = (*_IMAGE, *vision, *(_MASK if mask else ()), *_EPISODE)
    return tuple(
        ObservationEntry(index, name, unit, float(low), float(high))
        for index, (name, unit, low, high) in enumerate(fields)
    )


@functools.cache  # called for every context and image
def bounds(vision_features: int = 0, mask: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper bounds of the observation, float32 (D,) each, read-only."""
    table = observation_table(vision_features, mask)
    low, high = (np.array([getattr(entry, side) for entry in table], dtype=np.float32) for side in ("low", "high"))
    low.flags.writeable = high.flags.writeable = False
    return low, high


def observe_image(image: np.ndarray, vision_features: np.ndarray | None = None) -> np.ndarray:
    """The part of the observation that depends on the image only.

    Args:
        image: uint8 (H, W, 3), RGB in [0, 255]; another form, or a side below `SMALLEST` pixels, is a ValueError.
        vision_features: float (C,), pooled features of Sa2VA's image encoder; None omits them.

    Returns:
        float32 (`IMAGE_FEATURES` + C,), in the order and within the bounds of `observation_table(C)`; finite for any
        image.
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
    mean, std = float(grey.mean()), float(grey.std())
    # skewness and kurtosis of a constant image are defined as 0, not rounding noise over rounding noise
    centred = (grey - mean) / std if std > 1e-6 else np.zeros_like(grey)
    kurtosis = float((centred**4).mean() - 3) if std > 1e-6 else 0.0
    shares = np.bincount((grey * 255).round().astype(np.intp).ravel(), minlength=256) / grey.size
    entropy = float(-(shares[shares > 0] * np.log2(shares[shares > 0])).sum())
    percentiles = np.percentile(grey, GREY_PERCENTILES).tolist()
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


@dataclass(frozen=True, eq=False)
class EdgeFeatures:
    """An image uint8 (H, W, 3), RGB, as the operations see it: grey levels and ridges, computed once."""

    image: np.ndarray

    @functools.cached_property
    def grey(self) -> np.ndarray:
        """float32 (H, W) in [0, 1]."""
        return self.image.mean(axis=2, dtype=np.float32) / 255

    @functools.cached_property
    def ridges(self) -> np.ndarray:
        """float32 (2, H, W): tubeness of dark ridges, and of bright ones."""
        height, width = self.image.shape[:2]
        scale = min(1.0, SIDE / max(height, width))
        size = max(8, round(width * scale)), max(8, round(height * scale))
        grey = cv2.resize(self.grey, size, interpolation=cv2.INTER_AREA)
        strength = ridge_strength(grey, TUBE_SCALES).astype(np.float32)
        return np.stack([cv2.resize(one, (width, height)) for one in strength])

    @functools.cached_property
    def strong_ridges(self) -> np.ndarray:
        """bool (2, H, W): where the tubeness is among the highest of the image."""
        limits = np.percentile(self.ridges, STRONG_PERCENTILE, axis=(1, 2), keepdims=True)
        return self.ridges > np.maximum(limits, 1e-6)

    @property
    def unit(self) -> int:
        """Radius of the small structuring element, in pixels, at least 1."""
        return max(1, round(max(self.image.shape[:2]) / 256))


def observe_mask(guide: EdgeFeatures, soft: np.ndarray) -> np.ndarray:
    """Statistics of a soft mask float32 (H, W) in [0, 1]: float32 (`MASK_FEATURES`,), finite for any mask.

    They are within the bounds of `observation_table`.
    """
    small, grey, (dark, bright) = _reduced_mask(guide, soft)
    mask = small > 0.5
    around = cv2.dilate(mask.astype(np.uint8), np.ones((5, 5), np.uint8)) > 0
    length, side = int(skeletonize(mask).sum()), max(mask.shape)
    values = [
        float(mask.mean()),
        float((small > 0.2).mean()),
        float((small > 0.8).mean()),
        *_component_statistics(mask),
        length / side,
        float(mask.sum()) / length / side if length else 0.0,
        _mean(np.abs(2 * small - 1), around),
        _mean(grey, mask) - _mean(grey, around & ~mask),
        _mean(dark, mask),
        _mean(bright, mask),
        _mean(mask, dark),
        _mean(mask, bright),
        float(grey[mask].std()) if mask.any() else 0.0,
        float(np.concatenate([mask[0], mask[-1], mask[:, 0], mask[:, -1]]).mean()),
    ]
    lows, highs = zip(*(field[2:] for field in _MASK), strict=True)
    return np.clip(values, lows, highs).astype(np.float32)


def features_of(guide: EdgeFeatures, vision: np.ndarray | None, soft: np.ndarray | None = None) -> np.ndarray:
    """float32 (F,): what a policy observes of an image.

    `vision`, float (C,), are Sa2VA's pooled features, where the policy observes them; `soft`, float32 (H, W) in [0, 1],
    is the mask, where it chooses operations on it.
    """
    features = observe_image(guide.image, vision)
    return features if soft is None else np.concatenate([features, observe_mask(guide, soft)])


def _reduced_mask(guide: EdgeFeatures, soft: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Soft mask and grey image (h, w), and ridges bool (2, h, w), with a longer side of at most `SIDE`."""
    height, width = soft.shape
    if max(height, width) <= SIDE:
        return soft, guide.grey, guide.strong_ridges
    scale = SIDE / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    parts = (soft, guide.grey, *guide.strong_ridges.astype(np.float32))
    reduced = [cv2.resize(part, size, interpolation=cv2.INTER_AREA) for part in parts]
    return reduced[0], reduced[1], np.stack(reduced[2:]) > 0.5


def _component_statistics(mask: np.ndarray) -> list[float]:
    """Number of components, of small ones, share of the largest, ratio of the second, number of holes."""
    statistics = cv2.connectedComponentsWithStats(mask.astype(np.uint8), connectivity=8)[2]
    areas = np.sort(statistics[1:, cv2.CC_STAT_AREA])[::-1]
    background = np.pad(~mask, 1, constant_values=True).astype(np.uint8)
    holes = cv2.connectedComponents(background, connectivity=4)[0] - 2  # its label 0, and the one around the image
    if not len(areas):
        return [0.0, 0.0, 0.0, 0.0, 0.0]
    second = float(areas[1] / areas[0]) if len(areas) > 1 else 0.0
    small = int((areas < 0.1 * areas[0]).sum())
    return [np.log1p(len(areas)), np.log1p(small), float(areas[0] / areas.sum()), second, np.log1p(holes)]


def _mean(values: np.ndarray, where: np.ndarray) -> float:
    """Mean of the values where `where` holds; 0 if it holds nowhere."""
    return float(values[where].mean()) if where.any() else 0.0
