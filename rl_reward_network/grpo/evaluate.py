"""The evaluation of a GRPO run: the base model and the fine-tuned one on prompts of groups held out from training."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_reward_network.data.splits import subsample
from rl_reward_network.data_import.write import import_notes
from rl_reward_network.grpo.final_model import (
    evaluation_folder,
    load_base,
    load_trained,
    trained_config,
    training_facts,
)
from rl_reward_network.grpo.image_context import FeatureCache
from rl_reward_network.grpo.inputs import GRPOInputs, count_images, of_images, open_grpo_inputs
from rl_reward_network.grpo.measure import Measured, exact_share, iou_of_captions, measure, named_share, unpacked
from rl_reward_network.grpo.policy import prepare_model
from rl_reward_network.grpo.prompts import TrainingItem, of_one_image
from rl_reward_network.grpo.validation import notice, scores
from rl_reward_network.inputs.config import RegionConfig, RunConfig, pick_fields
from rl_reward_network.inputs.loading import located_data, located_model
from rl_reward_network.models.ema import copied, swapped
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.models.sa2va.arguments_sa2va import Quantization
from rl_reward_network.models.sa2va.loading_sa2va import Dtype
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.models.sa2va.side_network import side_network_config
from rl_reward_network.report.before_after import BeforeAfter, NamedItem, ReportItem, label, write_before_after
from rl_reward_network.report.by_name import Answers, NamesSection, Questions, names_section
from rl_reward_network.report.metrics import SCORE
from rl_reward_network.report.page import Origin, made_by
from rl_reward_network.report.statistics import few_patients_note, plain_segmenter, rounded
from rl_reward_network.report.table import Results, paired_rows, picks
from rl_reward_network.rewards.learned import ForegroundMaps
from rl_reward_network.rewards.metrics import dice, meteor_variant
from rl_reward_network.run import FINAL, REWARD_NET, reward_run_files

SPLIT = "test"
QUICK_REGIONS = 120  # test regions of a quick run; the interval is that of so many
PICTURED = 3  # prompts with the largest gains, and as many with the largest losses, in the report


def run_grpo_evaluation(
    final_model: Path,
    data_root: Path | None = None,
    base_model: str | None = None,
    gpu: int | None = None,
    items: int | None = None,
) -> tuple[BeforeAfter, Path]:
    """Compare both models, of a final_model or a checkpoint, and write `<run>/evaluation/`.

    Args:
        data_root, base_model: where data and Sa2VA are now, if they were moved since training.
        gpu: index; -1 is the CPU; None is as in training.
        items: maximum number of test images (regions); the folder is then `evaluation_<number>`. None is all, of the
            captioned regions of a quick run 120.

    Raises:
        ValueError: the run is not complete, or data or model differ from those in training.
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
    path = base_model or located_model(run, config, "--base_model")
    inputs = _open(config, run, data_root, path, gpu)
    prompts, notes = _test_prompts(inputs, config["settings"]["mode"], items)
    if why := why_not_judged(prompts, (run / REWARD_NET).exists()):
        raise ValueError(f"{inputs.config.data_root}: {why}")
    model, processor = load_prepared(path, config, inputs.device, inputs.config.dtype, inputs.regions.quantization)
    inputs.set_up(processor)
    cache, longest = FeatureCache(model, processor), config["settings"]["training"]["max_completion_length"]
    start_weights = copied(model)
    before = measure(model, prompts, cache, longest, desc="before")
    load_trained(model, final_model, config)
    after = measure(model, prompts, cache, longest, desc="after")
    notes += (*import_notes(inputs.config.data_root, inputs.samples),)
    if (run / REWARD_NET).exists():
        maps = ForegroundMaps.beside(run, RewardNetwork.from_pretrained(run / REWARD_NET).to(inputs.device))
        for measured in (before, after):
            measured.values[SCORE] = scores(maps, prompts, measured)
        if outside := int(np.isnan(after.values[SCORE]).sum()):
            if outside == len(prompts) and not any(prompt.labelled for prompt in prompts):
                raise ValueError(f"none of {outside} test items has a true mask or is in the reward network's domain")
            notes += (f"{outside} of {len(prompts)} test items are outside the reward network's domain: no score.",)
        notes += segmenter_note(maps, prompts, after)
    if "cycle_iou" in before.values:  # with the base model's masks: low if the captions suit the trained model alone
        before.values["cycle_iou_by_base"] = before.values["cycle_iou"]
        with swapped(model, start_weights):
            after.values["cycle_iou_by_base"] = iou_of_captions(model, prompts, cache, after.captions)
    by_name = None
    if inputs.by_name:
        reworded = held_out_prompts(prompts)
        held = measure(model, reworded, cache, longest, desc="held-out wording") if reworded else None
        by_name = by_name_section(prompts, before, after, held, inputs.config.seed)
    minutes = (time.perf_counter() - start) / 60
    flags = {"data_root": data_root, "base_model": base_model, "gpu": gpu, "images": items}
    result = _result(inputs, config, prompts, before, after, run, minutes)
    notes += few_patients_note(result.groups, "test groups")
    named = pictured_by_name(prompts, after) if by_name else ()
    origin = _origin(inputs, config, final_model, flags)
    result = replace(result, notes=notes, origin=origin, by_name=by_name, named=named)
    folder = evaluation_folder(final_model, None if items is None else count_images(prompts))
    return result, write_before_after(folder, result)


