"""Compare a trained prompt policy with its baselines on patients it has never seen, and write the report.

    python -m scripts.evaluate_rl_finetuned_sa2va --model_path outputs/sa2va_rl_finetune_*/final_model --split test

Model, data, prompts and reward network are the run's own, read from its config.json. Written: <run>/evaluation/ with
eval.json, eval.csv and report.html (one file; open it in a browser).
"""

import glob
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from rl_reward_network.data.embedded import RECIPE_FILE
from rl_reward_network.data.sample import Sample
from rl_reward_network.evaluation.baselines import (
    ORACLE,
    POLICY,
    RIDGE,
    Comparison,
    compare,
    overlay_picks,
)
from rl_reward_network.evaluation.bootstrap import Estimate, group_bootstrap
from rl_reward_network.evaluation.deployment import Deployment
from rl_reward_network.evaluation.overlays import Overlay, expected_errors
from rl_reward_network.evaluation.report import EvaluationResult, deployed_sentence, write_report
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.models.sa2va.checkpoint_sa2va import DEFAULT_MODEL
from rl_reward_network.rewards.learned import truth_map
from rl_reward_network.training.policy_stage import REWARD_NET, TABLES
from rl_reward_network.training.prompt_policy import choose_prompts, load_policy, read_policy_config
from rl_reward_network.training.prompt_tables import PromptTable, load_tables, prompt_tables, ridge_choices
from rl_reward_network.training.reward_stage import check_no_leak
from rl_reward_network.training.run_folder import world_config
from rl_reward_network.training.world import World, open_world
from scripts.cli import run


@dataclass(frozen=True)
class Args:
    """Compare a trained prompt policy with its baselines on patients it has never seen."""

    model_path: tuple[str, ...]
    """The run's final_model folder; several (a pattern) mean the newest of them."""
    split: Literal["test"] = "test"
    """Patients to evaluate on; those of val have decided what is deployed, so they prove nothing any more."""
    images: int | None = None
    """At most this many images, one per series before a second; without it all."""
    data_root: Path | None = None
    """Where the data are now, if not where they were in training."""
    base_model: str | None = None
    """Where Sa2VA is now, if not where it was in training."""
    gpu: int | None = None
    """Index of the GPU; -1 is the CPU; without it as in training."""
    segment_batch: int | None = None
    """Prompts decoded at once (SEGMENT_BATCH); without it as in training."""
    show_names: bool = False
    """Put the names of images and patients into the report in place of their hashes."""


def main(args: Args) -> None:
    """Score every prompt on the split, compare the rows, write the report."""
    if args.images is not None and args.images < 1:
        raise ValueError(f"--images: got {args.images}; give 1 or more, or leave it out for all")
    start = time.perf_counter()
    final_model = newest(args.model_path)
    folder = final_model.parent
    config = read_policy_config(final_model)
    plan, deployment = config["plan"], _deployment(config["deployment"])
    policy, seen = load_policy(final_model), load_tables(folder / TABLES)
    rollouts = _rollouts(folder / "metrics.jsonl")
    world = _open_as_trained(config, args, folder)
    network = _reward_network(config, world, folder).to(world.config.device)
    samples = world.pick(args.split, args.images or len(world.samples))
    entries = prompt_tables(world, samples, network, f"{args.split} patients", plan["vision_features"])
    contexts, tables = [entry.context for entry in entries], [entry.table for entry in entries]
    chosen = {
        POLICY: choose_prompts(policy, contexts, plan["ppo"]["max_steps"], plan["reward"] == "net"),
        RIDGE: ridge_choices(seen["policy"], entries, plan["reward"]),
    }
    val = [entry.table for entry in seen["val"]]
    comparison = compare(val, tables, chosen, deployment, world.config.seed, plan["ppo"]["max_steps"])
    overlays = _overlays(world, comparison, network, samples, chosen[POLICY])
    about = _about(config, args.split, world, (time.perf_counter() - start) / 60)
    names = _names(samples) if args.show_names else {}
    notes = (*_segmenter_note(entries, comparison), *_rehearsal_note(world))
    result = EvaluationResult(comparison, world.prompts, about, notes, overlays, rollouts, names)
    report = write_report(folder / ("evaluation" if args.images is None else f"evaluation_{len(samples)}"), result)
    _show(comparison, notes)
    print(world.bank.counts())
    print(f"\nreport: {report}")


def newest(paths: tuple[str, ...]) -> Path:
    """The newest of the folders that the paths or patterns name.

    Raises:
        ValueError: no folder matches.
    """
    matches = {Path(match) for path in paths for match in ([path] if Path(path).exists() else glob.glob(path))}
    found = sorted(matches, key=lambda match: match.stat().st_mtime)
    if not found:
        raise ValueError(
            f"model_path {' '.join(paths)}: no such folder; train a policy: bash run_step2_finetune.sh quick"
        )
    if len(found) > 1:
        print(f"{len(found)} folders match, the newest is evaluated: {found[-1]}")
    return found[-1]


def _open_as_trained(config: dict[str, Any], args: Args, folder: Path) -> World:
    """The world of the run; a split that no longer fits the data is an error."""
    own = world_config(folder, config, args.data_root, args.base_model)
    gpu = args.gpu if args.gpu is not None else -1 if config["device"] == "cpu" else own.gpu
    own = replace(own, gpu=gpu, segment_batch=args.segment_batch or own.segment_batch)
    world = open_world(own, folder / "split.json", config["prompts"])
    if config["model_fingerprint"] != (found := world.segmenter.fingerprint):
        raise ValueError(
            f"{folder / 'config.json'}: model_fingerprint is {config['model_fingerprint']}, now it is {found}; "
            f"evaluate on the kind of device it was trained on ({config['device']}), name its model by --base_model, "
            "or train again"
        )
    return world


