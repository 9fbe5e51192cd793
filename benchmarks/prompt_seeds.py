"""Step 2 under several seeds: the shipped preset, the published one, and the control with shuffled rewards.

    bash run_experiment3.sh full               # for each seed: SEED=0 to SEED=4
    python -m benchmarks.prompt_seeds full
    python -m benchmarks.prompt_seeds quick --data_root data/angiograms_no_gap

Each seed has its own reward network, training images, policy weights and validation images; test patients are the same.
Shuffled: each training image is combined with the rewards of every training image, so that the best prompt on average
stays the best, and the image carries no information on which prompt suits it.
Written: <output_dir>/prompt_seeds/<mode>_<data>.json.
"""

import statistics
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks.common import show
from rl_reward_network.atomic_io import write_json
from rl_reward_network.cli.app import run
from rl_reward_network.env.observation import IMAGE_FEATURES
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.inputs.loading import open_inputs
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.ppo.baselines import DEFAULT, DEPLOYED, FIXED, LAST, NET, POLICY, RIDGE, Comparison, compare
from rl_reward_network.ppo.contexts import Arms, Tables, prompt_tables, ridge_choices, table_of
from rl_reward_network.ppo.policy import choose_prompts, load_weights
from rl_reward_network.ppo.prompts import PolicyPlan, decide_prompts, policy_plan
from rl_reward_network.ppo.train import LAST_WEIGHTS, train_prompt_policy
from rl_reward_network.report.statistics import Estimate, few_patients_note
from rl_reward_network.report.table import ORACLE
from rl_reward_network.reward_training.stage import check_no_leak, find_reward_network, reward_plan
from rl_reward_network.rewards.learned import ForegroundMaps

ROWS = (DEFAULT, FIXED, NET, RIDGE, POLICY, DEPLOYED, ORACLE)


@dataclass(frozen=True)
class Args:
    """Measure step 2 under several seeds."""

    mode: tyro.conf.Positional[Literal["quick", "full"]]
    """As in step 2; the reward networks must be of the same mode."""
    inputs: tyro.conf.OmitArgPrefixes[RunConfig]
    seeds: int = 5
    """Seeds 0, 1, ..."""


def main(args: Args) -> None:
    """Measure all seeds and print their tables."""
    results: dict[str, list[dict[str, Any]]] = {}
    for seed in range(args.seeds):
        config = replace(args.inputs, seed=seed)
        tables, plan = scored(config, args.mode), policy_plan(args.mode, seed=seed)
        for name, variant, data in (
            ("default", plan, tables),
            ("published", policy_plan(args.mode, "published", seed=seed), without_vision(tables)),
            ("shuffled", plan, shuffled(tables)),
        ):
            comparison = measured(data, variant)
            results.setdefault(name, []).append(summary(comparison))
    for name, seeds in results.items():
        show_seeds(f"{args.mode}, {name}", seeds)
    path = args.inputs.output_dir / "prompt_seeds" / f"{args.mode}_{args.inputs.data_root.name}.json"
    write_json(path, results)
    print(f"\nall numbers: {path}")


def scored(config: RunConfig, mode: str) -> Tables:
    """Every prompt's mask on this seed's images, scored by this seed's reward network."""
    inputs, plan = open_inputs(config), policy_plan(mode, seed=config.seed)  # type: ignore[arg-type]
    reward_net = find_reward_network(inputs, reward_plan(config, mode), config.seed)
    if reward_net is None:
        command = f"SEED={config.seed} DATA_ROOT={config.data_root} bash run_experiment3.sh {mode}"
        raise ValueError(f"{config.output_dir}: no {mode} reward network of seed {config.seed}; train one: {command}")
    network = RewardNetwork.from_pretrained(reward_net)
    check_no_leak(inputs.split, network, reward_net, samples=inputs.samples)
    counts = {"policy": plan.images, "val": plan.val_images, "test": len(inputs.samples)}
    maps = ForegroundMaps.beside(config.output_dir / "prompt_seeds", network.to(config.device))
    return {
        name: prompt_tables(Arms(inputs, True), inputs.pick(name, count), maps, f"seed {config.seed}, {name}")
        for name, count in counts.items()
    }


