"""Step 1: train the reward network, an ensemble of CNNs that predicts the quality of masks of an image.

    sa2va-rl reward quick --model_path MODEL --data_root DATA

It learns to segment the images of `reward` patients, is calibrated on masks of `val` patients, and is tested on test
patients. With --unlabelled_root each U-Net is a mean teacher on these images.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from rl_reward_network.atomic_io import read_json
from rl_reward_network.cli.app import open_run, show_ending
from rl_reward_network.flags import Rare
from rl_reward_network.inputs.config import PromptConfig, RunConfig
from rl_reward_network.run import AGREEMENT, BEST_REWARD_NET, REWARD_RUN, Run

if TYPE_CHECKING:
    from rl_reward_network.reward_training.stage import RewardPlan


@dataclass(frozen=True)
class Args:
    """Step 1: train the reward network, which predicts the quality of masks."""

    mode: tyro.conf.Positional[Literal["quick", "full"]]
    """quick: 50 images, members of 200 steps. full: 200 images, members of 700 steps. Minutes on two cores are in
    docs/how-to/reward-network.md. A full run of step 2 never uses a quick network."""
    inputs: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    prompting: Annotated[PromptConfig, tyro.conf.arg(name="")] = field(default_factory=PromptConfig)
    steps: int | None = None
    """Optimiser steps of each member: quick 200, full 700. Fewer than 100 are for trials only."""
    max_labelled: int | None = None
    """Train on at most so many labelled images, one per series before a second: quick 50, full 200. A smaller number is
    a subset of a larger one; labels of val and test are not counted."""
    members: int = 3
    """U-Nets in the ensemble. One is a third of the work, but has no spread: its score is not conservative, and its
    interval is as wide for every mask."""
    score_weights: Rare[tuple[float, float, float, float]] = (1.0, 0.0, 0.0, 0.0)
    """Weights of the predicted Dice, IoU, precision and recall in the score, with sum 1. `0.5 0 0 0.5` counts recall as
    much as Dice; recall alone would reward masks that cover everything."""
    resume: bool = False
    """Resume the newest unfinished run of the same settings, data, model and seed; the final weights are those of an
    uninterrupted run (on a CPU; a GPU rounds differently each time)."""


def check(args: Args) -> "RewardPlan":
    """The settings, or a ValueError: all that can be refused before anything is read is."""
    from rl_reward_network.inputs.loading import check_inputs
    from rl_reward_network.reward_training.stage import reward_plan

    check_inputs(args.inputs)
    budget, teaches = args.max_labelled, args.inputs.unlabelled_root is not None
    return reward_plan(args.inputs, args.mode, args.steps, args.members, args.score_weights, budget, teaches)


def main(args: Args) -> None:
    """Open the inputs, train, and print how far the network can be trusted."""
    plan = check(args)
    from rl_reward_network.inputs.loading import open_inputs
    from rl_reward_network.reward_training.stage import run_reward_stage, run_settings

    inputs = open_inputs(args.inputs, args.prompting)
    run = open_run(REWARD_RUN, args, run_settings(inputs, plan), state="interrupted")
    run.announce()
    print(f"data: {inputs.summary}")
    run_reward_stage(inputs, plan, run)
    show_agreement(run)
    made = {"report": run / "report.html", "reward network": run / BEST_REWARD_NET}
    show_ending(made, args.inputs.output_dir, run.path, frozen=True)


def show_agreement(run: Run) -> None:
    """Print what agreement.json says of Sa2VA's masks, and the network as a segmenter; the report has the rest."""
    from rich.console import Console
    from rich.table import Table

    from rl_reward_network.reward_training.masks import SEGMENTER
    from rl_reward_network.reward_training.report import HEADS, LEGEND, agreement_lines

    result, console = read_json(run / AGREEMENT), Console()
    table = Table(title=f"{SEGMENTER}: {result['masks'][SEGMENTER]} masks of test patients")
    for name in ("", *HEADS.values()):
        table.add_column(name, no_wrap=bool(name))
    for name, row in result["tables"][SEGMENTER].items():
        table.add_row(name, *("-" if row[column] is None else f"{row[column]:.3f}" for column in HEADS))
    console.print(table, end="\n\n")
    console.print(LEGEND)
    for line in agreement_lines(result, (SEGMENTER,)):
        console.print(line, soft_wrap=True)
