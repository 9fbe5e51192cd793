"""Improve the masks of your own images: a few of them with masks, more without.

    sa2va-rl improve --data_root DATA [--unlabelled_root IMAGES]
    sa2va-rl segment image.png --model_path outputs/improve_<time>

A plain segmenter and Sa2VA with a side network learn the masks; in full mode a mean teacher then takes Sa2VA to the
images without masks; the mean of both models is a candidate, too. Each is measured on patients that it was not trained
on. What has beaten the model as it was is deployed, and otherwise nothing is; of a model that is tuned on few masks of
another place, the best estimate. Six labelled patients are enough: with fewer than 40, folds of them decide, and all
train the deployed model.
"""

import shlex
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro

from rl_reward_network.cli.app import open_run, show_ending
from rl_reward_network.flags import Rare, check_at_least
from rl_reward_network.grpo.plan import Chosen, PlanArgs, check_acts
from rl_reward_network.grpo.settings import Mode
from rl_reward_network.inputs.config import RegionConfig, RunConfig
from rl_reward_network.run import IMPROVE_RUN, check_folder


@dataclass(frozen=True)
class Args:
    """Improve the masks of own images by what pays, and deploy only what is better."""

    mode: tyro.conf.Positional[Mode] = "full"
    """quick: 8 minutes on two CPU cores with the embedded model and 30 images. full: 700 steps of each training, of
    a mean teacher 1,400."""
    inputs: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    regions: Annotated[RegionConfig, tyro.conf.arg(name="")] = field(default_factory=RegionConfig)
    steps: Rare[int | None] = None
    """Optimisation steps of each training, in place of those of the mode."""
    run_folder: Rare[Path | None] = None
    """Folder of this run; by default <output_dir>/improve_<time>."""
    resume: bool = False
    """Resume the newest improvement of these settings, or that of --run_folder."""


def check(args: Args) -> None:
    """Raise a ValueError for what can be refused before anything is read."""
    from rl_reward_network.grpo.inputs import check_config
    from rl_reward_network.inputs.loading import check_inputs

    check_at_least(args, 1, "steps")
    check_acts(Chosen(PlanArgs(inputs=args.inputs, regions=args.regions), learned=False))
    check_inputs(args.inputs)
    check_config(args.inputs, args.regions)
    check_folder(args.run_folder, IMPROVE_RUN, args.resume)


def main(args: Args) -> None:
    """Open the data, print the plan, train, and say what is deployed."""
    check(args)
    from rl_reward_network.grpo.checkpoint import first_process, run_of_all
    from rl_reward_network.methods.improve import (
        data_words,
        make_improve_plan,
        open_improve_inputs,
        plan_lines,
        run_improve_stage,
        settings_of,
        train_along,
    )
    from rl_reward_network.methods.improve_report import IMPROVED, START
    from rl_reward_network.segment.maker import trainable_model

    config = replace(args.inputs, model_path=trainable_model(args.inputs.model_path))
    inputs = open_improve_inputs(config, args.regions)
    plan = make_improve_plan(inputs, args.mode, args.steps)
    run = run_of_all(open_run(IMPROVE_RUN, args, settings_of(inputs, plan)), inputs.device == "cpu")
    if first_process():
        run.announce()
        print("\n".join([f"data: {data_words(inputs, plan)}", *plan_lines(inputs, plan)]), flush=True)
        if run.finished:
            print(f"nothing to resume: this run is finished; its results are in {run}")
    if run.finished:
        return
    if not first_process():
        train_along(inputs, plan, run)
        return
    result = run_improve_stage(inputs, plan, run, shlex.join(["sa2va-rl", *sys.argv[1:]]))
    note = "\n".join(filter(None, (result.deployed_line, *result.notes, result.verdict, result.test_line)))
    model = run / IMPROVED if result.chosen != START else Path(args.inputs.model_path)
    show_ending({"report": run / "report.html"}, args.inputs.output_dir, model, note=note)
