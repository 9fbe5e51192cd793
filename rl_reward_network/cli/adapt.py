"""Adapt Sa2VA to your images: few of them with masks, many without.

    sa2va-rl adapt --model_path MODEL --data_root LABELLED --unlabelled_root IMAGES
    sa2va-rl segment image.png --model_path outputs/adapt_<time>/adapted

First the model learns the true masks, with a side network for thin objects; then a mean teacher, a moving average of
the model, gives masks for the images without. This order won in a comparison (docs/how-to/images-without-masks.md).
Held-out labelled patients stop each stage and decide whether it is kept; what has not beaten the model as it was is not
deployed. Training images beyond --max_labelled are used without their masks, so --unlabelled_root may be left out.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from rl_reward_network.cli.app import open_run, show_ending
from rl_reward_network.flags import Rare, check_at_least
from rl_reward_network.grpo.plan import Chosen, PlanArgs, check_acts
from rl_reward_network.inputs.config import RegionConfig, RunConfig
from rl_reward_network.ppo.settings import Mode
from rl_reward_network.run import ADAPT_RUN, check_folder


@dataclass(frozen=True)
class Args:
    """Adapt Sa2VA to images of which few have masks, and deploy only what is better."""

    mode: tyro.conf.Positional[Mode] = "full"
    """quick: a trial of minutes with the embedded model. full: two stages of at most 700 steps, with every model."""
    inputs: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    regions: Annotated[RegionConfig, tyro.conf.arg(name="")] = field(default_factory=RegionConfig)
    max_labelled: int | None = None
    """Train on at most so many labelled images; a smaller number is a subset of a larger one. The other images join
    without their masks."""
    no_side_network: Rare[bool] = False
    """Do not add a side network to a model without one, and begin with the mean teacher."""
    run_folder: Rare[Path | None] = None
    """Folder of this run; by default <output_dir>/adapt_<time>."""
    resume: bool = False
    """Resume the newest adaptation of these settings, or that of --run_folder."""


def check(args: Args) -> None:
    """Raise a ValueError for what can be refused before anything is read."""
    from rl_reward_network.grpo.inputs import check_config
    from rl_reward_network.inputs.loading import check_inputs
    from rl_reward_network.models.default import has_side_network

    check_at_least(args, 1, "max_labelled")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "adapt runs in one process; on several GPUs call its stages: torchrun ... sa2va-rl grpo --objective "
            "supervised --side_network, then merge, then --objective mean_teacher (docs/how-to/images-without-masks.md)"
        )
    check_acts(Chosen(PlanArgs(inputs=args.inputs, regions=args.regions), learned=False))
    if args.no_side_network and has_side_network(args.inputs.model_path):
        raise ValueError(f"--no_side_network does nothing: {args.inputs.model_path} has a side network; leave it out")
    check_inputs(args.inputs)
    check_config(args.inputs, args.regions)
    check_folder(args.run_folder, ADAPT_RUN, args.resume)


def main(args: Args) -> None:
    """Open the data, train the stages, and say what is deployed."""
    check(args)
    from rl_reward_network.grpo.inputs import open_grpo_inputs
    from rl_reward_network.methods.adapt import ADAPTED, check_labels, make_adapt_plan, run_adapt_stage, settings_of

    inputs = open_grpo_inputs(args.inputs, args.regions)
    check_labels(inputs, args.max_labelled)
    plan = make_adapt_plan(inputs, args.mode, not args.no_side_network, args.max_labelled)
    run = open_run(ADAPT_RUN, args, settings_of(inputs, plan))
    run.announce()
    print(f"data: {inputs.summary}")
    if run.finished:
        print(f"nothing to resume: this run is finished; its results are in {run}")
        return
    result = run_adapt_stage(inputs, plan, run)
    as_it_was = ["Nothing was better beyond chance on the validation patients: use the model as it is."]
    note = "\n".join([*result.lines, *(as_it_was if result.report is None else [])])
    made = {} if result.report is None else {"adapted model": run / ADAPTED, "report": result.report}
    show_ending(made, args.inputs.output_dir, run / ADAPTED if made else None, note=note)