def _reward_network(config: dict[str, Any], world: World, folder: Path) -> RewardNetwork:
    """The network that rewarded this run, proven to be the same one."""
    path = folder / REWARD_NET
    network = RewardNetwork.from_pretrained(path)
    check_no_leak(world, network, path)
    if network.fingerprint != config["reward_net_fingerprint"]:
        raise ValueError(f"{path}: has other weights than in training; copy the run folder again, or run step 2 again")
    return network


def _deployment(saved: dict[str, Any]) -> Deployment:
    """What validation decided, from the policy's config.json."""
    return Deployment(**{**saved, "difference": Estimate(**saved["difference"])})


def _rollouts(path: Path) -> tuple[dict[str, Any], ...]:
    """The training's curves."""
    try:
        return tuple(json.loads(line) for line in path.read_text().splitlines())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); run step 2 again") from None


def _overlays(
    world: World, comparison: Comparison, network: RewardNetwork, samples: list[Sample], chosen: np.ndarray
) -> tuple[Overlay, ...]:
    """Best, median and worst image of the policy, with the masks of the default and of the chosen prompt."""
    ids, overlays = [sample.sample_id for sample in samples], []
    for title, place in overlay_picks(comparison).items():
        index = ids.index(comparison.tables[place].sample_id)
        image = samples[index].load_image()
        masks = world.probabilities(image) > 0.5
        mine = masks[chosen[index]]
        errors = expected_errors(mine, truth_map(network, image))
        overlays.append(Overlay(title, ids[index], image, samples[index].load_mask(), masks[0], mine, errors))
    return tuple(overlays)


def _segmenter_note(entries: list[PromptTable], comparison: Comparison) -> tuple[str, ...]:
    """Whether a plain segmenter would serve better than any choice of prompts: the reward network is one."""
    own = [(e.own_dice, e.table.group_id) for e in entries if e.own_dice is not None]
    if not own:
        return ()
    dices, groups = zip(*own, strict=True)
    found, oracle = group_bootstrap(np.array(dices), groups, 0), comparison.row(ORACLE).means["dice"]
    advice = ": a plain segmenter serves these images better than any choice among the prompts"
    return (
        f"The reward network's own segmentation of these images has Dice {found}, the best prompt of each image "
        f"{oracle}{advice if found.mean > oracle.mean else ''}.",
    )


def _rehearsal_note(world: World) -> tuple[str, ...]:
    """The embedded model on images that are not its own says nothing about Sa2VA."""
    own = world.config.model_path != DEFAULT_MODEL or (world.config.data_root / RECIPE_FILE).exists()
    return () if own else (f"{DEFAULT_MODEL} has learned rendered pictures only; name a real Sa2VA by MODEL_PATH.",)


def _names(samples: list[Sample]) -> dict[str, str]:
    """The file of each image and the name of each patient, by their hashes."""
    return {s.sample_id: s.image_path.name for s in samples} | {s.group_id: s.group for s in samples}


def _about(config: dict[str, Any], split: str, world: World, minutes: float) -> dict[str, Any]:
    """What the reader of the report must know about where the numbers come from."""
    plan, bank, spent = config["plan"], config["bank"], config["seconds"]
    since = " (since it was resumed)" if config["resumed"] else ""
    return {
        "mode": f"{plan['mode']}, preset {plan['preset']}",
        "reward": plan["reward"],
        "split": split,
        "Sa2VA": Path(config["world"]["model_path"]).name,
        "model fingerprint": config["model_fingerprint"],
        "data fingerprint": config["data_fingerprint"][:16],
        "reward network": f"{config['reward_net_info']['mode']}, seed {config['reward_net_info']['seed']}",
        "observation": f"{len(config['observation'])} numbers, {config['vision_features']} of them Sa2VA's features",
        "training": f"{plan['images']} images at most, {plan['ppo']['total_timesteps']} prompts tried",
        "seed": world.config.seed,
        "commit": config["commit"],
        "step 2: masks computed / read, images encoded": (
            f"{bank['computed']} / {bank['reused']}, {bank['encoded']}{since}"
        ),
        "step 2: minutes": ", ".join(f"{name} {value / 60:.2f}" for name, value in spent.items()) + since,
        "evaluation: masks computed / read, images encoded": (
            f"{world.bank.computed} / {world.bank.reused}, {world.bank.encoded}"
        ),
        "evaluation: minutes": f"{minutes:.1f}",
    }


def _show(comparison: Comparison, notes: tuple[str, ...]) -> None:
    """The rows on the terminal, and the verdict in words."""
    table = Table(title=f"mean over patients ({comparison.criterion}), minus default and best fixed", box=box.SIMPLE)
    for name in ("", "mean [95 %]", "-default", "-fixed", "closed"):
        table.add_column(name, no_wrap=True)
    for row in comparison.rows:
        closed = "-" if row.gap_closed is None else f"{row.gap_closed:.0%}"
        differences = (f"{row.to_default.mean:+.3f}", f"{row.to_fixed.mean:+.3f}")
        table.add_row(row.name, f"{row.means[comparison.criterion]}".replace("[", r"\["), *differences, closed)
    Console().print(table)
    for line in (comparison.verdict.sentence, deployed_sentence(comparison), *comparison.notes, *notes):
        print(line)


if __name__ == "__main__":
    run(main, Args)
