"""Step 2: train a PPO policy that chooses the prompt for each image; the reward is the network of step 1.

    python -m scripts.finetune_sa2va_with_rl quick --model_path MODEL --data_root DATA

Sa2VA stays frozen: each (image, prompt) is segmented once and kept in the mask bank. A reward network of the same mode,
data and model under <output_dir> is used; if there is none, step 1 runs first.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from rl_reward_network.training.policy_stage import PRESETS, run_policy_stage
from rl_reward_network.training.prompt_ppo import PromptPPOConfig
from rl_reward_network.training.reward_stage import RewardPlan, find_reward_network, reward_plan, run_reward_stage
from rl_reward_network.training.run_folder import new_run_folder
from rl_reward_network.training.world import World, WorldConfig, open_world
from scripts.cli import run
from scripts.train_reward_network import show_agreement


@dataclass(frozen=True)
class PPOArgs:
    """Settings of PPO that differ from the mode's; names are Stable-Baselines3's."""

    total_timesteps: int | None = None
    """Prompts tried in training: quick 2000, full 10000."""
    n_envs: int | None = None
    """Environments side by side (N_ENVS): quick 2, full 4."""
    n_steps: int | None = None
    """Steps of each environment per rollout: 128, fewer in short runs."""
    batch_size: int | None = None
    """Mini-batch: 64."""
    learning_rate: float | None = None
    """Step size of Adam: 3e-4."""
    ent_coef: float | None = None
    """Weight of the entropy bonus: 0.01."""


@dataclass(frozen=True)
class Args:
    """Step 2: train a PPO policy that chooses the prompt for each image."""

    mode: tyro.conf.Positional[Literal["quick", "full"]]
    """quick: 20 images, 2000 steps, 2 environments. full: 100 images, 10000 steps, 4 environments."""
    world: Annotated[WorldConfig, tyro.conf.arg(name="")]
    ppo: Annotated[PPOArgs, tyro.conf.arg(name="")]
    reward_net: Path | None = None
    """Folder of a trained reward network (REWARD_NET); without it the newest fitting one, or a new one."""
    reward_steps: int | None = None
    """Optimiser steps of step 1, should it have to run."""
    run_folder: Path | None = None
    """Folder of this run; without it <output_dir>/sa2va_rl_finetune_<time>."""


def main(args: Args) -> None:
    """Open the world, make sure of a reward network, train the policy."""
    ppo = ppo_config(args)
    plan = reward_plan(args.world, args.mode, args.reward_steps)
    world = open_world(args.world)
    reward_net = args.reward_net or find_reward_network(world, plan) or _train_reward_network(world, plan)
    folder = args.run_folder or new_run_folder(args.world.output_dir, "sa2va_rl_finetune")
    run_policy_stage(world, args.mode, reward_net, ppo, folder)
    print(f"masks computed by Sa2VA: {world.bank.computed}, read from the bank: {world.bank.reused}")
    print(f"\nprompt policy: {folder / 'final_model'}")


def ppo_config(args: Args) -> PromptPPOConfig:
    """The mode's settings with what the user changed; refused before anything is loaded."""
    changed = {f.name: value for f in fields(args.ppo) if (value := getattr(args.ppo, f.name)) is not None}
    preset = PRESETS[args.mode].ppo
    if {"n_envs", "n_steps"} & set(changed) and "batch_size" not in changed:
        rollout = changed.get("n_envs", preset.n_envs) * changed.get("n_steps", preset.n_steps)
        changed["batch_size"] = max(2, min(preset.batch_size, rollout))
    return replace(preset, **changed)


def _train_reward_network(world: World, plan: RewardPlan) -> Path:
    print(
        f"no reward network of mode {plan.mode} and otherwise default settings for these data and this model: training "
        "one first (--reward_net names any other)"
    )
    folder = new_run_folder(world.config.output_dir, "reward_net")
    run_reward_stage(world, plan, folder)
    show_agreement(folder)
    return folder / "best_reward_net"


if __name__ == "__main__":
    run(main, Args)
