"""The evaluation as a whole: every prompt on test patients, the policy beside its baselines, the report."""

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rl_reward_network.data.sample import Sample
from rl_reward_network.embedded.datasets import is_rendered
from rl_reward_network.evaluation.baselines import ORACLE, POLICY, RIDGE, Comparison, compare, overlay_picks
from rl_reward_network.evaluation.bootstrap import Estimate, plain_segmenter
from rl_reward_network.evaluation.deployment import Deployment
from rl_reward_network.evaluation.overlays import Overlay, expected_errors
from rl_reward_network.evaluation.report import EvaluationResult, write_report
from rl_reward_network.inputs.loading import RunInputs, open_inputs
from rl_reward_network.inputs.saved import saved_config
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.models.sa2va.checkpoint_sa2va import DEFAULT_MODEL
from rl_reward_network.prompt_policy.policy import choose_prompts, load_policy, read_policy_config
from rl_reward_network.prompt_policy.stage import TABLES
from rl_reward_network.prompt_policy.tables import PromptTable, load_tables, prompt_tables, ridge_choices
from rl_reward_network.reward_training.stage import check_no_leak
from rl_reward_network.rewards.learned import truth_map
from rl_reward_network.runs.folder import REWARD_NET

FROZEN_CALLS = "evaluation: masks computed / read, images encoded"  # how often Sa2VA ran
SPLIT = "test"  # patients of val have decided what is deployed, so they prove nothing any more


@dataclass(frozen=True)
class Whereabouts:
    """What may be elsewhere than in training; None is as it was."""

    data_root: Path | None = None
    """Where the data are now, if not where they were in training."""
    base_model: str | None = None
    """Where Sa2VA is now, if not where it was in training."""
    gpu: int | None = None
    """Index of the GPU; -1 is the CPU; without it as in training."""
    segment_batch: int | None = None
    """Prompts decoded at once (SEGMENT_BATCH); without it as in training."""


def run_evaluation_stage(
    final_model: Path, where: Whereabouts, images: int | None = None, show_names: bool = False
) -> tuple[EvaluationResult, Path]:
    """Compare a policy with its baselines, and write `<run>/evaluation/`.

    Args:
        final_model: folder of a policy, in its run folder.
        where: model and data, if they were moved.
        images: at most this many test images, one per series before a second; None is all. The folder is then called
            `evaluation_<number>`.
        show_names: names of images and patients stand in the report in place of their hashes.

    Returns:
        What was measured, and the path of report.html.

    Raises:
        ValueError: the run is not whole, or data, model or reward network are others than in training.
    """
    if images is not None and images < 1:
        raise ValueError(f"--images: got {images}; give 1 or more, or leave it out for all")
    start, run = time.perf_counter(), final_model.parent
    config = read_policy_config(final_model)
    rollouts, seen = _rollouts(run / "metrics.jsonl"), load_tables(run / TABLES)
    world = _open_as_trained(config, where, run)
    network = _reward_network(config, world, run).to(world.config.device)
    samples = world.pick(SPLIT, images or len(world.samples))
    entries = prompt_tables(world, samples, network, f"{SPLIT} patients", config["plan"]["vision_features"])
    comparison, chosen = _compared(config, final_model, seen, entries)
    result = EvaluationResult(
        comparison,
        world.prompts,
        _about(config, world, (time.perf_counter() - start) / 60),
        (*segmenter_note(entries, comparison), *rehearsal_note(world)),
        _overlays(world, comparison, network, samples, chosen),
        rollouts,
        _names(world, samples) if show_names else {},
    )
    return result, write_report(run / ("evaluation" if images is None else f"evaluation_{len(samples)}"), result)


def _compared(
    config: dict[str, Any], final_model: Path, seen: dict[str, list[PromptTable]], entries: list[PromptTable]
) -> tuple[Comparison, np.ndarray]:
    """All rows on the test images, and the policy's prompts int64 (N,)."""
    plan, policy = config["plan"], load_policy(final_model)
    contexts, tables = [entry.context for entry in entries], [entry.table for entry in entries]
    steps, reward = plan["ppo"]["max_steps"], plan["reward"]
    chosen = choose_prompts(policy, contexts, steps, reward == "net")
    picks = {POLICY: chosen, RIDGE: ridge_choices(seen["policy"], entries, reward)}
    val, deployment = [entry.table for entry in seen["val"]], _deployment(config["deployment"])
    return compare(val, tables, picks, deployment, config["world"]["seed"], steps), chosen


