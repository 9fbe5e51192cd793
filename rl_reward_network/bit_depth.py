"""Pictures of more than 8 bit: which they are, and the grey window that becomes 0..255.

X-ray detectors give 10 to 16 bit, and few files use all of them: a CT may begin at 32768, an inverted X-ray at 60000.
All images of a data set have one window, or all of a series that their records name. Windows per image would not do: a
frame without contrast medium would become brighter than the frame before, and a hot pixel would turn a frame black.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from tqdm import tqdm

DARKEST_SHARE, BRIGHTEST_SHARE = 0.001, 0.999  # of the pixels, so that hot pixels or bright letters move no end
SPAN = 255  # the least from black to white: what has no more values than 8 bit is not stretched
WHITEST = 2**16 - 1
MAX_IMAGES, MAX_FRAMES = (64, 4)  # measured of a data set, spread over all; of a series, whose frames are alike
DATA_SET = "data set"  # key of the window in a config.json


class GreyWindow(NamedTuple):
    """The grey values that become 0 and 255; those outside are cut."""

    black: int
    white: int
    of_series: bool = False  # alone

    def __str__(self) -> str:
        return f"black is {self.black}, white is {self.white}"


def is_deep(image: Image.Image) -> bool:
    """Whether it is grey of more than 8 bit."""
    return image.mode.startswith(("I", "F"))


def is_cut(image: Image.Image) -> bool:
    """Whether Pillow keeps only 8 of its 16 bits per channel, as in colour; known until the pixels are decoded."""
    tiles = getattr(image, "tile", None) or ()
    return not is_deep(image) and any(";16" in str(tile[3]) for tile in tiles)  # e.g. "RGB;16B"


def robust_window(histogram: np.ndarray) -> GreyWindow:
    """The values that all but the darkest and the brightest 0.1 % of the pixels lie between.

    An 8-bit picture in a 16-bit file stays as it is. `histogram` has the number of pixels with each value, from 0.

    >>> str(robust_window(np.bincount([100] * 9999 + [65535])))
    'black is 0, white is 255'
    >>> str(robust_window(np.bincount([0, *[30000] * 5000, *[34000] * 5000])))
    'black is 30000, white is 34000'
    """
    up_to = np.cumsum(histogram)  # pixels at or below each value
    white = int(np.searchsorted(up_to, BRIGHTEST_SHARE * up_to[-1]))
    if white <= SPAN:
        return GreyWindow(0, SPAN)
    black = int(np.searchsorted(up_to, DARKEST_SHARE * up_to[-1], side="right"))
    return GreyWindow(black, max(white, black + SPAN))


def window_of_bits(bit_depth: int | None) -> GreyWindow | None:
    """The full range of a number of bits, 0..4095 of 12; None of None; ValueError for others than 8 to 16."""
    if bit_depth is not None and not 8 <= bit_depth <= 16:
        raise ValueError(f"bit_depth: got {bit_depth}; give 8 to 16, the bits that the detector wrote")
    return None if bit_depth is None else GreyWindow(0, 2**bit_depth - 1)


def grey_to_rgb(grey: np.ndarray, window: GreyWindow | None = None) -> np.ndarray:
    """uint8 (H, W, 3) of unsigned grey (H, W) of any depth, linear in the window; without one, in its robust window."""
    black, white, _ = window or robust_window(np.bincount(grey.ravel()))
    scaled = np.round((np.clip(grey, black, white) - black) * (255 / (white - black))).astype(np.uint8)
    return np.repeat(scaled[:, :, None], 3, axis=2)


def common_window(frames: Iterable[np.ndarray]) -> GreyWindow:
    """The robust window of all pixels of some images, integers (H, W) in 0..65535."""
    histograms = (np.bincount(grey.ravel(), minlength=WHITEST + 1) for grey in frames)
    return robust_window(sum(histograms, np.zeros(WHITEST + 1, np.int64)))


def windows_of(
    images: Mapping[Path, str | None], bit_depth: int | None, load: Callable[[Path], np.ndarray]
) -> dict[Path, GreyWindow]:
    """The windows of grey images of more than 8 bit; equal files give equal ones, whatever their order and folder.

    `images` have the series that their record names, or None; `bit_depth` gives the full range to all, None measures
    them; `load` gives the stored values of an image, (H, W). ValueError where one that is measured cannot be read.
    """
    if full := window_of_bits(bit_depth):
        return dict.fromkeys(images, full)
    files: dict[str | None, list[Path]] = defaultdict(list)
    for path in sorted(images):
        files[images[path]].append(path)
    found: dict[str | None, GreyWindow] = {}
    with ThreadPoolExecutor() as threads:  # decoders run beside each other
        for key, paths in tqdm(files.items(), "grey windows", leave=False, unit="series", delay=2):
            step = -(-len(paths) // (MAX_IMAGES if key is None else MAX_FRAMES))
            found[key] = common_window(threads.map(load, paths[::step]))._replace(of_series=key is not None)
    return {path: found[key] for path, key in images.items()}


def recorded_window(windows: Mapping[str, GreyWindow | None]) -> dict[str, list[int]] | None:
    """What a config.json records as "grey_levels", for new images of the same device.

    `windows` are series -> window, None of 8 bit; without images of no series, it is the medians of the series.
    """
    known = [window for window in windows.values() if window is not None]
    own = [window for window in known if not window.of_series] or known
    return {DATA_SET: [median_low(ends) for ends in list(zip(*own, strict=True))[:2]]} if own else None


def window_for(saved: Mapping[str, Any], bit_depth: int | None) -> GreyWindow | None:
    """The window of new images: that of the training data, else by `bit_depth`; None: each image has its own.

    `saved` are the settings of a run. ValueError where both are given, or as `window_of_bits`.
    """
    pair = (saved.get("grey_levels") or {}).get(DATA_SET)
    if pair and bit_depth is not None:
        window = GreyWindow(*pair)
        raise ValueError(f"--bit_depth {bit_depth}: it was trained or measured where {window}; leave it out")
    return GreyWindow(*pair) if pair else window_of_bits(bit_depth)
