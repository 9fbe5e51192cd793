"""Masks for training and testing a reward network: the segmenter's, and damaged copies of the true mask.

One family of damage and one source of masks are excluded from training; the test measures generalisation on them.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from rl_reward_network.reward_training.damage import DAMAGES, damage, ridge_masks
from rl_reward_network.rewards.masks import dice

UNSEEN_FAMILY = "shift"
SEEN_FAMILIES = {name: family for name, family in DAMAGES.items() if name != UNSEEN_FAMILY}
SEGMENTER, SEEN, UNSEEN, RIDGE = "Sa2VA", "damage seen in training", "damage never seen", "ridge filter, never seen"
SOURCES = (SEGMENTER, SEEN, UNSEEN, RIDGE)
ON_OBJECT = 0.75  # share of windows centred on a pixel of the object; others are often empty
DICE_BINS = 10


class RewardExample(NamedTuple):
    """One labelled image and the segmenter's masks of it."""

    image: np.ndarray
    """uint8 (H, W, 3), RGB."""
    truth: np.ndarray
    """bool (H, W)."""
    masks: np.ndarray
    """bool (P, H, W), one per prompt, the default prompt first; P may be 0."""
    group_id: str
    """Hash of the patient or group."""


class Windows(NamedTuple):
    """Training data: N square windows of S pixels at native resolution, with M masks each."""

    image: np.ndarray
    """uint8 (N, S, S, 3), RGB."""
    truth: np.ndarray
    """bool (N, S, S)."""
    masks: np.ndarray
    """uint8 (N, M, S * S / 8), the masks packed to bits."""
    dice: np.ndarray
    """float (N, M), the true Dice of each mask inside its window."""


def make_windows(examples: Iterable[RewardExample], each: int, side: int, masks: int, seed: Sequence[int]) -> Windows:
    """Cut windows of every example at random places, three quarters of them centred on the object.

    The masks of a window are the true mask, masks of the segmenter (at most half), and damaged copies of the true mask.

    Args:
        examples: at least one; a generator is consumed lazily, with one image in memory at a time.
        each: windows per example.
        side: S in pixels of the original image, a multiple of 4; smaller images are mirrored up to it.
        masks: M.
        seed: equal seeds and examples give equal windows.

    Raises:
        ValueError: another dtype or shape; the message names the example and the field.
    """
    drawn = []
    for index, example in enumerate(examples):
        _check_example(example, f"example {index}")
        rng = np.random.default_rng([*seed, index])
        drawn += [_draw_window(example, side, masks, rng) for _ in range(each)]
    return Windows(*(np.stack(column) for column in zip(*drawn, strict=True)))


def balance(dice: np.ndarray) -> np.ndarray:
    """Sampling probabilities float (N, M) of the M masks of N windows from their Dice (N, M).

    Each row sums to 1. A mask is weighted by the inverse frequency of its tenth of the range of Dice.
    """
    bins = np.minimum((dice * DICE_BINS).astype(int), DICE_BINS - 1)
    rarity = 1 / np.bincount(bins.ravel(), minlength=DICE_BINS).clip(1)[bins]
    return rarity / rarity.sum(axis=1, keepdims=True)


def unpack(masks: np.ndarray, side: int) -> np.ndarray:
    """bool (..., S, S) of packed masks (..., S * S / 8)."""
    return np.unpackbits(masks, axis=-1).reshape(*masks.shape[:-1], side, side).astype(bool)


def source_masks(
    example: RewardExample, rng: np.random.Generator, count: int, sources: Sequence[str] = SOURCES
) -> dict[str, np.ndarray]:
    """Masks of a whole image by source, bool (n, H, W): `count` for each kind of damage, all of the other sources."""
    make = {
        SEGMENTER: lambda: example.masks,
        SEEN: lambda: np.stack([damage(example.truth, rng, SEEN_FAMILIES) for _ in range(count)]),
        UNSEEN: lambda: np.stack([DAMAGES[UNSEEN_FAMILY](example.truth, rng) for _ in range(count)]),
        RIDGE: lambda: ridge_masks(example.image),
    }
    return {name: make[name]() for name in sources}


def true_dice(masks: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Dice float64 (n,) of masks bool (n, H, W) of one image with truth bool (H, W)."""
    return dice(masks, np.broadcast_to(truth, masks.shape))


def _draw_window(
    example: RewardExample, side: int, count: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Image, truth, packed masks and their Dice in one window."""
    top, left = _corner(example.truth, side, rng)
    truth = _cut(example.truth, top, left, side)
    chosen = rng.permutation(len(example.masks))[: count // 2]
    masks = [truth, *(_cut(example.masks[index], top, left, side) for index in chosen)]
    masks += [damage(truth, rng, SEEN_FAMILIES) for _ in range(count - len(masks))]
    stack = np.stack(masks)
    packed = np.packbits(stack.reshape(len(stack), -1), axis=1)
    return _cut(example.image, top, left, side), truth, packed, true_dice(stack, truth)


def _corner(truth: np.ndarray, side: int, rng: np.random.Generator) -> tuple[int, int]:
    """Top left corner of a random window inside the image."""
    last = np.maximum(np.array(truth.shape) - side, 0)
    pixels = np.flatnonzero(truth)
    if len(pixels) and rng.random() < ON_OBJECT:
        centre = np.array(np.unravel_index(pixels[rng.integers(len(pixels))], truth.shape))
        top, left = np.clip(centre - side // 2, 0, last)
    else:
        top, left = rng.integers(0, last + 1)
    return int(top), int(left)


def _cut(array: np.ndarray, top: int, left: int, side: int) -> np.ndarray:
    """The side x side window of an (H, W) or (H, W, C) array, mirrored beyond the image border."""
    window = array[top : top + side, left : left + side]
    margins = [(0, side - window.shape[0]), (0, side - window.shape[1]), (0, 0)]
    return np.pad(window, margins[: array.ndim], mode="symmetric")


def _check_example(example: RewardExample, where: str) -> None:
    """Raise a ValueError for arrays of another dtype or shape."""
    image, truth, masks = example.image, example.truth, example.masks
    if truth.dtype != bool or truth.ndim != 2 or truth.size == 0:
        raise ValueError(f"{where}.truth must be bool (H, W), got {truth.dtype} {truth.shape}")
    if image.dtype != np.uint8 or image.shape != (*truth.shape, 3):
        raise ValueError(f"{where}.image must be uint8 {(*truth.shape, 3)}, got {image.dtype} {image.shape}")
    if masks.dtype != bool or masks.shape != (len(masks), *truth.shape):
        raise ValueError(f"{where}.masks must be bool (P, H, W) of {truth.shape}, got {masks.dtype} {masks.shape}")
