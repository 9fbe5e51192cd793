"""What benchmarks share: commands that are run once, clocks, tables."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from rl_reward_network.report.statistics import group_means
from rl_reward_network.run import AGREEMENT, FINAL


def call(command: str) -> None:
    """Run a command of `sa2va-rl`; a CalledProcessError if it fails."""
    print(f"\nsa2va-rl {command}", flush=True)
    words = [sys.executable, "-m", "rl_reward_network.cli", *shlex.split(command)]
    subprocess.run(words, check=True, env=os.environ)


def train_once(folder: Path, flags: str) -> None:
    """A run of `sa2va-rl grpo quick` in `folder`, unless it is finished; an interrupted one is resumed."""
    if not (folder / FINAL).exists():
        resume = "--resume" if (folder / "config.json").exists() else ""
        call(f"grpo quick {flags} --run_folder {folder} {resume}")


def train_reward_once(folder: Path, flags: str) -> Path:
    """The agreement.json of a reward network below `folder`; one is trained with `full` if there is none."""
    if not list(folder.glob(f"*/{AGREEMENT}")):
        resume = "--resume" if list(folder.glob("*/checkpoint.pt")) else ""
        call(f"reward full {flags} --output_dir {folder} {resume}")
    return max(folder.glob(f"*/{AGREEMENT}"))


def seconds(function: Callable[[], object]) -> float:
    """Wall time of one call in seconds, with the GPU synchronised."""
    start = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


@contextmanager
def exact_float32() -> Iterator[None]:
    """Full float32 inside the block: by default a GPU rounds the factors of float32 convolutions to ten bits (TF32)."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def show(heads: Iterable[str], rows: Iterable[Sequence[object]], title: str = "") -> None:
    """Print a table in Markdown."""
    table = Table(*heads, title=title or None, box=box.MARKDOWN)
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=1000, markup=False).print(table)


def with_seeds(estimate: object, values: np.ndarray, groups: Sequence[str]) -> str:
    """An estimate with the standard deviation of the means of several seeds; values are float (seeds, N)."""
    means = group_means(values, groups).mean(axis=1)
    return f"{estimate}, SD {means.std(ddof=1):.3f}" if len(means) > 1 else str(estimate)
