"""Step 2: train a PPO policy that chooses the prompt for each image; the reward is the score of step 1's network.

    sa2va-rl prompts quick --model_path MODEL --data_root DATA

A reward network of the same mode, data and model under <output_dir> is used; without one, step 1 runs first.
Experiment 1 is the same with a reward of labels.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from rl_reward_network.cli.app import open_run, show_ending
from rl_reward_network.cli.reward import show_agreement
from rl_reward_network.flags import Rare, changed
from rl_reward_network.inputs.config import PromptConfig, RunConfig
from rl_reward_network.ppo.settings import Mode, PPOSettings, Preset, prompt_settings
from rl_reward_network.rewards.table import RewardName, needs_truth
from rl_reward_network.run import BEST_REWARD_NET, CONFIG, FINAL, POLICY_RUN, REWARD_NET, REWARD_RUN, Run, check_folder

if TYPE_CHECKING:
    from rl_reward_network.inputs.loading import RunInputs
    from rl_reward_network.ppo.prompts import PolicyPlan
    from rl_reward_network.reward_training.stage import RewardPlan


@dataclass(frozen=True)
class Args:
    """Step 2: train a PPO policy that chooses the prompt for each image."""

    mode: tyro.conf.Positional[Mode]
    """quick: 20 images, 2000 steps, 2 environments. full: 100 images, 10000 steps, 4 environments, learning rate
    3e-4."""
    inputs: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    prompting: Annotated[PromptConfig, tyro.conf.arg(name="")] = field(default_factory=PromptConfig)
    ppo: Annotated[PPOSettings, tyro.conf.arg(name="")] = field(default_factory=lambda: prompt_settings("quick"))
    preset: Preset = "default"
    """published: the original specification's learning rate, 3e-4, and observation (docs/log.md compares the two)."""
    reward: RewardName = "net"
    """Reward of a mask: net, the reward network's score; net_and_dice, half score, half Dice; single_tree, and
    functions of the Python file that SA2VA_RL_REWARDS names, need neither; the others need the true mask."""
    shuffle_rewards: Rare[bool] = False
    """The control: each training image has the rewards of another, so nothing can be gained."""
    vision_features: Rare[bool | None] = None
    """Add Sa2VA's pooled image features to the observation: yes by default, no with --preset published."""
    reward_net: Path | None = None
    """Folder of a trained reward network (REWARD_NET); by default the newest that fits, or a new one."""
    reward_steps: Rare[int | None] = None
    """Optimiser steps of step 1, where it has to run."""
    run_folder: Rare[Path | None] = None
    """Folder of this run; by default <output_dir>/sa2va_rl_finetune_<time>, with a reward of labels
    sa2va_rl_finetune_experiment1_<time>."""
    resume: bool = False
    """Resume the newest run of these settings, or that of --run_folder; a run interrupted in step 1 resumes there."""

    def presets(self) -> "Args":
        """The defaults of the mode and the preset."""
        return Args(self.mode, ppo=prompt_settings(self.mode, self.preset))


def check(args: Args) -> "tuple[PolicyPlan, RewardPlan]":
    """Settings of both steps, or a ValueError: all that can be refused before anything is read is."""
    if args.inputs.unlabelled_root is not None and needs_truth(args.reward):
        raise ValueError(
            f"--unlabelled_root has no masks, but --reward {args.reward} needs them; leave one of them out"
        )
    from rl_reward_network.inputs.loading import check_inputs
    from rl_reward_network.ppo.prompts import policy_plan
    from rl_reward_network.reward_training.stage import reward_plan

    plan = policy_plan(
        args.mode, args.preset, args.reward, args.vision_features, args.inputs.seed, args.ppo, args.shuffle_rewards
    )
    rewards = reward_plan(args.inputs, args.mode, args.reward_steps)
    check_inputs(args.inputs)
    if not args.resume or _holds_a_run(args.run_folder):  # without a run in it, an interrupted step 1 may be resumed
        check_folder(args.run_folder, POLICY_RUN, args.resume)
    return plan, rewards


def _holds_a_run(folder: Path | None) -> bool:
    return folder is not None and (folder / CONFIG).exists()


def main(args: Args) -> None:
    """Open the inputs, find or train a reward network, train the policy."""
    plan, rewards = check(args)
    from rl_reward_network.inputs.loading import open_inputs
    from rl_reward_network.models.reward_network import RewardNetwork
    from rl_reward_network.ppo.prompts import policy_samples, run_policy_stage
    from rl_reward_network.reward_training.stage import find_reward_network, named

    inputs = open_inputs(args.inputs, args.prompting)
    policy_samples(inputs, plan)  # reports damaged files before step 1
    run = _run(args, inputs, plan, rewards)
    run.announce()
    print(f"data: {inputs.summary}")
    if (idle := changed(args.ppo, "gamma", "gae_lambda")) and plan.ppo.max_steps == 1:
        print(f"{' and '.join(idle)}: no effect while episodes have one prompt; --max_steps sets more")
    if run.finished:
        print("nothing to resume: this run is finished")
    else:
        begun = None if run.state == "new" else run / REWARD_NET
        reward_net = args.reward_net or begun or find_reward_network(inputs, rewards)
        reward_net = reward_net or _step_1(inputs, rewards, args.resume)
        print(f"reward network: {named(RewardNetwork.from_pretrained(reward_net))}")
        run_policy_stage(inputs, plan, reward_net, run)
        print(inputs.bank.counts())
    show_ending({"prompt policy": run / FINAL}, args.inputs.output_dir, run.path, frozen=True)


def _run(args: Args, inputs: "RunInputs", plan: "PolicyPlan", rewards: "RewardPlan") -> Run:
    """A new run, or with --resume that of --run_folder or the newest; a ValueError lists the runs if none fits."""
    from rl_reward_network.ppo.prompts import has_network, run_settings
    from rl_reward_network.reward_training.stage import find_reward_network, find_unfinished

    output_dir, settings = args.inputs.output_dir, run_settings(inputs, plan)
    if args.resume:
        also = has_network(inputs, rewards, args.reward_net)
        try:
            return Run.resume(POLICY_RUN, output_dir, settings, args.run_folder, None, also, "the reward network")
        except ValueError:
            only_step_1 = not args.reward_net and not find_reward_network(inputs, rewards)
            if _holds_a_run(args.run_folder) or not (only_step_1 and find_unfinished(inputs, rewards)):
                raise
    return open_run(plan.kind, replace(args, resume=False), settings)


def _step_1(inputs: "RunInputs", plan: "RewardPlan", resume: bool) -> Path:
    """Train a reward network, or finish the training that was interrupted."""
    from rl_reward_network.reward_training.stage import find_unfinished, run_reward_stage, run_settings

    print(
        f"no reward network of mode {plan.mode} and otherwise default settings for these data and this model: training "
        "one first (--reward_net names any other)"
    )
    run = find_unfinished(inputs, plan) if resume else None
    run = run or Run.create(REWARD_RUN, inputs.config.output_dir, run_settings(inputs, plan))
    print(f"step 1, {run.line()}")
    run_reward_stage(inputs, plan, run)
    show_agreement(run)
    return run / BEST_REWARD_NET
