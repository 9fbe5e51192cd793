"""The stage of all experiments with PPO: score the masks, train the policy, decide what is deployed.

The arms are prompts (experiments 1 and 3), or sequences of operations on the mask of the default prompt (experiment 2).
"""

import tempfile
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3 import PPO

from rl_reward_network.atomic_io import read_json, write_json
from rl_reward_network.data.items import Sample
from rl_reward_network.env.observation import observation_table
from rl_reward_network.inputs.loading import RunInputs, describe_run
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.ppo.baselines import PROMPTS, SEQUENCES, Names
from rl_reward_network.ppo.contexts import (
    SEARCH,
    TABLES,
    Arms,
    Tables,
    exchange_rewards,
    load_tables,
    prompt_tables,
    save_tables,
    search_sequences,
    table_of,
    training_images,
    with_default_prompt,
)
from rl_reward_network.ppo.policy import choose_prompts, save_network
from rl_reward_network.ppo.settings import Mode, PPOSettings, Preset, operation_settings, prompt_settings
from rl_reward_network.ppo.train import train_prompt_policy
from rl_reward_network.report.deployment import (
    FOLDS,
    Deployment,
    Labels,
    RunCost,
    best_fixed_prompt,
    can_decide,
    decide,
    out_of_fold,
    stack,
)
from rl_reward_network.reward_training.stage import RewardPlan, check_no_leak, named, origin
from rl_reward_network.rewards.learned import DomainCheck, ForegroundMaps, in_domain
from rl_reward_network.rewards.table import LEARNED, OF_LABELS, RewardName, needs_truth, own_fingerprint
from rl_reward_network.run import (
    FINAL,
    POLICY_RUN,
    POST_RUN,
    REWARD_NET,
    SPENT,
    Kind,
    Run,
    clock,
    differences,
    peak_memory_gib,
)

IMAGES = {"quick": 20, "full": 100}
VAL_IMAGES = {"quick": 48, "full": 100}  # for the decision what is deployed; they take seconds
EDITED_IMAGES = {"quick": 96, "full": 240}  # of experiment 2; half of them for the search
SEARCHED = 48  # images of the search, at most; the others of its half train the policy
FOUND = "sequences.json"  # in the folder of a run of experiment 2: what the search has found


@dataclass(frozen=True)
class PolicyPlan:
    """Settings of step 2, or of experiment 2; `images` and `val_images` are the most of training and validation."""

    mode: str
    preset: str
    """default, or published: the settings of the original specification."""
    images: int
    val_images: int
    vision_features: bool
    """Whether the observation has Sa2VA's pooled image features besides the image statistics."""
    reward: RewardName
    ppo: PPOSettings
    shuffle_rewards: bool = False
    """The control: each training image has the rewards of another."""
    length: int = 0
    """Of the longest sequence of operations; 0 where the policy chooses prompts."""

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "PolicyPlan":
        """The plan in config.json of a run."""
        return cls(**{**saved, "ppo": PPOSettings.from_json(saved["ppo"])})

    @property
    def names(self) -> Names:
        """What is chosen from."""
        return SEQUENCES if self.length else PROMPTS

    @property
    def kind(self) -> Kind:
        """Of a new run: experiment 1 has its own beginning of the folder's name; POLICY_RUN finds both."""
        if self.length:
            return POST_RUN
        of_labels = self.reward in OF_LABELS
        return replace(POLICY_RUN, prefix=f"{POLICY_RUN.prefix}_experiment1") if of_labels else POLICY_RUN


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


def post_plan(
    mode: Mode,
    reward: RewardName = "dice",
    seed: int = 0,
    ppo: PPOSettings | None = None,
    shuffle_rewards: bool = False,
) -> PolicyPlan:
    """The preset of experiment 2, with the user's changes; `max_steps` is the length of the longest sequence."""
    settings = (ppo or operation_settings(mode)).of_run(seed)
    ppo, images = replace(settings, max_steps=1), EDITED_IMAGES[mode]
    return PolicyPlan(mode, "default", images, VAL_IMAGES[mode], True, reward, ppo, shuffle_rewards, settings.max_steps)


