"""What `sa2va-nano` is trained on: rendered pictures kept in memory-mapped arrays, and conversations about them.

None of these patients is in the embedded data set: they come from another seed.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import Generator
from tqdm import tqdm

from rl_reward_network.artefacts import whole_folder
from rl_reward_network.embedded.angiograms import LOOKS, SIDE, render_series
from rl_reward_network.embedded.datasets import RECIPE
from rl_reward_network.embedded.nano.prompt_targets import TABLE, target
from rl_reward_network.embedded.regions import COLOURS, PLACES, SHAPES, SIZES, RegionObject, Scene, make_scenes
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.models.sa2va.templates import IMAGE_PLACEHOLDER, SEG_ANSWERS

SEED = 7_000_000  # far from the embedded data set's patients
ANSWER = SEG_ANSWERS[1]
DESCRIBE = "Please describe region{number}."
REGION_SENTENCE = "\nThere are {count} part regions in the picture: region1<vp></vp>, region2<vp></vp>.\n"
MOST_OBJECTS = 4
ATTRIBUTES = (tuple(COLOURS), SHAPES, SIZES, PLACES)  # what a caption says
CODED = (*PROMPTS, *COLOURS, *SHAPES, *SIZES, *PLACES)  # what has a learned code: see `training.nano`


def phrase_prompt(region: RegionObject) -> str:
    """What is asked to segment an object of a scene."""
    return f"Please segment {region.caption.replace('a ', 'the ', 1)}."


def corpus() -> Iterator[str]:
    """All words nano is trained on, for its tokenizer."""
    for prompt in PROMPTS:
        yield from (prompt, ANSWER)
    for number in range(1, MOST_OBJECTS + 1):
        yield REGION_SENTENCE.format(count=number) + DESCRIBE.format(number=number)
    yield "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
    for colour, shape, size, place in product(COLOURS, SHAPES, SIZES, PLACES):
        region = RegionObject(colour, shape, size, place, np.zeros((1, 1), bool))
        yield from (f"{region.caption}.", phrase_prompt(region))


@dataclass(frozen=True)
class Pictures:
    """Rendered training pictures, on disk.

    Args:
        name: of the folder: everything they depend on.
        images: uint8 (N, H, W), angiograms.
        parts: uint8 (N, H, W), their part maps; see `look_of_picture`.
        scenes: uint8 (M, H, W, 3).
        objects: uint8 (M, H, W), number of the object at each pixel, from 1.
        words: uint8 (M, 4, 4), indices of colour, shape, size, place of each object; 255 where there is none.
    """

    name: str
    images: np.ndarray
    parts: np.ndarray
    scenes: np.ndarray
    objects: np.ndarray
    words: np.ndarray


def open_pictures(folder: Path, angiograms: int, scenes: int, seed: int) -> Pictures:
    """The pictures in `folder`, rendered first if they are not there (whole or not at all).

    Args:
        folder: where their own folder stands, which is named by everything they depend on.
        angiograms, scenes: how many, at least 1 of each.
        seed: 0 or more.

    Raises:
        ValueError: a number that is too small.
    """
    if min(angiograms, scenes) < 1 or seed < 0:
        raise ValueError(f"got angiograms={angiograms}, scenes={scenes}, seed={seed}; expected >= 1, >= 1, >= 0")
    home = folder / f"pictures_{angiograms}_{scenes}_seed{seed}_recipe{RECIPE}"
    if not home.exists():
        with whole_folder(home) as temporary:
            _render(temporary, angiograms, scenes, seed)
    names = ("images", "parts", "scenes", "objects", "words")
    return Pictures(home.name, **{name: np.load(home / f"{name}.npy", mmap_mode="r") for name in names})


def _render(folder: Path, angiograms: int, scenes: int, seed: int) -> None:
    """Write the five arrays."""
    shapes: dict[str, tuple[int, ...]] = {"images": (angiograms, SIDE, SIDE), "parts": (angiograms, SIDE, SIDE)}
    shapes |= {"scenes": (scenes, SIDE, SIDE, 3), "objects": (scenes, SIDE, SIDE), "words": (scenes, MOST_OBJECTS, 4)}
    out = {
        name: np.lib.format.open_memmap(folder / f"{name}.npy", mode="w+", dtype=np.uint8, shape=shape)
        for name, shape in shapes.items()
    }
    for number in tqdm(range(angiograms), "rendering angiograms", unit="image"):
        rng = np.random.default_rng([SEED + seed, number])
        (frame,) = render_series(rng, look_of_picture(number), 1)
        out["images"][number], out["parts"][number] = frame.image, frame.parts
    chosen = tqdm(make_scenes(scenes, SEED + seed), total=scenes, desc="rendering scenes", unit="image")
    for number, scene in enumerate(chosen):
        out["scenes"][number], out["objects"][number], out["words"][number] = scene.image, *_coded(scene)


def look_of_picture(number: int) -> str:
    """The look of a training angiogram: all come equally often."""
    return list(LOOKS)[number % len(LOOKS)]


def _coded(scene: Scene) -> tuple[np.ndarray, np.ndarray]:
    """Objects by number, and their words by index."""
    objects = np.zeros(scene.image.shape[:2], np.uint8)
    words = np.full((MOST_OBJECTS, 4), 255, np.uint8)
    for number, region in enumerate(scene.objects):
        objects[region.mask] = number + 1
        words[number] = [kind.index(word) for kind, word in zip(ATTRIBUTES, _words(region), strict=True)]
    return objects, words


@dataclass(frozen=True)
class Conversation:
    """One training sequence.

    Args:
        image: uint8 (H, W, 3).
        turns: (question, answer), without `<image>`.
        masks: bool (K, H, W), one per `[SEG]` in the answers, in order; K may be 0.
        said: for each `[SEG]`, or else for each region, the entries of `CODED` that describe it.
        regions: bool (N, H, W) visual prompts, or None.
        blind: the language model sees the words alone, each turn by itself; SAM 2 sees the image all the same.
    """

    image: np.ndarray
    turns: list[tuple[str, str]]
    masks: np.ndarray
    said: list[tuple[str, ...]]
    regions: np.ndarray | None = None
    blind: bool = False


def vessel_conversation(pictures: Pictures, rng: Generator, prompts: int, blind: bool) -> Conversation:
    """Some prompts, in any order, about an angiogram turned or mirrored at random."""
    number = int(rng.integers(len(pictures.images)))
    quarter = int(rng.integers(4))
    image, parts = (np.rot90(array[number], quarter) for array in (pictures.images, pictures.parts))
    if rng.integers(2):
        image, parts = image[:, ::-1], parts[:, ::-1]
    asked = [PROMPTS[index] for index in rng.permutation(len(PROMPTS))[:prompts]]
    look = look_of_picture(number)
    masks = np.stack([target(parts, TABLE[prompt, look]) for prompt in asked])
    image = np.repeat(image[..., None], 3, axis=2)
    turns = [(prompt, ANSWER) for prompt in asked]
    return Conversation(image, turns, masks, [(prompt,) for prompt in asked], blind=blind)


def phrase_conversation(pictures: Pictures, rng: Generator, blind: bool) -> Conversation:
    """Every object of a scene asked for by its phrase."""
    image, regions = _scene(pictures, rng)
    turns = [(phrase_prompt(region), ANSWER) for region in regions]
    said = [_words(region) for region in regions]
    return Conversation(image, turns, np.stack([region.mask for region in regions]), said, blind=blind)


def describing_conversation(pictures: Pictures, rng: Generator) -> Conversation:
    """Some objects of a scene pointed at, and described."""
    image, regions = _scene(pictures, rng)
    regions = regions[: int(rng.integers(1, len(regions) + 1))]
    turns = [(DESCRIBE.format(number=n), f"{region.caption}.") for n, region in enumerate(regions, start=1)]
    masks = np.stack([region.mask for region in regions])
    return Conversation(image, turns, masks[:0], [_words(region) for region in regions], masks)


def _words(region: RegionObject) -> tuple[str, ...]:
    """One entry of each of `ATTRIBUTES`."""
    return region.colour, region.shape, region.size, region.place


def _scene(pictures: Pictures, rng: Generator) -> tuple[np.ndarray, list[RegionObject]]:
    """A scene turned or mirrored at random, and its objects, with their new places, in any order."""
    number, quarter, flip = int(rng.integers(len(pictures.scenes))), int(rng.integers(4)), int(rng.choice((-1, 1)))

    def turned(array: np.ndarray) -> np.ndarray:
        return np.rot90(array, quarter)[:, ::flip]

    objects, regions = turned(pictures.objects[number]), []
    place_now = np.argsort(turned(np.arange(9).reshape(3, 3)).ravel())  # index of a place before -> after
    for index, word in enumerate(pictures.words[number]):
        if word[0] < 255:
            colour, shape, size, place = (int(w) for w in word)
            names = list(COLOURS)[colour], SHAPES[shape], SIZES[size], PLACES[place_now[place]]
            regions.append(RegionObject(*names, objects == index + 1))
    return turned(pictures.scenes[number]), [regions[i] for i in rng.permutation(len(regions))]


def collate(conversations: list[Conversation], processor: Sa2VAProcessor) -> dict[str, Any]:
    """One batch. The `[SEG]` of `seen`, then those of `blind`, come in the order of `masks`.

    Args:
        conversations: at least one with its image and at least one with masks.
        processor: nano's.

    Returns:
        `seen`: inputs and labels of the model for conversations with their image, as `Sa2VAProcessor` gives them.
        `blind`: the same for turns by themselves, or None.
        `sam_pixel_values`: float32 (B, 3, S, S) of the B pictures with masks, and `masks`: their bool (K, H, W).
        `said`: float32 (all K, CODED), 1 for what each question says.
        `attributes`: int64 (all regions of `seen`, 4), index of each region's word in `ATTRIBUTES`.
    """
    ordered = sorted(conversations, key=lambda conversation: conversation.blind)
    blind = [processor.tokenize_conversation([turn]) for c in ordered if c.blind for turn in c.turns]
    masked = [conversation for conversation in ordered if len(conversation.masks)]
    said = [[float(word in words) for word in CODED] for conversation in masked for words in conversation.said]
    described = [words for conversation in ordered if conversation.regions is not None for words in conversation.said]
    return {
        "seen": _seen([conversation for conversation in ordered if not conversation.blind], processor),
        "blind": _padded(blind, processor) if blind else None,
        "sam_pixel_values": torch.cat([processor.sam_pixel_values(conversation.image) for conversation in masked]),
        "masks": [torch.from_numpy(conversation.masks) for conversation in masked],
        "said": torch.tensor(said),
        "attributes": _indices(described),
    }


def watched_scenes(pictures: Pictures, rng: Generator, count: int, processor: Sa2VAProcessor) -> dict[str, Any]:
    """Scenes whose regions are read and not talked about, which costs a tenth of a conversation.

    Returns:
        `pixel_values`: float32 (count, 3, S, S). `cells`: bool (N, g, g) for each. `attributes`: as in `collate`.
    """
    scenes = [_scene(pictures, rng) for _ in range(count)]
    words = [_words(region) for _, regions in scenes for region in regions]
    return {
        "pixel_values": processor.pixel_values([tile for image, _ in scenes for tile in processor.tiles(image)]),
        "cells": [_cells(np.stack([region.mask for region in regions]), processor) for _, regions in scenes],
        "attributes": _indices(words),
    }


def _indices(words: list[tuple[str, ...]]) -> torch.Tensor:
    """int64 (regions, 4): index of each word in its kind of `ATTRIBUTES`."""
    found = [[kind.index(word) for kind, word in zip(ATTRIBUTES, own, strict=True)] for own in words]
    return torch.tensor(found, dtype=torch.long).reshape(-1, len(ATTRIBUTES))


def _cells(regions: np.ndarray, processor: Sa2VAProcessor) -> torch.Tensor:
    """`region_cells` without its warning: a small cross may lie between all points of the grid; part of the task."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"region \d+ .* misses every cell")
        return processor.region_cells(regions)


