"""The stage of experiments 1 and 3: score the masks of all prompts, train the policy, decide what is deployed."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.policies import BasePolicy

from rl_reward_network.data.items import Sample
from rl_reward_network.env.observation import EPISODE_FEATURES, bounds, observation_table
from rl_reward_network.env.sa2va_finetune_env import PromptContext, prompt_rewards
from rl_reward_network.inputs.loading import RunInputs
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.ppo.contexts import (
    TABLES,
    PromptTable,
    Tables,
    exchange_rewards,
    load_tables,
    prompt_tables,
    save_tables,
)
from rl_reward_network.ppo.policy import choose_prompts, policy_kwargs
from rl_reward_network.ppo.settings import Mode, PPOSettings, Preset, prompt_settings
from rl_reward_network.ppo.stage import Trained, complete_run, judged_out_of_fold
from rl_reward_network.ppo.train import Task, Weights, make_vector_env, train_ppo
from rl_reward_network.report.deployment import Deployment, Labels, best_fixed_prompt, decide, stack
from rl_reward_network.report.statistics import known_means
from rl_reward_network.reward_training.stage import RewardPlan, check_no_leak, named, origin
from rl_reward_network.rewards.learned import DomainCheck, ForegroundMaps, in_domain
from rl_reward_network.rewards.table import LEARNED, OF_LABELS, RewardName, needs_truth, own_fingerprint
from rl_reward_network.run import POLICY_RUN, REWARD_NET, Kind, Run, clock, differences

IMAGES = {"quick": 20, "full": 100}
VAL_IMAGES = {"quick": 48, "full": 100}  # for the decision what is deployed; they take seconds
LEAST_STD = 1e-4  # of a feature's range: a feature that is constant in training must not amplify rounding noise


@dataclass(frozen=True)
class PolicyPlan:
    """Settings of step 2.

    Args:
        mode: quick or full.
        preset: default, or published: the settings of the original specification.
        images: training images of the policy.
        val_images: images of the validation in training.
        vision_features: whether the observation has Sa2VA's pooled image features besides the image statistics.
        reward: reward of a mask.
        ppo: settings of PPO.
        shuffle_rewards: the control: each training image has the rewards of another.
    """

    mode: str
    preset: str
    images: int
    val_images: int
    vision_features: bool
    reward: RewardName
    ppo: PPOSettings
    shuffle_rewards: bool = False

    @property
    def learned(self) -> bool:
        """Whether more is in the reward than labels: the reward network's score, or a reward that needs none."""
        return self.reward not in OF_LABELS

    @property
    def kind(self) -> Kind:
        """Of a new run: experiment 1 has its own beginning of the folder's name; POLICY_RUN finds both."""
        return POLICY_RUN if self.learned else replace(POLICY_RUN, prefix=f"{POLICY_RUN.prefix}_experiment1")


def policy_plan(
    mode: Mode,
    preset: Preset = "default",
    reward: RewardName = "net",
    vision_features: bool | None = None,
    seed: int = 0,
    ppo: PPOSettings | None = None,
    shuffle_rewards: bool = False,
) -> PolicyPlan:
    """The preset of the mode, with the user's changes."""
    vision = preset == "default" if vision_features is None else vision_features
    settings = (ppo or prompt_settings(mode, preset)).of_run(seed)
    return PolicyPlan(mode, preset, IMAGES[mode], VAL_IMAGES[mode], vision, reward, settings, shuffle_rewards)


def run_policy_stage(inputs: RunInputs, plan: PolicyPlan, reward_net: Path, run: Run) -> None:
    """Train the prompt policy in `run`; in an interrupted run, PPO begins anew.

    Writes final_model/, reward_net/ (a copy), tables.json (what the policy learned from), config.json, split.json,
    metrics.jsonl, cost.json and logs/.

    Args:
        inputs: data, split, frozen model and its masks; with unlabelled images only if the reward needs no labels.
        plan: settings.
        reward_net: folder of a reward network; that of an interrupted run must be the one it began with.
        run: new, or interrupted.

    Raises:
        ValueError: the reward network is missing, damaged, or was trained on the policy's, val or test patients; the
            reward needs labels and there are none; or as `complete_run`.
    """
    network = RewardNetwork.from_pretrained(reward_net)
    check_no_leak(inputs.split, network, reward_net, inputs.samples)
    samples = policy_samples(inputs, plan)

    def train(seconds: dict[str, float]) -> Trained:
        before = _counts(inputs)
        with clock(seconds, "masks and scores"):
            maps = ForegroundMaps.beside(run.path, network.to(inputs.config.device))
            used, check = judged_samples(plan, samples, maps)
            if check is not None and check.outside:
                print(check.sentence)
            tables = _tables(inputs, plan, maps, used, run / TABLES)
        with clock(seconds, "PPO"):
            model = fit(tables, plan, run.path)
        with clock(seconds, "decision"):
            deployment = decide_prompts(tables, plan)
        vision = tables["policy"][0].context.vision_features
        facts = {
            "bank": {name: count - before[name] for name, count in _counts(inputs).items()},
            "domain": None if check is None else asdict(check),
            "observation": [entry.name for entry in observation_table(vision)],
            "vision_features": vision,
        }
        return Trained(model, deployment, labels_used(tables, plan), facts)

    info = {key: network.training_info.get(key) for key in ("mode", "data_fingerprint", "seed")}
    facts = {
        "plan": asdict(plan),
        "reward_net_fingerprint": network.fingerprint,
        "reward_net_info": {"named": named(network, run.path), **info},
    }
    settings = run_settings(inputs, plan)
    if run.state != "new":
        settings["reward_net"] = network.fingerprint
    complete_run(run, inputs, settings, network, facts, train)


