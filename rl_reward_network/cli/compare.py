"""Compare every method for better masks on one test split, choose the best and the cheapest, and write one report.

    sa2va-rl compare quick --model_path MODEL --data_root DATA
    sa2va-rl compare quick --methods prompts post fusion
    sa2va-rl segment image.png --model_path outputs/compare_<time>/best

Methods: prompt policies (experiments 1 and 3), post-processing (experiment 2), fusion with the reward network, and
fine-tuned weights (supervised, GRPO). What a method needs is trained in this process, one run after the other; finished
runs of the same settings under <output_dir> are reused, and interrupted ones are resumed. Best and cheapest are chosen
on validation patients; the test patients are for the report alone.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from rl_reward_network.cli import typed
from rl_reward_network.cli.app import open_run, show_ending
from rl_reward_network.flags import Rare
from rl_reward_network.inputs.config import PromptConfig, RunConfig
from rl_reward_network.methods import GROUPS, Group
from rl_reward_network.ppo.settings import Mode
from rl_reward_network.run import COMPARE_RUN, check_folder

if TYPE_CHECKING:
    from rl_reward_network.methods.compare import ComparePlan


@dataclass(frozen=True)
class Args:
    """Compare every method on one test split, and choose the best and the cheapest."""

    mode: tyro.conf.Positional[Mode]
    """quick: below 45 minutes on two cores with the embedded model and data. full: every run in its full mode."""
    inputs: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    prompting: Annotated[PromptConfig, tyro.conf.arg(name="")] = field(default_factory=PromptConfig)
    methods: tuple[Group, ...] = GROUPS
    """Groups of methods: prompts, post, fusion, weights, combined; combined needs weights."""
    seeds: tuple[int, ...] | None = None
    """Seeds of everything that is trained; by default --seed alone. Values of an image are means over seeds."""
    reward_net: Path | None = None
    """Folder of a trained reward network (REWARD_NET); by default the newest that fits, or a new one."""
    side_network: bool = False
    """Supervised training adds a side network, which refines masks of thin objects, and GRPO after it keeps it."""
    run_folder: Rare[Path | None] = None
    """Folder of this comparison; by default <output_dir>/compare_<time>."""
    resume: bool = False
    """Resume the newest comparison of these settings, or that of --run_folder."""


def check(args: Args) -> "ComparePlan":
    """The settings; raises a ValueError for what can be refused before anything is read."""
    if args.side_network and "weights" not in args.methods:
        raise ValueError("--side_network is trained with the weights; give --methods weights as well, or leave it out")
    seeds = args.seeds if args.seeds is not None else (args.inputs.seed,)
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds are {list(seeds)}, expected different numbers of 0 or more")
    check_folder(args.run_folder, COMPARE_RUN, args.resume)
    from rl_reward_network.inputs.loading import check_inputs
    from rl_reward_network.methods.compare import ComparePlan
    from rl_reward_network.methods.methods import methods_of
    from rl_reward_network.models.sa2va.loading_sa2va import check_first_gpu

    methods_of(args.methods)
    if "weights" in args.methods:
        check_first_gpu(args.inputs.gpu)
    check_inputs(args.inputs)
    network = None
    if args.reward_net is not None:
        from rl_reward_network.models.reward_network import RewardNetwork

        network = RewardNetwork.from_pretrained(args.reward_net).fingerprint
    groups = tuple(group for group in GROUPS if group in args.methods)
    return ComparePlan(args.mode, groups, tuple(seeds), network, args.side_network or None)


def main(args: Args) -> None:
    """Open the inputs, train what is missing, measure, and print the verdict."""
    plan = check(args)
    from rl_reward_network.inputs.loading import open_inputs
    from rl_reward_network.methods.compare import run_compare_stage, settings_of

    inputs = open_inputs(args.inputs, args.prompting)
    run = open_run(COMPARE_RUN, args, settings_of(inputs, plan))
    run.announce()
    print(f"data: {inputs.summary}")
    lines = run_compare_stage(inputs, plan, args.reward_net, run, typed())
    made = {"best method": run / "best", "cheapest method": run / "cheapest", "report": run / "report.html"}
    show_ending(made, args.inputs.output_dir, run / "best", note="\n".join(lines))
