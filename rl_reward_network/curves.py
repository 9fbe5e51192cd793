"""What a training writes as it goes, which weights it keeps, and when it stops.

Curves: metrics.jsonl, one JSON object per line, and TensorBoard's event files in logs/. Checkpoints: tensors and plain
values in one file, written atomically and never unpickled.

At a resume, rows and points after the checkpoint are dropped, because those steps are repeated. The metrics.jsonl of a
resumed run therefore equals that of an uninterrupted run.
"""

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from rl_reward_network.atomic_io import append_line, whole_file

GOLD_FALL, EVALUATIONS = 0.02, 3  # fall of Dice below its peak, and number of evaluations in a row


class Curves:
    """The curves of one run.

    Args:
        run_dir: run folder; made when missing.
        resume_from: where training continues, as fields of a row with the most significant first, such as
            `{"member": 1, "step": 50}`; later rows are dropped. All zeros for a new run.
        board_step: the same position on TensorBoard's axis; later points are dropped. None writes no event file.

    Attributes:
        rows: the rows of metrics.jsonl so far.
        board: TensorBoard's writer, or None.
    """

    def __init__(self, run_dir: Path, resume_from: Mapping[str, int], board_step: int | None = None) -> None:
        self.path = run_dir / "metrics.jsonl"
        self.rows = keep_rows(self.path, resume_from)
        purge_step = None if board_step is None else board_step + 1
        self.board = None if purge_step is None else SummaryWriter(str(run_dir / "logs"), purge_step=purge_step)

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl, and flush the event file, so that a checkpoint has all points before it.

        Numbers that are not finite are written as null, because JSON has no NaN.

        Raises:
            ValueError: the disk is full, or nothing may be written there.
        """
        self.rows.append({name: _finite(value) for name, value in row.items()})
        append_line(self.path, json.dumps(self.rows[-1], allow_nan=False))
        if self.board is not None:
            self.board.flush()

    def add_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add one point to each TensorBoard curve."""
        if self.board is not None:
            for tag, value in values.items():
                self.board.add_scalar(tag, value, step)

    def column(self, name: str) -> list[float]:
        """The values of one field, of the rows that have it, without null."""
        return [row[name] for row in self.rows if row.get(name) is not None]

    def close(self) -> None:
        """Close the event file."""
        if self.board is not None:
            self.board.close()


def keep_rows(path: Path, resume_from: Mapping[str, int]) -> list[dict[str, Any]]:
    """Drop the lines of a metrics.jsonl after `resume_from`, and an incomplete last line.

    Args:
        path: the file; it may be missing.
        resume_from: see `Curves`.

    Returns:
        The remaining rows.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = {number: row for number, line in enumerate(lines) if (row := _parse(line)) is not None}
    limit = tuple(resume_from.values())
    rows = {number: row for number, row in rows.items() if tuple(row[name] for name in resume_from) <= limit}
    with whole_file(path) as temporary:
        temporary.write_text("".join(f"{lines[number]}\n" for number in rows), encoding="utf-8")
    return list(rows.values())


def _finite(value: Any) -> Any:
    """None for a number that is not finite; else the value."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parse(line: str) -> dict[str, Any] | None:
    """The row in a line; None if the line is incomplete."""
    try:
        return dict(json.loads(line))
    except json.JSONDecodeError:
        return None


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write `state` (tensors, numbers, texts, and lists and dicts of them).

    Raises:
        ValueError: the disk is full, or nothing may be written there.
    """
    buffer = io.BytesIO()  # torch.save to a file hides the reason of a failure
    torch.save(state, buffer)
    with whole_file(path) as temporary:
        temporary.write_bytes(buffer.getbuffer())


def load_checkpoint(path: Path, device: str = "cpu") -> dict[str, Any]:
    """The state that `save_checkpoint` wrote, its tensors on `device`; empty if the file is missing.

    Raises:
        ValueError: the file is damaged, or holds more than tensors and plain values.
    """
    if not path.exists():
        return {}
    try:
        return dict(torch.load(path, map_location=device, weights_only=True))
    except Exception as error:  # damage raises RuntimeError, EOFError, KeyError, UnpicklingError, ...
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path}: damaged ({reason}); delete it, and this stage begins anew") from None


@dataclass
class Best:
    """The best weights of a training by their score in validation.

    Args:
        score: the highest so far; where first numbers are equal, the next decides. Equal scores count for the earlier.
        step: at which they were measured.
        weights: copies on the CPU; empty before the first.
    """

    score: tuple[float, ...] = (-math.inf,)
    step: int = 0
    weights: dict[str, Tensor] = field(default_factory=dict)

    def offer(self, score: tuple[float, ...], step: int, weights: Mapping[str, Tensor]) -> None:
        """Keep a copy of these weights if none had a better score."""
        if score > self.score:
            self.score, self.step = score, step
            self.weights = {name: tensor.detach().cpu().clone() for name, tensor in weights.items()}


def over_optimised(proxy: Sequence[float], gold: Sequence[float]) -> bool:
    """Whether training over-optimises its reward.

    True when gold was more than `GOLD_FALL` below its peak in each of the last `EVALUATIONS` evaluations, and the mean
    proxy of these evaluations is above the mean proxy of as many evaluations up to the peak.

    Args:
        proxy: mean reward of the greedy policy on validation images, one number per evaluation.
        gold: mean Dice of the same, against the ground truth; empty when unlabelled.
    """
    if len(gold) <= EVALUATIONS:
        return False
    peak = int(np.argmax(gold))
    fallen = all(value < gold[peak] - GOLD_FALL for value in gold[-EVALUATIONS:])
    return fallen and float(np.mean(proxy[-EVALUATIONS:])) > float(
        np.mean(proxy[max(0, peak + 1 - EVALUATIONS) : peak + 1])
    )
