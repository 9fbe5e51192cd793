"""Uploaded image files: read from the folder of the server alone, and shrunk to what a model can use."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from rl_reward_network.data.images import decode_grid, load_for_model
from rl_reward_network.depth import Levels

LONGEST_SIDE = 1024  # pixels; SAM 2 sees no more, and a larger mask holds the server for minutes
MOST_PIXELS = 50_000_000  # larger files are not decoded; cameras of phones give 48 million


@dataclass(frozen=True, eq=False)
class Opened:
    """An image of the user.

    Args:
        image: uint8 (H, W, 3).
        note: how it was changed; empty where it was not.
    """

    image: np.ndarray
    note: str


def check_upload(path: str | Path, folder: Path) -> Path:
    """The file, links resolved; whoever can reach the page could name any file of the computer.

    Args:
        path: as the browser names it.
        folder: of uploads and examples.

    Raises:
        ValueError: it lies elsewhere, or was deleted.
    """
    file = Path(path).resolve()
    if not file.is_relative_to(folder.resolve()):
        raise ValueError("the image is no upload and no example: upload it")
    if not file.is_file():
        raise ValueError(f"{file.name}: uploads are deleted after an hour or two; upload it again")
    return file


def open_upload(path: str | None, folder: Path, levels: Levels | None) -> Opened:
    """An uploaded image or an example, at most `LONGEST_SIDE` pixels long.

    Args:
        path: of the image.
        folder: of uploads and examples.
        levels: as in `load_for_model`.

    Raises:
        ValueError: no image, a file elsewhere, a file that is no image, or one that is too large.
    """
    if not path:
        raise ValueError("there is no image yet: upload one, or pick an example")
    file = check_upload(path, folder)
    try:
        image, _ = load_for_model(file, levels, MOST_PIXELS)
    except ValueError as error:
        raise ValueError(str(error).replace(str(file), file.name)) from None
    return shrink(image)


def open_layer(layer: str | bytes, folder: Path) -> np.ndarray:
    """bool (H, W): where a layer of a drawing is not transparent.

    Args:
        layer: path or bytes of an image file with transparency.
        folder: of uploads.

    Raises:
        ValueError: a file elsewhere, no image, larger than a picture of the page, or without transparency.
    """
    data = layer if isinstance(layer, bytes) else check_upload(layer, folder).read_bytes()
    grid = decode_grid(data, "the drawing", LONGEST_SIDE**2)
    if grid.ndim != 3 or grid.shape[2] not in (2, 4):
        raise ValueError("the drawing: expected an image with transparency; draw it on this page")
    return grid[..., -1] > 0


def shrink(image: np.ndarray) -> Opened:
    """The image uint8 (H, W, 3), its longer side at most `LONGEST_SIDE` pixels."""
    height, width = image.shape[:2]
    if max(height, width) <= LONGEST_SIDE:
        return Opened(image, "")
    small = Image.fromarray(image)
    small.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    return Opened(np.array(small), f"{width} x {height} pixels, shrunk to {small.width} x {small.height}")
