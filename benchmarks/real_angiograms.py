"""Every road on real coronary angiograms, for several numbers of labelled images: the table of docs/results.md.

    python -m benchmarks.real_angiograms ARCADE                     # all rows, seeds 0 to 2; hours on two cores
    python -m benchmarks.real_angiograms ARCADE --budgets 50 --seeds 0
    python -m benchmarks.real_angiograms ARCADE --show              # the table of what is finished

A budget N is the number of labelled images whose masks any part of a row learns from; the reward network and
supervised training learn from the same N images, GRPO from images of other patients without their labels. Each row
also uses the labels of 48 validation images, to choose weights and to calibrate. Every run is a command of `sa2va-rl`,
printed before it starts; finished runs are not repeated, interrupted ones are resumed. Dice is the mean over the groups
of all test images, with 95 % intervals over groups; with several seeds the Dice of an image is its mean over seeds,
and the standard deviation over seeds follows (SD), since intervals do not cover what another training would change.
"""

import csv
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from rl_reward_network.atomic_io import read_json
from rl_reward_network.cli.app import run
from rl_reward_network.report.statistics import CHANGE, UNIT, few_patients_note, group_means, mean_interval
from rl_reward_network.run import AGREEMENT, BEST_REWARD_NET, FINAL

BUDGETS, SEEDS = (20, 50, 195), (0, 1, 2)
GRPO_STEPS, SUPERVISED_STEPS, AFTER_STEPS = 60, 300, 60
LONGER_STEPS = 370  # supervised steps that take as long as SUPERVISED_STEPS and AFTER_STEPS of GRPO together
ROWS = {
    "default": "sa2va-nano as it is, default prompt",
    "grpo": "GRPO without labels, paid by the reward network",
    "supervised": "supervised",
    "longer": "supervised, as many minutes as the next row",
    "after": "supervised, merged, then GRPO without labels on other patients",
}
OWN_DICE = r"own segmentation of these images has Dice ([0-9.]+)"
DIFFERENCES = (
    ("grpo", "default", "dice"),
    ("supervised", "default", "dice"),
    ("after", "longer", "dice"),
    ("after", "supervised", "dice"),
    ("after", "supervised", "precision"),
    ("after", "supervised", "recall"),
)


@dataclass(frozen=True)
class Args:
    """Train and evaluate every road on a folder of real angiograms."""

    data_root: tyro.conf.Positional[Path]
    """The images, in a format that `sa2va-rl doctor` reads."""
    budgets: tuple[int, ...] = BUDGETS
    """Labelled images to learn from."""
    seeds: tuple[int, ...] = SEEDS
    """Seeds of every run."""
    output_dir: Path = Path("outputs/real_angiograms")
    """Folder of the runs."""
    show: bool = False
    """Run nothing; show what is finished."""


def main(args: Args) -> None:
    """Make the missing runs, and show all."""
    if not args.show:
        for seed in args.seeds:
            for budget in args.budgets:
                make_rows(args.data_root, args.output_dir, budget, seed)
    show(args)


def make_rows(data_root: Path, output_dir: Path, budget: int, seed: int) -> None:
    """All runs of one budget and seed, in `output_dir`/<row>_<budget>_<seed>."""
    data, folder = f"--data_root {shlex.quote(str(data_root))} --seed {seed}", _folder_of(output_dir, budget, seed)
    if not _agreement(folder("reward")):
        resume = "--resume" if list(folder("reward").glob("*/checkpoint.pt")) else ""
        _call(f"reward full {data} --max_labelled {budget} --output_dir {folder('reward')} {resume}")
    result = _agreement(folder("reward"))[-1]
    if (used := read_json(result)["used"]["reward"]["images"]) < budget:  # the other rows would use further labels
        raise ValueError(f"budgets: {budget} labelled images, but the reward split has {used}; give a smaller number")
    reward_net = result.parent / BEST_REWARD_NET
    labelled = f"--objective supervised --max_labelled {budget}"
    _train(folder("grpo"), f"{data} --reward_net {reward_net} --max_steps {GRPO_STEPS}")
    _train(folder("supervised"), f"{data} {labelled} --max_steps {SUPERVISED_STEPS}")
    _train(folder("longer"), f"{data} {labelled} --max_steps {LONGER_STEPS}")
    merged = folder("merged")
    if not merged.exists():
        _call(f"merge --model_path {folder('supervised') / FINAL} --output {merged}")
    after = f"{data} --model_path {merged} --reward_net {reward_net} --max_steps {AFTER_STEPS}"
    _train(folder("after"), after)


