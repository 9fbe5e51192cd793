"""Agreement of binary masks, pair by pair: Dice, IoU, precision, recall and centreline Dice.

Empty masks, for all of them: if prediction and target are both empty the value is 1, if only one is empty it is 0. An
empty prediction therefore has precision 0, which would be undefined otherwise.
"""

import numpy as np


def dice(pred: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Dice of each pair, 2 |pred & target| / (|pred| + |target|).

    Args:
        pred: bool (N, H, W), predicted masks.
        target: bool (N, H, W), true masks.

    Returns:
        float64 (N,) in [0, 1]; empty masks as in the module's docstring.

    Raises:
        ValueError: the shapes differ, a mask has no pixel, or it is not bool (threshold probabilities first).
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


def cldice(pred: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Centreline Dice of each pair, 2ps / (p + s); insensitive to width, sensitive to broken branches.

    p is the share of the prediction's skeleton inside the target, s the share of the target's skeleton inside the
    prediction. Arguments, range, empty masks and errors as `dice`.

    Source: Shit et al., clDice, CVPR 2021, equations 1 to 3; skeletons by `skimage.morphology.skeletonize`.
    """
    from skimage.morphology import skeletonize  # takes half a second to import, and --help needs the table of rewards

    check_masks(pred, target)
    different = {mask.tobytes(): mask for mask in (*pred, *target)}  # each different mask is thinned once
    skeletons = {key: skeletonize(np.array(mask)) for key, mask in different.items()}  # it refuses read-only views
    pairs = zip(pred, target, strict=True)
    return np.array([_cldice(a, b, skeletons[a.tobytes()], skeletons[b.tobytes()]) for a, b in pairs], dtype=np.float64)


def _cldice(pred: np.ndarray, target: np.ndarray, pred_skeleton: np.ndarray, target_skeleton: np.ndarray) -> float:
    """Centreline Dice of one pair of masks (H, W)."""
    if not pred.any() or not target.any():
        return float(pred.any() == target.any())
    precision = (pred_skeleton & target).sum() / pred_skeleton.sum()
    sensitivity = (target_skeleton & pred).sum() / target_skeleton.sum()
    return float(2 * precision * sensitivity / max(precision + sensitivity, 1e-12))


def _counts(pred: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pixels in both masks, in `pred`, in `target`: each int (N,)."""
    check_masks(pred, target)
    both, predicted, true = (np.count_nonzero(x, axis=(1, 2)) for x in (pred & target, pred, target))
    return both, predicted, true


def check_masks(pred: np.ndarray, target: np.ndarray) -> None:
    """Check two stacks of masks; N may be 0.

    Raises:
        ValueError: they are not bool (N, H, W) of one shape, H and W 1 or more.
    """
    if pred.shape != target.shape or pred.ndim != 3:
        raise ValueError(f"masks must share one (N, H, W) shape, got {pred.shape} and {target.shape}")
    if 0 in pred.shape[1:]:
        raise ValueError(f"masks must have pixels, got (N, H, W) = {pred.shape}; check how they were cut out")
    if pred.dtype != bool or target.dtype != bool:
        raise ValueError(f"masks must be bool, got {pred.dtype} and {target.dtype}; threshold probabilities first")


def _ratio(part: np.ndarray, whole: np.ndarray, predicted: np.ndarray, true: np.ndarray) -> np.ndarray:
    """part / whole, and 1 where both masks are empty; `part` is 0 wherever `whole` is."""
    return np.where(predicted + true == 0, 1.0, part / np.maximum(whole, 1))
