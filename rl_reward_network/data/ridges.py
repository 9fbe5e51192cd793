"""Tubes, such as vessels: their strength at every pixel, and whether labels leave out what is plain to see.

A labelled tree whose branches go on outside of the label, as clear as its own faint ones, is probably labelled in part
(some data sets name the main segments only). A network then loses precision for what it finds rightly.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from scipy import ndimage
from skimage import color, feature, morphology


def ridge_strength(grey: np.ndarray, sigmas: Sequence[float]) -> np.ndarray:
    """Sato's tubeness of dark and of bright tubes.

    Equal to two calls of `skimage.filters.sato`, which would compute the second derivatives twice.

    Args:
        grey: float (H, W).
        sigmas: radii of the tubes, in pixels.

    Returns:
        float (2, H, W), at least 0: dark tubes, then bright ones.
    """
    strongest = np.zeros((2, *grey.shape))
    for sigma in sigmas:
        hessian = feature.hessian_matrix(grey, sigma, mode="reflect", use_gaussian_derivatives=True)
        largest, smallest = feature.hessian_matrix_eigvals(hessian)
        np.maximum(strongest, sigma**2 * np.stack([largest, -smallest]), out=strongest)
    return strongest


LONGER_SIDE = 512  # pixels; larger images are reduced, since fine texture is no vessel
SIGMAS = (1.5, 3.0)  # radii of tubes in pixels of the reduced image
CLEAR = 0.1  # quantile of the ridge strength on the labelled centre lines; above it a tube counts as clear
GAP = 3  # pixels; nearer to the label is its edge
TOUCH = 6  # pixels; a tube that comes as near as this continues the labelled tree
REACH = 0.06  # share of the longer side; as far from the label a tube must lead
MIN_LENGTH = 20  # pixels of centre line
MAX_CALIBRE = 0.06  # share of the longer side; labels that are wider in the mean are no tubes
IMAGES = 24  # at most; their median decides
MIN_IMAGES = 3
SUSPICIOUS = 0.45  # complete labels: medians up to 0.29; two fifths of the tree left out: 0.68; docs/log.md


class LabelCheck(NamedTuple):
    """What was found in a set of labelled images."""

    unlabelled_ratio: float | None
    """Median over images of `unlabelled_ratio`; None if fewer than three have labelled tubes."""
    images: int
    """Images with labelled tubes."""

    @property
    def note(self) -> str | None:
        """The hint to give, or None if there is nothing to say."""
        if self.unlabelled_ratio is None or self.unlabelled_ratio < SUSPICIOUS:
            return None
        return (
            "labels seem to leave out what is plain to see: tubes as clear as labelled ones continue these, "
            f"{self.unlabelled_ratio:.1f} times as long as what is labelled (median of {self.images} images). "
            "Look at some of them; if it is true, precision and Dice are lower than they should be"
        )


def check_labels(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> LabelCheck:
    """Check at most 24 images, uint8 (H, W, 3), with their masks, bool (H, W); a generator is consumed lazily."""
    ratios = [unlabelled_ratio(image, mask) for image, mask in islice(pairs, IMAGES)]
    found = [ratio for ratio in ratios if ratio is not None]
    return LabelCheck(float(np.median(found)) if len(found) >= MIN_IMAGES else None, len(found))


def unlabelled_ratio(image: np.ndarray, mask: np.ndarray) -> float | None:
    """Length of the unlabelled tubes that continue the labelled ones, relative to the labelled length.

    Args:
        image: uint8 (H, W, 3), RGB.
        mask: bool (H, W).

    Returns:
        At least 0; None if the mask has no tubes. Tubes are dark or bright, as those in the mask.
    """
    grey, mask = _reduced(color.rgb2gray(image)), _reduced(mask.astype(float)) > 0.5
    line, longer_side = morphology.skeletonize(mask), max(mask.shape)
    length = np.count_nonzero(line)
    if length < MIN_LENGTH or np.count_nonzero(mask) > MAX_CALIBRE * longer_side * length:
        return None
    ridges = max(ridge_strength(grey, SIGMAS), key=lambda strength: strength[line].mean())
    clear = np.quantile(ndimage.maximum_filter(ridges, 3)[line], CLEAR)  # centre lines may be a pixel beside the ridge
    distance = ndimage.distance_transform_edt(~mask)
    tubes, count = ndimage.label(morphology.skeletonize(ridges > clear) & (distance > GAP), np.ones((3, 3)))
    nearest, farthest, pixels = (
        np.array(measure(values, tubes, range(1, count + 1)))
        for measure, values in (
            (ndimage.minimum, distance),
            (ndimage.maximum, distance),
            (ndimage.sum_labels, tubes > 0),
        )
    )
    return float(pixels[(nearest <= TOUCH) & (farthest >= REACH * longer_side)].sum() / length)


def _reduced(array: np.ndarray) -> np.ndarray:
    """A float (H, W) array averaged over square blocks, so that its longer side is about 512 pixels at most."""
    factor = max(1, round(max(array.shape) / LONGER_SIDE))
    height, width = (side // factor * factor for side in array.shape)
    return array[:height, :width].reshape(height // factor, factor, width // factor, factor).mean(axis=(1, 3))