def run_policy_stage(inputs: RunInputs, plan: PolicyPlan, reward_net: Path | None, run: Run) -> None:
    """Train the policy in `run`; in an interrupted run, PPO begins anew.

    Writes final_model/, reward_net/ (a copy), tables.json (what the policy learned from), config.json, split.json,
    metrics.jsonl, cost.json and logs/; in experiment 2 sequences.json, too. `reward_net` is the folder of a network,
    None only in experiment 2; that of an interrupted run must be the one it began with.

    Raises:
        ValueError: the reward network is missing, damaged, or was trained on the policy's, val or test patients; the
            reward needs labels and there are none; the run is of another version or began with other settings, or
            another process works in it.
    """
    network = None if reward_net is None else RewardNetwork.from_pretrained(reward_net)
    if network is None and plan.reward in LEARNED:
        raise ValueError(f"reward {plan.reward}: there is no reward network; give --reward_net, or use --reward dice")
    if network is not None and reward_net is not None:
        check_no_leak(inputs.split, network, reward_net, inputs.samples)
    inputs = with_default_prompt(inputs) if plan.length else inputs
    settings, samples = run_settings(inputs, plan), policy_samples(inputs, plan)
    with_network = settings if network is None else {**settings, "reward_net": network.fingerprint}
    resumed = run.state != "new"
    with run.working(with_network, partial(_begin, run, inputs, plan, network)):
        seconds, spent = run.seconds_before(), run / SPENT
        before = _counts(inputs)
        with clock(seconds, "masks and scores", spent):
            maps = None
            if network is not None:
                maps = ForegroundMaps.beside(run.path, network.to(inputs.config.device))
            tables, domain, sequences = _scored(inputs, plan, samples, maps, run)
        with clock(seconds, "PPO", spent):
            model = fit(tables, plan, run.path)
        with clock(seconds, "decision", spent):
            deployment = decide_prompts(tables, plan)
        labels, peak = labels_used(tables, plan), peak_memory_gib(inputs.config.device)
        parameters = sum(tensor.numel() for tensor in model.policy.parameters())
        RunCost(seconds, labels, parameters, peak, resumed).save(run.path)
        vision = tables["policy"][0].vision_features
        description = {
            "deployment": asdict(deployment),
            "labels": labels,
            "seconds": seconds,
            "peak_memory_gib": peak,
            "resumed": resumed,
            "bank": {name: count - before[name] for name, count in _counts(inputs).items()},
            "domain": None if domain is None else asdict(domain),
            "observation": [entry.name for entry in observation_table(vision, bool(sequences))],
            "vision_features": vision,
            **({"sequences": sequences} if sequences else {}),
        }
        save_network(model, run / FINAL, {**run.config, **description})


def _begin(run: Run, inputs: RunInputs, plan: PolicyPlan, network: RewardNetwork | None) -> None:
    """Write the reward network, split.json and config.json of a new run."""
    facts: dict[str, Any] = {"plan": asdict(plan)}
    if network is not None:
        network.save_pretrained(run / REWARD_NET)
        info = {key: network.training_info.get(key) for key in ("mode", "data_fingerprint", "seed")}
        facts["reward_net_fingerprint"] = network.fingerprint
        facts["reward_net_info"] = {"named": named(network, run.path), **info}
    describe_run(run, inputs, run_settings(inputs, plan), facts)


def _scored(
    inputs: RunInputs, plan: PolicyPlan, samples: dict[str, list[Sample]], maps: ForegroundMaps | None, run: Run
) -> tuple[Tables, DomainCheck | None, tuple[tuple[str, ...], ...]]:
    """Tables, the check of the reward network's domain, and in experiment 2 the sequences; read if the run has them."""
    used, check = judged_samples(plan, samples, maps)
    if check is not None and check.outside:
        print(check.sentence)
    sequences: tuple[tuple[str, ...], ...] = ()
    if plan.length:
        used = with_search(used)
        if not (run / FOUND).exists():
            found = search_sequences(inputs, used[SEARCH][:SEARCHED], maps, plan.reward, plan.length)
            write_json(run / FOUND, found)
        sequences = tuple(map(tuple, read_json(run / FOUND)))
    if (run / TABLES).exists():
        return load_tables(run / TABLES), check, sequences
    arms = Arms(inputs, plan.vision_features, sequences)
    tables = {name: prompt_tables(arms, picked, maps, f"{name} patients") for name, picked in used.items()}
    save_tables(run / TABLES, tables)
    return tables, check, sequences


def with_search(samples: dict[str, list[Sample]]) -> dict[str, list[Sample]]:
    """The samples, with those of every other patient of `policy` for the search if it has none of its own.

    Patients of the search decide nothing: what is best of many on them is so by chance, too.
    """
    if SEARCH in samples:
        return samples
    patients = list(dict.fromkeys(sample.group_id for sample in samples["policy"]))
    parts: tuple[list[Sample], list[Sample]] = ([], [])
    for sample in samples["policy"]:
        parts[patients.index(sample.group_id) % 2].append(sample)
    return {SEARCH: parts[0], "policy": parts[1] or parts[0], "val": samples["val"]}


