"""Pictures of more than 8 bit: which they are, and the two levels between which they are scaled to 8.

X-ray detectors give 10 to 16 bit, and few files use all of them: a CT may begin at 32768, an inverted X-ray at 60000.
"""

from typing import NamedTuple

import numpy as np
from PIL import Image

DARKEST_SHARE, BRIGHTEST_SHARE = 0.001, 0.999  # of the pixels, so that hot pixels or bright letters move no level
SPAN = 255  # the least from black to white: what has no more values than 8 bit is not stretched


class Levels(NamedTuple):
    """The grey values that are mapped to 0 and 255; those outside are cut."""

    black: int
    white: int

    def __str__(self) -> str:
        """For messages."""
        return f"black is {self.black}, white is {self.white}"


def is_deep(image: Image.Image) -> bool:
    """Whether it is grey of more than 8 bit."""
    return image.mode.startswith(("I", "F"))


def is_cut(image: Image.Image) -> bool:
    """Whether Pillow keeps only 8 of its 16 bits per channel, as in colour; known until the pixels are decoded."""
    tiles = getattr(image, "tile", None) or ()
    return not is_deep(image) and any(";16" in str(tile[3]) for tile in tiles)  # e.g. "RGB;16B"


def robust_levels(histogram: np.ndarray) -> Levels:
    """The values that all but the darkest and the brightest 0.1 % of the pixels lie between.

    An 8-bit picture in a 16-bit file stays as it is.

    Args:
        histogram: number of pixels with each value, from 0.

    >>> robust_levels(np.bincount([100] * 9999 + [65535]))
    Levels(black=0, white=255)
    >>> robust_levels(np.bincount([0, *[30000] * 5000, *[34000] * 5000]))
    Levels(black=30000, white=34000)
    """
    up_to = np.cumsum(histogram)  # pixels at or below each value
    white = int(np.searchsorted(up_to, BRIGHTEST_SHARE * up_to[-1]))
    if white <= SPAN:
        return Levels(0, SPAN)
    black = int(np.searchsorted(up_to, DARKEST_SHARE * up_to[-1], side="right"))
    return Levels(black, max(white, black + SPAN))


def levels_of_bits(bit_depth: int | None) -> Levels | None:
    """The full range of a number of bits, 0..4095 of 12; None of None.

    Raises:
        ValueError: not 8 to 16.
    """
    if bit_depth is not None and not 8 <= bit_depth <= 16:
        raise ValueError(f"bit_depth: got {bit_depth}; give 8 to 16, the bits that the detector wrote")
    return None if bit_depth is None else Levels(0, 2**bit_depth - 1)


def grey_to_rgb(grey: np.ndarray, levels: Levels) -> np.ndarray:
    """uint8 (H, W, 3) of unsigned grey (H, W) of any depth: black becomes 0, white 255, linear between."""
    above = np.clip(grey, *levels) - levels.black
    scaled = np.round(above * (255 / (levels.white - levels.black))).astype(np.uint8)
    return np.repeat(scaled[:, :, None], 3, axis=2)
