"""Seconds, memory and disk of each stage with a Sa2VA of real size, on a checkpoint of random weights.

    python -m benchmarks.real_size --size 1b
    python -m benchmarks.real_size --size 4b --dtype bfloat16 --gradient_checkpointing
    python -m benchmarks.real_size --size 1b --dtype bfloat16 --side_network --encoder lora

Each stage runs in a process of its own, so that its peak memory is its own: on the CPU that of the process, on a GPU
what torch reserved there. Images have 512 x 512 pixels and one tile, answers are short (24 tokens at most): times grow
with tiles and tokens, memory hardly does. Where a stage fails, the table says so, and the exit status is 1. Writing
and merging use main memory alone.
"""

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.random_checkpoint import Size, write_random_checkpoint
from rl_reward_network.atomic_io import weights_fingerprint
from rl_reward_network.cli.app import run
from rl_reward_network.cli.main import main as command
from rl_reward_network.embedded.datasets import embedded_angiograms, embedded_regions
from rl_reward_network.embedded.regions import make_scenes
from rl_reward_network.env.mask_bank import MaskBank
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.grpo.trainer import StepCallback
from rl_reward_network.inputs.segmenter import Sa2VASegmenter, load_segmenter
from rl_reward_network.models.sa2va.loading_sa2va import Dtype, load_sa2va_model
from rl_reward_network.run import peak_memory_gib

SIDE = 512  # pixels
IMAGES = {"cpu": 4, "cuda": 20}  # in the mask bank
STEPS = 2  # of training: the moments of AdamW exist from the second one on, whose seconds count
TOKENS = 24  # of an answer, at most
LAST_LINES = 30  # of the traceback of a stage
ALL = ("write", "load", "segment", "mask bank", "GRPO step", "supervised step", "merge", "load merged")

WRITTEN = ("model", "bank", "data", "grpo", "supervised", "merged")
MARKER = "written_by_real_size"  # in --folder: what is named above is ours, and may be deleted


@dataclass(frozen=True)
class Args:
    """Measure each stage."""

    size: Size = "1b"
    """Of the released checkpoint that the random one resembles."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """cpu or cuda."""
    dtype: Dtype = "auto"
    """Of the weights: auto is bfloat16 on a GPU and float32 on the CPU."""
    gradient_checkpointing: bool = False
    """In training: compute activations twice, keep few."""
    side_network: bool = False
    """In training: add a side network."""
    encoder: Literal["frozen", "lora", "full"] = "frozen"
    """What trains of SAM 2's image encoder."""
    stages: tuple[str, ...] = ALL
    """Which of them, in this order; `write` is needed once, and `GRPO step` by `merge`."""
    folder: Path = Path("outputs/real_size")
    """What is written goes here, into folders of its own, which are deleted at the end, unless --keep."""
    keep: bool = False
    """Keep the checkpoint and the runs, for a second measurement."""


@dataclass(frozen=True)
class Measured:
    """What a stage needed.

    Args:
        seconds: of the work named, without imports; of training those of one step, without loading.
        peak_gib: largest memory of the process, or of the GPU.
        note: more numbers.
    """

    seconds: float
    peak_gib: float
    note: str = ""


def main(args: Args) -> None:
    """Run all stages, each in a process, and print the table, also of a run that is interrupted."""
    table, status = Table("stage", "seconds", "peak memory (GiB)", "", title=_title(args)), 0
    claim(args.folder)
    try:
        for name in args.stages:
            status = status if _add_row(table, args, name) else 1
    except KeyboardInterrupt:
        status = 130
        table.add_row("interrupted", "-", "-", "the stages after it were not run")
    finally:
        if not args.keep:
            _delete(args.folder)
        Console(width=160).print(table)
    if status:
        sys.exit(status)


def _add_row(table: Table, args: Args, name: str) -> bool:
    """Run a stage; whether it succeeded."""
    if (result := _in_process(args, name)) is None:
        table.add_row(name, "-", "-", "failed, see above")
        return False
    table.add_row(name, f"{result.seconds:.1f}", f"{result.peak_gib:.2f}", result.note)
    return True