def train_prompt_policy(
    train_contexts: Sequence[PromptContext],
    val_contexts: Sequence[PromptContext],
    settings: PPOSettings,
    run_dir: Path,
    reward: RewardName = "net",
) -> PPO:
    """Train a prompt policy, as `train_ppo`; it ends early when the reward is over-optimised.

    Args:
        train_contexts: training images; the observations are standardised by their features.
        val_contexts: images for validating the greedy policy after each rollout; may be empty. The stop rule uses the
            labelled ones.
        settings: of PPO.
        run_dir: run folder; made when missing.
        reward: reward of a mask, see `prompt_rewards`.

    Raises:
        ValueError: contexts that do not fit together or to the reward.
    """

    def validate(policy: BasePolicy) -> dict[str, list[float]]:
        """Score of each validation patient, or its reward if that needs no network and no labels; Dice if labelled."""
        if not val_contexts:
            return {}
        chosen = choose_prompts(policy, val_contexts, settings.max_steps, reward == "net")
        pairs = list(zip(val_contexts, chosen.tolist(), strict=True))
        dices = [context.metrics["dice"][prompt] if "dice" in context.metrics else np.nan for context, prompt in pairs]
        proxy: RewardName = "net" if reward in (*LEARNED, *OF_LABELS) else reward
        judged = [proxy != "net" or context.judged for context in val_contexts]
        values = [
            float(prompt_rewards(context, proxy)[prompt]) if known else np.nan
            for known, (context, prompt) in zip(judged, pairs, strict=True)
        ]
        groups = [context.group_id or context.sample_id for context in val_contexts]
        return {"custom/val_score": known_means(values, groups), "custom/val_gt_dice": known_means(dices, groups)}

    venv = make_vector_env(train_contexts, settings.n_envs, settings.seed, settings.max_steps, reward)
    weights: Weights = "last" if reward in OF_LABELS else "last unless over-optimised"
    task = Task(venv, standardised(train_contexts), validate, "custom/val_gt_dice", weights, False, False)
    return train_ppo(task, settings, run_dir)


def standardised(contexts: Sequence[PromptContext]) -> dict[str, Any]:
    """SB3's `policy_kwargs` for a policy that standardises by these images, except the state of the episode."""
    features = np.stack([context.features for context in contexts]).astype(np.float64)
    low, high = (side[:-EPISODE_FEATURES] for side in bounds(contexts[0].vision_features))
    std = np.maximum(features.std(axis=0), LEAST_STD * (high - low))
    mean = np.append(features.mean(axis=0), np.zeros(EPISODE_FEATURES))
    return policy_kwargs(mean, np.append(std, np.ones(EPISODE_FEATURES)))


def fit(tables: Tables, plan: PolicyPlan, run: Path) -> PPO:
    """PPO on the images of `policy`, validated on those of `val`; writes its curves into `run`.

    In the control with shuffled rewards, each training image has the rewards of another.
    """
    rewarded = exchange_rewards(tables["policy"], plan.ppo.seed) if plan.shuffle_rewards else tables["policy"]
    train_contexts, val_contexts = ([entry.context for entry in entries] for entries in (rewarded, tables["val"]))
    return train_prompt_policy(train_contexts, val_contexts, plan.ppo, run, plan.reward)


