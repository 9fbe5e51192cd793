"""What a training writes as it goes, which weights it keeps, and when it stops.

Curves: metrics.jsonl, one JSON object per line, and TensorBoard's event files in logs/. Checkpoints: tensors and plain
values in one file, written atomically and never unpickled.

At a resume, rows and points after the checkpoint are dropped, because those steps are repeated. The metrics.jsonl of a
resumed run therefore equals that of an uninterrupted run.
"""

import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from rl_reward_network.atomic_io import append_line, read_json, whole_file

VALIDATED = ("val/dice", "val/gt_dice", "custom/val_gt_dice")  # Dice in validation, of steps 1, GRPO and 2
GOLD_FALL, EVALUATIONS = 0.02, 3  # fall of Dice below its peak, and number of evaluations in a row


class Curves:
    """The curves of one run; `rows` are those of metrics.jsonl so far, `board` is TensorBoard's writer, or None.

    Args:
        run_dir: made when missing.
        resume_from: where training continues, as fields of a row with the most significant first, such as
            `{"member": 1, "step": 50}`; later rows are dropped. All zeros for a new run.
        board_step: the same position on TensorBoard's axis; later points are dropped. None writes no event file.
    """

    def __init__(self, run_dir: Path, resume_from: Mapping[str, int], board_step: int | None = None) -> None:
        self.path = run_dir / "metrics.jsonl"
        self.rows = keep_rows(self.path, resume_from)
        config = read_json(run_dir / "config.json") if (run_dir / "config.json").exists() else {}
        self.board, self.tracker = None, None
        report_to = config.get("inputs", {}).get("report_to")
        if board_step is not None and report_to != "none":
            if report_to == "wandb":
                self.tracker = _tracker(run_dir, config["settings"])  # first: it listens to the writer
            self.board = SummaryWriter(str(run_dir / "logs"), purge_step=board_step + 1)
            if not any(resume_from.values()) or min(resume_from.values()) < 0:
                _add_settings(self.board, config.get("settings", {}))

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl, and flush the event file, so that a checkpoint has all points before it.

        Numbers that are not finite become null, as JSON has no NaN. A ValueError where it cannot be written.
        """
        lost = {name: None for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
        self.rows.append({**row, **lost})
        append_line(self.path, json.dumps(self.rows[-1], allow_nan=False))
        if self.board is not None:
            self.board.flush()

    def add_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add one point to each TensorBoard curve."""
        if self.board is not None:
            for tag, value in values.items():
                self.board.add_scalar(tag, value, step)

    def add_picture(self, tag: str, picture: np.ndarray | None, step: int) -> None:
        """Add a picture, uint8 (H, W, 3), to TensorBoard."""
        if self.board is not None and picture is not None:
            self.board.add_image(tag, picture, step, dataformats="HWC")

    def add_text(self, tag: str, text: str, step: int) -> None:
        """Add a text in Markdown to TensorBoard."""
        if self.board is not None:
            self.board.add_text(tag, text, step)

    def column(self, name: str) -> list[float]:
        """The values of one field, of the rows that have it, without null."""
        return [row[name] for row in self.rows if row.get(name) is not None]

    def close(self) -> None:
        """Close the event file, and end the run of a tracker."""
        if self.board is not None:
            self.board.close()
        if self.tracker is not None:
            self.tracker.finish()


def _tracker(run_dir: Path, settings: Mapping[str, Any]) -> Any:
    """A run of Weights & Biases under the folder's name, which takes all that TensorBoard gets."""
    import wandb  # an optional dependency

    about = {"name": run_dir.name, "dir": str(run_dir), "config": dict(settings)}
    return wandb.init(project="rl_reward_network", sync_tensorboard=True, **about)


def _add_settings(board: SummaryWriter, settings: Mapping[str, Any]) -> None:
    """Show the settings that a run began with in TensorBoard's tabs HPARAMS, beside its validation, and TEXT."""
    flat = {name: value for name, value in _flat(settings) if value is not None}
    shown = {name: value if isinstance(value, bool | int | float) else str(value) for name, value in flat.items()}
    for summary in hparams(shown, dict.fromkeys(VALIDATED, 0.0)):
        board._get_file_writer().add_summary(summary)
    lines = "\n".join(f"| {name} | {value} |" for name, value in flat.items())
    board.add_text("settings", f"| setting | value |\n|---|---|\n{lines}", 0)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings and those inside them, by dotted names."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def keep_rows(path: Path, resume_from: Mapping[str, int]) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, which may be missing; later ones and an incomplete one are dropped from the file."""
    if not path.exists():
        return []
    kept, rows, limit = "", list[dict[str, Any]](), tuple(resume_from.values())
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(json.JSONDecodeError):  # incomplete
            row = dict(json.loads(line))
            if tuple(row[name] for name in resume_from) <= limit:
                kept += f"{line}\n"
                rows.append(row)
    with whole_file(path) as temporary:
        temporary.write_text(kept, encoding="utf-8")
    return rows


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write tensors, numbers, texts, and lists and dicts of them; a ValueError where it cannot be written."""
    buffer = io.BytesIO()  # torch.save to a file hides the reason of a failure
    torch.save(state, buffer)
    with whole_file(path) as temporary:
        temporary.write_bytes(buffer.getbuffer())


def load_checkpoint(path: Path, device: str = "cpu") -> dict[str, Any]:
    """What `save_checkpoint` wrote, on `device`; empty if the file is missing, a ValueError for any other content."""
    if not path.exists():
        return {}
    try:
        return dict(torch.load(path, map_location=device, weights_only=True))
    except Exception as error:  # damage raises RuntimeError, EOFError, KeyError, UnpicklingError, ...
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path}: damaged ({reason}); delete it, and this stage begins anew") from None


@dataclass
class Best:
    """The best weights of a training by their score in validation, on the CPU; empty before the first.

    Where first numbers of a score are equal, the next decides. Equal scores count for the earlier.
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
    proxy of these evaluations is above the mean proxy of as many evaluations up to the peak. Proxy is the mean reward
    of the greedy policy on validation images, gold the mean Dice of the same; empty when unlabelled.
    """
    if len(gold) <= EVALUATIONS:
        return False
    peak = int(np.argmax(gold))
    fallen = all(value < gold[peak] - GOLD_FALL for value in gold[-EVALUATIONS:])
    before = proxy[max(0, peak + 1 - EVALUATIONS) : peak + 1]
    return fallen and bool(np.mean(proxy[-EVALUATIONS:]) > np.mean(before))
