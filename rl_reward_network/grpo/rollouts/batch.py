"""A batch of prompts with images decoded, the questions about them, and a model's answers under its current weights.

Axes: N prompts (rows), K masks, G answers to a question.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_reward_network.grpo.image_features import FeatureCache, ImageFeatures
from rl_reward_network.grpo.prompts import DESCRIBE, DESCRIBE_REAL, GRPOPrompt, segment_question
from rl_reward_network.grpo.rollouts.image_context import (
    ROWS_AT_ONCE,
    ImageContext,
    Question,
    make_question,
    rows_within_limits,
)
from rl_reward_network.models.sa2va.generation_sa2va import Answer, Decoding
from rl_reward_network.models.sa2va.pixels_sa2va import QUESTIONS, upsample_mask_logits
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor

Mask = np.ndarray | None


@dataclass(frozen=True)
class PromptBatch:
    """N prompts with their images decoded, and the features of each different image.

    Args:
        prompts: N of them.
        images: uint8 (H, W, 3) of each prompt.
        truths: bool (H, W) of each prompt, or None.
        image_ids: of each prompt, the digest of its image's pixels.
        image_indices: for each prompt the index of its image in `features`.
        features: of each different image.
        cache: of the features; its processor is Sa2VA's.
    """

    prompts: Sequence[GRPOPrompt]
    images: list[np.ndarray]
    truths: list[Mask]
    image_ids: list[str]
    image_indices: list[int]
    features: list[ImageFeatures]
    cache: FeatureCache

    @property
    def processor(self) -> Sa2VAProcessor:
        """Sa2VA's."""
        return self.cache.processor

    def context(self, model: Any, rows_at_once: int = ROWS_AT_ONCE) -> ImageContext:
        """Keys and values of all images under the model's current weights."""
        prefixes = [self.prefix_ids(index) for index in range(len(self.features))]
        return ImageContext(model, self.processor, self.features, prefixes, rows_at_once)

    def prefix_ids(self, image_index: int) -> list[int]:
        """Token ids at the start of every question about this image."""
        return make_question(self.processor, image_index, self._image_tokens(image_index), DESCRIBE).prefix_ids

    def _image_tokens(self, image_index: int) -> int:
        return self.processor.num_image_tokens(self.features[image_index].vision)

    def caption_question(self, row: int, mask: np.ndarray) -> Question:
        """The question for the caption of a region, bool (H, W), of this prompt's image."""
        if self.processor.shows_regions:
            return self.question(row, self.prompts[row].describe, region_cells(self.processor, mask))
        truth, own = self.truths[row], self.prompts[row].describe
        text = QUESTIONS[self.processor.region_prompt] if own in (DESCRIBE, DESCRIBE_REAL) else own
        repeated = truth is not None and np.array_equal(truth, mask)
        drawn = self.cache.get_region(self.images[row], mask, repeated)
        tokens = self.processor.num_image_tokens(drawn.vision)
        return replace(make_question(self.processor, self.image_indices[row], tokens, text), drawn=drawn)

    def answer_regions(
        self, context: ImageContext, questions: Sequence[Question], decoding: Decoding, num_answers: int = 1
    ) -> list[list[Answer]]:
        """As `ImageContext.answer`, for questions of `caption_question`: drawn regions are images of their own."""
        if not any(question.drawn for question in questions):
            return context.answer(questions, decoding, num_answers)
        at_once = rows_within_limits(max(len(question.prefix_ids) for question in questions), context.rows_at_once)
        answers = []
        for start in range(0, len(questions), at_once):
            part = questions[start : start + at_once]
            drawn = [question.drawn for question in part if question.drawn]
            own = ImageContext(context.model, self.processor, drawn, [q.prefix_ids for q in part], context.rows_at_once)
            asked = [replace(question, image_index=index) for index, question in enumerate(part)]
            answers += own.answer(asked, decoding, num_answers)
        return answers

    def question(self, row: int, text: str, cells: Tensor | None = None) -> Question:
        """A question about this prompt's image, or about a region of it, bool (1, g, g)."""
        index = self.image_indices[row]
        return make_question(self.processor, index, self._image_tokens(index), text, cells)

    def mask_probabilities(self, row: int, mask_logits: Tensor) -> np.ndarray:
        """float32 (K, H, W) in [0, 1] at the size of this prompt's image, from logits (K, h, w)."""
        size, side = self.images[row].shape[:2], self.processor.sam_image_size
        return upsample_mask_logits(mask_logits, size, side).sigmoid().cpu().numpy()

    def masks(self, context: ImageContext, rows: Sequence[int], texts: Sequence[str]) -> list[Mask]:
        """For each question, about the image of its row, float32 (H, W) in [0, 1]; None for an answer without `[SEG]`.

        Args:
            context: of this batch.
            rows: prompt of each question.
            texts: the questions.
        """
        if not rows:
            return []
        questions = [self.question(row, text) for row, text in zip(rows, texts, strict=True)]
        embeddings = [embedding for _, embedding in context.segment(questions)]
        logits = context.mask_logits([question.image_index for question in questions], embeddings)
        pairs = zip(rows, logits, strict=True)
        return [None if logit is None else self.mask_probabilities(row, logit[None])[0] for row, logit in pairs]

    def masks_from_captions(
        self, context: ImageContext, rows: Sequence[int], captions: Sequence[str]
    ) -> dict[tuple[int, str], Mask]:
        """(row, caption) -> its mask. Equal captions of one row are segmented once, empty ones not at all."""
        pairs = list(dict.fromkeys(pair for pair in zip(rows, captions, strict=True) if pair[1]))
        masks = self.masks(context, [row for row, _ in pairs], [segment_question(text) for _, text in pairs])
        return dict(zip(pairs, masks, strict=True))

    def captions(
        self, context: ImageContext, rows: Sequence[int], masks: Sequence[np.ndarray], max_completion_length: int
    ) -> list[str]:
        """The texts of `caption_answers`."""
        return [self.text(answer) for answer in self.caption_answers(context, rows, masks, max_completion_length)]

    def caption_answers(
        self, context: ImageContext, rows: Sequence[int], masks: Sequence[np.ndarray], max_completion_length: int
    ) -> list[Answer]:
        """Greedy captions of regions; regions that are equal on the model's grid are captioned once."""
        regions = list(zip(rows, masks, strict=True))
        keys = [(self.image_indices[row], self._shown(mask)) for row, mask in regions]
        different = dict(zip(keys, regions, strict=True))
        if not different:
            return []
        questions = [self.caption_question(row, mask) for row, mask in different.values()]
        answers = self.answer_regions(context, questions, Decoding(max_completion_length))
        by_key = dict(zip(different, (answer for (answer,) in answers), strict=True))
        return [by_key[key] for key in keys]

    def _shown(self, mask: np.ndarray) -> bytes:
        """What tells two regions of an image apart: their cells on the model's grid, or, drawn, their pixels."""
        shown = region_cells(self.processor, mask).numpy() if self.processor.shows_regions else mask
        return bytes(shown.tobytes())

    def text(self, answer: Answer) -> str:
        """The text of an answer without what ends it: a stop word, or the eos token."""
        text = self.processor.text(answer.token_ids).strip()
        for stop_word in (*self.processor.template.stop_words, self.processor.tokenizer.eos_token):
            text = text.removesuffix(stop_word).strip()
        return text


def open_batch(prompts: Sequence[GRPOPrompt], cache: FeatureCache) -> PromptBatch:
    """Decode images and masks, and look up or compute the features of each image."""
    images, masks = (list(column) for column in zip(*(prompt.load() for prompt in prompts), strict=True))
    image_ids, features = cache.get(images)
    image_indices = [list(features).index(image_id) for image_id in image_ids]
    return PromptBatch(prompts, images, masks, image_ids, image_indices, list(features.values()), cache)


def region_cells(processor: Sa2VAProcessor, mask: np.ndarray) -> Tensor:
    """bool (1, g, g) of a region; a region between all cells gets the nearest one, as in prediction."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"region \d+ .* misses every cell")
        return processor.region_cells(mask[None])


def seeded_generator(seed: Sequence[int]) -> torch.Generator:
    """A random number generator on the CPU that depends on the numbers of `seed` alone."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(list(seed)).generate_state(1)[0]))
