"""White levels of grey images of more than 8 bit: one per data set, or one per series that it names.

A level per image would not do: a frame without contrast medium would become brighter than the frame before, and a
single hot pixel would turn a frame black. 8-bit images have no level and are not changed.
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

DATA_SET = "data set"  # key of images whose record names no series
MAX_IMAGES = 64  # measured for the level of the data set, spread over all
MAX_FRAMES = 4  # measured per series, whose frames are nearly identical


class Levelled(Protocol):
    """Anything with a white level, such as a `Sample`."""

    @property
    def white_level(self) -> int | None:
        """The value that is mapped to 255; None: 8 bit."""

    @property
    def white_of(self) -> str:
        """The key of that level."""


def measured_levels(images: Mapping[Path, str]) -> dict[str, int]:
    """Key -> `robust_white` of the pixels of its images, with an entry for `DATA_SET`; {} without images.

    Equal files give equal levels, whatever their order and folder. If every record names a series, the level of
    `DATA_SET` is the median of theirs.

    Args:
        images: grey images of more than 8 bit, each with its key: the pseudonym of its series, or `DATA_SET`.

    Raises:
        ValueError: an image that is measured cannot be read.
    """
    files: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(images):
        files[images[path]].append(path)
    with ThreadPoolExecutor() as threads:  # decoders run beside each other
        bar = tqdm(files.items(), "white levels", leave=False, unit="series", delay=2)
        return _with_data_set({key: _level(key, paths, threads) for key, paths in bar})


def given_levels(bit_depth: int | None, white_levels: dict[str, int] | None) -> dict[str, int] | None:
    """The levels that settings give: those of an earlier run, else the full range of `bit_depth`; None: measure them.

    Raises:
        ValueError: as `white_of`.
    """
    white = white_of(bit_depth)
    return white_levels or (None if white is None else {DATA_SET: white})


def level_of(levels: Mapping[str, int], key: str) -> int:
    """The level of a key; that of `DATA_SET` for a series that is not in `levels`."""
    return levels.get(key, levels[DATA_SET])


def levels_of(samples: Iterable[Levelled]) -> dict[str, int]:
    """The levels of samples, to be saved with a run; {} if all images are of 8 bit."""
    return _with_data_set({s.white_of: s.white_level for s in samples if s.white_level is not None})


def _level(key: str, paths: list[Path], threads: ThreadPoolExecutor) -> int:
    """The level of the images of one key, measured on a few of them."""
    step = -(-len(paths) // (MAX_IMAGES if key == DATA_SET else MAX_FRAMES))
    total = np.zeros(WHITEST + 1, dtype=np.int64)
    for histogram in threads.map(grey_histogram, paths[::step]):
        total[: len(histogram)] += histogram
    return robust_white(total)


def _with_data_set(levels: dict[str, int]) -> dict[str, int]:
    """`levels` with an entry for the data set."""
    return {DATA_SET: median_low(levels.values()), **levels} if levels else {}
