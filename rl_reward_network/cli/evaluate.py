"""Compare what was trained with its baselines on test patients, and write the report.

    sa2va-rl evaluate --model_path outputs/sa2va_rl_finetune_*/final_model --split test

For a model fine-tuned by GRPO (outputs/sa2va_grpo_*/final_model) it is the model before; without --images the results
are added to its model card, too. Model, data, prompts and reward network are those of the run's config.json.
"""

import glob
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rl_reward_network.cli.app import show_ending
from rl_reward_network.flags import check_at_least
from rl_reward_network.run import CONFIG, FINAL, POST_RUN, age, read_object


@dataclass(frozen=True)
class Args:
    """Compare what was trained, a prompt policy or a GRPO run, with its baselines on test patients."""

    model_path: tuple[str, ...]
    """The run's final_model folder, or the run; several (a pattern) mean the newest of them."""
    split: Literal["test"] = "test"
    """Patients to evaluate on; those of val decide what is deployed, so results on them would be biased."""
    images: int | None = None
    """At most this many images (of a GRPO run regions), one per series before a second; without it all, but in quick
    mode 80 images of a prompt policy and 120 regions."""
    data_root: Path | None = None
    """Where the data are now, if not where they were in training."""
    base_model: str | None = None
    """Where Sa2VA is now, if not where it was in training."""
    gpu: int | None = None
    """Index of the GPU; -1 is the CPU; without it as in training."""
    segment_batch: int | None = None
    """Prompts decoded at once (SEGMENT_BATCH); without it as in training."""
    show_names: bool = False
    """Put the names of images and patients into a policy's report in place of their hashes."""


def main(args: Args) -> None:
    """Evaluate the newest of the named runs and show its table."""
    check_at_least(args, 1, "images", "segment_batch")
    check_at_least(args, -1, "gpu")
    from rl_reward_network.grpo.final_model import grpo_model

    folder = newest(args.model_path)
    final_model = grpo_model(folder)
    report = _evaluate_grpo(final_model, args) if final_model else _evaluate_policy(folder, args)
    output_dir = report.resolve().parents[2]  # <output_dir>/<run>/evaluation/report.html
    show_ending({"report": report}, output_dir, report.parents[1], frozen=not final_model)


def _evaluate_grpo(final_model: Path, args: Args) -> Path:
    from rl_reward_network.grpo.evaluate import run_grpo_evaluation
    from rl_reward_network.grpo.final_model import write_results
    from rl_reward_network.report.before_after import show_changes

    if args.show_names:
        raise ValueError("--show_names: the report of a GRPO run shows no names; leave it out")
    changes, report = run_grpo_evaluation(final_model, args.data_root, args.base_model, args.gpu, args.images)
    if args.images is None and final_model.name == FINAL:
        write_results(final_model, report.with_name("eval.json"))
    show_changes(changes)
    return report


def _evaluate_policy(folder: Path, args: Args) -> Path:
    from rl_reward_network.ppo.evaluate import FROZEN_CALLS, PathOverrides, run_evaluation_stage
    from rl_reward_network.ppo.policy import policy_folder
    from rl_reward_network.ppo.prompt_report import show_comparison

    moved = PathOverrides(args.data_root, args.base_model, args.gpu, args.segment_batch)
    config = next((path for path in (folder / CONFIG, folder.parent / CONFIG) if path.exists()), None)
    edits = config is not None and read_object(config).get("stage") == POST_RUN.stage
    result, report = run_evaluation_stage(policy_folder(folder), moved, args.images, args.show_names, edits)
    show_comparison(result)
    print(f"{FROZEN_CALLS}: {result.config[FROZEN_CALLS]}")
    return report


def newest(paths: tuple[str, ...]) -> Path:
    """The newest of the folders that the paths or patterns name; a ValueError if none does."""
    matches = {Path(match) for path in paths for match in ([path] if Path(path).exists() else glob.glob(path))}
    folders = sorted(matches, key=lambda match: (age(_run_of(match)), match.stat().st_mtime))
    if not folders:
        raise ValueError(f"model_path {' '.join(paths)}: no such folder; train a policy: sa2va-rl prompts quick")
    if len(folders) > 1:
        print(f"{len(folders)} folders match, the newest is evaluated: {folders[-1]}")
    return folders[-1]


def _run_of(match: Path) -> Path:
    """The folder of the run that a model or a checkpoint is of."""
    return match.parent if match.name.startswith((FINAL, "checkpoint-")) else match
