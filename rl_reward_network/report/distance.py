"""Distances between the boundaries of binary masks, in pixels."""

import cv2
import numpy as np

from rl_reward_network.rewards.masks import check_masks

PERCENT = 95
_CROSS = cv2.getStructuringElement(cv2.MORPH_CROSS, (3, 3))


def hd95(pred: np.ndarray, target: np.ndarray) -> np.ndarray:
    """95th percentile of the Hausdorff distance of each pair: the larger of both directions.

    A direction is the 95th percentile, linearly interpolated, of the Euclidean distances from each boundary pixel of
    one mask to the nearest boundary pixel of the other. A boundary pixel is a foreground pixel with a background pixel
    among its 4 neighbours; outside the image is background. Equal to monai's
    `compute_hausdorff_distance(..., percentile=95)`.

    Empty masks: if both are empty the distance is 0. If only one is empty it is undefined. There are two common
    conventions: NaN (monai: infinity or NaN), which leaves the image out of means and so rewards a method that finds
    nothing, or the diagonal of the image. Here it is the diagonal, sqrt(H^2 + W^2), and every image counts.

    Args:
        pred: bool (N, H, W), predicted masks.
        target: bool (N, H, W), true masks.

    Returns:
        float64 (N,) in pixels, from 0 to the diagonal.

    Raises:
        ValueError: as `check_masks`.
    """
    check_masks(pred, target)
    return np.array([_hd95(*pair) for pair in zip(pred, target, strict=True)], dtype=np.float64)


def _hd95(pred: np.ndarray, target: np.ndarray) -> float:
    """The distance of one pair of masks (H, W)."""
    if not pred.any() or not target.any():
        return 0.0 if pred.any() == target.any() else float(np.hypot(*pred.shape))
    first, second = boundary(pred), boundary(target)
    return max(_directed(first, second), _directed(second, first))


def boundary(mask: np.ndarray) -> np.ndarray:
    """bool (H, W): pixels of a bool (H, W) mask with a 4-neighbour outside the mask or outside the image."""
    pixels = mask.astype(np.uint8)
    inside = cv2.erode(pixels, _CROSS, borderType=cv2.BORDER_CONSTANT, borderValue=(0, 0, 0, 0))
    return mask & (inside == 0)


def _directed(start: np.ndarray, end: np.ndarray) -> float:
    """Percentile of the distances from the pixels of `start` to the nearest of `end`, both bool (H, W)."""
    distances = cv2.distanceTransform((~end).astype(np.uint8), cv2.DIST_L2, cv2.DIST_MASK_PRECISE)
    return float(np.percentile(distances[start], PERCENT))
