"""Compare a trained prompt policy with its baselines on patients it has never seen, and write the report.

    python -m scripts.evaluate_rl_finetuned_sa2va --model_path outputs/sa2va_rl_finetune_*/final_model --split test

Model, data, prompts and reward network are the run's own, read from its config.json. Written: <run>/evaluation/ with
eval.json, eval.csv and report.html (one file; open it in a browser).
"""

import glob
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from rl_reward_network.evaluation.report import EvaluationResult, deployed_sentence
from rl_reward_network.training.evaluation_stage import FROZEN_CALLS, Whereabouts, run_evaluation_stage
from scripts.cli import run


@dataclass(frozen=True)
class Args:
    """Compare a trained prompt policy with its baselines on patients it has never seen."""

    model_path: tuple[str, ...]
    """The run's final_model folder; several (a pattern) mean the newest of them."""
    split: Literal["test"] = "test"
    """Patients to evaluate on; those of val have decided what is deployed, so they prove nothing any more."""
    images: int | None = None
    """At most this many images, one per series before a second; without it all."""
    where: Annotated[Whereabouts, tyro.conf.arg(name="")] = field(default_factory=Whereabouts)
    show_names: bool = False
    """Put the names of images and patients into the report in place of their hashes."""


def main(args: Args) -> None:
    """Evaluate the newest of the named runs and show its table."""
    result, report = run_evaluation_stage(newest(args.model_path), args.where, args.images, args.show_names)
    show(result)
    print(f"\nreport: {report}")


def newest(paths: tuple[str, ...]) -> Path:
    """The newest of the folders that the paths or patterns name.

    Raises:
        ValueError: no folder matches.
    """
    matches = {Path(match) for path in paths for match in ([path] if Path(path).exists() else glob.glob(path))}
    found = sorted(matches, key=lambda match: match.stat().st_mtime)
    if not found:
        raise ValueError(
            f"model_path {' '.join(paths)}: no such folder; train a policy: bash run_step2_finetune.sh quick"
        )
    if len(found) > 1:
        print(f"{len(found)} folders match, the newest is evaluated: {found[-1]}")
    return found[-1]


def show(result: EvaluationResult) -> None:
    """The rows on the terminal, and the verdict in words."""
    comparison = result.comparison
    table = Table(title=f"mean over patients ({comparison.criterion}), minus default and best fixed", box=box.SIMPLE)
    for name in ("", "mean [95 %]", "-default", "-fixed", "closed"):
        table.add_column(name, no_wrap=True)
    for row in comparison.rows:
        closed = "-" if row.gap_closed is None else f"{row.gap_closed:.0%}"
        differences = (f"{row.to_default.mean:+.3f}", f"{row.to_fixed.mean:+.3f}")
        table.add_row(row.name, f"{row.means[comparison.criterion]}".replace("[", r"\["), *differences, closed)
    Console().print(table)
    for line in (comparison.verdict.sentence, deployed_sentence(comparison), *comparison.notes, *result.notes):
        print(line)
    print(f"{FROZEN_CALLS}: {result.config[FROZEN_CALLS]}")


if __name__ == "__main__":
    run(main, Args)
