"""Step 2: train a PPO policy that chooses the prompt for each image; the reward is the network of step 1.

    sa2va-rl prompts quick --model_path MODEL --data_root DATA

Sa2VA stays frozen: each (image, prompt) is segmented once and kept in the mask bank. A reward network of the same mode,
data and model under <output_dir> is used; if there is none, step 1 runs first. With --resume the newest run of the very
same settings goes on where it was cut off, to the numbers it would have had.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Literal

import tyro

from rl_reward_network.cli.reward import show_agreement
from rl_reward_network.inputs.loading import World, WorldConfig, check_world, open_world
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.prompt_policy.stage import (
    FINAL,
    KIND,
    REWARD_NET,
    PolicyPlan,
    check_settings,
    find_policy_run,
    has_begun,
    origin_of,
    policy_plan,
    policy_samples,
    run_policy_stage,
)
from rl_reward_network.reward_training.stage import (
    FOLDER,
    RewardPlan,
    find_reward_network,
    find_unfinished,
    named,
    reward_plan,
    run_reward_stage,
)
from rl_reward_network.rewards.table import RewardName
from rl_reward_network.runs.folder import check_new, new_run_folder
from rl_reward_network.runs.resume import nothing_to_resume, run_line


@dataclass(frozen=True)
class PPOArgs:
    """Settings of PPO that differ from the preset's; names are Stable-Baselines3's."""

    total_timesteps: int | None = None
    """Prompts tried in training: quick 2000, full 10000."""
    n_envs: int | None = None
    """Environments side by side (N_ENVS): quick 2, full 4."""
    n_steps: int | None = None
    """Steps of each environment per rollout: 128, fewer in short runs."""
    batch_size: int | None = None
    """Mini-batch: 64."""
    learning_rate: float | None = None
    """Step size of Adam: quick 1e-3, full and published 3e-4."""
    n_epochs: int | None = None
    """Passes over each rollout: 10."""
    gamma: float | None = None
    """Discount: 0.99; without effect while each image is asked one prompt (max_steps 1)."""
    gae_lambda: float | None = None
    """Bias against variance of the advantages: 0.95; without effect while each image is asked one prompt."""
    clip_range: float | None = None
    """Largest change of an action's probability ratio that is still rewarded: 0.2."""
    ent_coef: float | None = None
    """Weight of the entropy bonus: 0.01."""
    vf_coef: float | None = None
    """Weight of the value loss: 0.5."""
    max_steps: int | None = None
    """Prompts tried per image: 1. With more, the mask that the reward network likes best is kept."""


@dataclass(frozen=True)
class Args:
    """Step 2: train a PPO policy that chooses the prompt for each image."""

    mode: tyro.conf.Positional[Literal["quick", "full"]]
    """quick: 20 images, 2000 steps, 2 environments. full: 100 images, 10000 steps, 4 environments."""
    world: Annotated[WorldConfig, tyro.conf.arg(name="")] = field(default_factory=WorldConfig)
    ppo: Annotated[PPOArgs, tyro.conf.arg(name="")] = field(default_factory=PPOArgs)
    preset: Literal["default", "published"] = "default"
    """published: the original specification's learning rate and observation (docs/log.md compares the two)."""
    reward: RewardName = "net"
    """Reward of a mask: net, the reward network's score; mix, half score, half Dice; or a measure with the truth."""
    vision_features: bool | None = None
    """Let the policy see Sa2VA's pooled image features, too: yes by default, no with --preset published."""
    reward_net: Path | None = None
    """Folder of a trained reward network (REWARD_NET); without it the newest fitting one, or a new one."""
    reward_steps: int | None = None
    """Optimiser steps of step 1, should it have to run."""
    run_folder: Path | None = None
    """Folder of this run; without it <output_dir>/sa2va_rl_finetune_<time>."""
    resume: bool = False
    """Go on with the newest run of these settings (or with --run_folder); if it was cut off in step 1, with that."""


def check(args: Args) -> tuple[PolicyPlan, RewardPlan]:
    """Settings of both steps, after all that can be refused before anything is read.

    Raises:
        ValueError: settings that do not go together, a GPU or data that are not there.
    """
    changed = {f.name: value for f in fields(args.ppo) if (value := getattr(args.ppo, f.name)) is not None}
    plan = policy_plan(args.mode, args.preset, args.reward, args.vision_features, args.world.seed, **changed)
    rewards = reward_plan(args.world, args.mode, args.reward_steps)
    check_world(args.world)
    if args.run_folder and not args.resume:
        check_new(args.run_folder)
    return plan, rewards


def main(args: Args) -> None:
    """Open the world, make sure of a reward network, train the policy."""
    plan, rewards = check(args)
    world = open_world(args.world)
    policy_samples(world, plan)  # what is wrong with them must not come out after hours of step 1
    found = _to_resume(args, world, plan, rewards) if args.resume else None
    folder = found or args.run_folder or new_run_folder(args.world.output_dir, KIND)
    print(f"{run_line(folder, found is not None)}\ndata: {world.seen}")
    idle = [name for name in ("gamma", "gae_lambda") if getattr(args.ppo, name) is not None]
    if idle and plan.ppo.max_steps == 1:
        print(f"{' and '.join(idle)}: no effect while each image is asked one prompt; --max_steps asks more")
    if found and (found / FINAL).exists():
        print("nothing to resume: this run is finished")
    else:
        own = found / REWARD_NET if found else None
        reward_net = (
            args.reward_net or own or find_reward_network(world, rewards) or _step_1(world, rewards, args.resume)
        )
        print(f"reward network: {named(RewardNetwork.from_pretrained(reward_net))}")
        run_policy_stage(world, plan, reward_net, folder, resume=found is not None)
        print(world.bank.counts())
    print(f"\nprompt policy: {folder / FINAL}")


def _to_resume(args: Args, world: World, plan: PolicyPlan, rewards: RewardPlan) -> Path | None:
    """The run that was named, or the newest of these settings; None where only step 1 has begun.

    Raises:
        ValueError: there is none; names the runs there are.
    """
    if args.run_folder is not None and has_begun(args.run_folder):
        check_settings(args.run_folder, world, plan)
        return args.run_folder
    found = None if args.run_folder else find_policy_run(world, plan, rewards, args.reward_net)
    if found is None and (
        args.reward_net or find_reward_network(world, rewards) or not find_unfinished(world, rewards)
    ):
        raise nothing_to_resume(args.world.output_dir, KIND, origin_of(world, plan), "the reward network")
    return found


def _step_1(world: World, plan: RewardPlan, resume: bool) -> Path:
    """A reward network of this run's own, a cut-off one finished where that was asked for."""
    print(
        f"no reward network of mode {plan.mode} and otherwise default settings for these data and this model: training "
        "one first (--reward_net names any other)"
    )
    unfinished = find_unfinished(world, plan) if resume else None
    folder = unfinished or new_run_folder(world.config.output_dir, "reward_net")
    print(f"step 1, {run_line(folder, unfinished is not None)}")
    run_reward_stage(world, plan, folder)
    show_agreement(folder)
    return folder / FOLDER