def load_prepared(
    path: str, config: dict[str, Any], device: str, dtype: Dtype, bits: Quantization | None
) -> tuple[Any, Sa2VAProcessor]:
    """The base model of a run with the layers that it has trained, whose weights `load_trained` puts in."""
    origin = config["settings"]
    model, processor = load_base(path, origin["model_fingerprint"], device, dtype, bits)
    side = None if (sizes := origin.get("side_network")) is None else side_network_config(sizes, "config.json")
    frozen = bool(origin["freeze_embeddings"])
    prepare_model(model, origin["lora_r"], origin["lora_alpha"], frozen, side, origin.get("encoder"))
    return model, processor


def why_not_judged(prompts: Sequence[TrainingItem], learned: bool) -> str:
    """Why nothing tells which model is better on test prompts, with or without a reward network; empty if it does."""
    if learned or any(prompt.labelled for prompt in prompts):
        return ""
    return (
        f"none of {len(prompts)} test images has a mask, and the run has no reward network, so nothing can tell which "
        "model is better; annotate images of some test patients, or look at the masks of both (sa2va-rl segment)"
    )


def _test_prompts(inputs: GRPOInputs, mode: str, items: int | None) -> tuple[list[TrainingItem], tuple[str, ...]]:
    """The test prompts of an evaluation, as in `run_grpo_evaluation`, and a note if quick mode leaves any out."""
    prompts = inputs.pick(SPLIT)
    most = items or (QUICK_REGIONS if (mode, inputs.kind) == ("quick", "regions") else len(prompts))
    if items is None and most >= len(prompts):
        return prompts, ()
    note = f"quick: {most} of {len(prompts)} test regions; evaluate --images {len(prompts)} takes all."
    return of_images(subsample(prompts, len(prompts), inputs.config.seed), most), () if items else (note,)


def _open(config: dict[str, Any], run: Path, data_root: Path | None, model_path: str, gpu: int | None) -> GRPOInputs:
    """The inputs as in training; the question depends on the size of the model at `model_path`."""
    saved = config["inputs"]
    settings = replace(
        pick_fields(RunConfig, saved),
        data_root=data_root or located_data(run, config),
        output_dir=run.parent,
        unlabelled_root=None,  # no evaluation needs it
        model_path=model_path,
        gpu=saved["gpu"] if gpu is None else gpu,
    )
    return open_grpo_inputs(settings, pick_fields(RegionConfig, saved), run / "split.json")


def _result(
    inputs: GRPOInputs,
    config: dict[str, Any],
    prompts: list[TrainingItem],
    before: Measured,
    after: Measured,
    run: Path,
    minutes: float,
) -> BeforeAfter:
    groups, metrics = [prompt.group_id for prompt in prompts], run / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    labelled = bool(np.isfinite(before.values["dice"]).any())
    criterion = "cycle_iou" if "cycle_iou" in before.values else "dice" if labelled else SCORE
    totals = {"cIoU": (before.phrase_ciou, after.phrase_ciou)} if labelled else {}
    if inputs.captions_are_names:
        totals["name exact"] = exact_share(prompts, before), exact_share(prompts, after)
    named = named_share(prompts, before), named_share(prompts, after)
    if named[0] is not None and named[1] is not None:
        totals["true region named"] = named[0], named[1]
    rows = paired_rows(before.values, after.values, groups, inputs.config.seed)
    about = {
        "split": SPLIT,
        "Sa2VA": Path(config["inputs"]["model_path"]).name,
        "model fingerprint": config["settings"]["model_fingerprint"],
        **training_facts(config),
        "METEOR": meteor_variant() if config["kind"] == "regions" else "",
        "training: minutes": f"{config['minutes']:.1f}",
        "evaluation: minutes": f"{minutes:.1f}",
    }
    return BeforeAfter(
        Results(rows, tuple((prompt.sample_id, prompt.group_id) for prompt in prompts), criterion),
        totals,
        about,
        notice=notice(config),
        shown=pictured(prompts, before, after, criterion),
        curves=tuple(json.loads(line) for line in lines if line),
    )


def by_name_section(
    prompts: list[TrainingItem], before: Measured, after: Measured, held: Measured | None, seed: int
) -> NamesSection | None:
    """The section of the report, of the labelled prompts; None without any.

    `before` and `after` were asked in wordings that train, `held`, the trained model, in the held-out ones.
    """
    if not (labelled := [number for number, prompt in enumerate(prompts) if prompt.labelled]):
        return None
    asked = [prompts[number] for number in labelled]
    truths = (prompt.load()[1] for prompt in asked)
    there = np.array([truth is not None and bool(truth.any()) for truth in truths])
    questions = Questions([prompt.name for prompt in asked], [prompt.group_id for prompt in asked], there)
    models = {}
    for title, measured in {"before": before, "after": after, "held-out wording": held}.items():
        if measured is not None:
            masks = (unpacked(measured.masks[number]) for number in labelled)
            empty = np.array([mask is None or not mask.any() for mask in masks])
            models[title] = Answers(measured.values["dice"][labelled], empty)
    return names_section(questions, models, seed)