def _agreement(folder: Path) -> list[Path]:
    """The results of the finished reward networks in a folder, oldest first."""
    return sorted(folder.glob(f"*/{AGREEMENT}"))


def _train(folder: Path, flags: str) -> None:
    """A GRPO run and its evaluation, unless they are finished."""
    if not (folder / FINAL).exists():
        resume = "--resume" if (folder / "config.json").exists() else ""
        _call(f"grpo quick {flags} --run_folder {folder} {resume}")
    if not (folder / "evaluation" / "eval.json").exists():
        _call(f"evaluate --model_path {folder / FINAL}")


def _call(command: str) -> None:
    """Run a command of `sa2va-rl`; a CalledProcessError if it fails."""
    print(f"\nsa2va-rl {command}", flush=True)
    arguments = [sys.executable, "-m", "rl_reward_network.cli", *shlex.split(command)]
    subprocess.run(arguments, check=True, env=os.environ)


def _folder_of(output_dir: Path, budget: int, seed: int) -> Callable[[str], Path]:
    """The function from a row's name to its folder."""
    return lambda row: output_dir / f"{row}_{budget}_{seed}"


def show(args: Args) -> None:
    """Print both tables in Markdown."""
    console = Console(width=200)
    table = Table("method", *(f"{budget} labelled" for budget in args.budgets), box=box.MARKDOWN)
    for row, title in ROWS.items():
        table.add_row(title, *(_cell(args, budget, row) for budget in args.budgets))
    table.add_row("the reward network's own segmentation", *(_own_dice(args, budget) for budget in args.budgets))
    console.print(table, end="\n\n")
    table = Table("difference", *(f"{budget} labelled" for budget in args.budgets), box=box.MARKDOWN)
    for row, other, metric in DIFFERENCES:
        cells = (_difference(args, budget, row, other, metric) for budget in args.budgets)
        table.add_row(f"{metric}: {ROWS[row]} - {ROWS[other]}", *cells)
    console.print(table)
    _, groups, _ = _values(args, args.budgets[0], "default", "dice")
    for note in few_patients_note(len(set(groups)), "test groups"):
        print(note)


def _cell(args: Args, budget: int, row: str) -> str:
    values, groups, seeds = _values(args, budget, row, "dice")
    return _with_seeds(str(mean_interval(values.mean(axis=0), groups, bounds=UNIT)), values, groups) if seeds else "-"


def _difference(args: Args, budget: int, row: str, other: str, metric: str) -> str:
    (values, groups, seeds), (others, _, of_others) = (_values(args, budget, name, metric) for name in (row, other))
    if not seeds or seeds != of_others:
        return "-"
    gain = values - others
    return _with_seeds(mean_interval(gain.mean(axis=0), groups, bounds=CHANGE).signed, gain, groups)


def _with_seeds(estimate: str, values: np.ndarray, groups: list[str]) -> str:
    """An estimate with the number of seeds and their standard deviation; values are float (seeds, N)."""
    means = group_means(values, groups).mean(axis=1)
    spread = f", SD {means.std(ddof=1):.3f}" if len(means) > 1 else ""
    return f"{estimate} ({len(means)}{spread})"


def _values(args: Args, budget: int, row: str, metric: str) -> tuple[np.ndarray, list[str], list[int]]:
    """A metric with each seed on each test image, float (seeds, N); the groups; the seeds."""
    name, model = ("grpo", "before") if row == "default" else (row, "after")
    columns, groups, seeds = [], [], []
    for seed in args.seeds:
        path = _folder_of(args.output_dir, budget, seed)(name) / "evaluation" / "eval.csv"
        if path.exists():
            with path.open(newline="") as file:
                rows = sorted((line["sample_id"], line) for line in csv.DictReader(file) if line["model"] == model)
            columns.append([float(line[metric]) for _, line in rows])
            groups = [line["group_id"] for _, line in rows]
            seeds.append(seed)
    return np.array(columns), groups, seeds


def _own_dice(args: Args, budget: int) -> str:
    """Mean and range over seeds, from the note in the evaluations of the row `grpo`."""
    files = [_folder_of(args.output_dir, budget, seed)("grpo") / "evaluation" / "eval.json" for seed in args.seeds]
    notes = [note for file in files if file.exists() for note in read_json(file)["notes"]]
    values = [float(found.group(1)) for note in notes if (found := re.search(OWN_DICE, note))]
    ends = f"({min(values):.3f} to {max(values):.3f}) ({len(values)})" if values else ""
    return f"{np.mean(values):.3f} {ends}" if values else "-"


if __name__ == "__main__":
    run(main, Args)
