"""Experiment 2: train a PPO policy that chooses, for each image, the operations that repair Sa2VA's mask.

    sa2va-rl operations quick --model_path MODEL --data_root DATA

A search on training images finds the sequences that the policy chooses from.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from rl_reward_network.cli.app import open_run, show_ending
from rl_reward_network.flags import Rare
from rl_reward_network.inputs.config import PromptConfig, RunConfig
from rl_reward_network.ppo.settings import Mode, PPOSettings, operation_settings
from rl_reward_network.rewards.table import LEARNED, RewardName
from rl_reward_network.run import FINAL, POST_RUN, check_folder

if TYPE_CHECKING:
    from rl_reward_network.ppo.prompts import PolicyPlan


@dataclass(frozen=True)
class Args:
    """Experiment 2: train a PPO policy that edits Sa2VA's masks by operations."""

    mode: tyro.conf.Positional[Mode]
    """quick: 96 images, 24000 sequences tried. full: 240 images, 60000 sequences."""
    inputs: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    prompting: Annotated[PromptConfig, tyro.conf.arg(name="")] = field(default_factory=PromptConfig)
    ppo: Annotated[PPOSettings, tyro.conf.arg(name="")] = field(default_factory=lambda: operation_settings("quick"))
    reward: RewardName = "dice"
    """Reward of a mask: dice and others from labels, net, the reward network's score, or another as of prompts."""
    reward_net: Path | None = None
    """Folder of a trained reward network (REWARD_NET): the reward with --reward net, else a row of the report."""
    shuffle_rewards: Rare[bool] = False
    """The control: each training image has the rewards of another, so nothing can be gained."""
    run_folder: Rare[Path | None] = None
    """Folder of this run; by default <output_dir>/sa2va_post_process_<time>."""
    resume: bool = False
    """Resume the newest run of these settings, or that of --run_folder."""

    def presets(self) -> "Args":
        """The defaults of the mode."""
        return Args(self.mode, ppo=operation_settings(self.mode))


def check(args: Args) -> "PolicyPlan":
    """The settings, or a ValueError: all that can be refused before anything is read is."""
    if args.reward in LEARNED and args.reward_net is None:
        raise ValueError(f"--reward {args.reward}: give --reward_net; sa2va-rl reward quick trains one")
    if args.inputs.unlabelled_root is not None:
        raise ValueError("--unlabelled_root does nothing here: experiment 2 has no such images; leave it out")
    from rl_reward_network.inputs.loading import check_inputs
    from rl_reward_network.ppo.prompts import post_plan

    check_inputs(args.inputs)
    check_folder(args.run_folder, POST_RUN, args.resume)
    return post_plan(args.mode, args.reward, args.inputs.seed, args.ppo, args.shuffle_rewards)


def main(args: Args) -> None:
    """Open the inputs and train the policy."""
    plan = check(args)
    from rl_reward_network.inputs.loading import open_inputs
    from rl_reward_network.models.reward_network import RewardNetwork
    from rl_reward_network.ppo.prompts import run_policy_stage, run_settings

    inputs = open_inputs(args.inputs, args.prompting)
    settings = run_settings(inputs, plan)
    if args.reward_net is not None and plan.reward in LEARNED:
        settings["reward_net"] = RewardNetwork.from_pretrained(args.reward_net).fingerprint
    run = open_run(POST_RUN, args, settings)
    run.announce()
    print(f"data: {inputs.summary}")
    if run.finished:
        print("nothing to resume: this run is finished")
    else:
        run_policy_stage(inputs, plan, args.reward_net, run)
    show_ending({"post-processing policy": run / FINAL}, args.inputs.output_dir, frozen=True)