def decide_prompts(tables: Tables, plan: PolicyPlan) -> Deployment:
    """What is deployed, by the true masks of the patients of `policy` and `val`.

    No reward network was trained on them (`check_no_leak`). PPO is judged out of fold, by fits as `fit`.
    """
    everything = [*tables["policy"], *tables["val"]]
    labelled = _labelled(everything)
    groups = [entry.table.group_id for entry in labelled]
    fixed = best_fixed_prompt([entry.table for entry in everything])
    values = stack([entry.table for entry in labelled], "dice").T if labelled else np.zeros((1, 0))

    def refit(patients: frozenset[str], folder: Path) -> PPO:
        return fit(_without(tables, patients), plan, folder)

    def dice(model: PPO, indices: np.ndarray) -> np.ndarray:
        held = [labelled[index].context for index in indices]
        return values[choose_prompts(model, held, plan.ppo.max_steps, plan.reward == "net"), indices]

    policy = judged_out_of_fold(groups, refit, dice, "more")
    return decide(values, policy, groups, fixed, seed=plan.ppo.seed)


def _without(tables: Tables, patients: Collection[str]) -> Tables:
    """The tables of the other patients; where less than two training images are left, labelled ones of `val` join."""
    left = {
        name: [entry for entry in entries if entry.table.group_id not in patients] for name, entries in tables.items()
    }
    more = [entry for entry in _labelled(left["val"]) if entry.context.judged]
    return left if len(left["policy"]) > 1 else {**left, "policy": left["policy"] + more}


def _labelled(entries: Sequence[PromptTable]) -> list[PromptTable]:
    return [entry for entry in entries if entry.table.metrics is not None]


def labels_used(tables: Tables, plan: PolicyPlan) -> Labels:
    """The labelled images, besides those of the reward network; with a learned reward `val` chooses the weights."""
    count = {name: len(_labelled(entries)) for name, entries in tables.items()}
    uses = {
        "reward": {} if not needs_truth(plan.reward) else {"policy": count["policy"]},
        "weights": {"val": count["val"]} if plan.learned else {},
        "deployment": {name: count[name] for name in ("policy", "val")},
    }
    return {use: {name: images for name, images in of.items() if images} for use, of in uses.items()}


def policy_samples(inputs: RunInputs, plan: PolicyPlan) -> dict[str, list[Sample]]:
    """The images of the splits `policy` and `val` that step 2 uses.

    Raises:
        ValueError: there are none, none is labelled although the reward needs it, or a file is damaged.
    """
    return {
        "policy": inputs.pick("policy", plan.images, labelled=needs_truth(plan.reward)),
        "val": inputs.pick("val", plan.val_images),
    }


def judged_samples(
    plan: PolicyPlan, samples: dict[str, list[Sample]], maps: ForegroundMaps
) -> tuple[dict[str, list[Sample]], DomainCheck | None]:
    """The samples without training images outside the network's domain, where the reward is learned, and their number.

    Raises:
        ValueError: an image cannot be read, or none is left.
    """
    if plan.reward not in LEARNED:
        return samples, None
    inside, check = in_domain(maps, (sample.load_image() for sample in samples["policy"]))
    if not any(inside):
        raise ValueError(f"no training image is left: {check.sentence}")
    return {**samples, "policy": list(compress(samples["policy"], inside))}, check


def _tables(
    inputs: RunInputs, plan: PolicyPlan, maps: ForegroundMaps, samples: dict[str, list[Sample]], file: Path
) -> Tables:
    """Tables for training and validation; a resumed run reads them from its folder."""
    if file.exists():
        return load_tables(file)
    tables = {
        name: prompt_tables(inputs, picked, maps, f"{name} patients", plan.vision_features)
        for name, picked in samples.items()
    }
    save_tables(file, tables)
    return tables


def _counts(inputs: RunInputs) -> dict[str, int]:
    """Calls of the frozen model in this process."""
    return {"computed": inputs.bank.computed, "reused": inputs.bank.reused, "encoded": inputs.bank.encoded}


def has_network(inputs: RunInputs, rewards: RewardPlan, reward_net: Path | None = None) -> Callable[[Run], bool]:
    """The condition, for `Run.find`, that a run began with a reward network of `rewards`, or with `reward_net`."""
    fingerprint = reward_net and RewardNetwork.from_pretrained(reward_net).fingerprint
    trained = origin(inputs, rewards)

    def began_with_it(run: Run) -> bool:
        network = RewardNetwork.from_pretrained(run / REWARD_NET)
        return network.fingerprint == fingerprint if fingerprint else not differences(network.training_info, trained)

    return began_with_it


def run_settings(inputs: RunInputs, plan: PolicyPlan) -> dict[str, Any]:
    """The settings that a run to resume must share."""
    return {
        **asdict(plan),
        "data_fingerprint": inputs.data_fingerprint,
        "model_fingerprint": inputs.segmenter.fingerprint,
        "prompts": list(inputs.prompts),
        "split_seed": inputs.split.seed,
        "unlabelled": inputs.unlabelled,
        **own_fingerprint([plan.reward]),
    }
