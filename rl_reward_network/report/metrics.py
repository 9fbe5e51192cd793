"""What is measured of the masks of every prompt, and how well scores predict their Dice."""

from dataclasses import dataclass

import numpy as np
from scipy import stats

from rl_reward_network.rewards.table import MASK_REWARDS

AgreementRow = dict[str, float | None]

POOR = 0.7  # a mask with a lower Dice counts as poor
MIDDLE = (0.7, 0.9)  # range of Dice of most real masks, in which ranking is hard
MIN_MASKS = 10  # for a correlation
SCORE = "reward_net_score"  # the reward network's of a mask: the only column that needs no true mask


@dataclass(frozen=True, eq=False)
class SampleTable:
    """Score and metrics of the masks of P prompts on one image, which hashes name with its phrase and patient."""

    sample_id: str
    group_id: str
    scores: np.ndarray  # float (P,) in [0, 1], of the reward network for each prompt's mask; NaN outside its domain
    metrics: dict[str, np.ndarray] | None  # of `MASK_REWARDS`, float64 (P,) in [0, 1]; None for an unlabelled image

    def column(self, name: str) -> np.ndarray:
        """float64 (P,): `SCORE` or a metric; raises a KeyError for a metric of an unlabelled image."""
        return {SCORE: self.scores, **(self.metrics or {})}[name].astype(np.float64)


def measure_sample(
    sample_id: str, group_id: str, scores: np.ndarray, masks: np.ndarray, target: np.ndarray | None
) -> SampleTable:
    """Measure masks, bool (P, H, W), by a true one, bool (H, W) or None; a ValueError names one of other shapes."""
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


def agreement(predicted: np.ndarray, true: np.ndarray, image_ids: np.ndarray) -> AgreementRow:
    """Error and rank agreement of N predicted scores with true Dice, both finite float (N,) in [0, 1]; or a ValueError.

    The masks are of the images `image_ids`, (N,).

    - `mae`: mean absolute error.
    - `pearson`, `spearman`: over all masks; None if either side is constant (undefined, not zero).
    - `within_image_spearman`: mean over images with different true scores; an image with constant predictions counts as
      0. None if all predictions are equal or no image has different true scores.
    - `top1_regret`: best true Dice of an image minus the true Dice of the mask predicted best, mean over images; ties
      are averaged.
    - `auroc_poor`: probability that a mask of true Dice below 0.7 is predicted lower than another, ties count half;
      None if there are only masks of one kind.
    - `pearson_middle`: over the masks of true Dice 0.7 to 0.9; None if there are fewer than 10, or if either side is
      constant.
    """
    predicted, true, image_ids = (np.asarray(x) for x in (predicted, true, image_ids))
    if not (predicted.shape == true.shape == image_ids.shape) or predicted.ndim != 1 or predicted.size == 0:
        raise ValueError(
            "predicted, true and image_ids must be three arrays of one length (N,), N >= 1, "
            f"got {predicted.shape}, {true.shape} and {image_ids.shape}"
        )
    for name, values in (("predicted", predicted), ("true", true)):
        if not np.isfinite(values).all():
            raise ValueError(f"{name} has {np.count_nonzero(~np.isfinite(values))} scores that are not finite")
    undefined, poor = _constant(predicted) or _constant(true), true < POOR
    middle = (true >= MIDDLE[0]) & (true <= MIDDLE[1])
    pairs = [(predicted[image_ids == name], true[image_ids == name]) for name in np.unique(image_ids)]
    regrets = [t.max() - t[p == p.max()].mean() for p, t in pairs]
    auroc = None
    if poor.any() and not poor.all():
        wins = stats.mannwhitneyu(predicted[~poor], predicted[poor]).statistic
        auroc = float(wins / (poor.sum() * (~poor).sum()))
    within = [0.0 if _constant(p) else stats.spearmanr(p, t).statistic for p, t in pairs if not _constant(t)]
    return {
        "mae": float(np.abs(predicted - true).mean()),
        "pearson": _pearson(predicted, true),
        "spearman": None if undefined else float(stats.spearmanr(predicted, true).statistic),
        "within_image_spearman": None if undefined or not within else float(np.mean(within)),
        "top1_regret": float(np.mean(regrets)),
        "auroc_poor": auroc,
        "pearson_middle": _pearson(predicted[middle], true[middle]) if middle.sum() >= MIN_MASKS else None,
    }


def coverage(low: np.ndarray, high: np.ndarray, true: np.ndarray) -> float:
    """Share of masks whose true Dice lies in [low, high]; all float (N,)."""
    return float(((low <= true) & (true <= high)).mean())


def _pearson(predicted: np.ndarray, true: np.ndarray) -> float | None:
    undefined = _constant(predicted) or _constant(true)
    return None if undefined else float(stats.pearsonr(predicted, true).statistic)


def _constant(values: np.ndarray) -> bool:
    return bool(np.ptp(values) == 0)
