"""Logs of a GRPO run: TensorBoard curves, the same numbers in metrics.jsonl, pictures, completions, a progress bar."""

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from datasets import Dataset
from PIL import Image, ImageDraw
from torch import Tensor
from tqdm import tqdm
from transformers import TrainerCallback

from rl_reward_network.atomic_io import append_line, whole_file
from rl_reward_network.curves import Curves
from rl_reward_network.grpo.rewards import Terms
from rl_reward_network.grpo.rollouts import Columns, Rollouts
from rl_reward_network.report.overlays import AFTER, TRUTH, paint_mask
from rl_reward_network.rewards.combine import Advantages
from rl_reward_network.rewards.judge import Judge

Metrics = dict[str, float | Tensor]  # tag -> value; tensors are read when they are logged, not before: see StepMetrics
TIMINGS = "timings.jsonl"  # of this and of earlier processes of a run; metrics.jsonl has what a resume repeats
TRAINING = "total_loss"  # in every line of a training step
SUMMARY_PREFIX = "train_"  # of the Trainer's summary of the whole run
PICTURES_EVERY = 25  # log calls
MAX_GROUPS = 4  # in a picture
REASON_LENGTH = 40  # characters of a judge's failure beside the bar


class StepMetrics:
    """Values recorded since the last log, by tag; every process must call `means`."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.values: dict[str, list[float | Tensor]] = defaultdict(list)

    def record(self, values: Mapping[str, float | Tensor]) -> None:
        """Add one value for each tag; a tensor stays where it is until its mean is asked for."""
        for tag, value in values.items():
            self.values[tag].append(value)

    def mean_of_last(self, tags: Sequence[str], count: int) -> list[float]:
        """Mean of the last `count` values of each tag, of this process."""
        return [float(sum(self.values[tag][-count:])) / count for tag in tags]

    def means(self) -> dict[str, float]:
        """Mean over the values of each process, then over the processes that recorded the tag."""
        # All tensors are read at once, since each reading waits for the GPU.
        tensors = [value.float() for of_tag in self.values.values() for value in of_tag if isinstance(value, Tensor)]
        numbers = iter(torch.stack([tensor.to(tensors[0].device) for tensor in tensors]).tolist() if tensors else ())
        read = {tag: [next(numbers) if isinstance(v, Tensor) else v for v in own] for tag, own in self.values.items()}
        means = {tag: sum(values) / len(values) for tag, values in read.items()}
        present = defaultdict(list)
        for values in gather_object([means]) if self.world_size > 1 else [means]:
            for tag, value in values.items():
                present[tag].append(value)
        return {tag: sum(values) / len(values) for tag, values in present.items()}


def summed_counts(counts: Mapping[str, int], world_size: int) -> dict[str, float]:
    """The counts of all processes together; every process must call this."""
    processes = gather_object([counts]) if world_size > 1 else [counts]
    return {name: float(sum(values[name] for values in processes)) for name in processes[0]}


def untaught_line(images: int, no_seg: int) -> str:
    """A sentence on the images without masks that the teacher gave none to either, counted each time they came up."""
    return (
        f"the teacher gave no mask ([SEG]) for {no_seg} of {images} views of images without masks, which taught "
        "nothing: lower learning_rate, or raise seg_text_weight"
    )


@dataclass
class SampledBatch:
    """The last micro-batch of this process whose completions were scored, by loop, for `--log_completions`."""

    columns: Mapping[str, Mapping[str, list[Any]]] = field(default_factory=dict)
    terms: Mapping[str, Terms] = field(default_factory=dict)
    advantages: Mapping[str, Advantages] = field(default_factory=dict)

    def write(self, run: Path, step: int) -> None:
        """Write `<run>/completions/completions_<step>.parquet`, as TRL does; nothing if there are none.

        A row for each completion: step, loop, prompt, completion, reference, reward terms (null in the other loop),
        advantage.
        """
        rows: list[dict[str, Any]] = []
        texts = {"prompt": "prompts", "completion": "completions", "reference": "captions"}
        for loop, columns in self.columns.items():
            values = {name: columns[column] for name, column in texts.items()}
            values |= {f"reward/{name}": term.ravel().tolist() for name, term in self.terms[loop].values.items()}
            values["advantage"] = self.advantages[loop].values.ravel().tolist()
            own = zip(*values.values(), strict=True)
            rows += [{"step": step, "loop": loop, **dict(zip(values, row, strict=True))} for row in own]
        if rows:
            names = list(dict.fromkeys(name for row in rows for name in row))
            file = run / "completions" / f"completions_{step:05}.parquet"
            file.parent.mkdir(exist_ok=True)
            with whole_file(file) as temporary:
                Dataset.from_dict({name: [row.get(name) for row in rows] for name in names}).to_parquet(temporary)


class GRPOLogs(TrainerCallback):
    """Write `<run>/logs`, `<run>/metrics.jsonl` and `<run>/timings.jsonl`.

    Args:
        run, rollouts: run folder; returns the last rollouts, for the pictures.
        judge: its first failure is printed as a warning, later ones are counted beside the bar.
        sampled: returns the last scored completions, which are written at each line.
        timings: returns the seconds of each phase since the last line, for curves and `TIMINGS`.
        looks: returns a picture of masks at the last validation, uint8 (H, W, 3), or None.
    """

    def __init__(
        self,
        run: Path,
        rollouts: Callable[[], Rollouts],
        judge: Judge | None = None,
        sampled: Callable[[], SampledBatch] | None = None,
        timings: Callable[[], Mapping[str, float]] | None = None,
        looks: Callable[[], np.ndarray | None] | None = None,
    ) -> None:
        self.run, self.rollouts, self.judge = run, rollouts, judge
        self.sampled, self.timings, self.looks = sampled, timings, looks
        self.calls, self.has_warned = 0, False
        self.curves: Curves | None = None  # on the first process alone
        self.bar: tqdm[Any] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Open the files; a resumed run drops lines and points after the step of its checkpoint."""
        if not state.is_world_process_zero:
            return
        last = state.global_step or -1  # a new run has a line of step 0, its first validation
        self.curves = Curves(self.run, {"step": last}, board_step=last)
        name = "GRPO" if args.objective == "grpo" else args.objective.replace("_", " ")
        self.bar = tqdm(total=state.max_steps, initial=state.global_step, desc=name, unit="step")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Advance the bar."""
        if self.bar is not None:
            self.bar.update()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Add a point to each curve."""
        if self.curves is None or self.bar is None or not logs or any(name.startswith(SUMMARY_PREFIX) for name in logs):
            return
        self.curves.add_scalars(logs, state.global_step)
        self.curves.add_row({"step": state.global_step, **logs})
        if TRAINING not in logs:  # a validation
            if self.looks is not None:
                self.curves.add_picture("val/masks", self.looks(), state.global_step)
            return
        if self.timings is not None:
            spent = dict(self.timings())
            self.curves.add_scalars(spent, state.global_step)
            append_line(self.run / TIMINGS, json.dumps({"step": state.global_step, **spent}))
        means = {loop: logs.get(f"{loop}/reward_mean") for loop in ("loop1", "loop2")}
        rewards = [f"{loop}={mean:.3f}" for loop, mean in means.items() if mean is not None]
        self.bar.set_postfix_str(", ".join([*self._failures(logs), *rewards]))
        if self.sampled is not None:
            self.sampled().write(self.run, state.global_step)
        if self.calls % PICTURES_EVERY == 0:
            self._pictures(self.curves, state.global_step)
        self.calls += 1

    def _failures(self, logs: dict[str, float]) -> list[str]:
        """The text beside the bar about failures of the judge, if there are any."""
        count = int(logs.get("judge/failures", 0))
        if self.judge is None or not count:
            return []
        reason = self.judge.last_failure or "in another process"
        if not self.has_warned:
            self.has_warned = True
            tqdm.write(
                f"warning: the LLM judge failed {count}x, the last time by {reason}; missing scores get the mean of "
                "their group, or METEOR alone if a group has no score",
                file=sys.stderr,
            )
        return [f"judge failed {count}x: {reason[:REASON_LENGTH]}"]

    def _pictures(self, curves: Curves, step: int) -> None:
        rollouts = self.rollouts()
        for loop, columns in rollouts.columns.items():
            count = len(columns["prompts"])
            rows = list(range(0, count, count // rollouts.prompts))[:MAX_GROUPS]
            curves.add_picture(f"{loop}/samples", picture_row(columns, rows), step)
            text = "\n\n".join(f"{columns['captions'][row]} -> {columns['completions'][row]}" for row in rows)
            curves.add_text(f"{loop}/completions", text, step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Close the files."""
        if self.curves is not None and self.bar is not None:
            self.curves.close()
            self.bar.close()


def picture_row(columns: Columns, rows: Sequence[int], side: int = 192) -> np.ndarray:
    """uint8 (side, n * side, 3): images with the outlines of the true (blue) and the predicted mask (orange)."""
    panels = []
    for row in rows:
        image = np.asarray(Image.fromarray(columns["images"][row]).resize((side, side)))
        for mask, colour in ((columns["masks"][row], TRUTH), (columns["predicted_masks"][row], AFTER)):
            if mask is not None:
                image = paint_mask(image, mask, colour, opacity=0)
        panel = Image.fromarray(image)
        ImageDraw.Draw(panel).text((4, side - 14), columns["completions"][row][:36], fill=(255, 255, 255))
        panels.append(np.asarray(panel))
    return np.concatenate(panels, axis=1)
