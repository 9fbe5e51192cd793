"""A batch of items, opened: what can be asked about them, and what a model under its weights of now answers.

Axes: N items (rows), G answers to a question.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_reward_network.grpo.items import DESCRIBE, GRPOItem, segment_question
from rl_reward_network.grpo.rollouts.features import FeatureCache, ImageFeatures
from rl_reward_network.grpo.rollouts.generation import ImageContext, Question, ask
from rl_reward_network.models.sa2va.generation_sa2va import Answer, Decoding
from rl_reward_network.models.sa2va.pixels_sa2va import upsample_mask_logits
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor

Mask = np.ndarray | None


@dataclass(frozen=True)
class Batch:
    """N items with their images decoded; each image's features once.

    Args:
        items: N of them.
        images: uint8 (H, W, 3) of each.
        truths: bool (H, W) of each, or None.
        places: index of each item's image in `features`.
        features: of each different image.
        processor: Sa2VA's.
    """

    items: Sequence[GRPOItem]
    images: list[np.ndarray]
    truths: list[Mask]
    places: list[int]
    features: list[ImageFeatures]
    processor: Sa2VAProcessor

    def context(self, model: Any, rows_at_once: int = 128) -> ImageContext:
        """The images as the model reads them now."""
        prefixes = [self.prefix_ids(place) for place in range(len(self.features))]
        return ImageContext(model, self.processor, self.features, prefixes, rows_at_once)

    def prefix_ids(self, place: int) -> list[int]:
        """What every question about the image of that index in `features` begins with."""
        return ask(self.processor, place, len(self.features[place].vision), DESCRIBE).prefix_ids

    def describing(self, row: int, mask: np.ndarray) -> Question:
        """What asks for the caption of a region of this item's image."""
        return self._ask(row, self.items[row].describe, region_cells(self.processor, mask))

    def drawing(self, row: int, text: str) -> Question:
        """A question about this item's image whose answer is a mask."""
        return self._ask(row, text)

    def _ask(self, row: int, text: str, cells: Tensor | None = None) -> Question:
        place = self.places[row]
        return ask(self.processor, place, len(self.features[place].vision), text, cells)

    def probabilities(self, row: int, mask_logits: Tensor) -> np.ndarray:
        """float32 (K, H, W) in [0, 1] at image size, of logits (K, h, w)."""
        size, side = self.images[row].shape[:2], self.processor.sam_image_size
        return upsample_mask_logits(mask_logits, size, side).sigmoid().cpu().numpy()

    def draw(self, context: ImageContext, rows: Sequence[int], texts: Sequence[str]) -> list[Mask]:
        """float32 (H, W) in [0, 1] for each question about the image of each row; None without `[SEG]`."""
        if not rows:
            return []
        questions = [self.drawing(row, text) for row, text in zip(rows, texts, strict=True)]
        embeddings = [embedding for _, embedding in context.segment(questions)]
        logits = context.mask_logits([question.image for question in questions], embeddings)
        pairs = zip(rows, logits, strict=True)
        return [None if one is None else self.probabilities(row, one[None])[0] for row, one in pairs]

    def draw_captions(
        self, context: ImageContext, rows: Sequence[int], captions: Sequence[str]
    ) -> dict[tuple[int, str], Mask]:
        """(row, caption) -> the mask drawn from it; equal captions of one row are drawn once, empty ones not at all."""
        wanted = list(dict.fromkeys(pair for pair in zip(rows, captions, strict=True) if pair[1]))
        masks = self.draw(context, [row for row, _ in wanted], [segment_question(text) for _, text in wanted])
        return dict(zip(wanted, masks, strict=True))

    def caption(
        self, context: ImageContext, rows: Sequence[int], masks: Sequence[np.ndarray], longest: int
    ) -> list[str]:
        """Greedy captions of regions; those that are the same on the model's grid are read once."""
        questions = [self.describing(row, mask) for row, mask in zip(rows, masks, strict=True)]
        keys = [(question.image, _key(question)) for question in questions]
        different = dict(zip(keys, questions, strict=True))
        if not different:
            return []
        answers = context.answer(list(different.values()), Decoding(longest))
        said = dict(zip(different, (self.text(answer) for (answer,) in answers), strict=True))
        return [said[key] for key in keys]

    def text(self, answer: Answer) -> str:
        """What was said, without the stop word."""
        said = self.processor.text(answer.token_ids).strip()
        for word in self.processor.template.stop_words:
            said = said.removesuffix(word).strip()
        return said


def open_batch(items: Sequence[GRPOItem], cache: FeatureCache) -> Batch:
    """Decode images and masks, and look up or compute the features of each image."""
    loaded = [item.load() for item in items]
    names = list(dict.fromkeys(item.image_id for item in items))
    images = {item.image_id: image for item, (image, _) in zip(items, loaded, strict=True)}
    return Batch(
        items,
        [image for image, _ in loaded],
        [mask for _, mask in loaded],
        [names.index(item.image_id) for item in items],
        cache.get(names, [images[name] for name in names]),
        cache.processor,
    )


def region_cells(processor: Sa2VAProcessor, mask: np.ndarray) -> Tensor:
    """bool (1, g, g) of a region; one that lies between all cells gets the nearest, as at prediction."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"region \d+ .* misses every cell")
        return processor.region_cells(mask[None])


def random_stream(seed: Sequence[int]) -> torch.Generator:
    """Chance that depends on the numbers of `seed` alone."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(list(seed)).generate_state(1)[0]))


def _key(question: Question) -> bytes:
    assert question.cells is not None
    return question.cells.numpy().tobytes()
