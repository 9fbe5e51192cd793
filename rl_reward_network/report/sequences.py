"""Masks of a sequence: agreement with the truth frame by frame, and stability over time.

Stability is the mean IoU of the masks of consecutive frames. It is 1 for masks that never change, so it has no best
value: vessels move with the heart and fill with contrast agent. Where two consecutive frames are annotated, the same
number of the truth says how much change is right.

Without any truth, flicker says how much masks change where the images hardly do: Dice and the distance of the borders
between consecutive frames whose contrast is alike. It compares models on the same frames; the heart moves the vessels
there, too.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rl_reward_network.rewards.metrics import border_distance, dice, iou

ALIKE = 0.05  # largest relative difference of the contrast of two frames that are alike


@dataclass(frozen=True)
class FrameMeasures:
    """The mask of one frame in numbers; None where there is nothing to compare with.

    Args:
        share: of the frame that the mask covers, [0, 1].
        dice: with the truth, [0, 1].
        iou_before: IoU with the mask of the frame before, [0, 1].
        true_iou_before: the same of the truth, where both frames are annotated.
        dice_before, border_before: Dice with the mask of the frame before, [0, 1], and mean distance of their borders
            in pixels, where the contrast of both frames is alike.
    """

    share: float
    dice: float | None
    iou_before: float | None
    true_iou_before: float | None
    dice_before: float | None = None
    border_before: float | None = None


def measure_frames(
    masks: Iterable[tuple[np.ndarray, np.ndarray | None]], contrast: Sequence[float]
) -> Iterator[FrameMeasures]:
    """Measure frame by frame; only the frame before is kept in memory.

    Args:
        masks: in order of time, the mask, bool (H, W), and the truth, bool (H, W) or None.
        contrast: of each frame, see `data_import.sequences.frame_contrast`.

    Raises:
        ValueError: as `rewards.metrics.dice`.
    """
    mask_before: np.ndarray | None = None
    truth_before: np.ndarray | None = None
    contrast_before: float | None = None
    for (mask, truth), visible in zip(masks, contrast, strict=True):
        compared = mask_before if contrast_before is not None and _alike(contrast_before, visible) else None
        yield FrameMeasures(
            share=float(mask.mean()),
            dice=None if truth is None else float(dice(mask[None], truth[None])[0]),
            iou_before=_iou(mask_before, mask),
            true_iou_before=_iou(truth_before, truth),
            dice_before=None if compared is None else float(dice(compared[None], mask[None])[0]),
            border_before=None if compared is None else float(border_distance(compared[None], mask[None])[0]),
        )
        mask_before, truth_before, contrast_before = mask, truth, visible


def summarise_frames(frames: Sequence[FrameMeasures]) -> dict[str, float | int | None]:
    """Means over a sequence; None where no frame, or no pair of consecutive frames, has the number.

    Returns:
        frames: their number. share: mean share of the frame that the mask covers.
        stability: mean IoU of consecutive masks.
        annotated: number of frames with a truth. dice: mean over them.
        true_stability: mean IoU of consecutive true masks. stability_there: of the masks, on those pairs alone.
        alike_pairs: number of consecutive frames with alike contrast. flicker_dice, flicker_pixels: means over them.
    """
    pairs = [frame for frame in frames if frame.true_iou_before is not None]
    return {
        "frames": len(frames),
        "share": _mean([frame.share for frame in frames]),
        "stability": _mean([frame.iou_before for frame in frames]),
        "annotated": sum(frame.dice is not None for frame in frames),
        "dice": _mean([frame.dice for frame in frames]),
        "true_stability": _mean([frame.true_iou_before for frame in pairs]),
        "stability_there": _mean([frame.iou_before for frame in pairs]),
        "alike_pairs": sum(frame.dice_before is not None for frame in frames),
        "flicker_dice": _mean([frame.dice_before for frame in frames]),
        "flicker_pixels": _mean([frame.border_before for frame in frames]),
    }


def _alike(contrast: float, other: float) -> bool:
    return abs(contrast - other) <= ALIKE * max(contrast, other)


def _iou(before: np.ndarray | None, now: np.ndarray | None) -> float | None:
    return None if before is None or now is None else float(iou(before[None], now[None])[0])


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
