"""Step 1: train the reward network, an ensemble of CNNs that judges the masks of an image.

    sa2va-rl reward quick --model_path MODEL --data_root DATA

It learns from the patients of the `reward` split only: every prompt's mask by the frozen Sa2VA, and the true mask
damaged in known ways. Written: <output_dir>/reward_net_<time>/best_reward_net and agreement.json, the latter on test
patients that neither training nor the choice of weights has seen.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from rl_reward_network.artefacts import read_json
from rl_reward_network.inputs.loading import WorldConfig, check_world, open_world
from rl_reward_network.reward_training.stage import (
    FINISHED,
    FOLDER,
    KIND,
    RewardPlan,
    find_unfinished,
    origin,
    reward_plan,
    run_reward_stage,
)
from rl_reward_network.runs.folder import new_run_folder
from rl_reward_network.runs.resume import nothing_to_resume, run_line

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
    "one image; regret: Dice lost by the mask liked best; AUROC: tells Dice < 0.7 from the rest; r .7-.9: Pearson of "
    "masks with Dice in between. Rows: mean of the members; one of them; mean - k * spread, the reward; the "
    "predecessor's CNN (4 channels, one mask per image); a constant."
)


@dataclass(frozen=True)
class Args:
    """Step 1: train the reward network, an ensemble of CNNs that judges the masks of an image."""

    mode: tyro.conf.Positional[Literal["quick", "full"]]
    """quick: 50 images, members of 150 steps, two to three minutes on two cores. full: 200 images, members of 500
    steps, ten minutes. A full run of step 2 never uses a quick network."""
    world: Annotated[WorldConfig, tyro.conf.arg(name="")] = field(default_factory=WorldConfig)
    steps: int | None = None
    """Optimiser steps of each member, if not those of the mode. Fewer than 100 is for trying things out."""
    members: int = 3
    """U-Nets in the ensemble. One is three times as fast, but cannot disagree with itself: its score is not
    conservative, and its interval equally wide for every mask."""
    score_weights: tuple[float, float, float, float] = (1.0, 0.0, 0.0, 0.0)
    """What the reward is made of: weights of the predicted Dice, IoU, precision and recall, with sum 1. `0.5 0 0 0.5`
    asks for recall as much as for Dice; recall alone would reward masks that cover everything."""
    resume: bool = False
    """Go on with the newest run of the same settings, data, model and seed that was cut off; the weights it ends in are
    those of a run that was not (on a CPU; a GPU rounds differently each time)."""


def check(args: Args) -> RewardPlan:
    """The settings, after all that can be refused before anything is read.

    Raises:
        ValueError: settings that do not go together, a GPU or data that are not there.
    """
    check_world(args.world)
    return reward_plan(args.world, args.mode, args.steps, args.members, args.score_weights)


def main(args: Args) -> None:
    """Open the world, train, and say how far the network can be trusted."""
    plan = check(args)
    world = open_world(args.world)
    folder = find_unfinished(world, plan) if args.resume else new_run_folder(args.world.output_dir, KIND)
    if folder is None:
        wanted = origin(world, plan) | {"seed": plan.config.seed}
        raise nothing_to_resume(args.world.output_dir, KIND, wanted)
    print(f"{run_line(folder, args.resume)}\ndata: {world.seen}")
    run_reward_stage(world, plan, folder)
    show_agreement(folder)
    print(f"\nwhere it sees masks go wrong: {folder / 'sheet.png'}")
    print(f"reward network: {folder / FOLDER}")


def show_agreement(folder: Path) -> None:
    """agreement.json on the terminal: what was used, the tables, and what else the test said."""
    found = read_json(folder / FINISHED)
    console = Console()
    for source, rows in found["tables"].items():
        console.print(_table(f"{source}: {found['masks'][source]} masks of test patients", rows), end="\n\n")
    console.print(LEGEND)
    held = ", ".join(f"{share:.1%} ({source})" for source, share in found["coverage"].items())
    console.print(f"90 % intervals hold the true Dice of {held}")
    ascent = found["ascent"]
    if ascent["raised"] is not None:
        console.print(
            f"ten steps up the score raise the true Dice of {ascent['raised']:.1%} of masks with damage never seen, "
            f"in the mean from {ascent['dice_before']:.3f} to {ascent['dice_after']:.3f}"
        )
    console.print(
        f"the network's own segmentation of the test images has Dice {found['own_dice']:.3f}; where Sa2VA's prompts "
        "stay below that, a plain segmenter serves these images better than any choice among them"
    )
    for name, n in found["used"].items():
        console.print(f"{name}: {n['images']} images of {n['patients']} patients, {n['series']} series")
    bank = found["bank"]
    console.print(f"masks of Sa2VA: {bank['computed']} computed, {bank['reused']} read from the bank")
    seconds = ", ".join(f"{name} {value:.0f}" for name, value in found["seconds"].items())
    console.print(f"seconds: {seconds}" + (" (since it was resumed)" if found["resumed"] else ""))


def _table(title: str, rows: dict[str, Any]) -> Table:
    """Rows and columns of one source of masks."""
    table = Table(title=title)
    for name in ("", *HEADS.values()):
        table.add_column(name, no_wrap=bool(name))
    for name, row in rows.items():
        table.add_row(name, *("-" if row[column] is None else f"{row[column]:.3f}" for column in HEADS))
    return table