def claim(folder: Path) -> None:
    """Mark a folder as this benchmark's, so that its own parts may be deleted.

    Raises:
        ValueError: it holds something under our names that this benchmark did not write.
    """
    if (folder / MARKER).exists():
        return
    if foreign := [name for name in WRITTEN if (folder / name).exists()]:
        raise ValueError(
            f"folder is {folder}, which holds {', '.join(foreign)}, not written by this benchmark, which would delete "
            "it; give a new folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()


def _delete(folder: Path) -> None:
    """What the stages wrote into a folder that is ours, and the folder if nothing else is in it."""
    for name in WRITTEN:
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / MARKER).unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _title(args: Args) -> str:
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else f"{torch.get_num_threads()} threads"
    extra = ", gradient checkpointing" if args.gradient_checkpointing else ""
    extra += ", side network" if args.side_network else ""
    extra += f", encoder {args.encoder}" if args.encoder != "frozen" else ""
    return f"Sa2VA-{args.size}, {args.device} ({device}), dtype {args.dtype}{extra}, torch {torch.__version__}"


def _in_process(args: Args, name: str) -> Measured | None:
    """The result of a stage; None if it failed, or its process was killed."""
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            result = pool.submit(STAGES[name], args).result()
    except (Exception, SystemExit) as error:  # what failed is part of the measurement
        where = str(error.__cause__ or "").splitlines()[-LAST_LINES:]  # in the stage's process
        told = [] if isinstance(error, SystemExit) else where  # a command has said why it ends
        print("\n".join([*told, f"{name}: {type(error).__name__}: {error}"]), file=sys.stderr)
        return None
    print(f"{name}: {result.seconds:.1f} s, {result.peak_gib:.2f} GiB {result.note}", flush=True)
    return result


# ---- the stages ----


def _timed(args: Args, work: Callable[[], str]) -> Measured:
    start = time.perf_counter()
    note = work()
    return _measured(args, _now(args) - start, note)


def _now(args: Args) -> float:
    """The clock in seconds, when the GPU is done."""
    if args.device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def _measured(args: Args, seconds: float, note: str) -> Measured:
    """With the peak so far; of a GPU also what tensors took of the reserved memory."""
    if args.device.startswith("cuda"):
        note = f"{note}; allocated {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB".removeprefix("; ")
    return Measured(seconds, peak_memory_gib(args.device), note)


def _write(args: Args) -> Measured:
    claim(args.folder)

    def work() -> str:
        shutil.rmtree(args.folder / "model", ignore_errors=True)
        count = write_random_checkpoint(args.folder / "model", args.size)
        return f"{count:,} parameters, {_gib(args.folder / 'model'):.2f} GiB on disk"

    return _timed(_in_main_memory(args), work)


def _load(args: Args) -> Measured:
    def work() -> str:
        return _read(args, "model")

    return _timed(args, work)


def _read(args: Args, name: str) -> str:
    """Load a model and read all weights: on the CPU those of the file's own dtype are mapped, not copied."""
    model, _ = load_sa2va_model(args.folder / name, args.device, dtype=args.dtype)
    return f"weights {weights_fingerprint(model)[:8]}"


def _segment(args: Args) -> Measured:
    segmenter, (image,) = _segmenter(args), _images(1)
    segmenter.segment(image, list(PROMPTS))  # the first call loads the GPU's kernels
    return _timed(args, lambda: f"{len(segmenter.segment(image, list(PROMPTS)).mask_logits)} prompts, 1 image")


def _bank(args: Args) -> Measured:
    segmenter = _segmenter(args)
    images = _images(IMAGES["cuda" if args.device.startswith("cuda") else "cpu"])
    shutil.rmtree(args.folder / "bank", ignore_errors=True)  # answers of an earlier measurement
    bank = MaskBank(args.folder / "bank", segmenter.segment, segmenter.fingerprint, list(PROMPTS))
    segmenter.segment(images[0], list(PROMPTS))  # the first call loads the GPU's kernels

    def work() -> str:
        for image in images:
            bank.answer(image)
        return f"{len(images)} images, {_gib(args.folder / 'bank') * 2**20 / len(images):.0f} KiB on disk each"

    result = _timed(args, work)
    return replace(result, note=f"{result.note}, {len(images) / result.seconds:.2f} images/s")


