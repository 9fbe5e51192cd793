"""The domain of a reward network: the images on which it can judge masks.

A U-Net answers on any image. What it answers on an image unlike those that it was trained and validated on is not known
to be worth anything, so no number is given there. A few statistics of the image and of the network's own foreground map
decide; their limits come from validation images. Where the training images have one size, an image of another size is
first resized to it, as objects would be too large or too small otherwise.

Axes: K members, H rows, W columns, N images.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

ONE_SIZE = 1.3  # factor: the zoom of the training windows; training images within it count as of one size
SMALLEST, LARGEST = 0.4, 16.0  # of the training size: a smaller image has lost its detail
BEYOND = 0.5  # limits lie this share of the range of the validation images beyond it
NOTHING = 0.1  # of the smallest true object: a map that expects less foreground shows nothing
OUTSIDE = "outside the reward network's domain"
TINY = 1e-6  # keeps ratios of empty maps finite
UNLIMITED = 1e9  # JSON has no infinity
SURER = 0.01  # of how sure a network is of what it sees: a smaller difference between two pictures is chance
MOSTLY = 0.95  # of the images that are known must not be taken for negatives, or none is
EMPTY_IMAGES, EMPTY_RIGHT = 3, 0.9  # least validation images without foreground, and share of them that are truly empty


class Judged(NamedTuple):
    """What a network saw in a validation image: the numbers `OF_MAP`, and the shares of foreground, seen and true."""

    statistics: dict[str, float]
    share: float
    true_share: float


class Statistic(NamedTuple):
    """A number of an image or of its map that has limits."""

    words: str
    floor: float
    """Least distance of a limit from the range of the validation images; of a ratio its logarithm."""
    ratio: bool = False
    low: bool = True
    """Whether there is a lower limit."""
    high: bool = True


OF_IMAGE = {
    "brightness": Statistic("the mean grey level (black 0, white 1)", 0.1),
    "contrast": Statistic("the contrast (standard deviation of the 256 grey levels)", 0.4, ratio=True),
    "colour": Statistic("the colour (mean difference between the channels, 0 to 1)", 0.05),
}
OF_MAP = {
    "share": Statistic("the object that it sees, as share of the image,", 0.7, ratio=True),
    "width": Statistic("the width of what it sees in pixels", 0.25, ratio=True),
    "decided": Statistic("how sure it is of what it sees (0 to 1)", 0.05, high=False),
    "disagreement": Statistic("its members' disagreement (0 to 1)", 0.02, low=False),
}
STATISTICS = OF_IMAGE | OF_MAP


@dataclass(frozen=True)
class Domain:
    """Which images a reward network can judge."""

    sides: tuple[int, int]
    """Smallest and largest longer side of the training and validation images, in pixels."""
    limits: dict[str, tuple[float, float]]
    """Name of a statistic -> (lowest, highest)."""
    nothing: float
    """Expected share of foreground, in [0, 1], below which a map shows nothing."""
    empty: bool
    """Whether such a map is in the domain, since validation images without an object had one."""
    images: int
    """Validation images that set the limits."""
    knows_negatives: bool = False
    """Whether an image is outside if the network is surer of what it sees in its negative, and so is one itself."""

    def __post_init__(self) -> None:
        if set(self.limits) != set(STATISTICS) or not all(low <= high for low, high in self.limits.values()):
            raise ValueError(f"domain has limits {self.limits}, expected low <= high of {', '.join(STATISTICS)}")
        if not (0 < self.sides[0] <= self.sides[1] and 0 <= self.nothing <= 1 and self.images >= 1):
            raise ValueError(f"{self}: expected sides > 0 in order, nothing in [0, 1], images >= 1")

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Domain":
        """A domain from what `dataclasses.asdict` made of it, read from JSON."""
        limits = {name: tuple(pair) for name, pair in values["limits"].items()}
        return cls(**{**values, "sides": tuple(values["sides"]), "limits": limits})

    @property
    def side(self) -> float | None:
        """The longer side, in pixels, at which images are seen; None where the training images have several sizes."""
        smallest, largest = self.sides
        return math.sqrt(smallest * largest) if largest <= ONE_SIZE * smallest else None

    def seen_size(self, height: int, width: int) -> tuple[int, int]:
        """(H, W) at which the U-Nets see an image: that of training, unless it is near, or training has several."""
        longer = max(height, width)
        if self.side is None or self.sides[0] / ONE_SIZE <= longer <= self.sides[1] * ONE_SIZE:
            return height, width
        return max(1, round(height * self.side / longer)), max(1, round(width * self.side / longer))

    def outside(self, image: np.ndarray, probs: Tensor, is_negative: Callable[[], bool]) -> str | None:
        """Why an image uint8 (H, W, 3) with maps (K, 1, 1, H, W) is outside, in one sentence; None if it is inside.

        `is_negative`: whether the network is surer of what it sees in the negative; called where that decides.
        """
        longer, (smallest, largest) = max(image.shape[:2]), self.sides
        low, high = (ONE_SIZE**-1, ONE_SIZE) if self.side is None else (SMALLEST, LARGEST)
        if not low * smallest <= longer <= high * largest:
            return self._sentence("the longer side in pixels", longer, low * smallest, high * largest)
        found = image_statistics(image)
        if reason := self._beyond(found, OF_IMAGE):
            return reason
        if float(probs.mean()) < self.nothing:
            return None if self.empty else f"{OUTSIDE}: it sees no object in this image"
        seen = max(self.seen_size(*image.shape[:2]))
        if reason := self._beyond(map_statistics(probs, seen / longer), OF_MAP):
            return reason
        if self.knows_negatives and is_negative():
            return f"{OUTSIDE}: it is surer of what it sees in the negative of this image"
        return None

    def _beyond(self, found: dict[str, float], names: dict[str, Statistic]) -> str | None:
        for name, statistic in names.items():
            low, high = self.limits[name]
            if not low <= found[name] <= high:
                return self._sentence(statistic.words, found[name], low, high)
        return None

    def _sentence(self, words: str, value: float, low: float, high: float) -> str:
        limits = f"{low:.3g} to {high:.3g}"
        if -low == UNLIMITED or high == UNLIMITED:
            limits = f"at most {high:.3g}" if -low == UNLIMITED else f"{low:.3g} or more"
        return f"{OUTSIDE}: {words} is {value:.3g}, and it can judge {limits}"


def fit_domain(judged: Sequence[Judged], images: Sequence[np.ndarray], negatives: Sequence[bool]) -> Domain:
    """The domain of a network, by the training and validation images and what it saw in the validation images.

    A validation image in which it misses the object is no part of it. `negatives`: of such images, whether the network
    is surer of what it sees in the negative; at least one.
    """
    nothing = NOTHING * min((one.true_share for one in judged if one.true_share), default=0.0)
    blank = [one for one in judged if one.share < nothing]
    right = sum(one.true_share == 0 for one in blank)
    found = {
        name: [one.statistics[name] for one in judged if one.share >= nothing or len(blank) == len(judged)]
        for name in OF_MAP
    }
    of_images = [image_statistics(image) for image in images]
    found |= {name: [one[name] for one in of_images] for name in OF_IMAGE}
    sides = [max(image.shape[:2]) for image in images]
    return Domain(
        (min(sides), max(sides)),
        {name: _limits(values, STATISTICS[name]) for name, values in found.items()},
        nothing,
        right >= max(EMPTY_IMAGES, EMPTY_RIGHT * len(blank)),
        len(judged),
        float(np.mean(negatives)) <= 1 - MOSTLY,
    )


def _limits(values: Sequence[float], statistic: Statistic) -> tuple[float, float]:
    scaled = np.log(np.maximum(values, TINY)) if statistic.ratio else np.array(values)
    reach = max(BEYOND * float(np.ptp(scaled)), statistic.floor)
    low, high = scaled.min() - reach, scaled.max() + reach
    low, high = (float(np.exp(limit)) if statistic.ratio else float(limit) for limit in (low, high))
    return low if statistic.low else -UNLIMITED, high if statistic.high else UNLIMITED


def image_statistics(image: np.ndarray) -> dict[str, float]:
    """The numbers `OF_IMAGE` of an image uint8 (H, W, 3)."""
    grey = image.mean(axis=2, dtype=np.float32)
    return {
        "brightness": float(grey.mean() / 255),
        "contrast": float(grey.std()),
        "colour": float(np.ptp(image, axis=2).mean() / 255),
    }


def map_statistics(probs: Tensor, scale: float = 1.0) -> dict[str, float]:
    """The numbers `OF_MAP` of foreground maps float (K, 1, 1, H, W); `scale` is pixels seen per pixel of the maps.

    All are smooth in the maps: a map that just reaches 0.5 nowhere is not a special case.
    """
    maps = probs[:, 0, 0].double()
    mean = maps.mean(dim=0)
    total = float(mean.sum()) + TINY
    border = float(mean.diff(dim=0).abs().sum() + mean.diff(dim=1).abs().sum()) + TINY
    return {
        "share": total / mean.numel(),
        "width": scale * 2 * total / border,  # of a long tube: area by half of its border
        "decided": float(mean.square().sum()) / total,
        "disagreement": float(maps.var(dim=0, correction=0).sum()) / total,
    }
