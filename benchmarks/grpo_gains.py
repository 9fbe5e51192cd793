"""Gains of GRPO on the embedded regions: seeds, supervised training for the same minutes, ablations, controls.

    python -m benchmarks.grpo_gains quick
    python -m benchmarks.grpo_gains long

The long runs take 15 minutes each on one CPU core; they are limited by steps, not by time, so that other programs do
not change the result. Every run is one of `sa2va-rl grpo` with the flags printed beside it, evaluated on the test
scenes; finished runs are not repeated, interrupted ones are resumed. Numbers are after - before, with 95 % intervals
over scenes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks.common import show
from rl_reward_network.atomic_io import read_json
from rl_reward_network.cli import grpo as train_sa2va_rl
from rl_reward_network.cli.app import run
from rl_reward_network.grpo.evaluate import run_grpo_evaluation
from rl_reward_network.report.before_after import label
from rl_reward_network.rewards.metrics import meteor_variant
from rl_reward_network.run import FINAL

ALL = 10**6  # test regions; there are 349
METRICS = ("cycle_iou", "expected_cycle_iou", "cycle_iou_by_base", "meteor", "cycle_meteor", "iou")
SEEDS = (0, 1, 2)
QUICK = {
    **{f"GRPO, seed {seed}": f"--seed {seed}" for seed in SEEDS},
    "lr 0": "--learning_rate 0 --max_steps 20",  # further steps change nothing
    "shuffled rewards": "--shuffle_rewards",
    "loop 1 alone": "--caption_to_mask_weight 0",
    "loop 2 alone": "--mask_to_caption_weight 0",
    "no EMA": "--ema_decay 0",
    "Gaussian masks": "--mask_policy gaussian",
    "curriculum": "--curriculum",
    "adaptive loop weights": "--adaptive_loop_weights",
    "original rewards": "--caption_weight 0 --loop2_iou_weight 0 --mask_policy gaussian --learning_rate 3e-4",
}
LONG = {
    **{f"GRPO, seed {seed}": f"--max_steps 230 --seed {seed}" for seed in SEEDS},
    **{
        f"supervised, seed {seed}": f"--objective supervised --learning_rate 3e-4 --max_steps 600 --seed {seed}"
        for seed in SEEDS
    },
}


@dataclass(frozen=True)
class Args:
    """Train and evaluate a set of GRPO runs on the embedded regions."""

    runs: tyro.conf.Positional[Literal["quick", "long"]]
    """quick: the preset of that name, three seeds, controls and ablations. long: against supervised training."""
    only: tuple[str, ...] = ()
    """Names of the runs to make; default: all."""
    output_dir: Path = Path("outputs/grpo_gains")
    """Folder of the runs."""


def main(args: Args) -> None:
    """Make the missing runs, and show all."""
    runs = QUICK if args.runs == "quick" else LONG
    if unknown := set(args.only) - set(runs):
        raise ValueError(f"only: no run is called {sorted(unknown)}; there are {list(runs)}")
    results = {}
    for name, flags in runs.items():
        if not args.only or name in args.only:
            folder = args.output_dir / f"{args.runs}_{name.replace(' ', '_').replace(',', '')}"
            results[name] = run_and_evaluate(folder, f"quick {flags}".split())
    heads = ("run", "steps", "minutes", *(label(metric, meteor_variant()) for metric in METRICS), "cIoU")
    show(heads, ((name, *cells(rows)) for name, rows in results.items()))


def run_and_evaluate(folder: Path, flags: list[str]) -> dict[str, Any]:
    """metric -> its row of eval.json; the run is made first if it is missing."""
    if not (folder / FINAL).exists():
        print(f"\n{folder.name}: {' '.join(flags)}")
        resume = ["--resume"] if (folder / "config.json").exists() else []
        args = [*flags, "--run_folder", str(folder), "--save_steps", "50", *resume]
        train_sa2va_rl.main(tyro.cli(train_sa2va_rl.Args, args=args))
    reports = list(folder.glob("evaluation_*/eval.json"))
    if not reports:
        reports = [run_grpo_evaluation(folder / FINAL, items=ALL)[1].with_name("eval.json")]
    results = read_json(reports[0])
    rows = {row["metric"]: row for row in results["rows"]}
    config = results["config"]
    return rows | {"cIoU": results["totals"]["cIoU"], "steps": config["steps"], "minutes": config["training: minutes"]}


def cells(rows: dict[str, Any]) -> list[object]:
    """Of a run: each metric before and its gain."""
    found = []
    for row in map(rows.__getitem__, METRICS):
        before, gain = row["before"]["mean"], row["gain"]
        found.append(f"{before:.3f} {gain['mean']:+.3f} ({gain['low']:+.3f}, {gain['high']:+.3f})")
    ciou = rows["cIoU"]
    return [rows["steps"], rows["minutes"], *found, f"{ciou['before']:.3f} to {ciou['after']:.3f}"]


if __name__ == "__main__":
    run(main, Args)
