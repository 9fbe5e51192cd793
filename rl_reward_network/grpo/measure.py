"""What a model does on items that were not trained on: its captions, its masks, and both loops closed.

Every number is per item, so that two models are compared item by item. Axes: N items.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pycocotools import mask as coco
from tqdm import tqdm

from rl_reward_network.data.masks import to_rle
from rl_reward_network.grpo.items import GRPOItem
from rl_reward_network.grpo.rollouts.batch import Batch, Mask, open_batch, random_stream
from rl_reward_network.grpo.rollouts.features import FeatureCache
from rl_reward_network.grpo.rollouts.generation import ImageContext
from rl_reward_network.models.sa2va.generation_sa2va import Decoding
from rl_reward_network.rewards.captions import meteor
from rl_reward_network.rewards.masks import dice, iou, precision, recall

AT_ONCE = 32  # items of one tile
SAMPLED = 4  # captions per item for the expected reward
Seed = tuple[int, int]
Packed = dict[str, Any] | None


@dataclass(frozen=True)
class Measured:
    """Numbers and pictures of N items.

    Args:
        values: metric -> float64 (N,), NaN where the item lacks what it takes.
        captions: greedy captions, "" without a region.
        masks: of each item's question, packed (COCO RLE), or None: thousands of masks of photographs must fit.
        drawn: of each greedy caption, likewise; those of the question where there are no captions.
        overlap: int64 (N, 2), pixels in both and in either of mask and truth; for cIoU.
    """

    values: dict[str, np.ndarray]
    captions: list[str]
    masks: list[Packed]
    drawn: list[Packed]
    overlap: np.ndarray

    @property
    def phrase_ciou(self) -> float:
        """Intersections over unions, both summed over all items."""
        both, either = self.overlap.sum(axis=0)
        return float(both / max(either, 1))


def measure(
    model: Any,
    items: Sequence[GRPOItem],
    cache: FeatureCache,
    max_completion_length: int,
    seed: int = 0,
    desc: str = "measuring",
    quiet: bool = False,
) -> Measured:
    """All metrics of `items`; greedy, but for the expected rewards, which are means over sampled captions.

    Metrics with a region and a caption: `iou_of_drawn` (caption, then its mask, against the region: the reward of loop
    1), `expected_iou_of_drawn` (the same at temperature 1), `meteor`, `expected_meteor`, `cycle_meteor` (caption, mask,
    caption again). With a truth: `dice`, `iou`, `precision` and `recall` of the mask that the item's question asks for.
    """
    step = items_at_once(cache)
    with mixed_precision(model):
        parts = [
            _measure_batch(model, items[start : start + step], cache, max_completion_length, (seed, start))
            for start in tqdm(range(0, len(items), step), desc, unit=f"{step} items", disable=quiet)
        ]
    return Measured(
        {name: np.concatenate([part.values[name] for part in parts]) for name in parts[0].values},
        [caption for part in parts for caption in part.captions],
        [mask for part in parts for mask in part.masks],
        [mask for part in parts for mask in part.drawn],
        np.concatenate([part.overlap for part in parts]),
    )


def iou_of_captions(model: Any, items: Sequence[GRPOItem], cache: FeatureCache, captions: Sequence[str]) -> np.ndarray:
    """float64 (N,): IoU of the mask that the model draws from each caption with the item's region."""
    found: list[float] = []
    step = items_at_once(cache)
    with mixed_precision(model):
        for start in range(0, len(items), step):
            batch, own = open_batch(items[start : start + step], cache), captions[start : start + step]
            drawn = batch.draw_captions(batch.context(model), range(len(own)), own)
            truths = [mask for mask in batch.truths if mask is not None]
            found += [_iou(drawn.get((row, text)), truths[row]) for row, text in enumerate(own)]
    return np.array(found)


def items_at_once(cache: FeatureCache) -> int:
    """Items of one batch: fewer where an image is cut into tiles, which the language model all reads."""
    return max(1, AT_ONCE // cache.processor.max_tiles)


def mixed_precision(model: Any) -> AbstractContextManager[Any]:
    """Autocast where the frozen weights are bfloat16 and what trains is float32; nothing in a float32 model."""
    return torch.autocast(model.device.type, torch.bfloat16) if model.dtype == torch.bfloat16 else nullcontext()


def _measure_batch(model: Any, items: Sequence[GRPOItem], cache: FeatureCache, longest: int, seed: Seed) -> Measured:
    batch = open_batch(items, cache)
    context, rows = batch.context(model), list(range(len(items)))
    masks = _hard(batch.draw(context, rows, [item.question for item in items]))
    values, overlap = _against_truth(masks, batch.truths)
    captions, drawn = [""] * len(items), masks
    if all(item.caption for item in items):
        captions, drawn, own = _captioned(batch, context, masks, longest, seed)
        values |= own
    return Measured(values, captions, _packed(masks), _packed(drawn), overlap)


def _captioned(
    batch: Batch, context: ImageContext, masks: Sequence[Mask], longest: int, seed: Seed
) -> tuple[list[str], list[Mask], dict[str, np.ndarray]]:
    """Greedy captions of the true regions, the masks drawn from them, and the metrics of both loops."""
    rows, references = list(range(len(batch.items))), [item.caption for item in batch.items]
    truths = [mask for mask in batch.truths if mask is not None]
    captions = batch.caption(context, rows, truths, longest)
    questions = [batch.describing(row, mask) for row, mask in enumerate(truths)]
    answers = context.answer(questions, Decoding(longest, 1.0, generator=random_stream(seed)), SAMPLED)
    sampled = [[batch.text(answer) for answer in own] for own in answers]
    pairs = [(row, text) for row in rows for text in (captions[row], *sampled[row])]
    drawn = batch.draw_captions(context, [row for row, _ in pairs], [text for _, text in pairs])
    overlap = {key: _iou(mask, truths[key[0]]) for key, mask in drawn.items()}
    shown = [row for row in rows if (mask := masks[row]) is not None and mask.any()]
    again = batch.caption(context, shown, [mask for row in shown if (mask := masks[row]) is not None], longest)
    said = dict(zip(shown, again, strict=True))
    return (
        captions,
        _hard([drawn.get((row, captions[row])) for row in rows]),
        {
            "iou_of_drawn": np.array([overlap.get((row, captions[row]), 0.0) for row in rows]),
            "expected_iou_of_drawn": np.array(
                [np.mean([overlap.get((row, text), 0.0) for text in sampled[row]]) for row in rows]
            ),
            "meteor": meteor(captions, references, normalise=True),
            "expected_meteor": np.array(
                [meteor(sampled[row], [references[row]] * SAMPLED, normalise=True).mean() for row in rows]
            ),
            "cycle_meteor": meteor([said.get(row, "") for row in rows], references, normalise=True),
        },
    )


def unpacked(mask: Packed) -> Mask:
    """Bool (H, W) of a mask in `Measured`."""
    return None if mask is None else coco.decode(mask).astype(bool)


def _packed(masks: Sequence[Mask]) -> list[Packed]:
    return [None if mask is None else to_rle(mask) for mask in masks]


def _hard(probabilities: Sequence[Mask]) -> list[Mask]:
    return [None if one is None else one > 0.5 for one in probabilities]


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
    return 0.0 if mask is None else float(iou((mask > 0.5)[None], truth[None])[0])
