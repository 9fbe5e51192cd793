"""Many questions about a few images, under the weights of the moment: each image is read once, whoever asks about it.

Axes: U images, N questions (rows), T tokens, D language width, C SAM 2 width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from rl_reward_network.grpo.rollouts.features import ImageFeatures
from rl_reward_network.models.sa2va.generation_sa2va import Answer, Decoding, decode, evaluating
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.models.sa2va.templates import IMAGE_END, IMAGE_PLACEHOLDER, SEG_ANSWERS

MASKS_AT_ONCE = 64
TOKENS_AT_ONCE = 2**16  # keys and values in memory: 10 GB at the size of Sa2VA-4B in bfloat16


@dataclass(frozen=True)
class Question:
    """A prompt about an image, cut where the image ends.

    Args:
        image: index of the image.
        prefix_ids: up to and with `</img>`, the same for all questions about an image.
        suffix_ids: the rest, up to where the answer begins.
        cells: bool (1, g, g), the region it points at; None without.
    """

    image: int
    prefix_ids: list[int]
    suffix_ids: list[int]
    cells: Tensor | None = None


def ask(processor: Sa2VAProcessor, image: int, tiles: int, text: str, cells: Tensor | None = None) -> Question:
    """The question `text` about an image of so many tiles, thumbnail included."""
    before, end, behind = processor.prompt_text(IMAGE_PLACEHOLDER + text, tiles, cells).partition(IMAGE_END)
    return Question(image, _prefix_ids(processor, before + end), processor.token_ids(behind), cells)


@lru_cache(maxsize=64)
def _prefix_ids(processor: Sa2VAProcessor, text: str) -> list[int]:
    """Ids of the part with the image, which is long and nearly always the same; a special token ends it."""
    return processor.token_ids(text)


class ImageContext:
    """The keys and values of U images under the model's weights of now; valid until they change.

    Args:
        model: Sa2VA; its processor.
        features: of each image.
        prefixes: ids up to and with `</img>` of each.
        rows_at_once: most questions answered in one batch; fewer where images have many tokens.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: Any,
        processor: Sa2VAProcessor,
        features: Sequence[ImageFeatures],
        prefixes: Sequence[list[int]],
        rows_at_once: int = 128,
    ) -> None:
        self.model, self.processor, self.features = model, processor, features
        self.rows_at_once = min(rows_at_once, max(1, TOKENS_AT_ONCE // max(map(len, prefixes))))
        with evaluating(model):
            self.rows = [model.model.project(image.vision) for image in features]  # (tiles, tokens, D) each
            padded = {name: ids.to(model.device) for name, ids in processor.pad(prefixes).items()}
            embeds = self._embed(padded["input_ids"], [rows.flatten(0, 1) for rows in self.rows])
            self.mask = padded["attention_mask"]
            self.cache = DynamicCache(config=model.config.text_config)
            model.model(inputs_embeds=embeds, attention_mask=self.mask, past_key_values=self.cache, use_cache=True)

    def _embed(self, ids: Tensor, rows: Sequence[Tensor]) -> Tensor:
        """(N, T, D) with placeholders filled, in order, by rows (R, D)."""
        embeds = self.model.get_input_embeddings()(ids)
        places = ids == self.model.config.image_token_id
        return embeds.masked_scatter(places[..., None], torch.cat(list(rows)).to(embeds.dtype)) if rows else embeds

    def _region_rows(self, questions: Sequence[Question]) -> list[Tensor]:
        """The rows of the regions that the questions point at, in order."""
        return [
            self.rows[question.image][-1][question.cells.flatten().to(self.model.device)]
            for question in questions
            if question.cells is not None
        ]

    @torch.no_grad()
    def answer(self, questions: Sequence[Question], how: Decoding, times: int = 1) -> list[list[Answer]]:
        """`times` answers to each question; its words are read once."""
        found: list[list[Answer]] = []
        at_once = max(1, self.rows_at_once // times)
        with evaluating(self.model):
            for start in range(0, len(questions), at_once):
                found += self._answer_batch(questions[start : start + at_once], how, times)
        return found

    def _answer_batch(self, questions: Sequence[Question], how: Decoding, times: int) -> list[list[Answer]]:
        index = torch.tensor([question.image for question in questions], device=self.model.device)
        padded = {
            name: ids.to(self.model.device)
            for name, ids in self.processor.pad([question.suffix_ids for question in questions]).items()
        }
        embeds = self._embed(padded["input_ids"], self._region_rows(questions))
        mask = torch.cat([self.mask[index], padded["attention_mask"]], dim=1)
        cache = _selected(self.cache, index, self.model.config.text_config)
        if times > 1:  # all but the last token of the question is read once; each answer then begins with that token
            self.model.model(
                inputs_embeds=embeds[:, :-1], attention_mask=mask[:, :-1], past_key_values=cache, use_cache=True
            )
            cache.batch_repeat_interleave(times)
            embeds, mask = embeds[:, -1:].repeat_interleave(times, 0), mask.repeat_interleave(times, 0)
        answers = decode(self.model, self.processor, embeds, mask, how, cache)
        return [answers[start : start + times] for start in range(0, len(answers), times)]

    def segment(self, questions: Sequence[Question], max_new_tokens: int = 32) -> list[tuple[list[int], Tensor | None]]:
        """Greedy answers up to and with their first `[SEG]` and its embedding (C,); no ids and None without one."""
        guess = self.processor.token_ids(SEG_ANSWERS[1] + self.processor.template.suffix)
        answers = self.answer(questions, Decoding(max_new_tokens, guess_ids=guess))
        return [self._segmented(answer) for (answer,) in answers]

    @torch.no_grad()
    def _segmented(self, answer: Answer) -> tuple[list[int], Tensor | None]:
        states = answer.states_at(self.processor.seg_token_id)
        if not states:
            return [], None
        end = answer.token_ids.index(self.processor.seg_token_id) + 1
        return answer.token_ids[:end], self.model.text_hidden_fcs(states[0][None])[0]

    @torch.no_grad()
    def mask_logits(self, images: Sequence[int], embeddings: Sequence[Tensor | None]) -> list[Tensor | None]:
        """float32 (h, w) of each `[SEG]` embedding on its image; None stays None."""
        found: list[Tensor | None] = [None] * len(images)
        for image in sorted(set(images)):
            own = [row for row, name in enumerate(images) if name == image and embeddings[row] is not None]
            for start in range(0, len(own), MASKS_AT_ONCE):
                part = own[start : start + MASKS_AT_ONCE]
                stacked = torch.stack([e for row in part if (e := embeddings[row]) is not None])
                logits = self.model.decode_masks(self.features[image].sam, stacked).mask_logits
                for row, one in zip(part, logits, strict=True):
                    found[row] = one
        return found


def _selected(cache: DynamicCache, index: Tensor, config: Any) -> DynamicCache:
    """The cache of chosen rows, as a new one."""
    copy = DynamicCache(config=config)
    for number, layer in enumerate(cache.layers):
        copy.update(layer.keys[index], layer.values[index], number)  # type: ignore[union-attr, index]
    return copy
