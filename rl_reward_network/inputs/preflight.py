"""Statistics of images and masks that can be read but may still be wrong, for the table of `sa2va-rl doctor`.

Each image and mask is decoded once, in threads. Nothing here is an error: only the user can tell whether a mask that
covers most of the image is right.
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from scipy.ndimage import distance_transform_edt, label
from skimage.morphology import skeletonize

from rl_reward_network.data.mask_checks import MaskShape, mask_shape
from rl_reward_network.data.region_sample import RegionSample
from rl_reward_network.data.sample import Sample
from rl_reward_network.inputs.loading import decode_files

CHECKED = 1000  # captioned regions that are decoded, spread over all
OUTLINED = 200  # masks whose outlines are measured, spread over all: annotators draw all trees alike
NEARLY_FULL = 0.95  # share of the image
FILLED = (12.0, 0.5)  # times the branches' width, and share of the mask; real trees reach 11, filled ones 17 to 48
WIDE = 3.0  # times the branches' width
BRANCHES = 0.35  # quantile of the widths along all centre lines, those of filled loops included: the branches' width
PIXELS = 10**6  # of an outline; a larger one is subsampled


@dataclass(frozen=True)
class ImageStatistics:
    """Statistics of one image and its mask.

    Attributes:
        name: file, or file and row; for the screen only, since it may name a patient.
        group_id: pseudonym of the patient or group.
        pixels: digest of the decoded image.
        mask: what the mask looks like from afar; None without one.
        bulge: widest place / width of the branches, and share of the mask in places wider than `WIDE` times that width;
            (1, 0) where it is not measured.
    """

    name: str
    group_id: str
    pixels: str
    mask: MaskShape | None = None
    bulge: tuple[float, float] = (1.0, 0.0)

    @property
    def share(self) -> float | None:
        """Share of the pixels that are foreground; None without a mask."""
        return None if self.mask is None else self.mask.share

    @property
    def filled(self) -> bool:
        """Whether the mask is probably the outer outline of a tree of thin branches, with its loops filled."""
        return self.bulge[0] > FILLED[0] and self.bulge[1] > FILLED[1]


def sample_statistics(samples: Sequence[Sample], images: Path) -> list[ImageStatistics]:
    """Statistics of every image and mask.

    Args:
        samples: all samples of a data folder.
        images: the folder of the images.

    Raises:
        ValueError: as `decode_files`.
    """
    outlined = [s for s in samples if s.mask_parts and s.mask_parts.polygons and not s.mask_parts.pngs]
    measured = {s.sample_id for s in outlined[:: -(-len(outlined) // OUTLINED) or 1]}

    def read(sample: Sample) -> ImageStatistics:
        name, outline = sample.image_path.relative_to(images).as_posix(), sample.sample_id in measured
        return image_statistics(name, sample.group_id, sample.load_image(), sample.load_mask(), outline)

    return decode_files([partial(read, sample) for sample in samples])


def region_statistics(regions: Sequence[RegionSample]) -> list[ImageStatistics]:
    """Statistics of captioned regions, `CHECKED` of them at most.

    Raises:
        ValueError: as `decode_files`.
    """
    picked = regions[:: -(-len(regions) // CHECKED) or 1]
    return decode_files([lambda r=r: image_statistics(r.where, r.group_id, *r.load()) for r in picked])  # type: ignore[misc]


def duplicates(images: Sequence[ImageStatistics]) -> list[tuple[ImageStatistics, ImageStatistics]]:
    """Pairs of images with equal pixels in two groups, each pair of groups once for each image."""
    by_pixels: dict[str, dict[str, ImageStatistics]] = defaultdict(dict)
    for image in images:
        by_pixels[image.pixels].setdefault(image.group_id, image)
    return [(first, other) for groups in by_pixels.values() for first, *rest in [groups.values()] for other in rest]


def image_statistics(
    name: str, group_id: str, image: np.ndarray, mask: np.ndarray | None, outlined: bool = False
) -> ImageStatistics:
    """Statistics of one image and its mask.

    Args:
        name, group_id: see `ImageStatistics`.
        image: uint8 (H, W, 3).
        mask: bool (H, W).
        outlined: whether `bulge` is measured.
    """
    pixels = f"{image.shape} {hashlib.sha256(image.tobytes()).hexdigest()}"
    if mask is None:
        return ImageStatistics(name, group_id, pixels)
    bulge = bulge_of(mask) if outlined and mask.any() else (1.0, 0.0)
    return ImageStatistics(name, group_id, pixels, mask_shape(mask), bulge)


def bulge_of(mask: np.ndarray) -> tuple[float, float]:
    """`ImageStatistics.bulge` of the largest part of a mask.

    Width is measured along the centre lines. A tube has (1, 0), a disc about that; an outer outline round a tree with
    loops is thin along many of its lines while most of its pixels lie in the filled loops.

    Args:
        mask: bool (H, W), not empty.
    """
    part = _largest_part(mask)
    radius = distance_transform_edt(part)
    thin = np.quantile(radius[skeletonize(part)], BRANCHES)
    deep = radius > WIDE * thin
    if not deep.any():
        return float(radius.max() / thin), 0.0
    wide = (distance_transform_edt(~deep) <= WIDE * thin) & part
    return float(radius.max() / thin), float(wide.sum() / part.sum())


def _largest_part(mask: np.ndarray) -> np.ndarray:
    """The largest connected part of a mask, cut out with a border, every k-th pixel of a very large one."""
    parts, _ = label(mask, np.ones((3, 3)))
    part = parts == np.bincount(parts.ravel())[1:].argmax() + 1
    rows, cols = np.flatnonzero(part.any(axis=1)), np.flatnonzero(part.any(axis=0))
    cut = part[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1]
    step = int(np.ceil(np.sqrt(cut.size / PIXELS)))
    return np.pad(cut[::step, ::step], 1)