def _grpo(args: Args) -> Measured:
    adapted = args.side_network or args.encoder != "frozen"
    reached = ["--mask_policy", "bernoulli"] * adapted  # the gradient of the other one ends at the [SEG] embedding
    result = _train(
        args,
        "grpo",
        ["--data_root", str(embedded_regions(args.folder / "data")), *reached, "--max_completion_length", str(TOKENS)],
    )
    checkpoint = next((args.folder / "grpo").glob("checkpoint-*"))
    sizes = f"final_model {_gib(args.folder / 'grpo' / 'final_model'):.2f} GiB, checkpoint {_gib(checkpoint):.2f} GiB"
    return replace(result, note="; ".join(filter(None, [f"both loops, 8 captions, 16 masks; {sizes}", result.note])))


def _supervised(args: Args) -> Measured:
    data = embedded_angiograms(args.folder / "data")
    return _train(args, "supervised", ["--data_root", str(data), "--objective", "supervised"])


def _train(args: Args, name: str, words: list[str]) -> Measured:
    """`STEPS` steps of `sa2va-rl grpo`; the seconds are those of the last one alone."""
    folder = args.folder / name
    shutil.rmtree(folder, ignore_errors=True)
    words += ["--model_path", str(args.folder / "model"), "--run_folder", str(folder), "--max_steps", str(STEPS)]
    words += ["--save_steps", str(STEPS), "--eval_steps", "0"]
    words += ["--dtype", args.dtype, "--gpu", "0" if args.device.startswith("cuda") else "-1"]
    words += ["--gradient_checkpointing"] * args.gradient_checkpointing + ["--side_network"] * args.side_network
    words += ["--encoder", args.encoder]
    with _step_ends(args) as ends:
        command(["grpo", "full", *words])
    return _measured(args, ends[-1] - ends[-2], "")


@contextmanager
def _step_ends(args: Args) -> Iterator[list[float]]:
    """The times at which optimisation steps end inside the block; loading, checkpoints and checks lie outside."""
    ends: list[float] = []
    whole = StepCallback.on_step_end

    def on_step_end(self: StepCallback, *words: Any, **named: Any) -> None:
        whole(self, *words, **named)
        ends.append(_now(args))

    with mock.patch.object(StepCallback, "on_step_end", on_step_end):
        yield ends


def _merge(args: Args) -> Measured:
    dtype = "bfloat16" if args.dtype == "bfloat16" else "float32"
    merged = args.folder / "merged"
    shutil.rmtree(merged, ignore_errors=True)
    words = ["--model_path", str(args.folder / "grpo"), "--output", str(merged), "--dtype", dtype]

    def work() -> str:
        command(["merge", *words])
        return f"{_gib(merged):.2f} GiB on disk"

    return _timed(_in_main_memory(args), work)


def _load_merged(args: Args) -> Measured:
    def work() -> str:
        return _read(args, "merged")

    return _timed(args, work)


def _in_main_memory(args: Args) -> Args:
    """For stages that never use a GPU: the process's memory counts."""
    return replace(args, device="cpu")


def _segmenter(args: Args) -> Sa2VASegmenter:
    return load_segmenter(args.folder / "model", args.device, max_new_tokens=TOKENS, dtype=args.dtype)


def _images(count: int) -> list[np.ndarray]:
    """Rendered scenes, uint8 (SIDE, SIDE, 3)."""
    return [scene.image for scene in make_scenes(count, 0, SIDE)]


def _gib(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 2**30


STAGES = dict(zip(ALL, (_write, _load, _segment, _bank, _grpo, _supervised, _merge, _load_merged), strict=True))


if __name__ == "__main__":
    run(main, Args)
