"""Step 2 as a whole: score the frozen model's masks, train the prompt policy, decide what to deploy."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rl_reward_network.artefacts import read_json
from rl_reward_network.env.sa2va_finetune_env import Reward
from rl_reward_network.evaluation.deployment import decide
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.training.prompt_policy import choose_prompts, save_policy
from rl_reward_network.training.prompt_ppo import train_prompt_policy
from rl_reward_network.training.prompt_ppo_config import PromptPPOConfig
from rl_reward_network.training.prompt_tables import prompt_tables, save_tables
from rl_reward_network.training.reward_stage import check_no_leak
from rl_reward_network.training.run_folder import describe_run, only_here, read_run_config
from rl_reward_network.training.world import World

KIND = "sa2va_rl_finetune"
TABLES, FINAL = "tables.json", "final_model"  # the latter is written last: without it a run was cut off
IMAGES = {"quick": 20, "full": 100}
VAL_IMAGES = {"quick": 48, "full": 100}  # they decide what is deployed, so as many as seconds allow
PPO = {
    "quick": PromptPPOConfig(total_timesteps=2000, n_envs=2),
    "full": PromptPPOConfig(total_timesteps=10000, n_envs=4),
}


@dataclass(frozen=True)
class PolicyPlan:
    """What step 2 is asked for.

    Args:
        mode: quick or full.
        preset: default, or published: the settings of the original specification.
        images: training images of the policy.
        val_images: images that are watched in training and decide what is deployed.
        vision_features: whether the policy sees Sa2VA's pooled image features besides the image statistics.
        reward: what a mask is paid.
        ppo: settings of PPO.
    """

    mode: str
    preset: str
    images: int
    val_images: int
    vision_features: bool
    reward: Reward
    ppo: PromptPPOConfig


def policy_plan(
    mode: Literal["quick", "full"],
    preset: Literal["default", "published"] = "default",
    reward: Reward = "net",
    vision_features: bool | None = None,
    seed: int = 0,
    **changed: Any,
) -> PolicyPlan:
    """The mode's settings with what the user changed (fields of `PromptPPOConfig`).

    Raises:
        ValueError: settings that do not go together.
    """
    ppo = PPO[mode]
    if preset == "published":
        ppo = replace(ppo, learning_rate=3e-4, target_kl=None)
    if {"n_envs", "n_steps"} & set(changed) and "batch_size" not in changed:
        rollout = changed.get("n_envs", ppo.n_envs) * changed.get("n_steps", ppo.n_steps)
        changed["batch_size"] = max(2, min(ppo.batch_size, rollout))
    vision = preset == "default" if vision_features is None else vision_features
    return PolicyPlan(mode, preset, IMAGES[mode], VAL_IMAGES[mode], vision, reward, replace(ppo, seed=seed, **changed))


def run_policy_stage(world: World, plan: PolicyPlan, reward_net: Path, run: Path) -> None:
    """Train the prompt policy in `run`, or go on where it was cut off.

    Writes final_model/, tables.json (what the policy learned from), config.json, split.json, checkpoint.pt,
    metrics.jsonl and logs/.

    Raises:
        ValueError: the reward network is missing, damaged, or has seen the policy's, val or test patients; the reward
            needs labels and there are none; another process works in `run`.
    """
    network = RewardNetwork.from_pretrained(reward_net)
    check_no_leak(world, network, reward_net)
    samples = {
        "policy": world.pick("policy", plan.images, labelled=plan.reward != "net"),
        "val": world.pick("val", plan.val_images),
    }
    with only_here(run):
        resumed = (run / "config.json").exists()
        config = (
            _resumed(run, network) if resumed else describe_run(run, world, _stage(world, plan, reward_net, network))
        )
        seconds: dict[str, float] = {}
        network = network.to(world.config.device)
        with _clock(seconds, "masks and scores"):
            tables = {
                name: prompt_tables(world, picked, network, f"{name} patients", plan.vision_features)
                for name, picked in samples.items()
            }
            save_tables(run / TABLES, tables)
        contexts = {name: [entry.context for entry in entries] for name, entries in tables.items()}
        with _clock(seconds, "PPO"):
            model = train_prompt_policy(contexts["policy"], contexts["val"], plan.ppo, run, plan.reward)
        chosen = choose_prompts(model, contexts["val"], plan.ppo.max_steps, plan.reward == "net")
        plain = {name: [entry.table for entry in entries] for name, entries in tables.items()}
        deployment = decide(plain["policy"], plain["val"], chosen, plan.ppo.seed)
        cost = {"computed": world.bank.computed, "reused": world.bank.reused, "encoded": world.bank.encoded}
        description = {"deployment": asdict(deployment), "seconds": seconds, "bank": cost, "resumed": resumed}
        save_policy(model, run / FINAL, {**config, **description})


def find_policy_run(world: World, plan: PolicyPlan) -> Path | None:
    """The newest run under the output folder with these very settings, whether finished or cut off."""
    for path in sorted(world.config.output_dir.glob(f"{KIND}_*/config.json"), reverse=True):
        if read_json(path).get("origin") == _origin(world, plan):
            return path.parent
    return None


def _resumed(run: Path, network: RewardNetwork) -> dict[str, Any]:
    """config.json of a run that goes on, with the reward network it began with."""
    config = read_run_config(run)
    if config["reward_net_fingerprint"] != network.fingerprint:
        raise ValueError(f"{run}: --resume: it began with the reward network {config['reward_net']}; name that one")
    return config


def _stage(world: World, plan: PolicyPlan, reward_net: Path, network: RewardNetwork) -> dict[str, Any]:
    """What config.json says about this run besides the world."""
    return {
        "stage": "prompt policy",
        "plan": asdict(plan),
        "origin": _origin(world, plan),
        "reward_net": str(reward_net.resolve()),
        "reward_net_fingerprint": network.fingerprint,
        "reward_net_info": {key: network.training_info.get(key) for key in ("mode", "data_fingerprint", "seed")},
    }


def _origin(world: World, plan: PolicyPlan) -> dict[str, Any]:
    """What must be the same for a run to be resumed."""
    return {
        **asdict(plan),
        "data_fingerprint": world.data_fingerprint,
        "model_fingerprint": world.segmenter.fingerprint,
        "prompts": list(world.prompts),
        "split_seed": world.split.seed,
    }


@contextmanager
def _clock(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Note how long the block takes."""
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start
