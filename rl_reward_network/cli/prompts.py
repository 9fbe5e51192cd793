"""Step 2: train a PPO policy that chooses the prompt for each image; the reward is the score of step 1's network.

    sa2va-rl prompts quick --model_path MODEL --data_root DATA

Sa2VA stays frozen: each (image, prompt) is segmented once and kept in the mask bank. A reward network of the same mode,
data and model under <output_dir> is used; without one, step 1 runs first. With --resume the newest run of the same
settings is resumed, with the results of an uninterrupted run. Experiment 1 is the same with a reward of labels.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from rl_reward_network.cli.reward import show_agreement
from rl_reward_network.flags import Rare, changed
from rl_reward_network.inputs.config import PromptConfig, RunConfig
from rl_reward_network.ppo.settings import Mode, PPOSettings, Preset, prompt_settings
from rl_reward_network.rewards.table import OF_LABELS, RewardName, needs_truth
from rl_reward_network.run import BEST_REWARD_NET, FINAL, POLICY_RUN, REWARD_NET, REWARD_RUN, Kind, Run, check_folder

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
    """Reward of a mask: net, the reward network's score; mix, half score, half Dice; the others need the true mask."""
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
    """Settings of both steps, after all that can be refused before anything is read.

    Raises:
        ValueError: settings that do not go together, a GPU or data that are missing.
    """
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
    if not args.resume:
        check_folder(args.run_folder, POLICY_RUN, resume=False)
    return plan, rewards


def main(args: Args) -> None:
    """Open the inputs, find or train a reward network, train the policy."""
    plan, rewards = check(args)
    from rl_reward_network.inputs.loading import open_inputs
    from rl_reward_network.models.reward_network import RewardNetwork
    from rl_reward_network.ppo.prompts import origin_of, policy_samples, run_policy_stage
    from rl_reward_network.report.index import write_index
    from rl_reward_network.reward_training.stage import find_reward_network, named

    inputs = open_inputs(args.inputs, args.prompting)
    policy_samples(inputs, plan)  # reports damaged files before step 1
    resumed = _to_resume(args, inputs, plan, rewards) if args.resume else None
    run = resumed or Run.create(run_kind(args), args.inputs.output_dir, origin_of(inputs, plan), args.run_folder)
    run.announce(resumed is not None)
    print(f"data: {inputs.summary}")
    if (idle := changed(args.ppo, "gamma", "gae_lambda")) and plan.ppo.max_steps == 1:
        print(f"{' and '.join(idle)}: no effect while episodes have one prompt; --max_steps sets more")
    if run.finished:
        print("nothing to resume: this run is finished")
    else:
        reward_net = args.reward_net or (resumed and resumed / REWARD_NET) or find_reward_network(inputs, rewards)
        reward_net = reward_net or _step_1(inputs, rewards, args.resume)
        print(f"reward network: {named(RewardNetwork.from_pretrained(reward_net))}")
        run_policy_stage(inputs, plan, reward_net, run.path, resume=resumed is not None)
        print(inputs.bank.counts())
    write_index(args.inputs.output_dir)
    print(f"\nprompt policy: {run / FINAL}")


def run_kind(args: Args) -> Kind:
    """With its own beginning of the folder's name for experiment 1; POLICY_RUN finds both."""
    of_labels = args.reward in OF_LABELS
    return replace(POLICY_RUN, prefix=f"{POLICY_RUN.prefix}_experiment1") if of_labels else POLICY_RUN


def _to_resume(args: Args, inputs: "RunInputs", plan: "PolicyPlan", rewards: "RewardPlan") -> Run | None:
    """The run of --run_folder, or the newest of these settings; None where only step 1 has begun.

    Raises:
        ValueError: there is none; lists the runs that exist.
    """
    from rl_reward_network.ppo.prompts import check_settings, find_policy_run, has_begun, origin_of
    from rl_reward_network.reward_training.stage import find_reward_network, find_unfinished

    if args.run_folder is not None and has_begun(args.run_folder):
        check_settings(args.run_folder, inputs, plan)
        return Run(args.run_folder, POLICY_RUN)
    run = None if args.run_folder else find_policy_run(inputs, plan, rewards, args.reward_net)
    if run is None and (
        args.reward_net or find_reward_network(inputs, rewards) or not find_unfinished(inputs, rewards)
    ):
        why = "the reward network"
        raise Run.nothing_to_resume(POLICY_RUN, args.inputs.output_dir, origin_of(inputs, plan), why)
    return None if run is None else Run(run, POLICY_RUN)


def _step_1(inputs: "RunInputs", plan: "RewardPlan", resume: bool) -> Path:
    """Train a reward network, or finish the training that was interrupted."""
    from rl_reward_network.reward_training.stage import find_unfinished, origin_and_seed, run_reward_stage

    print(
        f"no reward network of mode {plan.mode} and otherwise default settings for these data and this model: training "
        "one first (--reward_net names any other)"
    )
    unfinished = find_unfinished(inputs, plan) if resume else None
    run = unfinished or Run.create(REWARD_RUN, inputs.config.output_dir, origin_and_seed(inputs, plan))
    print(f"step 1, {run.line(unfinished is not None)}")
    run_reward_stage(inputs, plan, run)
    show_agreement(run)
    return run / BEST_REWARD_NET
