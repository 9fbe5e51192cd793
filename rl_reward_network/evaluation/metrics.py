"""How good the mask of each prompt is: one table per image, for all prompts at once, at the size of the image."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from skimage.morphology import skeletonize

from rl_reward_network.rewards import masks as mask_rewards


@dataclass(frozen=True, eq=False)
class SampleTable:
    """What each of the P prompts brings on one image.

    Args:
        sample_id: hash that names the image and phrase.
        group_id: hash that names the patient.
        scores: float (P,) in [0, 1], the reward network's score of each prompt's mask.
        metrics: float64 (P,) in [0, 1] for each name in `METRICS`; None when the image is unlabelled.
    """

    sample_id: str
    group_id: str
    scores: np.ndarray
    metrics: dict[str, np.ndarray] | None

    def column(self, name: str) -> np.ndarray:
        """float64 (P,): the score or a metric. A `KeyError` where an unlabelled image is asked for a metric."""
        return {"score": self.scores, **(self.metrics or {})}[name].astype(np.float64)


def cldice(pred: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Centreline Dice: is the centreline of each mask inside the other? Width counts little, broken branches much.

    Args:
        pred: bool (N, H, W), predicted masks.
        target: bool (N, H, W), ground-truth masks.

    Returns:
        float64 (N,) in [0, 1]: 2ps / (p + s) with p the share of the prediction's skeleton inside the target and s the
        share of the target's skeleton inside the prediction. Empty-mask rule as for Dice: both empty 1, one empty 0.

    Raises:
        ValueError: the shapes differ or a mask is not bool.

    Source: Shit et al., clDice, CVPR 2021, equations 1 to 3; skeletons by `skimage.morphology.skeletonize`.
    """
    if pred.shape != target.shape or pred.ndim != 3 or pred.dtype != bool or target.dtype != bool:
        got = f"{pred.dtype} {pred.shape} and {target.dtype} {target.shape}"
        raise ValueError(f"masks: got {got}; expected two bool (N, H, W)")
    # masks of one image share their target: each different mask is thinned once
    different = {mask.tobytes(): mask for mask in (*pred, *target)}
    thinned = {key: skeletonize(np.array(mask)) for key, mask in different.items()}  # it refuses read-only views
    return np.array(
        [_cldice(a, b, thinned[a.tobytes()], thinned[b.tobytes()]) for a, b in zip(pred, target, strict=True)]
    )


def _cldice(pred: np.ndarray, target: np.ndarray, pred_line: np.ndarray, target_line: np.ndarray) -> float:
    """One pair of masks (H, W) with their skeletons."""
    if not pred.any() or not target.any():
        return float(pred.any() == target.any())
    precision = (pred_line & target).sum() / pred_line.sum()
    sensitivity = (target_line & pred).sum() / target_line.sum()
    return float(2 * precision * sensitivity / max(precision + sensitivity, 1e-12))


METRICS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "dice": mask_rewards.dice,
    "iou": mask_rewards.iou,
    "recall": mask_rewards.recall,
    "precision": mask_rewards.precision,
    "cldice": cldice,
}


def measure_sample(
    sample_id: str, group_id: str, scores: np.ndarray, masks: np.ndarray, target: np.ndarray | None
) -> SampleTable:
    """The table of one image.

    Args:
        sample_id: hash that names the image and phrase.
        group_id: hash that names the patient.
        scores: float (P,) in [0, 1], the reward network's score of each mask.
        masks: bool (P, H, W), the mask of each prompt at the size of the image.
        target: bool (H, W), the ground truth; None when unlabelled.

    Raises:
        ValueError: shapes or dtypes that do not fit together; names the sample.
    """
    if masks.dtype != bool or masks.ndim != 3 or scores.shape != masks.shape[:1]:
        got = f"{masks.dtype} {masks.shape} and scores {scores.shape}"
        raise ValueError(f"{sample_id}: masks: got {got}; expected bool (P, H, W) and (P,)")
    if target is None:
        return SampleTable(sample_id, group_id, scores, None)
    if target.dtype != bool or target.shape != masks.shape[1:]:
        raise ValueError(f"{sample_id}: target: got {target.dtype} {target.shape}; expected bool {masks.shape[1:]}")
    targets = np.broadcast_to(target, masks.shape)
    return SampleTable(
        sample_id, group_id, scores, {name: measure(masks, targets) for name, measure in METRICS.items()}
    )
