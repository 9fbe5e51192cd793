"""The evaluation of a policy: all its arms on test patients, the policy beside its baselines, the report."""

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rl_reward_network.data.items import Sample
from rl_reward_network.data_import.write import import_notes
from rl_reward_network.embedded.datasets import is_rendered
from rl_reward_network.env.sa2va_finetune_env import PromptContext
from rl_reward_network.inputs.loading import RunInputs, open_inputs, saved_config
from rl_reward_network.models.default import DEFAULT_MODEL
from rl_reward_network.models.reward_network import RewardNetwork, error_map
from rl_reward_network.ppo.baselines import DEPLOYED, LAST, POLICY, THRESHOLD, Comparison, compare
from rl_reward_network.ppo.contexts import (
    TABLES,
    Arms,
    Tables,
    exchange_rewards,
    load_tables,
    prompt_tables,
    ridge_choices,
    table_of,
    training_images,
)
from rl_reward_network.ppo.operations import words
from rl_reward_network.ppo.policy import choose_prompts, load_policy, load_weights, read_policy_config
from rl_reward_network.ppo.prompt_report import EvaluationResult, Overlay, write_report
from rl_reward_network.ppo.prompts import PolicyPlan
from rl_reward_network.ppo.settings import TEST_IMAGES
from rl_reward_network.ppo.train import LAST_WEIGHTS
from rl_reward_network.report.deployment import Deployment, labels_sentence
from rl_reward_network.report.page import Origin, made_by
from rl_reward_network.report.statistics import plain_segmenter
from rl_reward_network.report.table import ORACLE
from rl_reward_network.reward_training.stage import check_no_leak
from rl_reward_network.rewards.learned import ForegroundMaps
from rl_reward_network.rewards.table import LEARNED, OF_LABELS
from rl_reward_network.run import REWARD_NET, reward_run_files

FROZEN_CALLS = "evaluation: masks computed / read, images encoded"  # number of calls of Sa2VA
SPLIT = "test"  # val patients decide what is deployed, so they are no independent test
NO_NETWORK = "There is no reward network, so no row of its choice."


@dataclass(frozen=True)
class PathOverrides:
    """Paths and devices that may differ from training; None is the value of training."""

    data_root: Path | None = None
    """Folder of the data, if it was moved since training."""
    base_model: str | None = None
    """Folder of Sa2VA, if it was moved since training."""
    gpu: int | None = None
    """Index of the GPU, -1 for the CPU; by default as in training."""
    segment_batch: int | None = None
    """Prompts decoded at once (SEGMENT_BATCH); by default as in training."""


def run_evaluation_stage(
    final_model: Path, where: PathOverrides, images: int | None = None, show_names: bool = False, edits: bool = False
) -> tuple[EvaluationResult, Path]:
    """Compare the policy in a run's `final_model` with its baselines, and write `<run>/evaluation/`.

    With at most `images` test images, one per series before a second, the folder is `evaluation_<number>`; None is all,
    but 80 for prompts in quick mode. `show_names` writes names into the report, not hashes; `edits`: whether the policy
    chooses operations (experiment 2). Returns the path of report.html, too.

    Raises:
        ValueError: the run is incomplete, or data, model or reward network differ from training.
    """
    if images is not None and images < 1:
        raise ValueError(f"--images: got {images}; give 1 or more, or leave it out for all")
    start, run = time.perf_counter(), final_model.parent
    config = read_policy_config(final_model, edits)
    plan = PolicyPlan.from_json(config["plan"])
    rollouts, trained_on = _rollouts(run / "metrics.jsonl"), load_tables(run / TABLES)
    inputs = open_as_trained(config, where, run)
    network = _reward_network(config, inputs, run)
    maps = None if network is None else ForegroundMaps.beside(run, network.to(inputs.config.device))
    samples, fewer = pick_test_samples(inputs, "full" if edits else plan.mode, images)
    sequences = tuple(map(tuple, config.get("sequences", [])))
    arms = Arms(inputs, plan.vision_features, sequences)
    entries = prompt_tables(arms, samples, maps, f"{SPLIT} patients")
    comparison = _compared(config, plan, final_model, trained_on, entries)
    result = EvaluationResult(
        comparison,
        tuple(map(words, sequences)) or inputs.prompts,
        _about(config, inputs, (time.perf_counter() - start) / 60),
        (
            *fewer,
            *_labels_note(config),
            *(segmenter_note(entries, comparison) if maps else [NO_NETWORK]),
            *rehearsal_note(inputs),
            *import_notes(inputs.config.data_root, inputs.samples),
        ),
        _overlays(arms, comparison, maps, samples),
        rollouts,
        _names(inputs, samples) if show_names else {},
        _origin(config, inputs, final_model, {**vars(where), "images": images, "show_names": show_names}),
    )
    return result, write_report(run / ("evaluation" if images is None else f"evaluation_{len(samples)}"), result)


