"""How well predicted Dice agrees with true Dice: over all masks, among the masks of one image, and where it matters."""

import numpy as np
from scipy import stats

Row = dict[str, float | None]

POOR = 0.7  # Dice below which a mask should be recognised as poor
MIDDLE = (0.7, 0.9)  # Dice between which real masks mostly lie, and where ranking them is hard
FEWEST = 10  # masks; a correlation of fewer says nothing


def agreement(predicted: np.ndarray, true: np.ndarray, image_ids: np.ndarray) -> Row:
    """Error and rank agreement of N predicted scores.

    Args:
        predicted: float (N,) in [0, 1], predicted Dice.
        true: float (N,) in [0, 1], true Dice.
        image_ids: (N,) of any kind, which image each mask belongs to.

    Returns:
        `mae`: mean absolute error.
        `pearson`, `spearman`: over all masks; None where either side is constant (undefined, not zero).
        `within_image_spearman`: mean over images with different true scores; an image whose predictions are all equal
            counts 0, because they rank nothing. None where the predictions are constant throughout or no image has
            different true scores.
        `top1_regret`: true Dice lost by taking the mask predicted best, mean over images; equal best predictions share
            the choice.
        `auroc_poor`: chance that a mask of true Dice below 0.7 is predicted below one that is not, equal predictions
            counting half; None where there are only masks of one kind.
        `pearson_middle`: over the masks of true Dice 0.7 to 0.9; None where fewer than 10 are, or either side is
            constant.

    Raises:
        ValueError: lengths differ, nothing came, or a score is not finite.
    """
    predicted, true, image_ids = (np.asarray(x) for x in (predicted, true, image_ids))
    _check(predicted, true, image_ids)
    images = [image_ids == name for name in np.unique(image_ids)]
    undefined = _constant(predicted) or _constant(true)
    middle = (true >= MIDDLE[0]) & (true <= MIDDLE[1])
    return {
        "mae": float(np.abs(predicted - true).mean()),
        "pearson": _pearson(predicted, true),
        "spearman": None if undefined else float(stats.spearmanr(predicted, true).statistic),
        "within_image_spearman": None if undefined else _within(predicted, true, images),
        "top1_regret": float(np.mean([_regret(predicted[image], true[image]) for image in images])),
        "auroc_poor": _auroc(predicted, true < POOR),
        "pearson_middle": _pearson(predicted[middle], true[middle]) if middle.sum() >= FEWEST else None,
    }


def coverage(predicted: np.ndarray, half_width: np.ndarray, true: np.ndarray) -> float:
    """Share of masks whose true Dice lies inside predicted +- half_width; all float (N,)."""
    return float((np.abs(predicted - true) <= half_width).mean())


def _pearson(predicted: np.ndarray, true: np.ndarray) -> float | None:
    """Correlation; None where it is undefined."""
    if _constant(predicted) or _constant(true):
        return None
    return float(stats.pearsonr(predicted, true).statistic)


def _auroc(predicted: np.ndarray, poor: np.ndarray) -> float | None:
    """Chance that a poor mask is predicted below another."""
    if poor.all() or not poor.any():
        return None
    wins = stats.mannwhitneyu(predicted[~poor], predicted[poor]).statistic
    return float(wins / (poor.sum() * (~poor).sum()))


def _within(predicted: np.ndarray, true: np.ndarray, images: list[np.ndarray]) -> float | None:
    """Mean Spearman over the images that have anything to rank."""
    ranked = [image for image in images if not _constant(true[image])]
    values = [_spearman_or_zero(predicted[image], true[image]) for image in ranked]
    return float(np.mean(values)) if values else None


def _spearman_or_zero(predicted: np.ndarray, true: np.ndarray) -> float:
    """Spearman, 0 for predictions that are all equal."""
    return 0.0 if _constant(predicted) else float(stats.spearmanr(predicted, true).statistic)


def _regret(predicted: np.ndarray, true: np.ndarray) -> float:
    """Best true score less the true score of the mask predicted best."""
    return float(true.max() - true[predicted == predicted.max()].mean())


def _constant(values: np.ndarray) -> bool:
    return bool(np.ptp(values) == 0)


def _check(predicted: np.ndarray, true: np.ndarray, image_ids: np.ndarray) -> None:
    """Refuse scores that cannot be compared."""
    if not (predicted.shape == true.shape == image_ids.shape) or predicted.ndim != 1 or predicted.size == 0:
        raise ValueError(
            "predicted, true and image_ids must be three arrays of one length (N,), N >= 1, "
            f"got {predicted.shape}, {true.shape} and {image_ids.shape}"
        )
    for name, values in (("predicted", predicted), ("true", true)):
        if not np.isfinite(values).all():
            raise ValueError(f"{name} holds {np.count_nonzero(~np.isfinite(values))} scores that are not finite")
