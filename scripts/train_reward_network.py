"""Step 1: train the CNN that judges a mask from image + mask.

    python -m scripts.train_reward_network quick --model_path MODEL --data_root DATA

It learns from the patients of the `reward` split only: every prompt's mask by the frozen Sa2VA, and the true mask
damaged in known ways. Written: <output_dir>/reward_net_<time>/best_reward_net and agreement.json, the latter on test
patients that neither training nor the choice of weights has seen.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from rl_reward_network.artefacts import read_json
from rl_reward_network.training.reward_stage import run_reward_stage
from rl_reward_network.training.run_folder import new_run_folder
from rl_reward_network.training.world import WorldConfig, open_world
from scripts.cli import run


@dataclass(frozen=True)
class Args:
    """Step 1: train the reward network, a CNN that judges a mask from image + mask."""

    mode: tyro.conf.Positional[Literal["quick", "full"]]
    """quick: 50 images, about a minute on two cores. full: 200 images."""
    world: Annotated[WorldConfig, tyro.conf.arg(name="")]
    steps: int | None = None
    """Optimiser steps, if not those of the mode."""


def main(args: Args) -> None:
    """Open the world, train, and say how far the network can be trusted."""
    world = open_world(args.world)
    folder = new_run_folder(args.world.output_dir, "reward_net")
    run_reward_stage(world, args.mode, folder, args.steps)
    show_agreement(folder)
    print(f"\nreward network: {folder / 'best_reward_net'}")


def show_agreement(folder: Path) -> None:
    """The table of agreement.json on the terminal."""
    rows = read_json(folder / "agreement.json")
    table = Table(title="predicted against true Dice, test patients")
    columns = list(next(iter(rows.values())))
    for name in ("", *columns):
        table.add_column(name.replace("_", " "))  # so that a narrow terminal breaks lines instead of words
    for name, row in rows.items():
        table.add_row(name, *("-" if row[column] is None else f"{row[column]:.3f}" for column in columns))
    Console().print(table)


if __name__ == "__main__":
    run(main, Args)
