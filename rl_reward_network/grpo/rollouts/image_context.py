"""Many questions about a few images under a model's current weights; the prefix of each image is computed once.

Axes: U images, N questions (rows), G answers to a question, T tokens, D language width, C SAM 2 width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from rl_reward_network.grpo.image_features import ImageFeatures
from rl_reward_network.models.sa2va.generation_sa2va import Answer, Decoding, decode, evaluating, selected_rows
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.models.sa2va.templates import IMAGE_PLACEHOLDER, SEG_ANSWERS

MASKS_AT_ONCE = 64
ROWS_AT_ONCE = 128  # most answers of one batch
TOKENS_AT_ONCE = 2**16  # keys and values in memory: 10 GB at the size of Sa2VA-4B in bfloat16


@dataclass(frozen=True)
class Question:
    """A question about an image, split where the image ends.

    Args:
        image_index: of the image in its batch.
        prefix_ids: token ids up to and including the end of the image, the same for all questions about an image.
        suffix_ids: the remaining ids, up to the start of the answer.
        region_cells: bool (1, g, g), the region that the question refers to, or None.
        drawn: features of the image with the region drawn into it, in place of `region_cells`; see
            `PromptBatch.answer_regions`.
    """

    image_index: int
    prefix_ids: list[int]
    suffix_ids: list[int]
    region_cells: Tensor | None = None
    drawn: ImageFeatures | None = None


def rows_within_limits(prefix_tokens: int, rows_at_once: int = ROWS_AT_ONCE) -> int:
    """Most answers of one batch: fewer if the prefixes of their images are long."""
    return min(rows_at_once, max(1, TOKENS_AT_ONCE // prefix_tokens))


def make_question(
    processor: Sa2VAProcessor, image_index: int, image_tokens: int, text: str, region_cells: Tensor | None = None
) -> Question:
    """The question `text` about an image with this number of tokens."""
    prompt = processor.prompt_text(IMAGE_PLACEHOLDER + text, image_tokens, region_cells)
    before, end, behind = prompt.partition(processor.image_tokens.end)
    return Question(image_index, _prefix_ids(processor, before + end), processor.token_ids(behind), region_cells)


@lru_cache(maxsize=64)
def _prefix_ids(processor: Sa2VAProcessor, text: str) -> list[int]:
    """Token ids of the part with the image, which is long and almost always the same; a special token ends it."""
    return processor.token_ids(text)


class ImageContext:
    """The keys and values of U images under the model's current weights; valid until the weights change.

    Args:
        model: Sa2VA.
        processor: of the model.
        features: of each image.
        prefixes: token ids up to and including the end of each image.
        rows_at_once: maximum number of answers decoded in one batch; fewer if images have many tokens.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: Any,
        processor: Sa2VAProcessor,
        features: Sequence[ImageFeatures],
        prefixes: Sequence[list[int]],
        rows_at_once: int = ROWS_AT_ONCE,
    ) -> None:
        self.model, self.processor, self.features = model, processor, features
        self.rows_at_once = rows_within_limits(max(map(len, prefixes)), rows_at_once)
        with evaluating(model):
            self.image_tokens = [model.model.project(image.vision) for image in features]  # (tiles, tokens, D) each
            padded = self._pad(prefixes)
            self.mask = padded["attention_mask"]
            inputs = model.model.splice(padded["input_ids"], model.model.join(self.image_tokens), self.mask)
            self.position_table = inputs.get("position_table")
            self.cache = DynamicCache(config=model.config.text_config)
            model.model(**inputs, attention_mask=self.mask, past_key_values=self.cache, use_cache=True)

    def _pad(self, token_ids: Sequence[list[int]]) -> dict[str, Tensor]:
        """input_ids and attention_mask, left-padded, on the model's device."""
        return {name: ids.to(self.model.device) for name, ids in self.processor.pad(token_ids).items()}

    def _region_tokens(self, questions: Sequence[Question]) -> Tensor | None:
        """(R, D): image tokens, of the last tile, inside the regions that the questions refer to, in order."""
        tokens = [
            self.image_tokens[question.image_index][-1][question.region_cells.flatten().to(self.model.device)]
            for question in questions
            if question.region_cells is not None
        ]
        return torch.cat(tokens) if tokens else None

    @torch.no_grad()
    def answer(self, questions: Sequence[Question], decoding: Decoding, num_answers: int = 1) -> list[list[Answer]]:
        """G = `num_answers` answers to each question; each question is processed once."""
        at_once = max(1, self.rows_at_once // num_answers)
        batches = [questions[start : start + at_once] for start in range(0, len(questions), at_once)]
        with evaluating(self.model):
            return [rows for batch in batches for rows in self._answer_batch(batch, decoding, num_answers)]

    def _answer_batch(self, questions: Sequence[Question], decoding: Decoding, num_answers: int) -> list[list[Answer]]:
        images = torch.tensor([question.image_index for question in questions], device=self.model.device)
        padded = self._pad([question.suffix_ids for question in questions])
        embeds = self.model.model.splice(padded["input_ids"], self._region_tokens(questions))["inputs_embeds"]
        mask = torch.cat([self.mask[images], padded["attention_mask"]], dim=1)
        cache = selected_rows(self.cache, images, self.model.config.text_config)
        positions = self._positions(images)
        if num_answers > 1:  # all but the last token of a question is processed once; each answer starts from it
            asked = {"attention_mask": mask[:, :-1], "past_key_values": cache, "use_cache": True}
            self.model.model(inputs_embeds=embeds[:, :-1], **asked, **positions)
            cache.batch_repeat_interleave(num_answers)
            embeds, mask = embeds[:, -1:].repeat_interleave(num_answers, 0), mask.repeat_interleave(num_answers, 0)
            positions = self._positions(images.repeat_interleave(num_answers))
        answers = decode(self.model, self.processor, {"inputs_embeds": embeds} | positions, mask, decoding, cache)
        return [answers[start : start + num_answers] for start in range(0, len(answers), num_answers)]

    def _positions(self, images: Tensor) -> dict[str, Tensor]:
        """The position tables of the images (N,) of some rows, for a Qwen-VL; empty for an InternVL."""
        return {} if self.position_table is None else {"position_table": self.position_table[:, images]}

    def segment(self, questions: Sequence[Question], max_new_tokens: int = 32) -> list[tuple[list[int], Tensor | None]]:
        """Greedy answers up to and including their first `[SEG]`, and its embedding (C,).

        No token ids and None for an answer without `[SEG]`.
        """
        guess = self.processor.answer_ids(SEG_ANSWERS[1])
        answers = self.answer(questions, Decoding(max_new_tokens, guess_ids=guess))
        return [self._first_seg(answer) for (answer,) in answers]

    @torch.no_grad()
    def _first_seg(self, answer: Answer) -> tuple[list[int], Tensor | None]:
        states = answer.states_at(self.processor.seg_token_id)
        if not states:
            return [], None
        end = answer.token_ids.index(self.processor.seg_token_id) + 1
        return answer.token_ids[:end], self.model.text_hidden_fcs(states[0][None])[0]

    @torch.no_grad()
    def mask_logits(self, image_indices: Sequence[int], embeddings: Sequence[Tensor | None]) -> list[Tensor | None]:
        """float32 (h, w) of each `[SEG]` embedding on its image; None for None."""
        logits: list[Tensor | None] = [None] * len(image_indices)
        for index in sorted(set(image_indices)):
            pairs = enumerate(zip(image_indices, embeddings, strict=True))
            rows = [(row, embedding) for row, (i, embedding) in pairs if i == index and embedding is not None]
            for start in range(0, len(rows), MASKS_AT_ONCE):
                part = rows[start : start + MASKS_AT_ONCE]
                stacked = torch.stack([embedding for _, embedding in part])
                decoded = self.model.decode_masks(self.features[index].sam, stacked).mask_logits
                for (row, _), mask_logits in zip(part, decoded, strict=True):
                    logits[row] = mask_logits
        return logits
