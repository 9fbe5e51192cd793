"""Many questions about a few images under a model's current weights; the prefix of each image is computed once.

Axes: U images, N questions (rows), G answers to a question, T tokens, D language width, C SAM 2 width.
"""

import re
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import Tensor
from transformers.cache_utils import DynamicCache

from rl_reward_network.atomic_io import pixels_digest
from rl_reward_network.data.windows import augmented
from rl_reward_network.grpo.prompts import DESCRIBE, DESCRIBE_REAL, TrainingItem, of_one_image, segment_question
from rl_reward_network.grpo.settings import ROWS_AT_ONCE
from rl_reward_network.models.sa2va.generation_sa2va import (
    Answer,
    Decoding,
    decode,
    evaluating,
    image_features,
    selected_rows,
)
from rl_reward_network.models.sa2va.grounding_sa2va import Sam2Features
from rl_reward_network.models.sa2va.pixels_sa2va import QUESTIONS, draw_region, upsample_mask_logits
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.models.sa2va.templates import IMAGE_PLACEHOLDER, SEG_ANSWERS

GIBIBYTE = 2**30
Mask = np.ndarray | None


@dataclass(frozen=True)
class ImageFeatures:
    """Features of one image, before any part that is trained."""

    vision: Any  # of the body's `get_vision_features`; (tiles, patches, V), input of `mlp1`, in an InternVL
    sam: Sam2Features  # input of conv_s0 / conv_s1, batch axis 1; no maps of a drawn region, which is only described

    def to(self, device: torch.device | str) -> "ImageFeatures":
        """The same features on another device."""
        return ImageFeatures(self.vision.to(device), self.sam.to(device))

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(self.vision.nbytes + self.sam.nbytes)


class FeatureCache:
    """Least-recently-used cache of image features, in main memory, by the digest of the decoded pixels.

    Names and bytes of files do not tell images apart: uncompressed files of one size may share both of their ends.
    """

    def __init__(self, model: Any, processor: Sa2VAProcessor, limit_gib: float = 4.0) -> None:
        self.model, self.processor, self.limit = model, processor, int(limit_gib * GIBIBYTE)
        self.entries: OrderedDict[str, ImageFeatures] = OrderedDict()
        self.nbytes = 0

    def get(self, images: Sequence[np.ndarray], repeated: bool = True) -> tuple[list[str], dict[str, ImageFeatures]]:
        """The digest of each image, uint8 (H, W, 3), and digest -> features on the model's device.

        Features of images that are not `repeated`, such as augmented ones, are not kept.
        """
        digests = [pixels_digest(image) for image in images]
        different = dict(zip(digests, images, strict=True))
        return digests, {digest: self._get_one(digest, image, repeated) for digest, image in different.items()}

    def get_region(self, image: np.ndarray, region: np.ndarray, repeated: bool) -> ImageFeatures:
        """Features of an image, uint8 (H, W, 3), with the region, bool (H, W), drawn into it, see `draw_region`.

        True regions will be asked for again (`repeated`); others are not kept.
        """
        drawn = draw_region(image, region, self.processor.region_prompt)
        return self._get_one(pixels_digest(drawn, "region"), drawn, repeated, drawn=True)

    def _get_one(self, key: str, image: np.ndarray, repeated: bool, drawn: bool = False) -> ImageFeatures:
        if not repeated:
            return encode_image(self.model, self.processor, image, drawn)
        if key in self.entries:
            self.entries.move_to_end(key)
            return self.entries[key].to(self.model.device)
        features = encode_image(self.model, self.processor, image, drawn)
        self.entries[key] = features.to("cpu")
        self.nbytes += features.nbytes
        while self.nbytes > self.limit and len(self.entries) > 1:
            self.nbytes -= self.entries.popitem(last=False)[1].nbytes
        return features


@torch.no_grad()
def encode_image(model: Any, processor: Sa2VAProcessor, image: np.ndarray, drawn: bool = False) -> ImageFeatures:
    """Output of both encoders for one uint8 (H, W, 3) image; where SAM 2's encoder trains, its pixels.

    Of an image with a region drawn into it (`drawn`) that of the vision tower alone.
    """
    trains = any(p.requires_grad for p in model.grounding_encoder.vision_encoder.parameters())
    with evaluating(model):
        pixels, _ = processor.vision_inputs([image])
        vision = model.model.get_vision_features(**send_to_device(pixels, model.device))
        return ImageFeatures(vision, Sam2Features(()) if drawn else image_features(model, processor, [image], trains))


