"""Metrics of a model on prompts it was not trained on: of its captions, of its masks, and of both loops.

Every value is per prompt, so that two models can be compared prompt by prompt. Axes: N prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object
from pycocotools import mask as coco
from tqdm import tqdm

from rl_reward_network.data.annotations import phrase_key
from rl_reward_network.data.masks import to_rle
from rl_reward_network.grpo.competition import rivals, without_excluded
from rl_reward_network.grpo.image_context import (
    FeatureCache,
    ImageContext,
    Mask,
    PromptBatch,
    open_batch,
    seeded_generator,
)
from rl_reward_network.grpo.policy import mixed_precision
from rl_reward_network.grpo.prompts import TrainingItem, of_one_image
from rl_reward_network.models.default import SMALL_HIDDEN_SIZE
from rl_reward_network.models.sa2va.generation_sa2va import Decoding
from rl_reward_network.rewards.metrics import METRICS, dice, iou, meteor

BATCH_SIZE = {"small": 32, "large": 8}  # prompts whose image is one tile, by kind of model, as in training
TILES_OF_QWEN_VL = 2  # an image has about as many tokens
SAMPLED = 4  # captions per prompt for the expected reward
OVERLAPS = {name: metric.function for name, metric in sorted(METRICS.items()) if metric.in_training}
Seed = tuple[int, int]
PackedMask = dict[str, Any] | None


@dataclass(frozen=True)
class Measured:
    """Metrics, captions and masks of N prompts; masks as COCO RLE, since those of thousands of photographs must fit."""

    values: dict[str, np.ndarray]  # metric -> float64 (N,), NaN if the metric is not defined for the prompt
    captions: list[str]  # greedy, "" without a region
    masks: list[PackedMask]  # answers to the prompts' questions
    drawn: list[PackedMask]  # of the greedy captions; those of the questions if there are no captions
    overlap: np.ndarray  # int64 (N, 2), pixels of intersection and union of mask and truth; for cIoU

    @property
    def phrase_ciou(self) -> float:
        """Sum of all intersections over the sum of all unions."""
        intersection, union = self.overlap.sum(axis=0)
        return float(intersection / max(union, 1))


def measure(
    model: Any,
    prompts: Sequence[TrainingItem],
    cache: FeatureCache,
    max_completion_length: int,
    seed: int = 0,
    desc: str = "measuring",
    quiet: bool = False,
    expected: bool = True,
    accelerator: Accelerator | None = None,
) -> Measured:
    """All metrics of `prompts`; greedy, except for the expected rewards, which are means over sampled captions.

    Metrics with a region and a caption: `cycle_iou` (caption, then its mask, against the region: the reward of loop
    1), `expected_cycle_iou` (the same at temperature 1), `meteor`, `expected_meteor`, `cycle_meteor` (caption, mask,
    caption again). With a truth: `dice`, `iou`, `precision` and `recall` of the mask for the prompt's question. With
    `expected` False the expected rewards, nearly half of the time, are left out. With an `accelerator` its processes
    share the batches, and all of them must call this.
    """
    size = batch_size(model.config, cache.processor.max_tiles)
    batches = of_whole_images(prompts, size)
    own = batches if accelerator is None else batches[accelerator.process_index :: accelerator.num_processes]
    measured: dict[int, Measured] = {}
    with mixed_precision(model):
        for rows in tqdm(own, desc, unit=f"{size} items", disable=quiet):
            batch, first = open_batch([prompts[row] for row in rows], cache), rows[0]
            measured[first] = _measure_batch(batch, model, max_completion_length, expected, (seed, first))
    if accelerator is not None and accelerator.num_processes > 1:
        measured = {first: part for parts in gather_object([measured]) for first, part in parts.items()}
    parts = [measured[rows[0]] for rows in batches]
    order = np.argsort(np.concatenate(batches))  # back to that of the prompts
    masks, drawn = ([mask for part in parts for mask in getattr(part, name)] for name in ("masks", "drawn"))
    captions = [caption for part in parts for caption in part.captions]
    return Measured(
        {name: np.concatenate([part.values[name] for part in parts])[order] for name in parts[0].values},
        [captions[row] for row in order],
        [masks[row] for row in order],
        [drawn[row] for row in order],
        np.concatenate([part.overlap for part in parts])[order],
    )


def of_whole_images(prompts: Sequence[TrainingItem], size: int) -> list[list[int]]:
    """Indices of the prompts in batches of about `size`; the names of an image are in one, since they may compete."""
    batches: list[list[int]] = [[]]
    for rows in of_one_image(prompts):
        if batches[-1] and len(batches[-1]) + len(rows) > size:
            batches.append([])
        batches[-1] += rows
    return batches


def iou_of_captions(
    model: Any, prompts: Sequence[TrainingItem], cache: FeatureCache, captions: Sequence[str]
) -> np.ndarray:
    """float64 (N,): IoU of the model's mask of each caption with the prompt's region."""
    values: list[float] = []
    size = batch_size(model.config, cache.processor.max_tiles)
    with mixed_precision(model):
        for start in range(0, len(prompts), size):
            batch, texts = open_batch(prompts[start : start + size], cache), captions[start : start + size]
            masks = batch.masks_from_captions(batch.context(model), range(len(texts)), texts)
            truths = [mask for mask in batch.truths if mask is not None]
            values += [_iou(masks.get((row, text)), truths[row]) for row, text in enumerate(texts)]
    return np.array(values)


def batch_size(config: Any, max_tiles: int) -> int:
    """Prompts of one batch: fewer if images are split into tiles, all of which the language model reads."""
    tiles = TILES_OF_QWEN_VL if config.family.body == "qwen_vl" else max_tiles
    return max(1, BATCH_SIZE["small" if config.text_config.hidden_size <= SMALL_HIDDEN_SIZE else "large"] // tiles)


def _measure_batch(batch: PromptBatch, model: Any, max_completion_length: int, expected: bool, seed: Seed) -> Measured:
    prompts, context = batch.prompts, batch.context(model)
    soft = batch.masks(context, range(len(prompts)), [prompt.question for prompt in prompts])
    masks = _thresholded(without_excluded(prompts, soft))
    values, overlap = _against_truth(masks, batch.truths)
    captions, drawn = [""] * len(prompts), masks
    if all(prompt.caption for prompt in prompts):
        captions, drawn, of_captions = _measure_captions(batch, context, masks, max_completion_length, expected, seed)
        values |= of_captions
    packed = [[None if mask is None else to_rle(mask) for mask in some] for some in (masks, drawn)]
    return Measured(values, captions, packed[0], packed[1], overlap)


def _measure_captions(
    batch: PromptBatch, context: ImageContext, masks: Sequence[Mask], longest: int, expected: bool, seed: Seed
) -> tuple[list[str], list[Mask], dict[str, np.ndarray]]:
    """Greedy captions of the true regions, their masks, and the metrics of both loops."""
    rows, references = list(range(len(batch.prompts))), [prompt.caption for prompt in batch.prompts]
    truths = [mask for mask in batch.truths if mask is not None]
    captions = batch.captions(context, rows, truths, longest)
    sampled = [[text] for text in captions]
    if expected:
        questions = [batch.caption_question(row, truth) for row, truth in enumerate(truths)]
        decoding = Decoding(longest, 1.0, generator=seeded_generator(seed))
        answers = batch.answer_regions(context, questions, decoding, SAMPLED)
        sampled = [[batch.text(answer) for answer in of_row] for of_row in answers]
    pairs = [(row, text) for row in rows for text in (captions[row], *sampled[row])]
    drawn = batch.masks_from_captions(context, [row for row, _ in pairs], [text for _, text in pairs])
    overlap = {key: _iou(mask, truths[key[0]]) for key, mask in drawn.items()}
    not_empty = {row: mask for row, mask in enumerate(masks) if mask is not None and mask.any()}
    cycle_captions = batch.captions(context, list(not_empty), list(not_empty.values()), longest)
    cycle = dict(zip(not_empty, cycle_captions, strict=True))
    values = {
        "cycle_iou": [overlap.get((row, captions[row]), 0.0) for row in rows],
        "expected_cycle_iou": [np.mean([overlap.get((row, text), 0.0) for text in sampled[row]]) for row in rows],
        "meteor": meteor(captions, references, normalise=True),
        "expected_meteor": [
            meteor(said, [truth] * len(said), True).mean() for said, truth in zip(sampled, references, strict=True)
        ],
        "cycle_meteor": meteor([cycle.get(row, "") for row in rows], references, normalise=True),
    }
    kept = {name: np.asarray(column) for name, column in values.items() if expected or not name.startswith("expected")}
    return captions, _thresholded([drawn.get((row, captions[row])) for row in rows]), kept


def exact_share(prompts: Sequence[TrainingItem], measured: Measured) -> float:
    """Share of the captions that are the reference but for case, a final dot and an article."""
    pairs = zip(measured.captions, prompts, strict=True)
    return float(np.mean([_bare(said) == _bare(prompt.caption) for said, prompt in pairs]))


def named_share(prompts: Sequence[TrainingItem], measured: Measured) -> float | None:
    """Share of the true masks that overlap most, by Dice, with the mask of their own name, and not with a rival's.

    It answers "which object is this?" by the masks of the names that were asked of the image; of ties none is right.
    None where no true mask has a rival.
    """
    right = []
    for rows in of_one_image(prompts):
        rival = rivals([prompts[row].named for row in rows])
        if not rival.any():  # before anything is decoded
            continue
        masks = [unpacked(measured.masks[row]) for row in rows]
        for own, row in enumerate(rows):
            truth, others = prompts[row].load()[1], np.flatnonzero(rival[own])
            if truth is None or not truth.any() or not len(others):
                continue
            of_name = [0.0 if (m := masks[n]) is None else dice(m[None], truth[None])[0] for n in (own, *others)]
            right.append(of_name[0] > max(of_name[1:]))
    return float(np.mean(right)) if right else None


def _bare(caption: str) -> str:
    first, _, rest = phrase_key(caption).partition(" ")
    return rest if first in ("a", "an", "the") and rest else phrase_key(caption)


def unpacked(mask: PackedMask) -> Mask:
    """Bool (H, W) of a mask in `Measured`."""
    return None if mask is None else coco.decode(mask).astype(bool)


def _thresholded(probabilities: Sequence[Mask]) -> list[Mask]:
    return [None if mask is None else mask > 0.5 for mask in probabilities]


def _against_truth(masks: Sequence[Mask], truths: Sequence[Mask]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Overlap metrics, NaN without a truth, and the pixels for cIoU."""
    values = {name: np.full(len(masks), np.nan) for name in OVERLAPS}
    overlap = np.zeros((len(masks), 2), dtype=np.int64)
    for row, (mask, truth) in enumerate(zip(masks, truths, strict=True)):
        if truth is not None:
            predicted = np.zeros_like(truth) if mask is None else mask
            for name, score in OVERLAPS.items():
                values[name][row] = score(predicted[None], truth[None])[0]
            overlap[row] = (predicted & truth).sum(), (predicted | truth).sum()
    return values, overlap


def _iou(mask: Mask, truth: np.ndarray) -> float:
    return 0.0 if mask is None else float(iou((mask > 0.5)[None], truth[None])[0])
