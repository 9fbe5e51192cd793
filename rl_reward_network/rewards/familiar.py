"""On which unlabelled images a reward network is about as sure as on those that it was calibrated on.

On images unlike its training images the ensemble's own segmentation is wrong and its members disagree; its score of any
mask then follows its errors. So images with a spread above the range of the validation images are left out of training.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from rl_reward_network.rewards.foreground_maps import ForegroundMaps

PERCENTILE, FACTOR = 95, 2.0  # the limit is FACTOR times this percentile of the validation images' spreads
LoadImage = Callable[[], np.ndarray]


@dataclass(frozen=True)
class Familiarity:
    """How many unlabelled images join a training.

    Attributes:
        looked_at: unlabelled images whose spread was computed.
        left_out: those above the limit.
        limit: largest spread of an image that joins, as Dice in [0, 1].
        validation_median, unlabelled_median: medians of the spreads.
        validation_images: number of images that set the limit.
    """

    looked_at: int
    left_out: int
    limit: float
    validation_median: float
    unlabelled_median: float
    validation_images: int

    @property
    def facts(self) -> dict[str, Any]:
        """As JSON, for config.json."""
        return asdict(self)

    @property
    def sentence(self) -> str:
        """What was left out and why, for the screen and the report."""
        return familiarity_sentence(self.facts)


def familiarity_sentence(facts: dict[str, Any]) -> str:
    """What was left out and why, from `Familiarity.facts`."""
    left, total = facts["left_out"], facts["looked_at"]
    why = (
        f"the spread of the network's own segmentation lies above {facts['limit']:.4f} ({FACTOR:g} times the "
        f"{PERCENTILE} % point of {facts['validation_images']} validation images)"
    )
    medians = f"median {facts['unlabelled_median']:.4f} here, {facts['validation_median']:.4f} there"
    if left == total:
        return (
            f"All {total} unlabelled images were left out of training: {why}; {medians}. No unlabelled image was used."
        )
    if not left:
        return (
            f"None of {total} unlabelled images was left out of training: their spread is as on validation; {medians}."
        )
    return f"{left} of {total} unlabelled images were left out of training: {why}; {medians}."


def own_segmentation(maps: ForegroundMaps, image: np.ndarray) -> tuple[float, float]:
    """Score and spread of the network's own segmentation of an image, uint8 (H, W, 3): its map thresholded at 0.5."""
    scorer = maps.scorer(image)
    quality = scorer.quality((scorer.foreground_prob > 0.5).astype(np.float32)[None])
    return float(quality["score"][0]), float(quality["spread"][0])


def own_spreads(maps: ForegroundMaps, images: Sequence[LoadImage], desc: str) -> np.ndarray:
    """float64 (N,): the spread of the network's own segmentation of each image."""
    bar = tqdm(images, desc, unit="image", leave=False)
    return np.array([own_segmentation(maps, load())[1] for load in bar], dtype=float)


def spread_limit(validation: np.ndarray) -> float:
    """The largest spread of an image that may join the training.

    Args:
        validation: float (N,), spreads of the network's own segmentation of validation images.

    Raises:
        ValueError: there are none.
    """
    if not len(validation):
        raise ValueError("validation: no spreads; the limit needs at least one validation image")
    return FACTOR * float(np.percentile(validation, PERCENTILE))


def familiar(
    maps: ForegroundMaps, validation: Sequence[LoadImage], unlabelled: Sequence[LoadImage]
) -> tuple[np.ndarray, Familiarity]:
    """Which unlabelled images may join the training.

    Args:
        maps: of the reward network.
        validation: labelled validation images.
        unlabelled: N images.

    Returns:
        bool (N,), and the counts.

    Raises:
        ValueError: there are no images in one of both, or an image cannot be read.
    """
    if not unlabelled:
        raise ValueError("unlabelled: no images, expected at least one")
    known, new = own_spreads(maps, validation, "validation images"), own_spreads(maps, unlabelled, "unlabelled images")
    limit = spread_limit(known)
    joins = new <= limit
    medians = float(np.median(known)), float(np.median(new))
    return joins, Familiarity(len(new), int((~joins).sum()), limit, *medians, len(known))
