"""The evaluation of a GRPO run: the model as it was and as it is now, on items of groups that training has not seen."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from rl_reward_network.artefacts import read_json
from rl_reward_network.data.splits import spread
from rl_reward_network.evaluation.before_after import BeforeAfter, ShownItem, compare_models, write_before_after
from rl_reward_network.evaluation.bootstrap import plain_segmenter
from rl_reward_network.grpo.card import training_facts
from rl_reward_network.grpo.checkpoint import STATE
from rl_reward_network.grpo.inputs import GRPOInputs, open_grpo_inputs
from rl_reward_network.grpo.items import GRPOItem
from rl_reward_network.grpo.measure import Measured, iou_of_captions, measure, unpacked
from rl_reward_network.grpo.rollouts.features import FeatureCache
from rl_reward_network.grpo.setup import prepare_model
from rl_reward_network.grpo.stage import STAGE
from rl_reward_network.grpo.validation import scores
from rl_reward_network.inputs.config import RegionConfig, RunConfig, pick_fields
from rl_reward_network.inputs.saved import located_data, located_model
from rl_reward_network.models.ema import copied, swapped
from rl_reward_network.models.fingerprint import weights_fingerprint
from rl_reward_network.models.lora import load_trainable
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.models.sa2va.loading_sa2va import check_device
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.rewards.captions import meteor_variant
from rl_reward_network.rewards.learned import truth_map
from rl_reward_network.rewards.masks import dice
from rl_reward_network.runs.checkpoints import load_checkpoint
from rl_reward_network.runs.folder import FINAL, REWARD_NET

SPLIT = "test"
TRAINED = "trainable"  # folder of the tensors, in a final_model as in a checkpoint
SHOWN = 3  # items at each end


def grpo_model(path: Path) -> Path | None:
    """The folder with what a GRPO run has trained: its final_model or a checkpoint, named by itself or by the run.

    Of a run that was cut off the last checkpoint is taken, and said; None where the path is no GRPO run's.
    """
    for folder in (path, path / FINAL):
        if (folder / TRAINED).is_dir() and trained_config(folder).get("stage") == STAGE:
            return folder
    last = get_last_checkpoint(str(path)) if path.is_dir() else None
    if last is None or trained_config(Path(last)).get("stage") != STAGE:
        return None
    print(f"{path}: no {FINAL} here, the run has not ended; its last checkpoint is taken: {last}")
    return Path(last)


def trained_config(folder: Path) -> dict[str, Any]:
    """What the folder says of the run: config.json of a final_model; of a checkpoint the run's, with steps and minutes.

    Empty where there is none.
    """
    if (folder / "config.json").exists():
        return dict(read_json(folder / "config.json"))
    if not (folder.parent / "config.json").exists() or not (folder / TRAINER_STATE_NAME).exists():
        return {}
    steps = read_json(folder / TRAINER_STATE_NAME)["global_step"]
    minutes = load_checkpoint(folder / STATE)["seconds"] / 60
    return {**read_json(folder.parent / "config.json"), "steps": steps, "minutes": minutes}


def evaluation_folder(trained: Path, items: int | None = None) -> Path:
    """Where the evaluation of a final_model or a checkpoint is written, on all test items or on so many."""
    which = "" if trained.name == FINAL else f"_{trained.name}"
    return trained.parent / f"evaluation{which}{'' if items is None else f'_{items}'}"


def run_grpo_evaluation(
    final_model: Path,
    data_root: Path | None = None,
    base_model: str | None = None,
    gpu: int | None = None,
    items: int | None = None,
) -> tuple[BeforeAfter, Path]:
    """Compare both models, and write `<run>/evaluation/`.

    Args:
        final_model: of a GRPO run, or one of its checkpoints.
        data_root, base_model: where data and Sa2VA are now, if not where they were.
        gpu: index; -1 is the CPU; None is as in training.
        items: at most so many test items; the folder is then `evaluation_<number>`.

    Raises:
        ValueError: the run is not whole, or data or model are others than in training.
    """
    if items is not None and items < 1:
        raise ValueError(f"--images: got {items}; give 1 or more, or leave it out for all")
    try:
        return _evaluate(final_model, data_root, base_model, gpu, items)
    except torch.OutOfMemoryError as error:
        raise ValueError("out of GPU memory in the evaluation; --gpu -1 makes it on the CPU") from error


def _evaluate(
    final_model: Path, data_root: Path | None, base_model: str | None, gpu: int | None, items: int | None
) -> tuple[BeforeAfter, Path]:
    start, run, config = time.perf_counter(), final_model.parent, trained_config(final_model)
    world = _open(config, run, data_root, gpu)
    found = world.pick(SPLIT)
    picked = found if items is None else spread(found, items, world.config.seed)
    path = base_model or located_model(run, config, "--base_model")
    model, processor = load_base(path, config["origin"]["model_fingerprint"], world.device)
    processor.max_tiles = world.regions.max_dynamic_patch
    prepare_model(model, config["origin"]["lora_r"], config["origin"]["lora_alpha"])
    cache, longest = FeatureCache(model, processor), config["origin"]["settings"]["max_completion_length"]
    start_weights = copied(model)
    before = measure(model, picked, cache, longest, desc="before")
    load_trainable(model, final_model / TRAINED)
    after = measure(model, picked, cache, longest, desc="after")
    notes: tuple[str, ...] = ()
    if (run / REWARD_NET).exists():
        network = RewardNetwork.from_pretrained(run / REWARD_NET).to(world.device)
        for measured in (before, after):
            measured.values["learned"] = scores(network, picked, measured)
        notes = segmenter_note(network, picked, after)
    with swapped(model, start_weights):
        _add_neutral_partner(model, picked, cache, before, after)
    minutes = (time.perf_counter() - start) / 60
    result = replace(_result(world, config, picked, before, after, run, minutes), notes=notes)
    return result, write_before_after(evaluation_folder(final_model, None if items is None else len(picked)), result)


def load_base(path: str, fingerprint: str, device: str = "cpu") -> tuple[Any, Sa2VAProcessor]:
    """Model and processor that a run began from; float32 on the CPU, after the rounding to bfloat16 that a GPU did.

    Raises:
        ValueError: the weights are others than in training.
    """
    check_device(device)
    dtypes = (torch.float32, torch.bfloat16) if device == "cpu" else (torch.bfloat16, torch.float32)
    for dtype in dtypes:
        model: Any = Sa2VAForConditionalGeneration.from_pretrained(path, dtype=dtype)
        if weights_fingerprint(model) == fingerprint:
            model = model.float() if device == "cpu" else model
            return model.to(device), Sa2VAProcessor.from_pretrained(path)
    raise ValueError(f"{path}: these are other weights than in training; give --base_model, the model of that run")


def _open(config: dict[str, Any], run: Path, data_root: Path | None, gpu: int | None) -> GRPOInputs:
    saved = config["world"]
    paths: dict[str, Any] = {"data_root": data_root or located_data(run, config), "output_dir": run.parent}
    settings = replace(pick_fields(RunConfig, saved), **paths, gpu=saved["gpu"] if gpu is None else gpu)
    return open_grpo_inputs(settings, pick_fields(RegionConfig, saved), run / "split.json")


def _add_neutral_partner(
    model: Any, items: list[GRPOItem], cache: FeatureCache, before: Measured, after: Measured
) -> None:
    """Masks of both models' captions drawn by the model as it was: a private language would show here."""
    if "iou_of_drawn" in before.values:
        name = "iou_of_drawn_by_base"
        before.values[name] = before.values["iou_of_drawn"]
        after.values[name] = iou_of_captions(model, items, cache, after.captions)