def _seen(conversations: list[Conversation], processor: Sa2VAProcessor) -> dict[str, Any]:
    """Inputs and labels of conversations with their image."""
    cells = [None if c.regions is None else _cells(c.regions, processor) for c in conversations]
    texts = [_tokens(c.turns, processor, cell) for c, cell in zip(conversations, cells, strict=True)]
    return _padded(texts, processor) | {
        "pixel_values": processor.pixel_values([tile for c in conversations for tile in processor.tiles(c.image)]),
        "prompt_masks": [cell for cell in cells if cell is not None],
        "vp_overall_mask": torch.tensor([cell is not None for cell in cells]),
    }


def _tokens(turns: list[tuple[str, str]], processor: Sa2VAProcessor, cells: torch.Tensor | None) -> dict[str, Any]:
    """Ids and labels of a conversation whose first question holds the image."""
    (question, answer), *rest = turns
    return processor.tokenize_conversation([(IMAGE_PLACEHOLDER + question, answer), *rest], 1, cells)


def _padded(texts: list[dict[str, Any]], processor: Sa2VAProcessor) -> dict[str, Any]:
    """Left-padded ids, attention mask and labels."""
    longest = max(len(text["input_ids"]) for text in texts)
    labels = [F.pad(text["labels"], (longest - len(text["labels"]), 0), value=-100) for text in texts]
    return processor.pad([text["input_ids"].tolist() for text in texts]) | {"labels": torch.stack(labels)}