def without_vision(tables: Tables) -> Tables:
    """The tables without Sa2VA's features, the observation of the published preset."""
    return {
        name: [replace(entry, features=entry.features[:IMAGE_FEATURES]) for entry in entries]
        for name, entries in tables.items()
    }


def shuffled(tables: Tables) -> Tables:
    """All pairs of a training image and the rewards of a training image, so that features and rewards are independent.

    A single permutation is not enough: among few images of few kinds it often leaves more right than wrong pairs, from
    which a policy learns.
    """
    train = tables["policy"]
    pairs = [
        replace(reward, features=image.features, sample_id=f"{image.sample_id} {reward.sample_id}")
        for image in train
        for reward in train
    ]
    return {**tables, "policy": pairs}


def measured(tables: Tables, plan: PolicyPlan) -> Comparison:
    """Train on `policy`, decide on `policy` and `val`, compare on `test`."""
    plain = {name: [table_of(entry) for entry in entries] for name, entries in tables.items()}
    chosen = {RIDGE: ridge_choices(tables["policy"], tables["test"], plan.reward)}
    with tempfile.TemporaryDirectory() as folder:
        model = train_prompt_policy(tables["policy"], tables["val"], plan.ppo, Path(folder))
        chosen[POLICY] = choose_prompts(model, tables["test"])
        if (last := Path(folder) / LAST_WEIGHTS).exists():
            load_weights(model.policy, last)
        chosen[LAST] = choose_prompts(model, tables["test"])  # which no label has chosen: the verdict is on them
    deployment = decide_prompts(tables, plan)
    return compare(plain["val"], plain["test"], chosen, deployment, plan.ppo.seed)


def summary(comparison: Comparison) -> dict[str, Any]:
    """The numbers of one seed."""
    row, difference = comparison.results.row, comparison.results.difference
    deployed, default, policy = (row(name) for name in (DEPLOYED, DEFAULT, POLICY))
    return {
        "dice": {name: row(name).estimates["dice"].mean for name in ROWS},
        "closed": {name: comparison.closed(row(name)) for name in (RIDGE, POLICY, DEPLOYED)},
        "deployed": comparison.deployment.words("best fixed prompt"),
        "deployed_minus_fixed": asdict(difference(deployed, FIXED)),
        "ppo_minus_fixed": asdict(difference(policy, FIXED)),
        "dice_minus_default": difference(deployed, DEFAULT).mean,
        "recall_minus_default": deployed.estimates["recall"].mean - default.estimates["recall"].mean,
        "most_chosen": float(comparison.weights[POLICY].mean(axis=0).max()),
        "verdict": comparison.verdict.label,
    }


def show_seeds(title: str, seeds: list[dict[str, Any]]) -> None:
    """One line per seed, and the medians."""
    heads = ("PPO closes", "deployed closes", "deployed - fixed", "Dice, recall - default", "top share", "verdict")
    rows = []
    for number, seed in enumerate(seeds):
        closed = (seed["closed"][name] for name in (POLICY, DEPLOYED))
        rows.append(
            (
                number,
                *(f"{seed['dice'][name]:.3f}" for name in ROWS),
                *("-" if share is None else f"{share:.0%}" for share in closed),
                Estimate(**seed["deployed_minus_fixed"]),
                f"{seed['dice_minus_default']:+.3f}, {seed['recall_minus_default']:+.3f}",
                f"{seed['most_chosen']:.0%}",
                f"{seed['verdict']}; {seed['deployed']}",
            )
        )
    show(("seed", *ROWS, *heads), rows, title)
    for note in few_patients_note(seeds[0]["deployed_minus_fixed"]["groups"]):
        print(note)
    for name in (POLICY, DEPLOYED):
        shares = [seed["closed"][name] for seed in seeds if seed["closed"][name] is not None]
        if shares:
            print(f"{name} closes {statistics.median(shares):.0%} of the gap in the median seed")
    lows = [seed["deployed_minus_fixed"]["low"] for seed in seeds]
    low = "none of so few patients" if None in lows else f"{min(lows):+.3f}"
    gains = [min(seed[f"{name}_minus_default"] for seed in seeds) for name in ("dice", "recall")]
    print(f"worst seed: lower bound of deployed - best fixed {low}; means of deployed - default, Dice and recall:")
    print("  " + ", ".join(f"{gain:+.3f}" for gain in gains))


if __name__ == "__main__":
    run(main, Args)