def _result(
    world: GRPOInputs,
    config: dict[str, Any],
    items: list[GRPOItem],
    before: Measured,
    after: Measured,
    run: Path,
    minutes: float,
) -> BeforeAfter:
    groups = [item.group_id for item in items]
    labelled = bool(np.isfinite(before.values["dice"]).any())
    criterion = "iou_of_drawn" if "iou_of_drawn" in before.values else "dice" if labelled else "learned"
    totals = {"cIoU": (before.phrase_ciou, after.phrase_ciou)} if labelled else {}
    rows = compare_models(before.values, after.values, groups, world.config.seed)
    return BeforeAfter(
        rows,
        criterion,
        totals,
        {"before": before.values, "after": after.values},
        tuple((item.sample_id, item.group_id) for item in items),
        _about(config, minutes),
        shown=_shown(items, before, after, criterion),
        curves=_lines(run / "metrics.jsonl"),
    )


def segmenter_note(network: RewardNetwork, items: list[GRPOItem], after: Measured) -> tuple[str, ...]:
    """Whether the reward network itself, which is a plain segmenter, would serve better than what it has trained."""
    known = np.flatnonzero(np.isfinite(after.values["dice"]))
    if not len(known):
        return ()
    own = np.array([_own_dice(network, items[number]) for number in known])
    groups, name = [items[number].group_id for number in known], "the fine-tuned model"
    return (plain_segmenter(own, after.values["dice"][known], groups, name, name),)


def _own_dice(network: RewardNetwork, item: GRPOItem) -> float:
    image, truth = item.load()
    assert truth is not None
    return float(dice((truth_map(network, image) > 0.5)[None], truth[None])[0])


def _shown(items: list[GRPOItem], before: Measured, after: Measured, criterion: str) -> tuple[ShownItem, ...]:
    """The items that gained most, and those that lost most."""
    gain = after.values[criterion] - before.values[criterion]
    order = np.argsort(-np.nan_to_num(gain), kind="stable")
    picks = [("gained most", int(n)) for n in order[:SHOWN]] + [("", int(n)) for n in order[::-1][:SHOWN]]
    shown = []
    for most, number in picks:
        title = most or ("lost most" if gain[number] < 0 else "gained least")
        image, truth = items[number].load()
        words = (items[number].caption or items[number].question, before.captions[number], after.captions[number])
        masks = unpacked(before.drawn[number]), unpacked(after.drawn[number])
        shown.append(ShownItem(f"{title}: {gain[number]:+.3f}", image, truth, *masks, words))
    return tuple(shown)


def _lines(path: Path) -> tuple[dict[str, Any], ...]:
    if not path.exists():
        return ()
    return tuple(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line)


def _about(config: dict[str, Any], minutes: float) -> dict[str, Any]:
    return {
        "split": SPLIT,
        "Sa2VA": Path(config["world"]["model_path"]).name,
        "model fingerprint": config["origin"]["model_fingerprint"],
        **training_facts(config),
        "METEOR": meteor_variant() if config["kind"] == "regions" else "",
        "training: minutes": f"{config['minutes']:.1f}",
        "evaluation: minutes": f"{minutes:.1f}",
    }
