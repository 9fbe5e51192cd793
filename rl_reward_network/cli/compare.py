"""Compare every road to better masks on one test split, choose the best and the cheapest, and write one report.

    sa2va-rl compare quick --model_path MODEL --data_root DATA
    sa2va-rl compare quick --roads prompts post fusion
    sa2va-rl segment --run outputs/compare_<time>/best image.png

Roads: prompt policies (experiments 1 and 3), post-processing (experiment 2), fusion with the reward network, and
fine-tuned weights (supervised, GRPO). What a road needs is trained by the commands of this program, which are printed;
runs of the same settings under <output_dir> are reused, and interrupted ones are resumed. Best and cheapest are chosen
on validation patients; the test patients are for the report alone.
"""

import os
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from rl_reward_network.flags import Rare
from rl_reward_network.inputs.config import PromptConfig, RunConfig
from rl_reward_network.methods.methods import GROUPS, Group, methods_of
from rl_reward_network.run import COMPARE_RUN, Run, check_folder

if TYPE_CHECKING:
    from rl_reward_network.methods.stage import ComparePlan


@dataclass(frozen=True)
class Args:
    """Compare every road on one test split, and choose the best and the cheapest."""

    mode: tyro.conf.Positional[Literal["quick", "full"]]
    """quick: below 45 minutes on two cores with the embedded model and data. full: every part in its full mode."""
    inputs: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    prompting: Annotated[PromptConfig, tyro.conf.arg(name="")] = field(default_factory=PromptConfig)
    roads: tuple[Group, ...] = GROUPS
    """Groups of roads: prompts, post, fusion, weights, combined; combined needs weights."""
    seeds: tuple[int, ...] | None = None
    """Seeds of everything that is trained; by default --seed alone. Values of an image are means over seeds."""
    reward_net: Path | None = None
    """Folder of a trained reward network (REWARD_NET); by default the newest that fits, or a new one."""
    run_folder: Rare[Path | None] = None
    """Folder of this comparison; by default <output_dir>/compare_<time>."""
    resume: bool = False
    """Resume the newest comparison of these settings, or that of --run_folder."""


def check(args: Args) -> "ComparePlan":
    """The settings, after all that can be refused before anything is read.

    Raises:
        ValueError: settings that do not go together, a GPU or data that are missing.
    """
    methods_of(args.roads)
    seeds = args.seeds if args.seeds is not None else (args.inputs.seed,)
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds are {list(seeds)}, expected different numbers of 0 or more")
    check_folder(args.run_folder, COMPARE_RUN, args.resume)
    from rl_reward_network.inputs.loading import check_inputs
    from rl_reward_network.methods.stage import ComparePlan
    from rl_reward_network.models.sa2va.loading_sa2va import check_first_gpu

    if "weights" in args.roads:
        check_first_gpu(args.inputs.gpu)
    check_inputs(args.inputs)
    network = None
    if args.reward_net is not None:
        from rl_reward_network.models.reward_network import RewardNetwork

        network = RewardNetwork.from_pretrained(args.reward_net).fingerprint
    return ComparePlan(args.mode, tuple(group for group in GROUPS if group in args.roads), tuple(seeds), network)


def main(args: Args) -> None:
    """Open the inputs, train what is missing, measure, and print the verdict."""
    plan = check(args)
    from rl_reward_network.cli.compare_parts import PartCommands
    from rl_reward_network.inputs.loading import open_inputs
    from rl_reward_network.methods.stage import origin_of, run_compare_stage
    from rl_reward_network.report.index import write_index

    inputs = open_inputs(args.inputs, args.prompting)
    begin = Run.resume if args.resume else Run.create
    run = begin(COMPARE_RUN, args.inputs.output_dir, origin_of(inputs, plan), args.run_folder)
    run.announce(args.resume)
    print(f"data: {inputs.summary}")
    commands = PartCommands(args.mode, args.inputs, args.prompting, inputs, args.reward_net)
    lines = run_compare_stage(inputs, plan, commands, run.path, _typed())
    write_index(args.inputs.output_dir)
    print("\n" + "\n".join(lines))
    print(f"\nreport: {run / 'report.html'}")


def _typed() -> str:
    """The command as the user typed it."""
    called = os.environ.get("SA2VA_RL_CALLED_AS")
    return f"{called} {shlex.join(sys.argv[2:])}" if called else f"sa2va-rl {shlex.join(sys.argv[1:])}"
