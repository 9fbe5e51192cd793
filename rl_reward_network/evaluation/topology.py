"""Topology of binary masks: connected components and holes, Betti-0 and Betti-1.

Convention: the foreground is 8-connected and the background 4-connected, so that a diagonal line of pixels is one
component and closes a loop. The whole image is counted, not windows of it.
"""

import cv2
import numpy as np


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
        ValueError: the shapes differ or a mask is not bool.
    """
    check_masks(pred, target)
    numbers = [np.array([betti_numbers(mask) for mask in masks], dtype=np.float64) for masks in (pred, target)]
    errors = np.abs(numbers[0] - numbers[1]).reshape(-1, 2)
    return errors[:, 0], errors[:, 1]


def betti_numbers(mask: np.ndarray) -> tuple[int, int]:
    """Betti-0 and Betti-1 of a bool (H, W) mask, see `betti_errors`."""
    background = np.pad(~mask, 1, constant_values=True)
    components = cv2.connectedComponents(mask.astype(np.uint8), connectivity=8)[0]
    outside = cv2.connectedComponents(background.astype(np.uint8), connectivity=4)[0]
    return components - 1, outside - 2  # the label 0 is counted, too, and the background around the image


def check_masks(pred: np.ndarray, target: np.ndarray) -> None:
    """Raise a ValueError unless both are bool (N, H, W) of one shape."""
    if pred.shape != target.shape or pred.ndim != 3:
        raise ValueError(f"masks: got {pred.shape} and {target.shape}; expected one shape (N, H, W)")
    if pred.dtype != bool or target.dtype != bool:
        raise ValueError(f"masks: got {pred.dtype} and {target.dtype}; expected bool, threshold probabilities first")
