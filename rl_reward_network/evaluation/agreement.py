"""How well predicted Dice agrees with true Dice: over all masks, and among the masks of one image."""

import numpy as np
from scipy import stats

Row = dict[str, float | None]


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

    Raises:
        ValueError: lengths differ, nothing came, or a score is not finite.
    """
    predicted, true, image_ids = (np.asarray(x) for x in (predicted, true, image_ids))
    _check(predicted, true, image_ids)
    images = [image_ids == name for name in np.unique(image_ids)]
    undefined = _constant(predicted) or _constant(true)
    return {
        "mae": float(np.abs(predicted - true).mean()),
        "pearson": None if undefined else float(stats.pearsonr(predicted, true).statistic),
        "spearman": None if undefined else float(stats.spearmanr(predicted, true).statistic),
        "within_image_spearman": None if undefined else _within(predicted, true, images),
        "top1_regret": float(np.mean([_regret(predicted[image], true[image]) for image in images])),
    }


def agreement_table(
    predicted: np.ndarray, true: np.ndarray, image_ids: np.ndarray, mean: float | None = None
) -> dict[str, Row]:
    """`agreement` of the network beside the row it must beat.

    Args:
        predicted: as `agreement`.
        true: as `agreement`.
        image_ids: as `agreement`.
        mean: the constant that "predict the mean" predicts, such as the mean true Dice of the training masks; without
            it the mean of `true` itself, the best that constant could be.
    """
    constant = np.full(len(true), np.mean(true) if mean is None else mean)
    return {
        "reward network": agreement(predicted, true, image_ids),
        "predict the mean": agreement(constant, true, image_ids),
    }


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