def pick_test_samples(inputs: RunInputs, mode: str, images: int | None) -> tuple[list[Sample], tuple[str, ...]]:
    """The test images of an evaluation, as in `run_evaluation_stage`, and a note if quick mode leaves any out."""
    samples = inputs.pick(SPLIT, images or TEST_IMAGES.get(mode, len(inputs.samples)))
    total = len(inputs.pick(SPLIT, len(inputs.samples)))
    if images or len(samples) == total:
        return samples, ()
    return samples, (f"quick: {len(samples)} of {total} test images; evaluate --images {total} takes all.",)


def _compared(
    config: dict[str, Any], plan: PolicyPlan, final_model: Path, trained_on: Tables, entries: list[PromptContext]
) -> Comparison:
    policy, steps, names = load_policy(final_model, plan.length > 0), plan.ppo.max_steps, plan.names
    train = training_images(trained_on)
    rewarded = exchange_rewards(train, plan.ppo.seed) if plan.shuffle_rewards else train
    picks = {
        POLICY: choose_prompts(policy, entries, steps, plan.reward == "net"),
        names.ridge: ridge_choices(rewarded, entries, plan.reward),
    }
    if plan.length:
        picks[THRESHOLD] = np.ones(len(entries), dtype=np.int64)
    if config.get("labels", {}).get("weights"):  # labels have not chosen the weights of the last step
        if (archive := final_model.parent / LAST_WEIGHTS).exists():
            load_weights(policy, archive)
        picks[LAST] = choose_prompts(policy, entries, steps, plan.reward == "net")
    deployment = Deployment.from_json(config["deployment"])
    val, test = ([table_of(entry) for entry in part] for part in (trained_on["val"], entries))
    return compare(val, test, picks, deployment, config["inputs"]["seed"], steps, names)


def open_as_trained(config: dict[str, Any], where: PathOverrides, run: Path) -> RunInputs:
    """The inputs of the run; a split that no longer fits the data, or another model, is an error."""
    settings, limits = saved_config(run, config, where.data_root, where.base_model)
    gpu = where.gpu if where.gpu is not None else -1 if config["device"] == "cpu" else settings.gpu
    limits = replace(limits, segment_batch=where.segment_batch or limits.segment_batch)
    inputs = open_inputs(replace(settings, gpu=gpu), limits, run / "split.json", config["prompts"])
    if config["model_fingerprint"] != (fingerprint := inputs.segmenter.fingerprint):
        raise ValueError(
            f"{run / 'config.json'}: model_fingerprint is {config['model_fingerprint']}, now it is {fingerprint}; "
            f"evaluate on the kind of device it was trained on ({config['device']}), name its model by --base_model, "
            "or train again"
        )
    return inputs


def _reward_network(config: dict[str, Any], inputs: RunInputs, run: Path) -> RewardNetwork | None:
    """The reward network of this run, checked by its fingerprint; None if it has none (experiment 2)."""
    path = run / REWARD_NET
    if "reward_net_fingerprint" not in config:
        return None
    network = RewardNetwork.from_pretrained(path)
    check_no_leak(inputs.split, network, path, samples=inputs.samples)
    if network.fingerprint != config["reward_net_fingerprint"]:
        raise ValueError(f"{path}: weights differ from training; copy the run folder again, or run step 2 again")
    return network


def _rollouts(path: Path) -> tuple[dict[str, Any], ...]:
    try:
        return tuple(json.loads(line) for line in path.read_text().splitlines())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); run step 2 again") from None


def _overlays(
    arms: Arms, comparison: Comparison, maps: ForegroundMaps | None, samples: list[Sample]
) -> tuple[Overlay, ...]:
    """Best, median and worst image of the deployed choice, with the mask of the first arm and the deployed one."""
    ids, overlays = [sample.sample_id for sample in samples], []
    deployed = comparison.prompts(DEPLOYED)
    for title, number in comparison.results.picks(DEPLOYED).items():
        sample = samples[ids.index(comparison.results.ids[number][0])]
        image = sample.load_image()
        masks = arms.of(image)[0]
        mask, errors = masks[deployed[number]], None
        if maps is not None:
            errors = error_map(mask.astype(np.float32), maps.scorer(image).foreground_prob)
        overlays.append(Overlay(title, number, image, sample.load_mask(), masks[0], mask, errors))
    return tuple(overlays)


