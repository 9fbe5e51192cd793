"""Batches of `sa2va-nano`: conversations as tensors, padded and paired with their masks."""

import warnings
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import Generator

from rl_reward_network.embedded.nano.conversations import CODED, Conversation, random_scene
from rl_reward_network.embedded.nano.pictures import ATTRIBUTES, Pictures, attributes_of
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.models.sa2va.templates import IMAGE_PLACEHOLDER


def collate(conversations: list[Conversation], processor: Sa2VAProcessor) -> dict[str, Any]:
    """One batch. `masks` are in the order of the `[SEG]` tokens of `with_image`, then of `text_only`.

    Args:
        conversations: at least one that is not `text_only` and at least one with masks.
        processor: nano's.

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
    indices = [[kind.index(word) for kind, word in zip(ATTRIBUTES, attributes, strict=True)] for attributes in words]
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
