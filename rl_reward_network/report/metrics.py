"""Score and metrics of the mask of every prompt: one table per image, at the size of the image."""

from dataclasses import dataclass

import numpy as np

from rl_reward_network.rewards.table import MASK_REWARDS


@dataclass(frozen=True, eq=False)
class SampleTable:
    """Score and metrics of the masks of P prompts on one image.

    Args:
        sample_id: hash that names the image and phrase.
        group_id: hash that names the patient.
        scores: float (P,) in [0, 1], the reward network's score of each prompt's mask; NaN outside its domain.
        metrics: float64 (P,) in [0, 1] for each name in `MASK_REWARDS`; None for an unlabelled image.
    """

    sample_id: str
    group_id: str
    scores: np.ndarray
    metrics: dict[str, np.ndarray] | None

    def column(self, name: str) -> np.ndarray:
        """float64 (P,): "score" or a metric; raises a KeyError for a metric of an unlabelled image."""
        return {"score": self.scores, **(self.metrics or {})}[name].astype(np.float64)


def measure_sample(
    sample_id: str, group_id: str, scores: np.ndarray, masks: np.ndarray, target: np.ndarray | None
) -> SampleTable:
    """Measure the masks of one image.

    Args:
        sample_id: hash that names the image and phrase.
        group_id: hash that names the patient.
        scores: float (P,) in [0, 1], the reward network's score of each mask.
        masks: bool (P, H, W), the mask of each prompt at the size of the image.
        target: bool (H, W), the ground truth; None for an unlabelled image.

    Raises:
        ValueError: shapes or dtypes that do not match; the message names the sample.
    """
    if masks.dtype != bool or masks.ndim != 3 or scores.shape != masks.shape[:1]:
        got = f"{masks.dtype} {masks.shape} and scores {scores.shape}"
        raise ValueError(f"{sample_id}: masks: got {got}; expected bool (P, H, W) and (P,)")
    if target is None:
        return SampleTable(sample_id, group_id, scores, None)
    if target.dtype != bool or target.shape != masks.shape[1:]:
        raise ValueError(f"{sample_id}: target: got {target.dtype} {target.shape}; expected bool {masks.shape[1:]}")
    targets = np.broadcast_to(target, masks.shape)
    metrics = {name: measure(masks, targets) for name, measure in MASK_REWARDS.items()}
    return SampleTable(sample_id, group_id, scores, metrics)
