"""Which frames of a sequence a model is shown: the first, evenly spaced ones, or those with most contrast agent."""

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from PIL import Image

from rl_reward_network.data.ridges import ridge_strength

KeyFrames = Literal["first", "uniform", "contrast"]
CONTRAST_SIDE = 256  # pixels of the longer side on which contrast is measured
CONTRAST_SIGMAS = (1.5, 3.0)  # radii of vessels there, in pixels
CONTRAST_PERCENTILE = 98  # vessels cover a few percent of an angiogram


def key_frames(count: int, how: KeyFrames, contrast: Sequence[float] | None = None, most: int = 5) -> list[int]:
    """Numbers of the chosen frames, counted from 0, in order of time.

    "first" is what the official prediction does; in an angiogram those frames may lie before the contrast agent.
    "uniform" is evenly spaced, with the first and the last frame. "contrast" leaves out the frames in which contrast
    stays below the middle between its minimum and maximum, before the agent arrives and after it has left; the others
    are split into `most` equal parts, and the best frame of each is chosen. The mere maxima would be neighbours that
    show the same.

    Args:
        count: length of the sequence.
        how: rule.
        contrast: `frame_contrast` of every frame; for "contrast" only.
        most: largest number of frames; all are chosen if there are fewer.

    Raises:
        ValueError: an unknown rule, count or most below 1, or not one finite contrast for each frame.

    >>> key_frames(20, "first"), key_frames(20, "uniform", most=3)
    ([0, 1, 2, 3, 4], [0, 10, 19])
    >>> key_frames(8, "contrast", [0, 1, 5, 8, 9, 7, 6, 0], most=2)
    [4, 5]
    """
    if how not in get_args(KeyFrames):
        raise ValueError(f"key_frames is {how!r}, expected one of {list(get_args(KeyFrames))}")
    if count < 1 or most < 1:
        raise ValueError(f"{count} frames, at most {most} key frames: expected 1 or more of both")
    if how == "first":
        return list(range(min(count, most)))
    if how == "uniform":
        return np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()
    values = np.asarray([] if contrast is None else contrast, dtype=np.float64)
    if values.shape != (count,) or not np.isfinite(values).all():
        raise ValueError(
            f"contrast has {len(values)} values ({int(np.isfinite(values).sum())} finite) for {count} frames; "
            "give frame_contrast of every frame"
        )
    filled = np.flatnonzero(values >= (values.min() + values.max()) / 2)
    parts = np.array_split(filled, min(len(filled), most))
    return [int(part[values[part].argmax()]) for part in parts]


def frame_contrast(frame: np.ndarray) -> float:
    """How well vessels are visible in a frame of an angiogram, at least 0; for comparison within one sequence.

    The 98th percentile of ridge strength, of dark or bright tubes alike, in the frame reduced to 256 pixels. Catheters,
    ribs and the edge of the field of view count as well; they are alike in all frames of a sequence, the agent is not.

    Args:
        frame: uint8 (H, W) or (H, W, 3).

    Raises:
        ValueError: another dtype or shape.
    """
    if frame.dtype != np.uint8 or frame.ndim not in (2, 3):
        raise ValueError(f"a frame must be uint8 (H, W) or (H, W, 3), got {frame.dtype} {frame.shape}")
    picture = Image.fromarray(frame).convert("L")
    picture.thumbnail((CONTRAST_SIDE, CONTRAST_SIDE), Image.Resampling.BOX)
    strength = ridge_strength(np.asarray(picture, dtype=np.float64) / 255, CONTRAST_SIGMAS)
    return float(np.percentile(strength.max(axis=0), CONTRAST_PERCENTILE))
