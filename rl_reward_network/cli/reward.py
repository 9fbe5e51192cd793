"""Step 1: train the reward network, an ensemble of CNNs that predicts the quality of masks of an image.

    sa2va-rl reward quick --model_path MODEL --data_root DATA

It learns to segment the images of `reward` patients, is calibrated on masks of `val` patients, and is tested on test
patients. With --unlabelled_root each U-Net is a mean teacher on these images.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from rl_reward_network.atomic_io import read_json
from rl_reward_network.cli.app import show_ending
from rl_reward_network.flags import Rare
from rl_reward_network.inputs.config import PromptConfig, RunConfig
from rl_reward_network.run import AGREEMENT, BEST_REWARD_NET, REWARD_RUN, Run

if TYPE_CHECKING:
    from rl_reward_network.reward_training.stage import RewardPlan

HEADS = {
    "mae": "MAE",
    "pearson": "r",
    "spearman": "rho",
    "within_image_spearman": "rho img",
    "top1_regret": "regret",
    "auroc_poor": "AUROC",
    "pearson_middle": "r .7-.9",
}

LEGEND = (
    "Predicted against true Dice. MAE: mean absolute error; r: Pearson; rho: Spearman; rho img: rho among the masks of "
    "one image; regret: Dice lost by the mask with the highest score; AUROC: tells Dice < 0.7 from the rest; r .7-.9: "
    "Pearson of masks with Dice in between. Rows: mean of the members; one of them; mean - k * spread, the reward; "
    "two constants: mean of the training masks, and of these masks."
)


@dataclass(frozen=True)
class Args:
    """Step 1: train the reward network, an ensemble of CNNs that predicts the quality of masks of an image."""

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
    settings, output_dir = run_settings(inputs, plan), args.inputs.output_dir
    if args.resume:
        run = Run.resume(REWARD_RUN, output_dir, settings, state="interrupted")
    else:
        run = Run.create(REWARD_RUN, output_dir, settings)
    run.announce()
    print(f"data: {inputs.summary}")
    run_reward_stage(inputs, plan, run)
    show_agreement(run)
    lines = f"pictures of its errors: {run / 'sheet.png'}\nreward network: {run / BEST_REWARD_NET}"
    show_ending(lines, output_dir, frozen=True)


def show_agreement(run: Run) -> None:
    """Print agreement.json: the images used, the tables, and the other results of the test."""
    from rich.console import Console
    from rich.table import Table

    result, console = read_json(run / AGREEMENT), Console()
    for source, rows in result["tables"].items():
        table = Table(title=f"{source}: {result['masks'][source]} masks of test patients")
        for name in ("", *HEADS.values()):
            table.add_column(name, no_wrap=bool(name))
        for name, row in rows.items():
            table.add_row(name, *("-" if row[column] is None else f"{row[column]:.3f}" for column in HEADS))
        console.print(table, end="\n\n")
    console.print(LEGEND)
    for line in agreement_lines(result):
        console.print(line, soft_wrap=True)


def agreement_lines(result: dict[str, Any]) -> Iterator[str]:
    """The lines below the tables, from agreement.json."""
    for source, row in result["intervals"].items():
        if row["refusal"]:
            yield f"90 % interval, {source}: none can be given ({row['refusal']})"
        else:
            held = f"holds the true Dice of {row['coverage']:.1%}, median half width {row['half_width']:.3f}"
            yield f"90 % interval, {source}: {held}"
    if (ascent := result["ascent"])["raised"] is not None:
        yield (
            f"ten steps up the score raise the true Dice of {ascent['raised']:.1%} of shifted true masks, "
            f"in the mean from {ascent['dice_before']:.3f} to {ascent['dice_after']:.3f}"
        )
    empty = result["without_foreground"]
    if result["own_dice"] is None:
        yield f"no true mask of the {empty} test images has foreground: how well the network segments is unknown"
    else:
        left_out = f" ({empty} with an empty true mask are left out)" if empty else ""
        yield (
            f"the network's own segmentation of the test images has Dice {result['own_dice']:.3f}{left_out}; where "
            "Sa2VA's prompts stay below that, a plain segmenter serves these images better than any choice among them"
        )
    yield (
        f"its own segmentation gets a higher number than the true mask on {result['own_above_truth']:.0%} of them, "
        f"means {result['predicted_own']:.3f} and {result['predicted_truth']:.3f}; {result['outside']} of them are "
        "outside its domain, where no number is given"
    )
    yield from result["notes"]
    for name, n in result["used"].items():
        yield f"{name}: {n['images']} images of {n['patients']} patients, {n['series']} series"
    if n := result.get("unlabelled"):
        yield f"without masks, by a mean teacher: {n['images']} images of {n['patients']} patients"
    yield f"masks of Sa2VA: {result['bank']['computed']} computed, {result['bank']['reused']} read from the bank"
    seconds = ", ".join(f"{name} {value:.0f}" for name, value in result["seconds"].items())
    yield f"seconds: {seconds}" + (" (it was interrupted)" if result["resumed"] else "")