def pictured_by_name(prompts: Sequence[TrainingItem], after: Measured) -> tuple[NamedItem, ...]:
    """The images with the best, the median and the worst mean Dice over their questions with a true mask."""
    labelled = np.flatnonzero(np.isfinite(after.values["dice"])).tolist()
    of_image = [[labelled[place] for place in of] for of in of_one_image([prompts[number] for number in labelled])]
    items = []
    for title, chosen in picks(np.array([after.values["dice"][of].mean() for of in of_image])).items():
        asked = {prompts[number].name: number for number in of_image[chosen]}
        truths, masks = {}, {}
        for name, number in asked.items():
            image, truths[name] = prompts[number].load()
            masks[name] = unpacked(after.masks[number])
        dice = after.values["dice"][of_image[chosen]].mean()
        items.append(NamedItem(f"{title}: Dice {dice:.3f} over {len(asked)} questions", image, truths, masks))
    return tuple(items)


def held_out_prompts(prompts: Sequence[TrainingItem]) -> list[TrainingItem]:
    """The prompts in their held-out wording; [] unless all have one."""
    return [replace(prompt, question=prompt.held_out) for prompt in prompts] if all(p.held_out for p in prompts) else []


def segmenter_note(maps: ForegroundMaps, prompts: list[TrainingItem], after: Measured) -> tuple[str, ...]:
    """A note comparing the reward network as a segmenter with the model trained on its scores; empty without labels."""
    if not len(labelled := np.flatnonzero(np.isfinite(after.values["dice"]))):
        return ()
    network_dice = np.full(len(labelled), np.nan)  # of an empty true mask
    for place, number in enumerate(labelled):
        image, truth = prompts[number].load()
        if truth is not None and truth.any():
            network_dice[place] = dice(maps.scorer(image).own_mask[None], truth[None])[0]
    groups, name = [prompts[number].group_id for number in labelled], "the fine-tuned model"
    return (plain_segmenter(network_dice, after.values["dice"][labelled], groups, name, name),)


def pictured(prompts: list[TrainingItem], before: Measured, after: Measured, criterion: str) -> tuple[ReportItem, ...]:
    """Best, median and worst prompt after training; those with the largest gains and losses; the worst captions.

    The last are those whose METEOR fell most. Each title names its measure, its value after training and its change.
    """
    gains = {name: after.values[name] - before.values[name] for name in (criterion, "meteor") if name in after.values}
    gain, end, groups = gains[criterion], after.values[criterion], len({prompt.group_id for prompt in prompts})
    if not len(known := np.flatnonzero(np.isfinite(gain))):  # the labelled ones, if the criterion needs labels
        return ()
    by_gain = known[np.argsort(-gain[known], kind="stable")]
    shown = [(f"{title} after training", criterion, known[n]) for title, n in picks(end[known]).items()]
    shown += [("gained most" if gain[n] > 0 else "lost least", criterion, n) for n in by_gain[:PICTURED]]
    shown += [("lost most" if gain[n] < 0 else "gained least", criterion, n) for n in by_gain[::-1][:PICTURED]]
    falls = gains.get("meteor", np.zeros(0))
    shown += [("lost most", "meteor", n) for n in np.argsort(falls, kind="stable")[:PICTURED] if falls[n] < 0]
    items = []
    for title, metric, n in shown:
        value, change = (rounded(of[metric][n], groups, sign) for of, sign in ((after.values, ""), (gains, "+")))
        heading = f"{title}, {label(metric, '')}: {value} ({change})"
        image, truth = prompts[n].load()
        texts = (prompts[n].caption or prompts[n].question, before.captions[n], after.captions[n])
        items.append(ReportItem(heading, image, truth, unpacked(before.drawn[n]), unpacked(after.drawn[n]), texts))
    return tuple(items)


def _origin(inputs: GRPOInputs, config: dict[str, Any], trained: Path, flags: dict[str, Any]) -> Origin:
    """The header of the report, with links into the run and to that of its reward network."""
    run = trained.parent
    model = f"{Path(config['inputs']['model_path']).name}, {config['settings']['model_fingerprint']}"
    data = f"{inputs.config.data_root.name}: {config['data']}, split {SPLIT}"
    origin = made_by("evaluate", {"model_path": trained, **flags}, data, model, config["version"], run / "logs")
    files = {"run of the model": run, "its metrics": run / "metrics.jsonl", "model card": run / FINAL / "README.md"}
    return replace(origin, files={**origin.files, **files, **reward_run_files(run, config.get("reward_net"))})
