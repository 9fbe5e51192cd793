"""The conversations that `sa2va-nano` is trained on: prompts about angiograms, phrases and captions about scenes."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.random import Generator

from rl_reward_network.embedded.nano.pictures import ABSENT, MAX_OBJECTS, Pictures, attributes_of, look_of_picture
from rl_reward_network.embedded.nano.prompt_targets import PROMPT_TARGETS, target_mask
from rl_reward_network.embedded.regions import COLOURS, PLACES, SHAPES, SIZES, RegionObject
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.models.sa2va.templates import SEG_ANSWERS

ANSWER = SEG_ANSWERS[1]
DESCRIBE = "Please describe region{number}."
REGION_SENTENCE = "\nThere are {count} part regions in the picture: region1<vp></vp>, region2<vp></vp>.\n"
CODED = (*PROMPTS, *COLOURS, *SHAPES, *SIZES, *PLACES)  # prompts and words with a learned code, see `losses`


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
