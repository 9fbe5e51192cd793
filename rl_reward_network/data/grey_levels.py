"""Levels of grey images of more than 8 bit: one pair, black and white, per data set, or per series that it names.

Levels per image would not do: a frame without contrast medium would become brighter than the frame before, and a
single hot pixel would turn a frame black. 8-bit images have no levels and are not changed.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median_low
from typing import Any, Protocol

import numpy as np
from tqdm import tqdm

from rl_reward_network.data.images import WHITEST, grey_histogram
from rl_reward_network.depth import Levels, levels_of_bits, robust_levels

DATA_SET = "data set"  # key of images whose record names no series
MAX_IMAGES = 64  # measured for the levels of the data set, spread over all
MAX_FRAMES = 4  # measured per series, whose frames are nearly identical


class Levelled(Protocol):
    """Anything with levels, such as a `Sample`."""

    @property
    def levels(self) -> Levels | None:
        """The values that are mapped to 0 and 255; None: 8 bit."""

    @property
    def levels_key(self) -> str:
        """The key of these levels."""


def measured_levels(images: Mapping[Path, str]) -> dict[str, Levels]:
    """Key -> `robust_levels` of the pixels of its images, with an entry for `DATA_SET`; {} without images.

    Equal files give equal levels, whatever their order and folder. If every record names a series, those of
    `DATA_SET` are the medians of theirs.

    Args:
        images: grey images of more than 8 bit, each with its key: the pseudonym of its series, or `DATA_SET`.

    Raises:
        ValueError: an image that is measured cannot be read.
    """
    files: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(images):
        files[images[path]].append(path)
    with ThreadPoolExecutor() as threads:  # decoders run beside each other
        bar = tqdm(files.items(), "grey levels", leave=False, unit="series", delay=2)
        return _with_data_set({key: _levels(key, paths, threads) for key, paths in bar})


def given_levels(bit_depth: int | None, grey_levels: dict[str, Levels] | None) -> dict[str, Levels] | None:
    """The levels that settings give: those of an earlier run, else the full range of `bit_depth`; None: measure them.

    Raises:
        ValueError: as `levels_of_bits`.
    """
    full = levels_of_bits(bit_depth)
    return grey_levels or (None if full is None else {DATA_SET: full})


def saved_levels(saved: Mapping[str, Any]) -> dict[str, Levels] | None:
    """The levels in the settings of a run; those of version 0.11 and before are of white alone, with black at 0."""
    white_alone = {key: (0, white) for key, white in (saved.get("white_levels") or {}).items()}
    levels = saved.get("grey_levels") or white_alone
    return {key: Levels(*pair) for key, pair in levels.items()} or None


def level_of(levels: Mapping[str, Levels], key: str) -> Levels:
    """The levels of a key; those of `DATA_SET` for a series that is not in `levels`."""
    return levels.get(key, levels[DATA_SET])


def levels_of(samples: Iterable[Levelled]) -> dict[str, Levels]:
    """The levels of samples, to be saved with a run; {} if all images are of 8 bit."""
    return _with_data_set({s.levels_key: s.levels for s in samples if s.levels is not None})


def _levels(key: str, paths: list[Path], threads: ThreadPoolExecutor) -> Levels:
    """The levels of the images of one key, measured on a few of them."""
    step = -(-len(paths) // (MAX_IMAGES if key == DATA_SET else MAX_FRAMES))
    total = np.zeros(WHITEST + 1, dtype=np.int64)
    for histogram in threads.map(grey_histogram, paths[::step]):
        total[: len(histogram)] += histogram
    return robust_levels(total)


def _with_data_set(levels: dict[str, Levels]) -> dict[str, Levels]:
    """`levels` with an entry for the data set."""
    if not levels:
        return {}
    median = Levels(*map(median_low, zip(*levels.values(), strict=True)))
    return {DATA_SET: median, **levels}
