"""Masks that can be read and may still be wrong: inverted ones, fields of view in place of objects, filled loops.

The import and the pre-flight check note the same. Only the user can tell whether such masks are right.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image
from scipy.ndimage import distance_transform_edt, label
from skimage.morphology import skeletonize

from rl_reward_network.data.masks import without_soft_edges

INVERTED = (0.5, 0.75)  # share of the image, and of its border: an object seldom covers both, a background does
SIDE = 16  # of a thumbnail, in pixels
ALIKE = 0.9  # overlap of the thumbnails of fields of view; those of organs and vessels differ more
LARGE = 0.3  # share of the image that a field of view covers at least
FEW = 3  # masks, below which nothing is said of all
FLAT_VALUES = 8  # colours, up to which a picture is no photograph
FILLED = (12.0, 0.5)  # times the branches' width, and share of the mask; real trees reach 11, filled ones 17 to 48
WIDE = 3.0  # times the branches' width
BRANCHES = 0.35  # quantile of the widths along all centre lines, those of filled loops included: the branches' width
PIXELS = 10**6  # of an outline; a larger one is subsampled
EXTREME = 0.5  # share of pixels that are quite black or quite white in a mask with soft edges, at least


@dataclass(frozen=True, eq=False)
class MaskShape:
    """What a mask looks like from afar.

    Attributes:
        share: of the pixels that are foreground.
        border: the same of the pixels at the image's border.
        thumbnail: float32 (SIDE, SIDE), the share of foreground in each part.
    """

    share: float
    border: float
    thumbnail: np.ndarray

    @property
    def inverted(self) -> bool:
        """Whether the foreground covers most of the image and of its border."""
        return self.share > INVERTED[0] and self.border > INVERTED[1]


def mask_shape(mask: np.ndarray) -> MaskShape:
    """The `MaskShape` of a bool (H, W) mask."""
    border = np.concatenate([mask[0], mask[-1], mask[:, 0], mask[:, -1]])
    small = Image.fromarray(mask.astype(np.float32)).resize((SIDE, SIDE), Image.Resampling.BOX)
    return MaskShape(float(mask.mean()), float(border.mean()), np.asarray(small))


def field_of_view(shapes: Sequence[MaskShape]) -> str:
    """The note that all masks are nearly the same large area, as fields of view are; "" where they are not."""
    if len(shapes) < FEW or any(shape.share < LARGE or shape.inverted for shape in shapes):
        return ""
    thumbnails = np.stack([shape.thumbnail for shape in shapes])
    mean = thumbnails.mean(axis=0)
    overlaps = np.minimum(thumbnails, mean).sum(axis=(1, 2)) / np.maximum(thumbnails, mean).sum(axis=(1, 2))
    if overlaps.min() < ALIKE:
        return ""
    share = float(np.median([shape.share for shape in shapes]))
    return (
        f"all {len(shapes)} masks cover nearly the same {share:.1%} of the picture: fields of view of the camera, no"
        " object? Give the drawings of the object instead"
    )


def looks_like_mask(image: np.ndarray) -> bool:
    """Whether a picture holds a few flat colours, or black and white alone with soft edges.

    A picture of one colour does not: a recording may begin with a blank frame.

    Args:
        image: uint8 (H, W, 3), or grey (H, W) of any depth.
    """
    codes = image if image.ndim == 2 else image.astype(np.uint32) @ np.array([2**16, 2**8, 1], np.uint32)
    some = codes.ravel()[:: max(1, codes.size // 4096)]
    if len(np.unique(some)) <= FLAT_VALUES and 2 <= len(np.unique(codes)) <= FLAT_VALUES:
        return True
    grid = image if image.ndim == 2 else image[..., 0]
    black, white = (float((grid == value).mean()) for value in (0, 255))
    grey = image.ndim == 2 or bool((image == image[..., :1]).all())
    if not grey or grid.max() != 255 or black + white < EXTREME:
        return False
    return set(np.unique(without_soft_edges(grid)).tolist()) == {0, 255}


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