def _open_as_trained(config: dict[str, Any], where: Whereabouts, run: Path) -> RunInputs:
    """The world of the run; a split that no longer fits the data is an error."""
    settings, limits = saved_config(run, config, where.data_root, where.base_model)
    gpu = where.gpu if where.gpu is not None else -1 if config["device"] == "cpu" else settings.gpu
    limits = replace(limits, segment_batch=where.segment_batch or limits.segment_batch)
    world = open_inputs(replace(settings, gpu=gpu), limits, run / "split.json", config["prompts"])
    if config["model_fingerprint"] != (found := world.segmenter.fingerprint):
        raise ValueError(
            f"{run / 'config.json'}: model_fingerprint is {config['model_fingerprint']}, now it is {found}; "
            f"evaluate on the kind of device it was trained on ({config['device']}), name its model by --base_model, "
            "or train again"
        )
    return world


def _reward_network(config: dict[str, Any], world: RunInputs, run: Path) -> RewardNetwork:
    """The network that rewarded this run, proven to be the same one."""
    path = run / REWARD_NET
    network = RewardNetwork.from_pretrained(path)
    check_no_leak(world.split, network, path)
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
    world: RunInputs, comparison: Comparison, network: RewardNetwork, samples: list[Sample], chosen: np.ndarray
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


def segmenter_note(entries: list[PromptTable], comparison: Comparison) -> tuple[str, ...]:
    """Whether a plain segmenter would serve better than any choice of prompts: the reward network is one."""
    own = np.array([entry.own_dice for entry in entries if entry.own_dice is not None])
    if not len(own):
        return ()
    groups = [table.group_id for table in comparison.tables]  # the labelled images, in the order of the entries
    best = comparison.values(comparison.row(ORACLE), "dice")
    return (plain_segmenter(own, best, groups, "the best prompt of each image", "any choice of prompts"),)


def rehearsal_note(world: RunInputs) -> tuple[str, ...]:
    """The embedded model on images that are not its own says nothing about Sa2VA."""
    own = world.config.model_path != DEFAULT_MODEL or is_rendered(world.config.data_root)
    return () if own else (f"{DEFAULT_MODEL} has learned rendered pictures only; name a real Sa2VA by MODEL_PATH.",)


def _names(world: RunInputs, samples: list[Sample]) -> dict[str, str]:
    """The file of each image below images/ and the name of each patient, by their hashes."""
    images = world.config.data_root / "images"
    files = {sample.sample_id: sample.image_path.relative_to(images).as_posix() for sample in samples}
    return files | {sample.group_id: sample.group for sample in samples}


def _about(config: dict[str, Any], world: RunInputs, minutes: float) -> dict[str, Any]:
    """What the reader of the report must know about where the numbers come from."""
    plan, bank, spent, network = config["plan"], config["bank"], config["seconds"], config["reward_net_info"]
    since = " (since it was resumed)" if config["resumed"] else ""
    return {
        "mode": f"{plan['mode']}, preset {plan['preset']}",
        "reward": plan["reward"],
        "split": SPLIT,
        "Sa2VA": Path(config["world"]["model_path"]).name,
        "model fingerprint": config["model_fingerprint"],
        "data": world.summary,
        "data fingerprint": config["data_fingerprint"][:16],
        "reward network": ", ".join(
            [f"{network['mode']}, seed {network['seed']}", *([network["named"]] if "named" in network else [])]
        ),
        "observation": f"{len(config['observation'])} numbers, {config['vision_features']} of them Sa2VA's features",
        "training": f"{plan['images']} images at most, {plan['ppo']['total_timesteps']} prompts tried",
        "seed": world.config.seed,
        "commit": config["commit"],
        "step 2: masks computed / read, images encoded": (
            f"{bank['computed']} / {bank['reused']}, {bank['encoded']}{since}"
        ),
        "step 2: minutes": ", ".join(f"{name} {value / 60:.2f}" for name, value in spent.items()) + since,
        FROZEN_CALLS: (f"{world.bank.computed} / {world.bank.reused}, {world.bank.encoded}"),
        "evaluation: minutes": f"{minutes:.1f}",
    }
