"""Statistics of a soft mask on its image, the observation of experiment 2; they contain no ground truth."""

import cv2
import numpy as np
from skimage.morphology import skeletonize

from rl_reward_network.env.observation import ObservationEntry
from rl_reward_network.env.operations import SIDE, GuideImage

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
MASK_FEATURES = len(_MASK)


def mask_observation_table(first: int = 0) -> tuple[ObservationEntry, ...]:
    """Name, unit and bounds of the entries of `observe_mask`; `first` is the index of the first one."""
    return tuple(
        ObservationEntry(first + index, name, unit, float(low), float(high))
        for index, (name, unit, low, high) in enumerate(_MASK)
    )


def observe_mask(guide: GuideImage, soft: np.ndarray) -> np.ndarray:
    """Statistics of a soft mask.

    Args:
        guide: the image.
        soft: float32 (H, W) in [0, 1].

    Returns:
        float32 (`MASK_FEATURES`,), within the bounds of `mask_observation_table`; finite for any mask.
    """
    small, grey, (dark, bright) = _reduced(guide, soft)
    mask = small > 0.5
    around = cv2.dilate(mask.astype(np.uint8), np.ones((5, 5), np.uint8)) > 0
    values = [
        float(mask.mean()),
        float((small > 0.2).mean()),
        float((small > 0.8).mean()),
        *_component_statistics(mask),
        *_skeleton_statistics(mask),
        _mean(np.abs(2 * small - 1), around),
        _mean(grey, mask) - _mean(grey, around & ~mask),
        _mean(dark, mask),
        _mean(bright, mask),
        _mean(mask, dark),
        _mean(mask, bright),
        float(grey[mask].std()) if mask.any() else 0.0,
        float(np.concatenate([mask[0], mask[-1], mask[:, 0], mask[:, -1]]).mean()),
    ]
    table = mask_observation_table()
    return np.clip(values, [entry.low for entry in table], [entry.high for entry in table]).astype(np.float32)


def _reduced(guide: GuideImage, soft: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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


def _skeleton_statistics(mask: np.ndarray) -> list[float]:
    """Length of the skeleton and mean width, over the longer side."""
    length, side = int(skeletonize(mask).sum()), max(mask.shape)
    return [length / side, float(mask.sum()) / length / side if length else 0.0]


def _mean(values: np.ndarray, where: np.ndarray) -> float:
    """Mean of the values where `where` holds; 0 if it holds nowhere."""
    return float(values[where].mean()) if where.any() else 0.0
