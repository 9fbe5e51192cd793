"""Every method on real coronary angiograms, for several numbers of labelled images: the table of docs/results.md.

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
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from benchmarks.common import call, show, train_once, train_reward_once, with_seeds
from rl_reward_network.atomic_io import read_json
from rl_reward_network.cli.app import run
from rl_reward_network.report.statistics import CHANGE, UNIT, few_patients_note, mean_interval
from rl_reward_network.run import BEST_REWARD_NET, FINAL

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
    """Train and evaluate every method on a folder of real angiograms."""

    data_root: tyro.conf.Positional[Path]
    """The images, in a format that `sa2va-rl doctor` reads."""
    budgets: tuple[int, ...] = (20, 50, 195)
    """Labelled images to learn from."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of every run."""
    output_dir: Path = Path("outputs/real_angiograms")
    """Folder of the runs."""
    show: bool = False
    """Run nothing; show what is finished."""

    def folder(self, row: str, budget: int, seed: int) -> Path:
        """Of a row."""
        return self.output_dir / f"{row}_{budget}_{seed}"


def main(args: Args) -> None:
    """Make the missing runs, and show all."""
    for seed in () if args.show else args.seeds:
        for budget in args.budgets:
            make_rows(args, budget, seed)
    show_all(args)


def make_rows(args: Args, budget: int, seed: int) -> None:
    """All runs of one budget and seed."""
    data = f"--data_root {shlex.quote(str(args.data_root))} --seed {seed}"
    agreement = train_reward_once(args.folder("reward", budget, seed), f"{data} --max_labelled {budget}")
    if (used := read_json(agreement)["used"]["reward"]["images"]) < budget:  # the other rows would use further labels
        raise ValueError(f"budgets: {budget} labelled images, but the reward split has {used}; give a smaller number")
    reward_net, merged = agreement.parent / BEST_REWARD_NET, args.folder("merged", budget, seed)
    labelled = f"--objective supervised --max_labelled {budget}"
    rows = {
        "grpo": f"--reward_net {reward_net} --max_steps {GRPO_STEPS}",
        "supervised": f"{labelled} --max_steps {SUPERVISED_STEPS}",
        "longer": f"{labelled} --max_steps {LONGER_STEPS}",
        "after": f"--model_path {merged} --reward_net {reward_net} --max_steps {AFTER_STEPS}",
    }
    for row, flags in rows.items():
        folder = args.folder(row, budget, seed)
        if row == "after" and not merged.exists():
            call(f"merge --model_path {args.folder('supervised', budget, seed) / FINAL} --output {merged}")
        train_once(folder, f"{data} {flags}")
        if not (folder / "evaluation" / "eval.json").exists():
            call(f"evaluate --model_path {folder / FINAL}")


def show_all(args: Args) -> None:
    """Print both tables."""
    heads = [f"{budget} labelled" for budget in args.budgets]
    rows = [(title, *(_cell(args, budget, row) for budget in args.budgets)) for row, title in ROWS.items()]
    own = (_own_dice(args, budget) for budget in args.budgets)
    show(("method", *heads), [*rows, ("the reward network's own segmentation", *own)])
    gains = (
        (f"{metric}: {ROWS[row]} - {ROWS[other]}", *(_cell(args, n, row, other, metric) for n in args.budgets))
        for row, other, metric in DIFFERENCES
    )
    show(("difference", *heads), gains)
    _, groups, _ = _values(args, args.budgets[0], "default", "dice")
    print("\n".join(few_patients_note(len(set(groups)), "test groups")))


def _cell(args: Args, budget: int, row: str, other: str = "", metric: str = "dice") -> str:
    """A metric of a row, or its difference to another row, with the number of seeds."""
    values, groups, seeds = _values(args, budget, row, metric)
    if other:
        others, _, of_others = _values(args, budget, other, metric)
        if seeds != of_others:
            return "-"
        values = values - others
    if not seeds:
        return "-"
    mean = mean_interval(values.mean(axis=0), groups, bounds=CHANGE if other else UNIT)
    return f"{with_seeds(mean.signed if other else mean, values, groups)} ({len(seeds)})"


def _values(args: Args, budget: int, row: str, metric: str) -> tuple[np.ndarray, list[str], list[int]]:
    """A metric with each seed on each test image, float (seeds, N); the groups; the seeds."""
    name, model = ("grpo", "before") if row == "default" else (row, "after")
    columns, groups, seeds = [], [], []
    for seed in args.seeds:
        path = args.folder(name, budget, seed) / "evaluation" / "eval.csv"
        if path.exists():
            with path.open(newline="") as file:
                rows = sorted((line["sample_id"], line) for line in csv.DictReader(file) if line["model"] == model)
            columns.append([float(line[metric]) for _, line in rows])
            groups = [line["group_id"] for _, line in rows]
            seeds.append(seed)
    return np.array(columns), groups, seeds


def _own_dice(args: Args, budget: int) -> str:
    """Mean and range over seeds, from the note in the evaluations of the row `grpo`."""
    files = [args.folder("grpo", budget, seed) / "evaluation" / "eval.json" for seed in args.seeds]
    notes = [note for file in files if file.exists() for note in read_json(file)["notes"]]
    values = [float(found.group(1)) for note in notes if (found := re.search(OWN_DICE, note))]
    return f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f}) ({len(values)})" if values else "-"


if __name__ == "__main__":
    run(main, Args)
