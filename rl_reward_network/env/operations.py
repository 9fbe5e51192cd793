"""Operations on a soft mask, the actions of experiment 2: thresholds, morphology, components, ridges, edges.

Sizes are shares of the image's longer side, so that images of 256 and of 1,024 pixels are treated alike. The mask is
always where the soft mask is above 0.5.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import cv2
import numpy as np
from scipy.special import expit, logit

from rl_reward_network.data.ridges import ridge_strength

SIDE = 256  # pixels of the longer side on which ridges are found
UNIT = 1 / 256  # of the longer side: radius of the small structuring element
SMALL_SHARE = 1e-3  # of the image: smaller components are dropped
HOLE_SHARE = 5e-3  # of the image: larger holes are not filled
LOGIT_STEP = 1.0  # shift by one threshold operation
SURE = 1e-4  # soft masks are kept this far from 0 and 1 where logits are taken
STRONG_PERCENTILE = 88  # of the tubeness in an image
RIDGE_SIGMAS = (1.0, 2.0, 3.0)  # pixels of the reduced image
STRONG_RIDGE = 0.5  # of the median tubeness inside the mask
ADDED = 0.75  # least soft value of a pixel that is added
EDGE_RADIUS, EDGE_EPSILON = 3, 1e-3  # units; variance of grey levels in [0, 1] that counts as an edge


@dataclass(frozen=True, eq=False)
class GuideImage:
    """An image as the operations see it: grey levels and ridges, computed once.

    Args:
        image: uint8 (H, W, 3), RGB.
    """

    image: np.ndarray

    @cached_property
    def grey(self) -> np.ndarray:
        """float32 (H, W) in [0, 1]."""
        return self.image.mean(axis=2, dtype=np.float32) / 255

    @cached_property
    def ridges(self) -> np.ndarray:
        """float32 (2, H, W): tubeness of dark ridges, and of bright ones."""
        height, width = self.image.shape[:2]
        scale = min(1.0, SIDE / max(height, width))
        size = max(8, round(width * scale)), max(8, round(height * scale))
        grey = cv2.resize(self.grey, size, interpolation=cv2.INTER_AREA)
        strength = ridge_strength(grey, RIDGE_SIGMAS).astype(np.float32)
        return np.stack([cv2.resize(one, (width, height)) for one in strength])

    @cached_property
    def strong_ridges(self) -> np.ndarray:
        """bool (2, H, W): where the tubeness is among the highest of the image."""
        limits = np.percentile(self.ridges, STRONG_PERCENTILE, axis=(1, 2), keepdims=True)
        return self.ridges > np.maximum(limits, 1e-6)

    @property
    def unit(self) -> int:
        """Radius of the small structuring element, in pixels, at least 1."""
        return max(1, round(UNIT * max(self.image.shape[:2])))


def _shifted(soft: np.ndarray, shift: float) -> np.ndarray:
    return expit(logit(np.clip(soft, SURE, 1 - SURE)) + np.float32(shift)).astype(np.float32)


def _element(radius: int) -> np.ndarray:
    return cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (2 * radius + 1, 2 * radius + 1))


def _morphology(kind: int) -> Callable[[GuideImage, np.ndarray], np.ndarray]:
    return lambda guide, soft: cv2.morphologyEx(soft, kind, _element(guide.unit))


def _components(soft: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """8-connected components: labels int32 (H, W), 0 is the background, and the area of each label."""
    _, labels, statistics, _ = cv2.connectedComponentsWithStats((soft > 0.5).astype(np.uint8), connectivity=8)
    return labels, statistics[:, cv2.CC_STAT_AREA]


def _drop_small(guide: GuideImage, soft: np.ndarray) -> np.ndarray:
    labels, areas = _components(soft)
    return _without(guide, soft, labels, areas < SMALL_SHARE * soft.size)


def _keep_largest(guide: GuideImage, soft: np.ndarray) -> np.ndarray:
    labels, areas = _components(soft)
    if len(areas) == 1:
        return soft
    return _without(guide, soft, labels, np.arange(len(areas)) != 1 + areas[1:].argmax())


def _without(guide: GuideImage, soft: np.ndarray, labels: np.ndarray, dropped: np.ndarray) -> np.ndarray:
    """The soft mask, 0 on the dropped components (by label) and their soft rims, which a lower threshold shows."""
    inside = labels > 0
    gone = inside & dropped[labels]
    rim = cv2.dilate(gone.astype(np.uint8), _element(2 * guide.unit)) > 0
    return np.where(gone | (rim & ~inside), np.float32(0), soft)


def _fill_holes(guide: GuideImage, soft: np.ndarray) -> np.ndarray:
    """Fill small holes; large ones are loops of vessels."""
    background = np.pad(soft <= 0.5, 1, constant_values=True).astype(np.uint8)
    _, labels, statistics, _ = cv2.connectedComponentsWithStats(background, connectivity=4)
    small = statistics[:, cv2.CC_STAT_AREA] <= HOLE_SHARE * soft.size
    small[[0, labels[0, 0]]] = False  # the mask itself, and what surrounds the image
    return np.where(small[labels][1:-1, 1:-1], np.maximum(soft, np.float32(ADDED)), soft)


def _bridge(guide: GuideImage, soft: np.ndarray) -> np.ndarray:
    """Add the strong ridges that connect two components of the mask or more, dark or bright ones as the mask has."""
    mask = soft > 0.5
    labels, areas = _components(soft)
    if len(areas) < 3:
        return soft
    inside = guide.ridges[:, mask]
    polarity = int(inside[1].mean() > inside[0].mean())
    strength = guide.ridges[polarity]
    strong = (strength > STRONG_RIDGE * np.median(inside[polarity])) & ~mask
    count, pieces = cv2.connectedComponents(strong.astype(np.uint8), connectivity=8)
    joins = _touching(labels, pieces, count, _element(2 * guide.unit)) > 1
    joins[0] = False  # what is no ridge
    return np.where(joins[pieces], np.maximum(soft, np.float32(ADDED)), soft)


def _touching(labels: np.ndarray, pieces: np.ndarray, count: int, element: np.ndarray) -> np.ndarray:
    """int (count,): 0, 1, or 2 for several: the number of components of the mask that each piece of ridge touches."""
    largest = cv2.dilate(labels.astype(np.float32), element)  # of the labels near a pixel
    smallest = cv2.erode(np.where(labels > 0, labels, np.inf).astype(np.float32), element)
    near = (pieces > 0) & (largest > 0)
    high, low = np.zeros(count), np.full(count, np.inf)
    np.maximum.at(high, pieces[near], largest[near])
    np.minimum.at(low, pieces[near], smallest[near])
    return (high > 0).astype(int) + (high > low)


def _smooth_along_edges(guide: GuideImage, soft: np.ndarray) -> np.ndarray:
    """Guided filter of the soft mask by the grey image. Source: He et al., Guided Image Filtering, 2013, equation 5."""
    size = (2 * EDGE_RADIUS * guide.unit + 1,) * 2

    def mean(values: np.ndarray) -> np.ndarray:
        return cv2.blur(values, size, borderType=cv2.BORDER_REFLECT)

    grey = guide.grey
    mean_grey, mean_soft = mean(grey), mean(soft)
    slope = (mean(grey * soft) - mean_grey * mean_soft) / (mean(grey * grey) - mean_grey**2 + EDGE_EPSILON)
    return np.clip(mean(slope) * grey + mean(mean_soft - slope * mean_grey), 0, 1)


STOP = "stop"
_FUNCTIONS: dict[str, Callable[[GuideImage, np.ndarray], np.ndarray]] = {
    "threshold up": lambda guide, soft: _shifted(soft, -LOGIT_STEP),
    "threshold down": lambda guide, soft: _shifted(soft, LOGIT_STEP),
    "open": _morphology(cv2.MORPH_OPEN),
    "close": _morphology(cv2.MORPH_CLOSE),
    "dilate": _morphology(cv2.MORPH_DILATE),
    "erode": _morphology(cv2.MORPH_ERODE),
    "drop small components": _drop_small,
    "keep the largest": _keep_largest,
    "fill holes": _fill_holes,
    "bridge gaps along ridges": _bridge,
    "smooth along edges": _smooth_along_edges,
}
OPERATIONS: tuple[str, ...] = (*_FUNCTIONS, STOP)


def apply_operation(name: str, guide: GuideImage, soft: np.ndarray) -> np.ndarray:
    """The soft mask after one operation.

    Args:
        name: one of `OPERATIONS`; stop changes nothing.
        guide: the image.
        soft: float32 (H, W) in [0, 1]; not changed.

    Returns:
        float32 (H, W) in [0, 1], rounded to float16.

    Raises:
        KeyError: no operation has that name.
    """
    if name == STOP:
        return soft
    return _FUNCTIONS[name](guide, soft).astype(np.float16).astype(np.float32)  # so that half of the memory keeps it
