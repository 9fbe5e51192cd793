"""Step 2 as a whole: score the frozen model's masks, train the prompt policy, decide what to deploy."""

import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rl_reward_network.data.sample import Sample
from rl_reward_network.evaluation.deployment import decide
from rl_reward_network.inputs.loading import World
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.prompt_policy.config import PromptPPOConfig
from rl_reward_network.prompt_policy.policy import choose_prompts, save_policy
from rl_reward_network.prompt_policy.ppo import train_prompt_policy
from rl_reward_network.prompt_policy.tables import PromptTable, load_tables, prompt_tables, save_tables
from rl_reward_network.reward_training.stage import RewardPlan, check_no_leak, named, origin
from rl_reward_network.rewards.table import RewardName
from rl_reward_network.runs.folder import (
    began_with,
    check_new,
    check_origin,
    check_version,
    clock,
    describe_run,
    only_here,
    read_run_config,
)

KIND = "sa2va_rl_finetune"
TABLES, FINAL = "tables.json", "final_model"  # the latter is written last: without it a run was cut off
REWARD_NET = "reward_net"  # the run's own copy, so that it can be evaluated wherever it is moved
IMAGES = {"quick": 20, "full": 100}
VAL_IMAGES = {"quick": 48, "full": 100}  # they decide what is deployed, so as many as seconds allow
PPO = {
    "quick": PromptPPOConfig(total_timesteps=2000, n_envs=2, learning_rate=1e-3),
    "full": PromptPPOConfig(total_timesteps=10000, n_envs=4),
}
PUBLISHED_LEARNING_RATE = 3e-4  # too slow for quick's 8 rollouts, see docs/log.md


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
    reward: RewardName
    ppo: PromptPPOConfig