def _labels_note(config: dict[str, Any]) -> tuple[str, ...]:
    """A note on which labels chose what; runs of 0.11 and earlier did not record it."""
    if "choice" not in config["deployment"]:
        return ()
    reward = config["plan"]["reward"]
    note = labels_sentence(config["labels"])
    if reward in LEARNED:
        note = f"The reward network gave the reward. {note}"
    elif reward not in OF_LABELS:
        note = f"The reward was {reward}, which needs no labels. {note}"
    if config["labels"]["weights"]:
        note += f" The verdict is on the row {LAST}, which no label has chosen."
    return (note,)


def segmenter_note(entries: list[PromptContext], comparison: Comparison) -> tuple[str, ...]:
    """A note on whether a plain segmenter, such as the reward network, beats any choice of prompts or operations."""
    labelled = [entry for entry in entries if entry.labelled]  # as in `comparison`
    if not labelled:
        return ()
    segmenter_dice = np.array([np.nan if entry.own_dice is None else entry.own_dice for entry in labelled])
    groups, arm = [entry.group_id for entry in labelled], comparison.names.arm
    best = comparison.results.row(ORACLE).values["dice"]
    return (plain_segmenter(segmenter_dice, best, groups, f"the best {arm} of each image", f"any choice of {arm}s"),)


def rehearsal_note(inputs: RunInputs) -> tuple[str, ...]:
    """A note on the embedded model when it is evaluated on images that were not rendered for it."""
    if inputs.config.model_path != DEFAULT_MODEL or is_rendered(inputs.config.data_root):
        return ()
    return (f"{DEFAULT_MODEL} has learned rendered pictures only; train it (sa2va-rl improve), or set MODEL_PATH.",)


def _names(inputs: RunInputs, samples: list[Sample]) -> dict[str, str]:
    """The file name of each image below images/ and the name of each patient, by their hashes."""
    images = inputs.config.data_root / "images"
    files = {sample.sample_id: sample.image_path.relative_to(images).as_posix() for sample in samples}
    return files | {sample.group_id: sample.group for sample in samples}


def _origin(config: dict[str, Any], inputs: RunInputs, final_model: Path, flags: dict[str, Any]) -> Origin:
    run, model = final_model.parent, f"{Path(config['inputs']['model_path']).name}, {config['model_fingerprint']}"
    data = f"{inputs.config.data_root.name}: {inputs.summary}, split {SPLIT}"
    flags = {"model_path": final_model, **flags}
    origin = made_by("evaluate", flags, data, model, config["version"], run / "logs")
    files = {"run of the policy": run, "what it learned from": run / TABLES, "its metrics": run / "metrics.jsonl"}
    network = config.get("reward_net_info", {}).get("named")
    return replace(origin, files={**origin.files, **files, **reward_run_files(run, network)})


def _about(config: dict[str, Any], inputs: RunInputs, minutes: float) -> dict[str, Any]:
    plan, bank, spent = config["plan"], config["bank"], config["seconds"]
    network = config.get("reward_net_info")
    arms = "sequences" if config.get("sequences") else "prompts"
    named = [] if network is None else [f"{network['mode']}, seed {network['seed']}"]
    since = " (it was interrupted)" if config["resumed"] else ""
    return {
        "mode": f"{plan['mode']}, preset {plan['preset']}",
        "reward": plan["reward"] + (", exchanged between images (control)" if plan.get("shuffle_rewards") else ""),
        "split": SPLIT,
        "Sa2VA": Path(config["inputs"]["model_path"]).name,
        "model fingerprint": config["model_fingerprint"],
        "data": inputs.summary,
        "data fingerprint": config["data_fingerprint"][:16],
        "reward network": ", ".join([*named, *([network["named"]] if network and "named" in network else [])])
        or "none",
        "observation": f"{len(config['observation'])} numbers, {config['vision_features']} of them Sa2VA's features",
        "training": f"{plan['images']} images at most, {plan['ppo']['total_timesteps']} {arms} tried",
        "seed": inputs.config.seed,
        "commit": config["commit"],
        "step 2: masks computed / read, images encoded": (
            f"{bank['computed']} / {bank['reused']}, {bank['encoded']}{since}"
        ),
        "step 2: minutes": ", ".join(f"{name} {value / 60:.2f}" for name, value in spent.items()) + since,
        FROZEN_CALLS: f"{inputs.bank.computed} / {inputs.bank.reused}, {inputs.bank.encoded}",
        "evaluation: minutes": f"{minutes:.1f}",
    }
