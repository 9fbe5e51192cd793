"""Compare what was trained with its baselines on patients it has never seen, and write the report.

    sa2va-rl evaluate --model_path outputs/sa2va_rl_finetune_*/final_model --split test

For a prompt policy these are its baselines; for a model fine-tuned by GRPO (outputs/sa2va_grpo_*/final_model) the model
as it was. Model, data, prompts and reward network are the run's own, read from its config.json. Written:
<run>/evaluation/ with eval.json, eval.csv and report.html (one file; open it in a browser); without --images the
results also stand in the model card of what GRPO trained, final_model/README.md.
"""

import glob
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from rl_reward_network.evaluation.before_after import BeforeAfter
from rl_reward_network.evaluation.report import EvaluationResult, deployed_sentence
from rl_reward_network.grpo.card import write_results
from rl_reward_network.grpo.evaluate import grpo_model, run_grpo_evaluation
from rl_reward_network.grpo.stage import FINAL
from rl_reward_network.prompt_policy.evaluate import FROZEN_CALLS, MovedInputs, run_evaluation_stage
from rl_reward_network.prompt_policy.policy import policy_folder


@dataclass(frozen=True)
class Args:
    """Compare what was trained, a prompt policy or a GRPO run, with what was there before, on groups never seen."""

    model_path: tuple[str, ...]
    """The run's final_model folder, or the run; several (a pattern) mean the newest of them."""
    split: Literal["test"] = "test"
    """Patients to evaluate on; those of val have decided what is deployed, so they prove nothing any more."""
    images: int | None = None
    """At most this many images (of a GRPO run regions), one per series before a second; without it all."""
    where: Annotated[MovedInputs, tyro.conf.arg(name="")] = field(default_factory=MovedInputs)
    show_names: bool = False
    """Put the names of images and patients into a prompt policy's report in place of their hashes."""


def main(args: Args) -> None:
    """Evaluate the newest of the named runs and show its table."""
    folder = newest(args.model_path)
    if tuned := grpo_model(folder):
        if args.show_names:
            raise ValueError("--show_names: the report of a GRPO run shows no names; leave it out")
        where = args.where
        changes, report = run_grpo_evaluation(tuned, where.data_root, where.base_model, where.gpu, args.images)
        if args.images is None and tuned.name == FINAL:
            write_results(tuned, report.with_name("eval.json"))
        show_changes(changes)
    else:
        result, report = run_evaluation_stage(policy_folder(folder), args.where, args.images, args.show_names)
        show(result)
    print(f"\nreport: {report}")


def show_changes(result: BeforeAfter) -> None:
    """Both models on the terminal, and the verdict in words."""
    table = Table(title="means over groups, the model as it was and after fine-tuning", box=box.SIMPLE)
    table.add_column("")  # wraps where the terminal is narrow; numbers must not
    for name in ("before", "after", "change [95 %]", ""):
        table.add_column(name, no_wrap=True, min_width=5)
    for row in result.rows:
        change = row.gain.signed.replace("[", r"\[")
        table.add_row(result.label(row.metric), f"{row.before.mean:.3f}", f"{row.after.mean:.3f}", change, row.word)
    for name, (before, after) in result.totals.items():
        table.add_row(name, f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}", "")
    Console().print(table)
    for line in (result.verdict.sentence, *result.notes):
        print(line)


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
