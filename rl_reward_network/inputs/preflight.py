"""Measurements of pictures and masks that can be read but may still be wrong, for the doctor's table.

Each picture and mask is decoded once, in threads. Nothing here is an error: only the user can tell whether a mask that
covers most of the picture is right.
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

from rl_reward_network.data.region_sample import RegionSample
from rl_reward_network.data.sample import Sample
from rl_reward_network.inputs.loading import survey

CHECKED = 1000  # captioned regions that are decoded, spread over all
OUTLINED = 200  # masks whose outlines are measured, spread over all: whoever draws one tree's outline draws all alike
NEARLY_FULL = 0.95  # share of the picture
INVERTED = (0.5, 0.75)  # share of the picture, and of its border: an object seldom covers both, a background does
FILLED = (12.0, 0.5)  # times the branches' width, and share of the mask; real trees reach 11, filled ones 17 to 48
WIDE = 3.0  # times the branches' width
BRANCHES = (
    0.35  # quantile of the widths along all centre lines that stands for the branches: filled loops have lines, too
)
PIXELS = 10**6  # of an outline; a larger one is thinned out first


@dataclass(frozen=True)
class Look:
    """Measurements of one picture and its mask.

    Attributes:
        name: file, or file and row; for the screen only, since it may name a patient.
        group_id: pseudonym of the patient or group.
        pixels: digest of the decoded picture.
        share: of the pixels that are foreground; None without a mask.
        border: the same of the pixels at the picture's border.
        bulge: widest place / width of the branches, and share of the mask in places wider than `WIDE` times that width;
            (1, 0) where it was not looked at.
    """

    name: str
    group_id: str
    pixels: str
    share: float | None = None
    border: float = 0.0
    bulge: tuple[float, float] = (1.0, 0.0)

    @property
    def inverted(self) -> bool:
        """Whether it looks as if background were drawn."""
        return self.share is not None and self.share > INVERTED[0] and self.border > INVERTED[1]

    @property
    def filled(self) -> bool:
        """Whether it looks like the outer outline of a tree of thin branches, loops filled."""
        return self.bulge[0] > FILLED[0] and self.bulge[1] > FILLED[1]


def look_at_samples(samples: Sequence[Sample], images: Path) -> list[Look]:
    """A look at every image and mask.

    Args:
        samples: all of them.
        images: the folder the images are in.

    Raises:
        ValueError: what `survey` says.
    """
    outlined = [s for s in samples if s.mask_parts and s.mask_parts.polygons and not s.mask_parts.pngs]
    measured = {s.sample_id for s in outlined[:: -(-len(outlined) // OUTLINED) or 1]}
    return survey([partial(_look_at_sample, s, images, s.sample_id in measured) for s in samples])


def look_at_regions(regions: Sequence[RegionSample]) -> list[Look]:
    """A look at captioned regions, `CHECKED` of them at most.

    Raises:
        ValueError: what `survey` says.
    """
    picked = regions[:: -(-len(regions) // CHECKED) or 1]
    return survey([partial(_look_at_region, region) for region in picked])


def twins(looks: Sequence[Look]) -> list[tuple[Look, Look]]:
    """Pictures that are pixel by pixel the same in two groups, each pair of groups once for each picture."""
    first: dict[str, dict[str, Look]] = defaultdict(dict)
    for look in looks:
        first[look.pixels].setdefault(look.group_id, look)
    return [(one, other) for groups in first.values() for one, *others in [groups.values()] for other in others]


def _look_at_sample(sample: Sample, images: Path, outlined: bool) -> Look:
    name = sample.image_path.relative_to(images).as_posix()
    return look_at(name, sample.group_id, sample.load_image(), sample.load_mask(), outlined)


def _look_at_region(region: RegionSample) -> Look:
    return look_at(region.where, region.group_id, *region.load())


def look_at(name: str, group_id: str, image: np.ndarray, mask: np.ndarray | None, outlined: bool = False) -> Look:
    """One look.

    Args:
        name, group_id: see `Look`.
        image: uint8 (H, W, 3).
        mask: bool (H, W).
        outlined: whether `bulge` is measured.
    """
    pixels = f"{image.shape} {hashlib.sha256(image.tobytes()).hexdigest()}"
    if mask is None:
        return Look(name, group_id, pixels)
    border = np.concatenate([mask[0], mask[-1], mask[:, 0], mask[:, -1]])
    bulge = bulge_of(mask) if outlined and mask.any() else (1.0, 0.0)
    return Look(name, group_id, pixels, float(mask.mean()), float(border.mean()), bulge)


def bulge_of(mask: np.ndarray) -> tuple[float, float]:
    """How unevenly wide the largest part of a mask is: see `Look.bulge`.

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
