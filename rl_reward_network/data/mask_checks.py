"""Pictures that are masks although they are given as images, and masks whose loops are filled."""

import numpy as np
from scipy.ndimage import distance_transform_edt, label
from skimage.morphology import skeletonize

FLAT_VALUES = 8  # colours, up to which a picture is no photograph
FILLED = (12.0, 0.5)  # times the branches' width, and share of the mask; real trees reach 11, filled ones 17 to 48
WIDE = 3.0  # times the branches' width
BRANCHES = 0.35  # quantile of the widths along all centre lines, those of filled loops included: the branches' width
PIXELS = 10**6  # of an outline; a larger one is subsampled


def looks_like_mask(image: np.ndarray) -> bool:
    """Whether a picture, uint8 (H, W, 3) or grey (H, W), holds two to eight flat colours.

    A picture of one colour does not look like a mask: a recording may begin with a blank frame.
    """
    codes = image if image.ndim == 2 else image.astype(np.uint32) @ np.array([2**16, 2**8, 1], np.uint32)
    some = codes.ravel()[:: max(1, codes.size // 4096)]
    return len(np.unique(some)) <= FLAT_VALUES and 2 <= len(np.unique(codes)) <= FLAT_VALUES


def has_filled_loops(mask: np.ndarray) -> bool:
    """Whether a bool (H, W) mask is probably the outer outline of a tree of thin branches, with its loops filled.

    Width is measured along the centre lines of the largest part. An outer outline round a tree with loops is thin along
    many of its lines, while most of its pixels lie in the filled loops.
    """
    if not mask.any():
        return False
    part = _largest_part(mask)
    radius = distance_transform_edt(part)
    thin = np.quantile(radius[skeletonize(part)], BRANCHES)
    deep = radius > WIDE * thin
    if radius.max() <= FILLED[0] * thin or not deep.any():
        return False
    wide = (distance_transform_edt(~deep) <= WIDE * thin) & part
    return bool(wide.sum() > FILLED[1] * part.sum())


def _largest_part(mask: np.ndarray) -> np.ndarray:
    """The largest connected part of a mask, cut out with a border, every k-th pixel of a very large one."""
    parts, _ = label(mask, np.ones((3, 3)))
    part = parts == np.bincount(parts.ravel())[1:].argmax() + 1
    rows, cols = np.flatnonzero(part.any(axis=1)), np.flatnonzero(part.any(axis=0))
    cut = part[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1]
    step = int(np.ceil(np.sqrt(cut.size / PIXELS)))
    return np.pad(cut[::step, ::step], 1)
