"""Masks on which a reward network is calibrated and tested: the segmenter's, and damaged copies of the true mask.

One family of damage and one source of masks are excluded from calibration; the test measures generalisation on them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rl_reward_network.reward_training.damage import DAMAGES, damage, ridge_masks
from rl_reward_network.rewards.masks import dice

UNSEEN_FAMILY = "shift"
SEEN_FAMILIES = {name: family for name, family in DAMAGES.items() if name != UNSEEN_FAMILY}
SEGMENTER, SEEN, UNSEEN, RIDGE = "Sa2VA", "damage seen in training", "damage never seen", "ridge filter, never seen"
SOURCES = (SEGMENTER, SEEN, UNSEEN, RIDGE)


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
        SEEN: lambda: np.stack([damage(example.truth, rng, SEEN_FAMILIES) for _ in range(count)]),
        UNSEEN: lambda: np.stack([DAMAGES[UNSEEN_FAMILY](example.truth, rng) for _ in range(count)]),
        RIDGE: lambda: ridge_masks(example.image),
    }
    return {name: make[name]() for name in sources}


def true_dice(masks: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Dice float64 (n,) of masks bool (n, H, W) of one image with truth bool (H, W)."""
    return dice(masks, np.broadcast_to(truth, masks.shape))
