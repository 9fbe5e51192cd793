"""Agreement of predicted and true Dice on test patients, for the reward network and for simpler predictors.

In numbers, and as a sheet of masks with the predicted and the true error map beside each.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure

from rl_reward_network.atomic_io import whole_file
from rl_reward_network.data.ridges import IMAGES, check_labels
from rl_reward_network.models.reward_network import DiceInterval, RewardNetwork, error_map
from rl_reward_network.report.metrics import AgreementRow, agreement, coverage
from rl_reward_network.reward_training.baseline import Predictor
from rl_reward_network.reward_training.calibration import (
    CLIMBERS,
    dice_after_ascent,
    given_interval,
    true_numbers_of,
)
from rl_reward_network.reward_training.masks import SHIFTED, SOURCES, RewardExample, source_masks, true_dice
from rl_reward_network.rewards.learned import ImageScorer

NETWORK, MEMBER, CAUTIOUS = "network", "one member", "conservative"
NOT_FITTED = "not fitted on validation masks"
MEAN, SOURCE_MEAN, POOLED = "the mean", "mean of the source", "pooled CNN"
COLUMNS = ("image", "mask (white)", "predicted error map", "true error map")
INCHES = 2.6  # of one picture
SCALE = 0.7  # inches of the colour bar
ERRORS = ScalarMappable(cmap="inferno")
ERRORS.set_clim(0, 1)


class SheetRow(NamedTuple):
    """One mask with its predicted and true errors."""

    image: np.ndarray
    """uint8 (H, W, 3), RGB."""
    mask: np.ndarray
    """bool (H, W)."""
    predicted_error: np.ndarray
    """float (H, W) in [0, 1]."""
    true_error: np.ndarray
    """bool (H, W)."""
    source: str
    """Source of the mask, one of `masks.SOURCES`."""
    predicted_dice: float
    interval: tuple[float, float] | str
    """Limits of the 90 % interval of the Dice, or why none can be given."""
    true_dice: float


def measure_agreement(
    network: RewardNetwork,
    examples: Iterable[RewardExample],
    pooled: Predictor,
    mean: float,
    masks: int,
    seed: Sequence[int],
) -> dict[str, Any]:
    """Agreement and intervals by source of masks, gradient ascent, the labels, and the network as a segmenter.

    Args:
        network: the calibrated ensemble.
        examples: test images.
        pooled: the baseline of `train_pooled_cnn`.
        mean: the Dice predicted by the baseline "the mean".
        masks: damaged masks of each kind per image.
        seed: seed of the damage.

    Returns:
        `tables`: source -> predictor -> column of `agreement`; `intervals`: source -> `interval_row`; `ascent`: share
        of shifted true masks that ten steps of gradient ascent improve, their mean Dice before and after;
        `own_dice`: mean Dice of the foreground probability thresholded at 0.5 over the images whose true mask has
        foreground, None without any; `without_foreground`: number of the others; `own_above_truth`: share of images
        whose own segmentation gets a higher predicted Dice than the true mask although it differs, `predicted_own` and
        `predicted_truth`: means of both; `masks`: source -> number of masks; `outside`: number of images outside the
        network's domain, where no number would be given; `labels`: whether they seem to leave out what is plain to
        see.
    """
    measured, climbs, foreground_dice, labelled, favoured, outside = [], [], [], [], [], []
    for index, example in enumerate(examples):
        scorer, truth = ImageScorer(network, example.image), example.truth
        foreground_dice += [true_dice(scorer.own_mask[None], truth)] * bool(truth.any())
        labelled += [(example.image, truth)] * (index < IMAGES)
        outside.append(scorer.outside is not None)
        scorer.outside = None  # numbers of all images are compared, so that the domain cannot flatter them
        stacks = source_masks(example, np.random.default_rng([*seed, index]), masks, own=scorer.own_mask)
        sizes = [len(stack) for stack in stacks.values()]
        favoured.append(scorer.quality(np.stack([scorer.own_mask, truth]).astype(np.float32))["dice"])
        columns = _columns(scorer, network, pooled, mean, example, np.concatenate(list(stacks.values())))
        measured.append(columns | {"image": np.full(sum(sizes), index), "source": np.repeat(list(stacks), sizes)})
        damaged = stacks[SHIFTED][:CLIMBERS]
        after = dice_after_ascent(scorer, truth, damaged, network.config.ascent_step)
        climbs.append(np.stack([true_dice(damaged, truth), after]))
    predicted = np.array(favoured, dtype=float)
    table = {name: np.concatenate([columns[name] for columns in measured]) for name in measured[0]}
    parts = {source: {k: v[table["source"] == source] for k, v in table.items()} for source in SOURCES}
    labels = check_labels(labelled)
    return {
        "tables": {source: _rows(part) for source, part in parts.items()},
        "intervals": {
            source: interval_row(network.config.intervals.get(source), part["members"], part["true"])
            for source, part in parts.items()
        },
        "masks": {source: len(part["true"]) for source, part in parts.items()},
        "ascent": _ascent(*np.concatenate(climbs, axis=1)),
        "own_dice": float(np.mean(foreground_dice)) if foreground_dice else None,
        "without_foreground": len(measured) - len(foreground_dice),
        "own_above_truth": float((predicted[:, 0] > predicted[:, 1]).mean()),
        "predicted_own": float(predicted[:, 0].mean()),
        "predicted_truth": float(predicted[:, 1].mean()),
        "outside": sum(outside),
        "labels": {**labels._asdict(), "note": labels.note},
    }


def interval_row(interval: DiceInterval | None, dice: np.ndarray, true: np.ndarray) -> dict[str, Any]:
    """Result of the intervals of one source, for members' Dice (n, K) and true Dice (n,).

    Returns:
        `refusal`: why no interval can be given, or None; `coverage`: share of true Dice inside, `half_width`: median
        half width; both are None where no interval can be given.
    """
    refusal = NOT_FITTED if interval is None else interval.refusal
    if interval is None or refusal or not len(true):
        return {"refusal": refusal, "coverage": None, "half_width": None}
    low, high = interval.around(dice).T
    return {"refusal": None, "coverage": coverage(low, high, true), "half_width": float(np.median(high - low) / 2)}


def sheet_rows(network: RewardNetwork, examples: Iterable[RewardExample], seed: Sequence[int]) -> list[SheetRow]:
    """One mask of each example with its predicted and true errors; the sources take turns."""
    rows = []
    for index, example in enumerate(examples):
        source, scorer = SOURCES[index % len(SOURCES)], ImageScorer(network, example.image)
        masks = source_masks(example, np.random.default_rng([*seed, index]), 1, (source,), scorer.own_mask)[source]
        mask = masks[index // len(SOURCES) % len(masks)]
        rows.append(
            SheetRow(
                example.image,
                mask,
                error_map(mask.astype(np.float32), scorer.foreground_prob),
                mask ^ example.truth,
                source,
                float(scorer.quality(mask[None].astype(np.float32))["dice"][0]),
                given_interval(network.config, scorer, mask, source),
                float(true_dice(mask[None], example.truth)[0]),
            )
        )
    return rows


def _columns(
    scorer: ImageScorer,
    network: RewardNetwork,
    pooled: Predictor,
    mean: float,
    example: RewardExample,
    masks: np.ndarray,
) -> dict[str, np.ndarray]:
    """True Dice and score, every predictor's Dice and the conservative score, float (n,); members' Dice (n, K)."""
    quality = scorer.quality(masks.astype(np.float32))
    dice, true = quality["members"][..., 0], true_numbers_of(masks, example.truth)
    return {
        "true": true[:, 0],
        "true score": true @ network.config.score_weights,
        NETWORK: dice.mean(axis=1),
        MEMBER: dice[:, 0],
        CAUTIOUS: quality["score"],
        MEAN: np.full(len(masks), mean),
        POOLED: pooled(example.image, masks),
        "members": dice,
    }


def _rows(part: dict[str, np.ndarray]) -> dict[str, AgreementRow]:
    """One row per predictor, against the true Dice; the conservative score against the true score.

    The mean of the source is that of the very masks it is tested on: the best constant in the mean square.
    """
    true = {CAUTIOUS: part["true score"]}
    part = part | {SOURCE_MEAN: np.full_like(part["true"], part["true"].mean())}
    return {
        row: agreement(part[row], true.get(row, part["true"]), part["image"])
        for row in (NETWORK, MEMBER, CAUTIOUS, POOLED, MEAN, SOURCE_MEAN)
    }


def _ascent(before: np.ndarray, after: np.ndarray) -> dict[str, float | None]:
    """Effect of the ascent on the masks that were not perfect before."""
    wrong = before < 1
    if not wrong.any():
        return {"raised": None, "dice_before": None, "dice_after": None}
    before, after = before[wrong], after[wrong]
    return {
        "raised": float((after > before).mean()),
        "dice_before": float(before.mean()),
        "dice_after": float(after.mean()),
    }


def write_sheet(path: Path, rows: Sequence[SheetRow]) -> None:
    """Draw the rows into a PNG, which is written atomically."""
    figure = Figure(figsize=(INCHES * len(COLUMNS), (INCHES + 0.35) * len(rows) + SCALE), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), len(COLUMNS), squeeze=False)
    for row, line in zip(rows, axes, strict=True):
        pictures = (row.image, row.mask, row.predicted_error, row.true_error)
        for axis, picture in zip(line, pictures, strict=True):
            colours = "gray" if picture is row.mask else ERRORS.get_cmap()
            axis.imshow(picture, cmap=colours, vmin=0, vmax=1, interpolation="nearest")
            axis.set_axis_off()
        line[1].set_title(row.source, fontsize=9)
        line[2].set_title(predicted_title(row), fontsize=9)
        line[3].set_title(f"true Dice {row.true_dice:.2f}", fontsize=9)
    for axis, name in zip(axes[0], COLUMNS, strict=True):
        axis.set_title(f"{name}\n{axis.get_title()}".strip(), fontsize=9)
    words = "probability that the mask is wrong at a pixel (true errors: 0 or 1)"
    figure.colorbar(ERRORS, ax=axes, location="bottom", shrink=0.4, label=words)
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=90)


def predicted_title(row: SheetRow) -> str:
    """The predicted Dice with its interval, if they can be given."""
    if np.isnan(row.predicted_dice):
        return "outside the network's domain"
    limits = "no interval" if isinstance(row.interval, str) else "[{:.2f}, {:.2f}]".format(*row.interval)
    return f"predicted Dice {row.predicted_dice:.2f}, {limits}"