SIDES = re.compile(r"\b(left|right)\b", re.IGNORECASE)  # in a question: its image must not be mirrored; nor with names
MASKS_AT_ONCE = 64
TOKENS_AT_ONCE = 2**16  # keys and values in memory: 10 GB at the size of Sa2VA-4B in bfloat16


@dataclass(frozen=True)
class Question:
    """A question about an image, split where the image ends."""

    image_index: int  # in its batch
    prefix_ids: list[int]  # token ids up to and including the end of the image, the same for all questions about it
    suffix_ids: list[int]  # the remaining ids, up to the start of the answer
    region_cells: Tensor | None = None  # bool (1, g, g), the region that the question refers to
    drawn: ImageFeatures | None = None  # in its place those of the image with the region drawn into it


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

    The prefixes are token ids up to and including the end of each image. At most `rows_at_once` answers are decoded in
    one batch; fewer if images have many tokens.
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
        tokens = []
        for question in questions:
            if question.region_cells is not None:
                tile = self.image_tokens[question.image_index][-1]
                # Cells are on the CPU: of a mask on the GPU, the host would wait for the number of its cells.
                tokens.append(tile[question.region_cells.flatten().nonzero()[:, 0].to(tile.device)])
        return torch.cat(tokens) if tokens else None

    @torch.no_grad()
    def answer(self, questions: Sequence[Question], decoding: Decoding, num_answers: int = 1) -> list[list[Answer]]:
        """G = `num_answers` answers to each question; each question is processed once."""
        at_once, answers = max(1, self.rows_at_once // num_answers), list[list[Answer]]()
        with evaluating(self.model):
            for start in range(0, len(questions), at_once):
                answers += self._answer_batch(questions[start : start + at_once], decoding, num_answers)
        return answers

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

    @torch.no_grad()
    def segment(self, questions: Sequence[Question], max_new_tokens: int = 32) -> list[tuple[list[int], Tensor | None]]:
        """Greedy answers up to and including their first `[SEG]`, and its embedding (C,).

        No token ids and None for an answer without `[SEG]`.
        """
        decoding = Decoding(max_new_tokens, guess_ids=self.processor.answer_ids(SEG_ANSWERS[1]))
        seg_id, found = self.processor.seg_token_id, []
        for (answer,) in self.answer(questions, decoding):
            states = answer.states_at(seg_id)
            ids = answer.token_ids[: answer.token_ids.index(seg_id) + 1] if states else []
            found.append((ids, self.model.text_hidden_fcs(states[0][None])[0] if states else None))
        return found

    @torch.no_grad()
    def mask_logits(self, image_indices: Sequence[int], embeddings: Sequence[Tensor | None]) -> list[Tensor | None]:
        """float32 (h, w) of each `[SEG]` embedding on its image, as a deployed model makes it; None for None."""
        logits: list[Tensor | None] = [None] * len(image_indices)
        for index in sorted(set(image_indices)):
            pairs = enumerate(zip(image_indices, embeddings, strict=True))
            of_rows = {row: embedding for row, (i, embedding) in pairs if i == index and embedding is not None}
            rows = iter(of_rows)
            for stacked in torch.stack([*of_rows.values()]).split(MASKS_AT_ONCE) if of_rows else ():
                with evaluating(self.model):  # a side network that trains computes in bfloat16
                    decoded = self.model.decode_masks(self.features[index].sam, stacked)
                    for own in self.model.answer_masks(decoded):
                        logits[next(rows)] = own
        return logits


@dataclass(frozen=True)
class PromptBatch:
    """N prompts with their images decoded, and the features of each different image."""

    prompts: Sequence[TrainingItem]
    images: list[np.ndarray]  # uint8 (H, W, 3) of each prompt
    truths: list[Mask]  # bool (H, W) of each prompt, or None
    image_ids: list[str]  # of each prompt, the digest of its image's pixels
    image_indices: list[int]  # of each prompt, the index of its image in `features`
    features: list[ImageFeatures]  # of each different image
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
        text, truth = self.prompts[row].describe, self.truths[row]
        if self.processor.shows_regions:
            return self.question(row, text, region_cells(self.processor, mask))
        if text in (DESCRIBE, DESCRIBE_REAL):
            text = QUESTIONS[self.processor.region_prompt]
        drawn = self.cache.get_region(self.images[row], mask, truth is not None and np.array_equal(truth, mask))
        tokens = self.processor.num_image_tokens(drawn.vision)
        return replace(make_question(self.processor, self.image_indices[row], tokens, text), drawn=drawn)

    def answer_regions(
        self, context: ImageContext, questions: Sequence[Question], decoding: Decoding, num_answers: int = 1
    ) -> list[list[Answer]]:
        """As `ImageContext.answer`, for questions of `caption_question`: drawn regions are images of their own."""
        if not any(question.drawn for question in questions):
            return context.answer(questions, decoding, num_answers)
        at_once, answers = rows_within_limits(max(len(q.prefix_ids) for q in questions), context.rows_at_once), []
        for start in range(0, len(questions), at_once):
            part = [replace(question, image_index=n) for n, question in enumerate(questions[start : start + at_once])]
            drawn = [question.drawn for question in part if question.drawn]
            own = ImageContext(context.model, self.processor, drawn, [q.prefix_ids for q in part], context.rows_at_once)
            answers += own.answer(part, decoding, num_answers)
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
        """For each question, about the image of its row, float32 (H, W) in [0, 1]; None without `[SEG]`."""
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
        regions, on_grid = list(zip(rows, masks, strict=True)), self.processor.shows_regions
        shown = [region_cells(self.processor, mask).numpy() if on_grid else mask for mask in masks]  # drawn: its pixels
        keys = [(self.image_indices[row], one.tobytes()) for row, one in zip(rows, shown, strict=True)]
        different = dict(zip(keys, regions, strict=True))
        if not different:
            return []
        questions = [self.caption_question(row, mask) for row, mask in different.values()]
        answers = self.answer_regions(context, questions, Decoding(max_completion_length))
        by_key = dict(zip(different, (answer for (answer,) in answers), strict=True))
        return [by_key[key] for key in keys]

    def text(self, answer: Answer) -> str:
        """The text of an answer, see `without_end`."""
        return without_end(self.processor, self.processor.text(answer.token_ids))


def without_end(processor: Sa2VAProcessor, text: str) -> str:
    """A text without what ends it: a stop word, or the eos token."""
    text = text.strip()
    for end in (*processor.template.stop_words, processor.tokenizer.eos_token):
        text = text.removesuffix(end).strip()
    return text


def open_batch(
    prompts: Sequence[TrainingItem], cache: FeatureCache, views: np.random.Generator | None = None
) -> PromptBatch:
    """Decode images and masks, and look up or compute the features of each image.

    With `views`, every image with true masks is replaced by a random view of it (`windows.augmented`), which all of its
    prompts share.
    """
    images, masks = (list(column) for column in zip(*(prompt.load() for prompt in prompts), strict=True))
    if views is not None:
        for rows in of_one_image(prompts):
            truths = [masks[row] for row in rows if masks[row] is not None]
            if len(truths) == len(rows):
                mirror = mirrored([prompts[row] for row in rows])
                view, of_view = augmented(images[rows[0]], np.stack(truths), views, mirror)
                for row, truth in zip(rows, of_view, strict=True):
                    images[row], masks[row] = view, truth
    return make_batch(prompts, images, masks, cache, repeated=views is None)


def make_batch(
    prompts: Sequence[TrainingItem], images: list[np.ndarray], truths: list[Mask], cache: FeatureCache, repeated: bool
) -> PromptBatch:
    """The batch of prompts whose images, uint8 (H, W, 3), and masks are given; `repeated` as in `FeatureCache.get`."""
    image_ids, features = cache.get(images, repeated)
    image_indices = [list(features).index(image_id) for image_id in image_ids]
    return PromptBatch(prompts, images, truths, image_ids, image_indices, list(features.values()), cache)


def mirrored(prompts: Sequence[TrainingItem]) -> bool:
    """Whether views of the image of these prompts may be mirrored: not where left and right, or names, matter."""
    return not any(prompt.name or SIDES.search(prompt.question) for prompt in prompts)


def region_cells(processor: Sa2VAProcessor, mask: np.ndarray) -> Tensor:
    """bool (1, g, g) of a region; a region between all cells gets the nearest one, as in prediction."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"region \d+ .* misses every cell")
        return processor.region_cells(mask[None])


def seeded_generator(seed: Sequence[int]) -> torch.Generator:
    """A random number generator on the CPU that depends on the numbers of `seed` alone."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(list(seed)).generate_state(1)[0]))
