"""What fine-tuning cost elsewhere: both models of a run on questions that it did not train (`evaluate --general`).

Masks are scored as in LISA and gRefCOCO: gIoU, the mean IoU over questions, where two empty masks have 1; cIoU; the
share of questions without an object whose mask is empty (N-acc.), and of the others whose mask is not (T-acc.).
Texts have no truth here: the answers of both models are compared.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rl_reward_network.data.images import load_image
from rl_reward_network.data.items import pseudonym
from rl_reward_network.data.referring import IGNORE, Question, read_questions
from rl_reward_network.data.splits import subsample
from rl_reward_network.grpo.evaluate import load_prepared, pictured
from rl_reward_network.grpo.final_model import evaluation_folder, load_trained, trained_config, training_facts
from rl_reward_network.grpo.image_context import FeatureCache, without_end
from rl_reward_network.grpo.measure import Measured, measure, unpacked
from rl_reward_network.grpo.prompts import TrainingItem
from rl_reward_network.inputs.config import RegionConfig, RunConfig, pick_fields
from rl_reward_network.inputs.loading import located_model
from rl_reward_network.models.sa2va.templates import IMAGE_PLACEHOLDER
from rl_reward_network.report.before_after import BeforeAfter, write_before_after
from rl_reward_network.report.page import made_by
from rl_reward_network.report.statistics import few_patients_note
from rl_reward_network.report.table import Results, paired_rows
from rl_reward_network.rewards.metrics import meteor, meteor_variant

LONGEST = 64  # tokens of a text
FORGOT = {"worse": "It forgot:", "better": "It forgot nothing:", "cannot tell": "Whether it forgot cannot be told:"}


def run_general_evaluation(
    final_model: Path,
    paths: Sequence[Path],
    base_model: str | None = None,
    gpu: int | None = None,
    items: int | None = None,
) -> tuple[BeforeAfter, Path]:
    """Compare base and fine-tuned model on questions of other data, and write `<run>/evaluation_general/`.

    Args:
        final_model: of a GRPO run, or one of its checkpoints.
        paths: files or folders in the formats of `data.referring`; one has questions for masks.
        base_model, gpu: as in `run_grpo_evaluation`.
        items: at most this many questions for masks, drawn by chance; None is all.

    Raises:
        ValueError: no question for a mask, a file that does not fit, or another base model than in training.
    """
    start, run, config = time.perf_counter(), final_model.parent, trained_config(final_model)
    asked = [question for path in paths for question in read_questions(path)]
    masks, texts = ([one for one in asked if (one.truth is None) == is_text] for is_text in (False, True))
    if not masks:
        raise ValueError(f"{paths[0]}: no question has a mask; give some that have, which the verdict is about")
    saved = config["inputs"]
    prompts = [item_of(question, number) for number, question in enumerate(masks)]
    if items is not None:
        of_prompt = dict(zip((prompt.sample_id for prompt in prompts), masks, strict=True))
        prompts = subsample(prompts, items, saved["seed"])
        masks = [of_prompt[prompt.sample_id] for prompt in prompts]
    path = base_model or located_model(run, config, "--base_model")
    how = replace(pick_fields(RunConfig, saved), gpu=saved["gpu"] if gpu is None else gpu)
    regions = pick_fields(RegionConfig, saved)
    model, processor = load_prepared(path, config, how.device, how.dtype, regions.quantization)
    processor.max_tiles = regions.max_dynamic_patch
    processor.set_image_resize(how.image_resize)
    cache, answers = FeatureCache(model, processor), []
    for when in ("before", "after"):
        if when == "after":
            load_trained(model, final_model, config)
        answers.append(
            (scored(measure(model, prompts, cache, LONGEST, desc=when), masks), _said(model, processor, texts))
        )
    (before, said), (after, says) = answers
    there = np.array([bool((question.load()[1] == 1).any()) for question in masks])
    old, new = (totals_of(there, measured) for measured in (before, after))
    totals = {name: (value, new[name]) for name, value in old.items()}
    if texts:
        totals["equal texts"] = 1.0, float(np.mean([one == other for one, other in zip(said, says, strict=True)]))
        totals[f"METEOR of texts with those before ({meteor_variant()})"] = 1.0, float(meteor(says, said, True).mean())
    groups = [prompt.group_id for prompt in prompts]
    facts = {
        "questions": ", ".join(path.name for path in paths),
        "Sa2VA": Path(saved["model_path"]).name,
        "model fingerprint": config["settings"]["model_fingerprint"],
        **training_facts(config),
        "evaluation: minutes": f"{(time.perf_counter() - start) / 60:.1f}",
    }
    result = BeforeAfter(
        Results(
            paired_rows(before.values, after.values, groups, saved["seed"]),
            tuple((prompt.sample_id, prompt.group_id) for prompt in prompts),
            "iou",
        ),
        totals,
        facts,
        notes=few_patients_note(len(set(groups)), "images"),
        shown=pictured(prompts, before, after, "iou"),
    )
    result = replace(result, notice=FORGOT[result.verdict.label])
    flags = {"model_path": final_model, "general": tuple(paths), "base_model": base_model, "gpu": gpu, "images": items}
    origin = made_by("evaluate", flags, facts["questions"], facts["Sa2VA"], config["version"], run / "logs")
    folder = evaluation_folder(final_model, items).with_name(f"{evaluation_folder(final_model, items).name}_general")
    result = replace(result, origin=origin)
    return result, write_before_after(folder, result)


def item_of(question: Question, number: int) -> TrainingItem:
    """A question for a mask, one of several in equal words, as an item that is measured, without ignored pixels."""
    image, key = pseudonym("image", str(question.image)), pseudonym("question", str(question.image), str(number))

    def load() -> tuple[np.ndarray, np.ndarray]:
        pixels, truth = question.load()
        return pixels, truth == 1

    return TrainingItem(image, image, key, "", question.text, True, load, image_key=str(question.image))


def scored(measured: Measured, questions: Sequence[Question]) -> Measured:
    """The same answers with their IoU alone, and its intersections and unions, both without the ignored pixels."""
    overlap = np.zeros((len(questions), 2), dtype=np.int64)
    for row, question in enumerate(questions):
        truth = question.load()[1]
        mask = unpacked(measured.masks[row])
        predicted = np.zeros(truth.shape, dtype=bool) if mask is None else mask
        counted, there = truth != IGNORE, truth == 1
        overlap[row] = (predicted & there & counted).sum(), ((predicted | there) & counted).sum()
    iou = np.where(overlap[:, 1] == 0, 1.0, overlap[:, 0] / np.maximum(overlap[:, 1], 1))
    return replace(measured, values={"iou": iou}, overlap=overlap)


def totals_of(there: np.ndarray, measured: Measured) -> dict[str, float]:
    """cIoU and, of questions whose object is not `there`, bool (N,), N-acc. and T-acc."""
    empty = np.array([mask is None or not mask.any() for mask in map(unpacked, measured.masks)])
    totals = {"cIoU": measured.phrase_ciou}
    if not there.all():
        totals["N-acc."] = float(empty[~there].mean())
        totals |= {"T-acc.": float((~empty[there]).mean())} if there.any() else {}
    return totals


def _said(model: Any, processor: Any, questions: Sequence[Question]) -> list[str]:
    texts = []
    for one in questions:
        text = one.text if IMAGE_PLACEHOLDER in one.text else f"{IMAGE_PLACEHOLDER}{one.text}"
        how = {"image": load_image(one.image), "text": text, "processor": processor, "max_new_tokens": LONGEST}
        texts.append(without_end(processor, model.predict_forward(**how)["prediction"]))
    return texts
