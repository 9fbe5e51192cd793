"""Scores of a Sa2VA on the embedded data: Dice by look and prompt, the planted gap, phrases and captions."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from rl_reward_network.data.items import Sample
from rl_reward_network.data.splits import select
from rl_reward_network.embedded.angiograms import LOOKS
from rl_reward_network.embedded.datasets import read_looks
from rl_reward_network.embedded.regions import RegionObject, Scene, caption_correct
from rl_reward_network.inputs.loading import RunInputs
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.report.deployment import best_fixed_prompt
from rl_reward_network.report.metrics import SampleTable, measure_sample
from tools.nano.conversations import DESCRIBE, phrase_prompt

DEFAULT = 0  # index of the default prompt
TEST_SCENES = (100, 2)  # number and seed; training has seeds from 7,000,000 on, data/regions has seed 1


@dataclass(frozen=True)
class VesselScores:
    """Means over test images. All patients have the same number of images; the looks have about the same number.

    Args:
        images: number of test images.
        dice: prompt -> look -> mean Dice, look "all" included.
        oracle_dice, oracle_recall: look -> mean over images of the best prompt's mask (best by Dice).
        default_recall: recall of the default prompt over all looks.
        best_on: prompt -> share of images on which it has the highest Dice; ties go to the first.
        best_fixed: prompt with the highest mean Dice on the policy patients.
        gap: Dice of the oracle less Dice of the best fixed prompt.
    """

    images: int
    dice: dict[str, dict[str, float]]
    oracle_dice: dict[str, float]
    oracle_recall: dict[str, float]
    default_recall: float
    best_on: dict[str, float]
    best_fixed: str
    gap: float


def vessel_tables(inputs: RunInputs, split: str, desc: str) -> tuple[list[Sample], list[SampleTable]]:
    """The samples of a split, with the metrics of every prompt's mask; scores are 0, there is no reward network."""
    samples = select(inputs.samples, inputs.split, split)
    scores = np.zeros(len(inputs.prompts))
    return samples, [
        measure_sample(s.sample_id, s.group_id, scores, inputs.probabilities(s.load_image()) > 0.5, s.load_mask())
        for s in tqdm(samples, desc=desc, unit="image")
    ]


def score_vessels(inputs: RunInputs) -> VesselScores:
    """All numbers of the angiograms, on the test patients of the embedded data."""
    looks_of = read_looks(inputs.config.data_root)
    samples, tables = vessel_tables(inputs, "test", "test patients")
    fixed, _ = best_fixed_prompt(vessel_tables(inputs, "policy", "policy patients")[1])
    looks = np.array([looks_of[sample.image_path.name] for sample in samples])
    dice, recall = (np.stack([table.column(name) for table in tables]) for name in ("dice", "recall"))  # (N, P)
    best = dice.argmax(axis=1)
    rows = np.arange(len(best))
    return VesselScores(
        images=len(samples),
        dice={prompt: _by_look(dice[:, i], looks) for i, prompt in enumerate(inputs.prompts)},
        oracle_dice=_by_look(dice.max(axis=1), looks),
        oracle_recall=_by_look(recall[rows, best], looks),
        default_recall=_mean(recall[:, DEFAULT]),
        best_on={prompt: _mean(best == i) for i, prompt in enumerate(inputs.prompts)},
        best_fixed=inputs.prompts[fixed],
        gap=_mean(dice.max(axis=1) - dice[:, fixed]),
    )


def _mean(values: np.ndarray) -> float:
    return round(float(np.mean(values)), 4)


def _by_look(values: np.ndarray, looks: np.ndarray) -> dict[str, float]:
    """Mean over all and per look that there is."""
    return {"all": _mean(values)} | {look: _mean(values[looks == look]) for look in LOOKS if look in looks}


@dataclass(frozen=True)
class RegionScores:
    """Of scenes: cumulative IoU of masks asked for by phrase, share of captions with every word right, in [0, 1]."""

    scenes: int
    objects: int
    phrase_ciou: float
    captions_right: float


def score_regions(model: Sa2VAForConditionalGeneration, processor: Sa2VAProcessor, scenes: list[Scene]) -> RegionScores:
    """Segment each object by its phrase, and describe it given its mask as a visual prompt."""
    overlap = union = right = objects = 0
    for scene in tqdm(scenes, desc="scenes", unit="scene"):
        (answers,) = model.segment([scene.image], [phrase_prompt(region) for region in scene.objects], processor)
        for region, answer in zip(scene.objects, answers, strict=True):
            mask = answer.masks().any(axis=0)
            overlap, union = overlap + int((mask & region.mask).sum()), union + int((mask | region.mask).sum())
            result = describe(model, processor, scene, region)
            right, objects = right + caption_correct(result["prediction"], region), objects + 1
    return RegionScores(len(scenes), objects, round(overlap / max(union, 1), 4), round(right / max(objects, 1), 4))


def describe(
    model: Sa2VAForConditionalGeneration, processor: Sa2VAProcessor, scene: Scene, region: RegionObject
) -> dict[str, Any]:
    """The result of `predict_forward` for the caption of one object, its mask given as a visual prompt."""
    return model.predict_forward(
        image=scene.image,
        text=f"<image>{DESCRIBE.format(number=1)}",
        mask_prompts=[region.mask[None]],
        processor=processor,
        max_new_tokens=32,
    )
