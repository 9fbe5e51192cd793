"""What is white in grey images of more than 8 bit: one level for a data set, or for each series that it names.

An image alone cannot tell: the frame without contrast medium would come out brighter than the one before, and one hot
pixel would turn a frame black. Images of 8 bit have no level; nothing here touches them.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median_low
from typing import Protocol

import numpy as np
from tqdm import tqdm

from rl_reward_network.data.images import WHITEST, grey_histogram, robust_white, white_of

DATA_SET = "data set"  # the key of images whose record names no series
IMAGES_SEEN = 64  # at most, spread over all, to work out the level of the data set
FRAMES_SEEN = 4  # of each series, whose frames are nearly identical


class Levelled(Protocol):
    """What has a white level: a `Sample`."""

    @property
    def white_level(self) -> int | None:
        """The value shown as 255; None: 8 bit."""

    @property
    def white_of(self) -> str:
        """The key of that level."""


def measured_levels(images: Mapping[Path, str]) -> dict[str, int]:
    """The `robust_white` of each key's pixels together, and that of `DATA_SET`; {} without images.

    Equal for equal files, whatever their order and wherever the folder is. Where every record names a series,
    `DATA_SET` is the median of theirs.

    Args:
        images: grey images of more than 8 bit, each with its key: the pseudonym of its series, or `DATA_SET`.

    Raises:
        ValueError: an image that is looked at cannot be read.
    """
    files: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(images):
        files[images[path]].append(path)
    with ThreadPoolExecutor() as threads:  # decoders run beside each other
        bar = tqdm(files.items(), "white levels", leave=False, unit="series", delay=2)
        return _with_data_set({key: _level(key, paths, threads) for key, paths in bar})


def given_levels(bit_depth: int | None, white_levels: dict[str, int] | None) -> dict[str, int] | None:
    """What a run was told: its own levels of before, else the full range of so many bits; None: nothing.

    Raises:
        ValueError: as `white_of`.
    """
    white = white_of(bit_depth)
    return white_levels or (None if white is None else {DATA_SET: white})


def level_of(levels: Mapping[str, int], key: str) -> int:
    """The level of a key; that of `DATA_SET` for a series that `levels` does not know."""
    return levels.get(key, levels[DATA_SET])


def levels_of(samples: Iterable[Levelled]) -> dict[str, int]:
    """The levels that samples carry, for a run to keep; {} where all images are of 8 bit."""
    return _with_data_set({s.white_of: s.white_level for s in samples if s.white_level is not None})


def _level(key: str, paths: list[Path], threads: ThreadPoolExecutor) -> int:
    """The level of some images, of which a few are looked at."""
    step = -(-len(paths) // (IMAGES_SEEN if key == DATA_SET else FRAMES_SEEN))
    total = np.zeros(WHITEST + 1, dtype=np.int64)
    for histogram in threads.map(grey_histogram, paths[::step]):
        total[: len(histogram)] += histogram
    return robust_white(total)


def _with_data_set(levels: dict[str, int]) -> dict[str, int]:
    """`levels` with one for the data set."""
    return {DATA_SET: median_low(levels.values()), **levels} if levels else {}
