"""What a model does on items that were not trained on: its captions, its masks, and both loops closed.

Every number is per item, so that two models are compared item by item. Axes: N items.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from rl_reward_network.models.sa2va.generation_sa2va import Answer, Decoding
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.rewards.captions import meteor
from rl_reward_network.rewards.masks import dice, iou, precision, recall
from rl_reward_network.training.grpo.features import FeatureCache, ImageFeatures
from rl_reward_network.training.grpo.generation import ImageContext, ask, probabilities
from rl_reward_network.training.grpo.items import DESCRIBE, GRPOItem, segment_question
from rl_reward_network.training.grpo.rollouts import caption_text, region_cells

AT_ONCE = 32  # items
SAMPLED = 4  # captions per item for the expected reward
Mask = np.ndarray | None


@dataclass(frozen=True)
class Measured:
    """Numbers and pictures of N items.

    Args:
        values: metric -> float64 (N,), NaN where the item lacks what it takes.
        captions: greedy captions, "" without a region.
        masks: of each item's question, bool (H, W) or None.
        overlap: int64 (N, 2), pixels in both and in either of mask and truth; for cIoU.
    """

    values: dict[str, np.ndarray]
    captions: list[str]
    masks: list[Mask]
    overlap: np.ndarray

    @property
    def phrase_ciou(self) -> float:
        """Intersections over unions, both summed over all items."""
        both, either = self.overlap.sum(axis=0)
        return float(both / max(either, 1))


def measure(
    model: Any,
    processor: Sa2VAProcessor,
    items: Sequence[GRPOItem],
    cache: FeatureCache,
    max_completion_length: int,
    seed: int = 0,
    desc: str = "measuring",
) -> Measured:
    """All metrics of `items`; greedy, but for the expected rewards, which are means over sampled captions.

    Metrics with a region and a caption: `iou_of_drawn` (caption, then its mask, against the region: the reward of loop
    1), `expected_iou_of_drawn` (the same at temperature 1), `meteor`, `expected_meteor`, `cycle_meteor` (caption, mask,
    caption again). With a truth: `dice`, `iou`, `precision` and `recall` of the mask that the item's question asks for.
    """
    parts = [
        _measure_batch(model, processor, items[start : start + AT_ONCE], cache, max_completion_length, (seed, start))
        for start in tqdm(range(0, len(items), AT_ONCE), desc, unit=f"{AT_ONCE} items")
    ]
    return Measured(
        {name: np.concatenate([part.values[name] for part in parts]) for name in parts[0].values},
        [caption for part in parts for caption in part.captions],
        [mask for part in parts for mask in part.masks],
        np.concatenate([part.overlap for part in parts]),
    )


def draw_captions(
    model: Any, processor: Sa2VAProcessor, items: Sequence[GRPOItem], cache: FeatureCache, captions: Sequence[str]
) -> np.ndarray:
    """float64 (N,): IoU of the mask that the model draws from each caption with the item's region."""
    found: list[float] = []
    for start in range(0, len(items), AT_ONCE):
        batch, own = (
            _open(model, processor, items[start : start + AT_ONCE], cache, 1),
            captions[start : start + AT_ONCE],
        )
        masks = batch.draw(list(range(len(own))), [segment_question(caption) for caption in own])
        found += [_iou(mask, truth) for mask, truth in zip(masks, batch.truths, strict=True) if truth is not None]
    return np.array(found)


@dataclass
class _Batch:
    """A batch of items with everything that is asked about them."""

    items: Sequence[GRPOItem]
    images: list[np.ndarray]
    truths: list[Mask]
    places: list[int]
    features: list[ImageFeatures]
    context: ImageContext
    processor: Sa2VAProcessor
    longest: int

    def draw(self, rows: Sequence[int], texts: Sequence[str]) -> list[Mask]:
        """The mask of each question about the image of each row."""
        questions = [self._ask(row, text) for row, text in zip(rows, texts, strict=True)]
        embeddings = [embedding for _, embedding in self.context.segment(questions)]
        logits = self.context.mask_logits([question.image for question in questions], embeddings)
        side = self.processor.sam_image_size
        return [
            None if one is None else probabilities(one[None], self.images[row].shape[:2], side)[0] > 0.5
            for row, one in zip(rows, logits, strict=True)
        ]

    def describe(self, rows: Sequence[int], masks: Sequence[np.ndarray], how: Decoding, times: int) -> list[list[str]]:
        """Captions of masks."""
        questions = [self._ask(row, DESCRIBE, mask) for row, mask in zip(rows, masks, strict=True)]
        answers: list[list[Answer]] = self.context.answer(questions, how, times) if questions else []
        return [[caption_text(self.processor, answer) for answer in own] for own in answers]

    def _ask(self, row: int, text: str, mask: Mask = None) -> Any:
        place = self.places[row]
        cells = None if mask is None else region_cells(self.processor, mask)
        return ask(self.processor, place, len(self.features[place].vision), text, cells)


