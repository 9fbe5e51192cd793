"""Agreement of predicted and true Dice: over all masks, within images, and for poor masks."""

import numpy as np
from scipy import stats

AgreementRow = dict[str, float | None]

POOR = 0.7  # a mask with a lower Dice counts as poor
MIDDLE = (0.7, 0.9)  # range of Dice of most real masks, in which ranking is hard
MIN_MASKS = 10  # for a correlation


def agreement(predicted: np.ndarray, true: np.ndarray, image_ids: np.ndarray) -> AgreementRow:
    """Error and rank agreement of N predicted scores.

    Args:
        predicted: float (N,) in [0, 1], predicted Dice.
        true: float (N,) in [0, 1], true Dice.
        image_ids: (N,) of any dtype, the image of each mask.

    Returns:
        - `mae`: mean absolute error.
        - `pearson`, `spearman`: over all masks; None if either side is constant (undefined, not zero).
        - `within_image_spearman`: mean over images with different true scores; an image with constant predictions
          counts as 0. None if all predictions are equal or no image has different true scores.
        - `top1_regret`: best true Dice of an image minus the true Dice of the mask predicted best, mean over images;
          ties are averaged.
        - `auroc_poor`: probability that a mask of true Dice below 0.7 is predicted lower than another, ties count
          half; None if there are only masks of one kind.
        - `pearson_middle`: over the masks of true Dice 0.7 to 0.9; None if there are fewer than 10, or if either side
          is constant.

    Raises:
        ValueError: lengths differ or are 0, or a score is not finite.
    """
    predicted, true, image_ids = (np.asarray(x) for x in (predicted, true, image_ids))
    _check(predicted, true, image_ids)
    undefined = _constant(predicted) or _constant(true)
    middle = (true >= MIDDLE[0]) & (true <= MIDDLE[1])
    pairs = [(predicted[image_ids == name], true[image_ids == name]) for name in np.unique(image_ids)]
    regrets = [t.max() - t[p == p.max()].mean() for p, t in pairs]
    return {
        "mae": float(np.abs(predicted - true).mean()),
        "pearson": _pearson(predicted, true),
        "spearman": None if undefined else float(stats.spearmanr(predicted, true).statistic),
        "within_image_spearman": None if undefined else _within(pairs),
        "top1_regret": float(np.mean(regrets)),
        "auroc_poor": _auroc(predicted, true < POOR),
        "pearson_middle": _pearson(predicted[middle], true[middle]) if middle.sum() >= MIN_MASKS else None,
    }


def coverage(low: np.ndarray, high: np.ndarray, true: np.ndarray) -> float:
    """Share of masks whose true Dice lies in [low, high]; all float (N,)."""
    return float(((low <= true) & (true <= high)).mean())


def _pearson(predicted: np.ndarray, true: np.ndarray) -> float | None:
    """Pearson correlation; None if undefined."""
    undefined = _constant(predicted) or _constant(true)
    return None if undefined else float(stats.pearsonr(predicted, true).statistic)


def _auroc(predicted: np.ndarray, poor: np.ndarray) -> float | None:
    """Probability that a poor mask is predicted lower than another."""
    if poor.all() or not poor.any():
        return None
    wins = stats.mannwhitneyu(predicted[~poor], predicted[poor]).statistic
    return float(wins / (poor.sum() * (~poor).sum()))


def _within(pairs: list[tuple[np.ndarray, np.ndarray]]) -> float | None:
    """Mean Spearman over images with different true scores, from (predicted, true) of each image."""
    values = [0.0 if _constant(p) else stats.spearmanr(p, t).statistic for p, t in pairs if not _constant(t)]
    return float(np.mean(values)) if values else None


def _constant(values: np.ndarray) -> bool:
    return bool(np.ptp(values) == 0)


def _check(predicted: np.ndarray, true: np.ndarray, image_ids: np.ndarray) -> None:
    """Raise a ValueError for lengths that differ and values that are not finite."""
    if not (predicted.shape == true.shape == image_ids.shape) or predicted.ndim != 1 or predicted.size == 0:
        raise ValueError(
            "predicted, true and image_ids must be three arrays of one length (N,), N >= 1, "
            f"got {predicted.shape}, {true.shape} and {image_ids.shape}"
        )
    for name, values in (("predicted", predicted), ("true", true)):
        if not np.isfinite(values).all():
            raise ValueError(f"{name} has {np.count_nonzero(~np.isfinite(values))} scores that are not finite")