def policy_plan(
    mode: Literal["quick", "full"],
    preset: Literal["default", "published"] = "default",
    reward: RewardName = "net",
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
        ppo = replace(ppo, learning_rate=PUBLISHED_LEARNING_RATE)
    if {"n_envs", "n_steps"} & set(changed) and "batch_size" not in changed:
        rollout = changed.get("n_envs", ppo.n_envs) * changed.get("n_steps", ppo.n_steps)
        changed["batch_size"] = max(2, min(ppo.batch_size, rollout))
    vision = preset == "default" if vision_features is None else vision_features
    return PolicyPlan(mode, preset, IMAGES[mode], VAL_IMAGES[mode], vision, reward, replace(ppo, seed=seed, **changed))


def run_policy_stage(world: World, plan: PolicyPlan, reward_net: Path, run: Path, resume: bool = False) -> None:
    """Train the prompt policy in `run`.

    Writes final_model/, reward_net/ (a copy), tables.json (what the policy learned from), config.json, split.json,
    checkpoint.pt, metrics.jsonl and logs/.

    Args:
        world: data, split, frozen model and its masks.
        plan: settings.
        reward_net: folder of a reward network.
        run: a new run folder, or one that was cut off.
        resume: go on with the latter; it must have begun with the same settings and reward network.

    Raises:
        ValueError: the reward network is missing, damaged, or has seen the policy's, val or test patients; the reward
            needs labels and there are none; `run` holds another run, one of another version, or another process works
            in it.
    """
    if resume:
        check_settings(run, world, plan)  # before anything is loaded
    network = RewardNetwork.from_pretrained(reward_net)
    check_no_leak(world.split, network, reward_net)
    samples = policy_samples(world, plan)
    with only_here(run):
        config = check_settings(run, world, plan, network) if resume else _describe(run, world, plan, network)
        seconds: dict[str, float] = {}
        before = _counts(world)
        with clock(seconds, "masks and scores"):
            tables = _tables(world, plan, network.to(world.config.device), samples, run)
        contexts = {name: [entry.context for entry in entries] for name, entries in tables.items()}
        with clock(seconds, "PPO"):
            model = train_prompt_policy(contexts["policy"], contexts["val"], plan.ppo, run, plan.reward)
        chosen = choose_prompts(model, contexts["val"], plan.ppo.max_steps, plan.reward == "net")
        plain = {name: [entry.table for entry in entries] for name, entries in tables.items()}
        deployment = decide(plain["policy"], plain["val"], chosen, plan.ppo.seed)
        spent = {name: count - before[name] for name, count in _counts(world).items()}
        description = {"deployment": asdict(deployment), "seconds": seconds, "bank": spent, "resumed": resume}
        save_policy(model, run / FINAL, {**config, **description})


def policy_samples(world: World, plan: PolicyPlan) -> dict[str, list[Sample]]:
    """The images of `policy` and `val` that step 2 works on.

    Raises:
        ValueError: there are none, none is labelled although the reward needs it, or a file is damaged.
    """
    return {
        "policy": world.pick("policy", plan.images, labelled=plan.reward != "net"),
        "val": world.pick("val", plan.val_images),
    }


def find_policy_run(world: World, plan: PolicyPlan, rewards: RewardPlan, reward_net: Path | None = None) -> Path | None:
    """The newest run under the output folder with these very settings, whether finished or cut off.

    Args:
        world: data, split and frozen model.
        plan: settings.
        rewards: settings of step 1; the run's reward network must have been trained with them.
        reward_net: the very reward network it must have begun with, instead.
    """
    named = reward_net and RewardNetwork.from_pretrained(reward_net).fingerprint
    for path in sorted(world.config.output_dir.glob(f"{KIND}_*/config.json"), reverse=True):
        try:
            config = read_run_config(path.parent)
            network = RewardNetwork.from_pretrained(path.parent / REWARD_NET)
        except ValueError as error:
            warnings.warn(f"passed over: {error}", stacklevel=2)
            continue
        info, trained = network.training_info, origin(world, rewards)
        finished = (path.parent / FINAL).exists()
        fits = network.fingerprint == named if named else began_with(config, info, trained, finished)
        if began_with(config, config.get("origin", {}), origin_of(world, plan), finished) and fits:
            return path.parent
    return None


def has_begun(run: Path) -> bool:
    """Whether there is anything in `run` but what a kill before its config.json leaves."""
    return any(path.name not in (REWARD_NET, "split.json") and path.name[0] != "." for path in run.glob("*"))


def check_settings(run: Path, world: World, plan: PolicyPlan, network: RewardNetwork | None = None) -> dict[str, Any]:
    """config.json of a run that is to go on.

    Raises:
        ValueError: it is not finished and of another version, or began with other settings or with another reward
            network; names what differs.
    """
    config, wanted = read_run_config(run), origin_of(world, plan)
    if not (run / FINAL).exists():
        check_version(run)
    began = config.get("origin", {}) | {"reward_net": config.get("reward_net_fingerprint")}
    check_origin(run, began, wanted | ({"reward_net": network.fingerprint} if network else {}))
    return config


def _tables(
    world: World, plan: PolicyPlan, network: RewardNetwork, samples: dict[str, list[Sample]], run: Path
) -> dict[str, list[PromptTable]]:
    """What the policy learns from and is watched on; read where a run that goes on has it already."""
    if (run / TABLES).exists():
        return load_tables(run / TABLES)
    tables = {
        name: prompt_tables(world, picked, network, f"{name} patients", plan.vision_features)
        for name, picked in samples.items()
    }
    save_tables(run / TABLES, tables)
    return tables


def _counts(world: World) -> dict[str, int]:
    """How often the frozen model has run in this process."""
    return {"computed": world.bank.computed, "reused": world.bank.reused, "encoded": world.bank.encoded}


def _describe(run: Path, world: World, plan: PolicyPlan, network: RewardNetwork) -> dict[str, Any]:
    """Begin the run folder: its own copy of the reward network, then config.json."""
    check_new(run)
    network.save_pretrained(run / REWARD_NET)
    stage = {
        "stage": "prompt policy",
        "plan": asdict(plan),
        "origin": origin_of(world, plan),
        "reward_net_fingerprint": network.fingerprint,
        "reward_net_info": {
            "named": named(network, run),
            **{key: network.training_info.get(key) for key in ("mode", "data_fingerprint", "seed")},
        },
    }
    return describe_run(run, world, stage)


def origin_of(world: World, plan: PolicyPlan) -> dict[str, Any]:
    """What must be the same for a run to be resumed."""
    return {
        **asdict(plan),
        "data_fingerprint": world.data_fingerprint,
        "model_fingerprint": world.segmenter.fingerprint,
        "prompts": list(world.prompts),
        "split_seed": world.split.seed,
    }
