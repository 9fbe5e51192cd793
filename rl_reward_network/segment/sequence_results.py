"""The animation and the table of a sequence whose masks are on disk."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_reward_network.artefacts import whole_file
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.report.overlays import GREEN, ORANGE, paint_mask
from rl_reward_network.report.page import csv_text
from rl_reward_network.report.sequences import FrameMeasures, measure_frames, summarise_frames
from rl_reward_network.rewards.learned import ImageScorer
from rl_reward_network.segment.sequence_check import CheckedSequence
from rl_reward_network.segment.sequence_files import animation

PREDICTED = ("dice", "score")  # by the reward network


@dataclass(frozen=True)
class SequenceNumbers:
    """The numbers of a sequence, frame by frame.

    Args:
        frames: measures of each mask.
        predicted: of each mask `PREDICTED`, in this order; empty without a reward network.
    """

    frames: list[FrameMeasures]
    predicted: list[tuple[float, ...]]

    @property
    def summary(self) -> dict[str, Any]:
        """The means of `summarise_frames`, and those of the predicted numbers."""
        means = np.mean(self.predicted, axis=0).tolist() if self.predicted else []
        predicted = {f"predicted_{name}": mean for name, mean in zip(PREDICTED, means, strict=False)}
        return {**summarise_frames(self.frames), **predicted}

    @property
    def dice(self) -> list[float]:
        """Dice of each annotated frame."""
        return [frame.dice for frame in self.frames if frame.dice is not None]


def write_results(checked: CheckedSequence, network: RewardNetwork | None) -> SequenceNumbers:
    """Write the animation and frames.csv; one frame is in memory at a time.

    Args:
        checked: a sequence with all of its masks.
        network: predicts how good each mask is.
    """
    write_animation(checked)
    measures = list(measure_frames((checked.mask(index), checked.truth(index)) for index in range(len(checked.frames))))
    numbers = SequenceNumbers(measures, [] if network is None else predicted_numbers(checked, network))
    with whole_file(checked.target.results[1]) as temporary:
        table = frames_table(checked.frames.names, numbers)
        temporary.write_text(table, encoding="utf-8", errors="backslashreplace")  # names of frames may be Latin-1
    return numbers


def write_animation(checked: CheckedSequence) -> None:
    """Draw the outline of each mask on its frame, in orange, over that of the truth, in green."""
    with animation(checked.target.results[0], checked.frames.size, checked.frames.rate) as append:
        for index, frame in enumerate(checked.frames.frames()):
            if (truth := checked.truth(index)) is not None:
                frame = paint_mask(frame, truth, GREEN, opacity=0)
            append(paint_mask(frame, checked.mask(index), ORANGE, opacity=0))


def predicted_numbers(checked: CheckedSequence, network: RewardNetwork) -> list[tuple[float, ...]]:
    """`PREDICTED` of each mask."""
    rows = []
    for index, frame in enumerate(checked.frames.frames()):
        quality = ImageScorer(network, frame).quality(checked.mask(index)[None].astype(np.float32))
        rows.append(tuple(float(quality[name][0]) for name in PREDICTED))
    return rows


def frames_table(names: tuple[str, ...], numbers: SequenceNumbers) -> str:
    """A line for each frame, as CSV; what is not known is an empty cell."""
    heads = ["number", "frame", "share", "dice", "iou_before", "true_iou_before"]
    predicted = numbers.predicted or [()] * len(names)
    lines = [
        (number, name, frame.share, frame.dice, frame.iou_before, frame.true_iou_before, *quality)
        for number, (name, frame, quality) in enumerate(zip(names, numbers.frames, predicted, strict=True), 1)
    ]
    return csv_text([[*heads, *(f"predicted_{name}" for name in PREDICTED[: len(predicted[0])])], *lines])
