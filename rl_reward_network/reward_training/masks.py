"""Masks on which a reward network is calibrated and tested: the segmenter's, and damaged copies of the true mask.

Masks of real segmenters, damaged true masks, shifted ones and those of a ridge filter differ in how they are wrong, so
the numbers are reported for each source.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rl_reward_network.reward_training.damage import DAMAGES, damage, ridge_masks
from rl_reward_network.rewards.metrics import dice

SHIFT = "shift"
OTHER_FAMILIES = {name: family for name, family in DAMAGES.items() if name != SHIFT}
SEGMENTER, DAMAGED, SHIFTED, RIDGE = "Sa2VA", "damaged true masks", "shifted true masks", "ridge filter"
SOURCES = (SEGMENTER, DAMAGED, SHIFTED, RIDGE)


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


def source_masks(
    example: RewardExample, rng: np.random.Generator, count: int, sources: Sequence[str] = SOURCES
) -> dict[str, np.ndarray]:
    """Masks of a whole image by source, bool (n, H, W): `count` for each kind of damage, all of the other sources."""
    make = {
        SEGMENTER: lambda: example.masks,
        DAMAGED: lambda: np.stack([damage(example.truth, rng, OTHER_FAMILIES) for _ in range(count)]),
        SHIFTED: lambda: np.stack([DAMAGES[SHIFT](example.truth, rng) for _ in range(count)]),
        RIDGE: lambda: ridge_masks(example.image),
    }
    return {name: make[name]() for name in sources}


def true_dice(masks: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Dice float64 (n,) of masks bool (n, H, W) of one image with truth bool (H, W)."""
    return dice(masks, np.broadcast_to(truth, masks.shape))
