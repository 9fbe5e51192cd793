"""The conversations that `sa2va-nano` is trained on, and their batches.

Prompts about angiograms, phrases and captions about scenes; as tensors, padded and paired with their masks.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import Generator

from rl_reward_network.embedded.regions import COLOURS, PLACES, SHAPES, SIZES, RegionObject
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.models.sa2va.templates import IMAGE_PLACEHOLDER, SEG_ANSWERS
from tools.nano.pictures import (
    ABSENT,
    ATTRIBUTES,
    MAX_OBJECTS,
    PROMPT_TARGETS,
    Pictures,
    attributes_of,
    look_of_picture,
    target_mask,
)

ANSWER = SEG_ANSWERS[1]
DESCRIBE = "Please describe region{number}."
REGION_SENTENCE = "\nThere are {count} part regions in the picture: region1<vp></vp>, region2<vp></vp>.\n"
CODED = (*PROMPTS, *COLOURS, *SHAPES, *SIZES, *PLACES)  # prompts and words with a learned code, see `model`


def phrase_prompt(region: RegionObject) -> str:
    """The prompt for the mask of an object of a scene."""
    return f"Please segment {region.caption.replace('a ', 'the ', 1)}."


def corpus() -> Iterator[str]:
    """All texts that nano is trained on, for its tokenizer."""
    for prompt in PROMPTS:
        yield from (prompt, ANSWER)
    for number in range(1, MAX_OBJECTS + 1):
        yield REGION_SENTENCE.format(count=number) + DESCRIBE.format(number=number)
    yield "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
    for colour, shape, size, place in product(COLOURS, SHAPES, SIZES, PLACES):
        region = RegionObject(colour, shape, size, place, np.zeros((1, 1), bool))
        yield from (f"{region.caption}.", phrase_prompt(region))


@dataclass(frozen=True)
class Conversation:
    """One training sequence.

    Args:
        image: uint8 (H, W, 3).
        turns: (question, answer), without `<image>`.
        masks: bool (K, H, W), one per `[SEG]` in the answers, in order; K may be 0.
        words: for each `[SEG]`, or else for each region, the entries of `CODED` that describe it.
        regions: bool (N, H, W) visual prompts, or None.
        text_only: the language model gets the text alone, each turn as its own sequence; SAM 2 still gets the image.
    """

    image: np.ndarray
    turns: list[tuple[str, str]]
    masks: np.ndarray
    words: list[tuple[str, ...]]
    regions: np.ndarray | None = None
    text_only: bool = False


def vessel_conversation(pictures: Pictures, rng: Generator, prompts: int, text_only: bool) -> Conversation:
    """Random prompts, `prompts` of them, about a random angiogram, rotated by quarter turns or mirrored."""
    number = int(rng.integers(len(pictures.images)))
    quarter = int(rng.integers(4))
    image, parts = (np.rot90(array[number], quarter) for array in (pictures.images, pictures.parts))
    if rng.integers(2):
        image, parts = image[:, ::-1], parts[:, ::-1]
    questions = [PROMPTS[index] for index in rng.permutation(len(PROMPTS))[:prompts]]
    look = look_of_picture(number)
    masks = np.stack([target_mask(parts, PROMPT_TARGETS[prompt, look]) for prompt in questions])
    image = np.repeat(image[..., None], 3, axis=2)
    turns = [(prompt, ANSWER) for prompt in questions]
    return Conversation(image, turns, masks, [(prompt,) for prompt in questions], text_only=text_only)


def phrase_conversation(pictures: Pictures, rng: Generator, text_only: bool) -> Conversation:
    """One question per object of a random scene: its phrase, answered by its mask."""
    image, regions = random_scene(pictures, rng)
    turns = [(phrase_prompt(region), ANSWER) for region in regions]
    words = [attributes_of(region) for region in regions]
    return Conversation(image, turns, np.stack([region.mask for region in regions]), words, text_only=text_only)


def describing_conversation(pictures: Pictures, rng: Generator) -> Conversation:
    """One question per visual prompt, for 1 or more objects of a random scene, answered by a caption."""
    image, regions = random_scene(pictures, rng)
    regions = regions[: int(rng.integers(1, len(regions) + 1))]
    turns = [(DESCRIBE.format(number=n), f"{region.caption}.") for n, region in enumerate(regions, start=1)]
    masks = np.stack([region.mask for region in regions])
    return Conversation(image, turns, masks[:0], [attributes_of(region) for region in regions], masks)


def random_scene(pictures: Pictures, rng: Generator) -> tuple[np.ndarray, list[RegionObject]]:
    """A random scene, rotated by quarter turns or mirrored, and its objects with their new places, shuffled."""
    number, quarter, flip = int(rng.integers(len(pictures.scenes))), int(rng.integers(4)), int(rng.choice((-1, 1)))

    def turned(array: np.ndarray) -> np.ndarray:
        return np.rot90(array, quarter)[:, ::flip]

    objects, regions = turned(pictures.objects[number]), []
    new_places = np.argsort(turned(np.arange(9).reshape(3, 3)).ravel())  # index of a place before -> after
    for index, codes in enumerate(pictures.words[number]):
        if codes[0] != ABSENT:
            colour, shape, size, place = (int(code) for code in codes)
            names = list(COLOURS)[colour], SHAPES[shape], SIZES[size], PLACES[new_places[place]]
            regions.append(RegionObject(*names, objects == index + 1))
    return turned(pictures.scenes[number]), [regions[i] for i in rng.permutation(len(regions))]


def collate(conversations: list[Conversation], processor: Sa2VAProcessor) -> dict[str, Any]:
    """One batch. `masks` are in the order of the `[SEG]` tokens of `with_image`, then of `text_only`.

    At least one conversation is not `text_only`, and at least one has masks.

    Returns:
        `with_image`: model inputs and labels of the conversations that are not `text_only`, see `Sa2VAProcessor`.
        `text_only`: the same for each turn of the `text_only` ones, or None.
        `sam_pixel_values`: float32 (B, 3, S, S) of the B pictures with masks, and `masks`: their bool (K, H, W).
        `code_words`: float32 (all K, CODED), 1 for each entry of `CODED` that describes the mask, else 0.
        `attributes`: int64 (all regions of `with_image`, 4), index of each region's word in `ATTRIBUTES`.
    """
    ordered = sorted(conversations, key=lambda conversation: conversation.text_only)
    turns = [processor.tokenize_conversation([turn]) for c in ordered if c.text_only for turn in c.turns]
    masked = [conversation for conversation in ordered if len(conversation.masks)]
    code_words = [[float(word in words) for word in CODED] for conversation in masked for words in conversation.words]
    described = [words for conversation in ordered if conversation.regions is not None for words in conversation.words]
    return {
        "with_image": _with_image([conversation for conversation in ordered if not conversation.text_only], processor),
        "text_only": _padded(turns, processor) if turns else None,
        "sam_pixel_values": torch.cat([processor.sam_pixel_values(conversation.image) for conversation in masked]),
        "masks": [torch.from_numpy(conversation.masks) for conversation in masked],
        "code_words": torch.tensor(code_words),
        "attributes": _indices(described),
    }


def region_scenes(pictures: Pictures, rng: Generator, count: int, processor: Sa2VAProcessor) -> dict[str, Any]:
    """Random scenes for the region loss alone, which costs a tenth of a conversation.

    Returns:
        `pixel_values`: float32 (count, 3, S, S). `cells`: bool (N, g, g) for each. `attributes`: as in `collate`.
    """
    scenes = [random_scene(pictures, rng) for _ in range(count)]
    words = [attributes_of(region) for _, regions in scenes for region in regions]
    return {
        "pixel_values": processor.pixel_values([tile for image, _ in scenes for tile in processor.tiles(image)]),
        "cells": [_cells(np.stack([region.mask for region in regions]), processor) for _, regions in scenes],
        "attributes": _indices(words),
    }


def _indices(words: list[tuple[str, ...]]) -> torch.Tensor:
    """int64 (regions, 4): index of each word in its kind of `ATTRIBUTES`."""
    indices = [[kind.index(word) for kind, word in zip(ATTRIBUTES, row, strict=True)] for row in words]
    return torch.tensor(indices, dtype=torch.long).reshape(-1, len(ATTRIBUTES))


def _cells(regions: np.ndarray, processor: Sa2VAProcessor) -> torch.Tensor:
    """`region_cells` without its warning: a small cross may lie between all points of the grid, and is kept."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"region \d+ .* misses every cell")
        return processor.region_cells(regions)


def _with_image(conversations: list[Conversation], processor: Sa2VAProcessor) -> dict[str, Any]:
    """Model inputs and labels of conversations with their image."""
    cells = [None if c.regions is None else _cells(c.regions, processor) for c in conversations]
    texts = []
    for conversation, cell in zip(conversations, cells, strict=True):
        (question, answer), *rest = conversation.turns
        turns = [(IMAGE_PLACEHOLDER + question, answer), *rest]
        texts.append(processor.tokenize_conversation(turns, processor.tokens_per_tile, cell))
    return _padded(texts, processor) | {
        "pixel_values": processor.pixel_values([tile for c in conversations for tile in processor.tiles(c.image)]),
        "prompt_masks": [cell for cell in cells if cell is not None],
        "vp_overall_mask": torch.tensor([cell is not None for cell in cells]),
    }


def _padded(texts: list[dict[str, Any]], processor: Sa2VAProcessor) -> dict[str, Any]:
    """Left-padded ids, attention mask and labels."""
    longest = max(len(text["input_ids"]) for text in texts)
    labels = [F.pad(text["labels"], (longest - len(text["labels"]), 0), value=-100) for text in texts]
    return processor.pad([text["input_ids"].tolist() for text in texts]) | {"labels": torch.stack(labels)}
