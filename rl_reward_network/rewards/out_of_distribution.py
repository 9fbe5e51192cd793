"""Out-of-distribution check: which unlabelled images a reward network is about as sure of as of validation images.

On images unlike its training images the ensemble's own segmentation is wrong, and its score of any mask then follows
its errors. Two signs need no labels: its members disagree (spread), and its maps are undecided, so that it expects a
low Dice of its own segmentation (score). Images beyond the range of the validation images are left out of training.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from rl_reward_network.rewards.learned import ForegroundMaps

SPREAD_PERCENTILE, FACTOR = 95, 2.0  # the largest spread is FACTOR times this percentile of the validation images
SCORE_PERCENTILE = 50  # the smallest score is this percentile of the validation images; docs/log.md compares others
LoadImage = Callable[[], np.ndarray]


@dataclass(frozen=True)
class OODCheck:
    """How many unlabelled images are used in a training.

    Scores and spreads are of the network's own segmentation; both are Dice, in [0, 1].

    Attributes:
        looked_at: unlabelled images whose score and spread were computed.
        left_out: those beyond a limit.
        largest_spread, smallest_score: limits of an image that is used.
        validation_spread, unlabelled_spread, validation_score, unlabelled_score: medians.
        validation_images: number of images that set the limits.
    """

    looked_at: int
    left_out: int
    largest_spread: float
    smallest_score: float
    validation_spread: float
    unlabelled_spread: float
    validation_score: float
    unlabelled_score: float
    validation_images: int

    @property
    def facts(self) -> dict[str, Any]:
        """As JSON, for config.json."""
        return asdict(self)

    @property
    def sentence(self) -> str:
        """What was left out and why, for the screen and the report."""
        left, total = self.left_out, self.looked_at
        count = f"{left} of {total} unlabelled images were left out of training"
        if left == 0:
            count = f"None of {total} unlabelled images was left out of training"
        elif left == total:
            count = f"All {total} unlabelled images were left out of training, so no unlabelled image was used"
        return (
            f"{count}. An image joins if the network's own segmentation of it has a score of at least "
            f"{self.smallest_score:.3f} and a spread of at most {self.largest_spread:.4f}, limits from "
            f"{self.validation_images} validation images (medians: score {self.unlabelled_score:.3f} here, "
            f"{self.validation_score:.3f} on validation; spread {self.unlabelled_spread:.4f} and "
            f"{self.validation_spread:.4f})."
        )


def own_segmentation(maps: ForegroundMaps, image: np.ndarray) -> tuple[float, float]:
    """Score and spread of the network's own segmentation of an image, uint8 (H, W, 3): its map thresholded at 0.5."""
    scorer = maps.scorer(image)
    quality = scorer.quality((scorer.foreground_prob > 0.5).astype(np.float32)[None])
    return float(quality["score"][0]), float(quality["spread"][0])


def in_distribution(
    maps: ForegroundMaps, validation: Sequence[LoadImage], unlabelled: Sequence[LoadImage]
) -> tuple[np.ndarray, OODCheck]:
    """Which unlabelled images may be used in training.

    Args:
        maps: of the reward network.
        validation: labelled validation images.
        unlabelled: N images.

    Returns:
        bool (N,), and the counts.

    Raises:
        ValueError: there are no images in one of both, or an image cannot be read.
    """
    if not validation or not unlabelled:
        raise ValueError(f"{len(validation)} validation and {len(unlabelled)} unlabelled images, expected some of both")
    known, new = (
        np.array([own_segmentation(maps, load()) for load in tqdm(images, desc, unit="image", leave=False)])
        for images, desc in ((validation, "validation images"), (unlabelled, "unlabelled images"))
    )  # float64 (images, 2)
    smallest = float(np.percentile(known[:, 0], SCORE_PERCENTILE))
    largest = FACTOR * float(np.percentile(known[:, 1], SPREAD_PERCENTILE))
    joins = within(new[:, 0], new[:, 1], smallest, largest)
    score, spread = np.median(known, axis=0).tolist()
    new_score, new_spread = np.median(new, axis=0).tolist()
    counts = len(new), int((~joins).sum())
    return joins, OODCheck(*counts, largest, smallest, spread, new_spread, score, new_score, len(known))


def within(scores: np.ndarray, spreads: np.ndarray, smallest_score: float, largest_spread: float) -> np.ndarray:
    """bool (N,): which of N images are within both limits."""
    return (scores >= smallest_score) & (spreads <= largest_spread)
