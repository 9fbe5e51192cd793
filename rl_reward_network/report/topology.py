"""Topology of binary masks: connected components and holes, Betti-0 and Betti-1.

Convention: the foreground is 8-connected and the background 4-connected, so that a diagonal line of pixels is one
component and closes a loop. The whole image is counted, not windows of it.
"""

import cv2
import numpy as np

from rl_reward_network.rewards.masks import check_masks


def betti_errors(pred: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Betti errors of each pair: |Betti number of the prediction - Betti number of the target|.

    Betti-0 is the number of 8-connected components of the foreground. Betti-1 is the number of holes: 4-connected
    components of the background, of which the one around the image (padded by one pixel of background) is not counted.
    An empty mask has both numbers 0, so the error against it is the other mask's Betti number.

    Args:
        pred: bool (N, H, W), predicted masks.
        target: bool (N, H, W), true masks.

    Returns:
        Two float64 (N,), whole numbers >= 0: the errors of Betti-0 and of Betti-1.

    Raises:
        ValueError: as `check_masks`.
    """
    check_masks(pred, target)
    numbers = [np.array([betti_numbers(mask) for mask in masks], dtype=np.float64) for masks in (pred, target)]
    errors = np.abs(numbers[0] - numbers[1]).reshape(-1, 2)
    return errors[:, 0], errors[:, 1]


def betti_numbers(mask: np.ndarray) -> tuple[int, int]:
    """Betti-0 and Betti-1 of a bool (H, W) mask, see `betti_errors`; ValueError as there."""
    check_masks(mask[None], mask[None])
    background = np.pad(~mask, 1, constant_values=True)
    components = cv2.connectedComponents(mask.astype(np.uint8), connectivity=8)[0]
    outside = cv2.connectedComponents(background.astype(np.uint8), connectivity=4)[0]
    return components - 1, outside - 2  # the label 0 is counted, too, and the background around the image