def _measure_batch(
    model: Any,
    processor: Sa2VAProcessor,
    items: Sequence[GRPOItem],
    cache: FeatureCache,
    longest: int,
    seed: tuple[int, int],
) -> Measured:
    batch = _open(model, processor, items, cache, longest)
    rows = list(range(len(items)))
    masks = batch.draw(rows, [item.question for item in items])
    values, overlap = _against_truth(masks, batch.truths)
    captions = [""] * len(items)
    if all(item.caption for item in items):
        captions, own = _captioned(batch, rows, masks, seed)
        values |= own
    return Measured(values, captions, masks, overlap)


def _open(
    model: Any, processor: Sa2VAProcessor, items: Sequence[GRPOItem], cache: FeatureCache, longest: int
) -> _Batch:
    loaded = [item.load() for item in items]
    names = list(dict.fromkeys(item.image_id for item in items))
    images = {item.image_id: image for item, (image, _) in zip(items, loaded, strict=True)}
    features = cache.get(names, [images[name] for name in names])
    prefixes = [ask(processor, place, len(one.vision), DESCRIBE).prefix_ids for place, one in enumerate(features)]
    return _Batch(
        items,
        [image for image, _ in loaded],
        [mask for _, mask in loaded],
        [names.index(item.image_id) for item in items],
        features,
        ImageContext(model, processor, features, prefixes),
        processor,
        longest,
    )


def _captioned(
    batch: _Batch, rows: list[int], masks: Sequence[Mask], seed: tuple[int, int]
) -> tuple[list[str], dict[str, np.ndarray]]:
    """Greedy captions of the true regions, and the metrics of both loops."""
    truths = [mask for mask in batch.truths if mask is not None]
    references = [item.caption for item in batch.items]
    greedy, generator = (
        Decoding(batch.longest),
        torch.Generator().manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0])),
    )
    captions = [caption for (caption,) in batch.describe(rows, truths, greedy, 1)]
    sampled = batch.describe(rows, truths, Decoding(batch.longest, 1.0, generator=generator), SAMPLED)
    wanted = sorted({(row, text) for row in rows for text in (captions[row], *sampled[row]) if text})
    drawn = dict(zip(wanted, batch.draw([r for r, _ in wanted], [segment_question(t) for _, t in wanted]), strict=True))
    overlap = {key: _iou(mask, truths[key[0]]) for key, mask in drawn.items()}
    shown = [row for row in rows if (mask := masks[row]) is not None and mask.any()]
    again = batch.describe(shown, [mask for row in shown if (mask := masks[row]) is not None], greedy, 1)
    said = dict(zip(shown, (caption for (caption,) in again), strict=True))
    return captions, {
        "iou_of_drawn": np.array([overlap.get((row, captions[row]), 0.0) for row in rows]),
        "expected_iou_of_drawn": np.array(
            [np.mean([overlap.get((row, text), 0.0) for text in sampled[row]]) for row in rows]
        ),
        "meteor": meteor(captions, references, normalise=True),
        "expected_meteor": np.array(
            [meteor(sampled[row], [references[row]] * SAMPLED, normalise=True).mean() for row in rows]
        ),
        "cycle_meteor": meteor([said.get(row, "") for row in rows], references, normalise=True),
    }


def _against_truth(masks: Sequence[Mask], truths: Sequence[Mask]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Overlap metrics, NaN without a truth, and the pixels behind cIoU."""
    values = {name: np.full(len(masks), np.nan) for name in ("dice", "iou", "precision", "recall")}
    overlap = np.zeros((len(masks), 2), dtype=np.int64)
    for row, (mask, truth) in enumerate(zip(masks, truths, strict=True)):
        if truth is not None:
            found = np.zeros_like(truth) if mask is None else mask
            for name, score in (("dice", dice), ("iou", iou), ("precision", precision), ("recall", recall)):
                values[name][row] = score(found[None], truth[None])[0]
            overlap[row] = (found & truth).sum(), (found | truth).sum()
    return values, overlap


def _iou(mask: Mask, truth: np.ndarray) -> float:
    return 0.0 if mask is None else float(iou(mask[None], truth[None])[0])