def fit(tables: Tables, plan: PolicyPlan, run: Path) -> PPO:
    """PPO on the training images, validated on those of `val`; writes its curves into `run`.

    In the control with shuffled rewards, each training image has the rewards of another.
    """
    images = training_images(tables)
    rewarded = exchange_rewards(images, plan.ppo.seed) if plan.shuffle_rewards else images
    return train_prompt_policy(rewarded, tables["val"], plan.ppo, run, plan.reward)


def decide_prompts(tables: Tables, plan: PolicyPlan) -> Deployment:
    """What is deployed, by the true masks of the patients of `policy` and `val`.

    No reward network was trained on them (`check_no_leak`), and no sequence was searched on them. PPO is judged out of
    fold, by fits as `fit`.
    """
    everything = [*tables["policy"], *tables["val"]]
    labelled = [context for context in everything if context.labelled]
    groups = [context.group_id for context in labelled]
    fixed = best_fixed_prompt([table_of(context) for context in everything])
    values = stack([table_of(context) for context in labelled], "dice").T if labelled else np.zeros((1, 0))
    policy = None
    if can_decide(groups):
        print(f"{FOLDS} more fits of PPO decide what is deployed: each is judged on patients that it has not seen")

        def measure(patients: frozenset[str], indices: np.ndarray) -> np.ndarray:
            held = [labelled[index] for index in indices]
            with tempfile.TemporaryDirectory() as folder:
                model = fit(_without(tables, patients), plan, Path(folder))
            return values[choose_prompts(model, held, plan.ppo.max_steps, plan.reward == "net"), indices]

        policy = out_of_fold(groups, measure)
    return decide(values, policy, groups, fixed, plan.names.fixed, plan.ppo.seed)


def _without(tables: Tables, patients: Collection[str]) -> Tables:
    """The tables of the other patients; where less than two training images are left, labelled ones of `val` join."""
    left = {name: [one for one in contexts if one.group_id not in patients] for name, contexts in tables.items()}
    more = [context for context in left["val"] if context.labelled and context.judged]
    return left if len(training_images(left)) > 1 else {**left, "policy": left["policy"] + more}


def labels_used(tables: Tables, plan: PolicyPlan) -> Labels:
    """The labelled images, besides those of the reward network; with a learned reward `val` chooses the weights."""
    count = {name: sum(context.labelled for context in contexts) for name, contexts in tables.items()}
    rewarded = {"policy": count["policy"]}
    if SEARCH in count and plan.reward in LEARNED:  # a half of the same split
        rewarded["policy"] += count[SEARCH]
    elif SEARCH in count:
        rewarded = {"reward": count[SEARCH], **rewarded}
    uses = {
        "reward": rewarded if needs_truth(plan.reward) else {},
        "weights": {} if plan.reward in OF_LABELS else {"val": count["val"]},
        "deployment": {name: count[name] for name in ("policy", "val")},
    }
    return {use: {name: images for name, images in of.items() if images} for use, of in uses.items()}


def policy_samples(inputs: RunInputs, plan: PolicyPlan) -> dict[str, list[Sample]]:
    """The images of the splits `policy` and `val`; in experiment 2, unless a network rewards, those of a search, too.

    Raises:
        ValueError: there are none, none is labelled although the reward needs it, or a file is damaged.
    """
    labelled = needs_truth(plan.reward)
    apart = plan.length > 0 and plan.reward not in LEARNED  # else a network has learned the patients of `reward`
    images = plan.images // 2 if apart else plan.images
    search = {SEARCH: inputs.pick("reward", images, labelled)} if apart else {}
    policy, val = inputs.pick("policy", images, labelled), inputs.pick("val", plan.val_images)
    return {**search, "policy": policy, "val": val}


def judged_samples(
    plan: PolicyPlan, samples: dict[str, list[Sample]], maps: ForegroundMaps | None
) -> tuple[dict[str, list[Sample]], DomainCheck | None]:
    """The samples without training images outside a learned reward's domain, and how many; none left: ValueError."""
    if plan.reward not in LEARNED or maps is None:
        return samples, None
    inside, check = in_domain(maps, (sample.load_image() for sample in samples["policy"]))
    if not any(inside):
        raise ValueError(f"no training image is left: {check.sentence}")
    return {**samples, "policy": list(compress(samples["policy"], inside))}, check


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
        "prompts": list(inputs.prompts[:1] if plan.length else inputs.prompts),
        **inputs.split.settings,
        "unlabelled": inputs.unlabelled,
        **own_fingerprint([plan.reward]),
    }
