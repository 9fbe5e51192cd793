"""Overlap of binary masks: Dice, IoU, precision and recall per pair.

The empty-mask rule, for all four: prediction and target both empty score 1 ("nothing there" was right); if only one of
them is empty the score is 0, so an empty prediction has precision 0 rather than an undefined one.
"""

import numpy as np


def dice(pred: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Dice of each pair, 2 |pred & target| / (|pred| + |target|).

    Args:
        pred: bool (N, H, W), predicted masks.
        target: bool (N, H, W), true masks.

    Returns:
        float64 (N,) in [0, 1]; the empty-mask rule of this module applies.

    Raises:
        ValueError: the shapes differ or a mask is not bool (probabilities must be thresholded first).
    """
    both, predicted, true = _counts(pred, target)
    return _ratio(2 * both, predicted + true, predicted, true)


def iou(pred: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Intersection over union of each pair, |pred & target| / |pred | target|; otherwise as `dice`."""
    both, predicted, true = _counts(pred, target)
    return _ratio(both, predicted + true - both, predicted, true)


def precision(pred: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Share of the predicted pixels that are true, |pred & target| / |pred|; otherwise as `dice`."""
    both, predicted, true = _counts(pred, target)
    return _ratio(both, predicted, predicted, true)


def recall(pred: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Share of the true pixels that are predicted, |pred & target| / |target|; otherwise as `dice`."""
    both, predicted, true = _counts(pred, target)
    return _ratio(both, true, predicted, true)


def _counts(pred: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pixels in both masks, in `pred`, in `target`: each int (N,)."""
    if pred.shape != target.shape or pred.ndim != 3:
        raise ValueError(f"masks must share one (N, H, W) shape, got {pred.shape} and {target.shape}")
    if pred.dtype != bool or target.dtype != bool:
        raise ValueError(f"masks must be bool, got {pred.dtype} and {target.dtype}; threshold probabilities first")
    both, predicted, true = (np.count_nonzero(x, axis=(1, 2)) for x in (pred & target, pred, target))
    return both, predicted, true


def _ratio(part: np.ndarray, whole: np.ndarray, predicted: np.ndarray, true: np.ndarray) -> np.ndarray:
    """part / whole under the empty-mask rule; `part` is 0 wherever `whole` is."""
    return np.where(predicted + true == 0, 1.0, part / np.maximum(whole, 1))
