"""Masks in image files as one bool mask per class: 0/1, 0/255, label maps, palettes, colours."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from scipy import ndimage

from rl_reward_network.data.images import load_grid
from rl_reward_network.data.masks import parse_png
from rl_reward_network.data_import.items import ClassMasks, Size

MAX_CLASSES = 64  # in one file; a picture has more
JPEG = (".jpg", ".jpeg")
NEARLY = 40  # values that near to 0 or 255 are taken for it in a JPEG
ALL = "all"


def load_class_masks(path: Path, size: Size, palette_colours: bool = True) -> ClassMasks:
    """The classes of a mask file: "1", "2" ... of its values, "#rrggbb" of its colours; 0 and black are background.

    A grey among colours has the name of its value. Transparent pixels are background. Lossy masks of black and white
    are cut at 128.

    Args:
        path: the mask.
        size: (H, W) of its image, after EXIF rotation.
        palette_colours: see `load_grid`; False where the indices of all files have one meaning.

    Raises:
        ValueError: unreadable, of another size, or a picture rather than a mask.
    """
    parse_png(path, size)
    grid = load_grid(path, palette_colours)
    if grid.dtype == bool:
        grid = grid.astype(np.uint8)
    if grid.ndim == 3:
        grid = _opaque(grid)
    if grid.ndim == 3 and (grid == grid[..., :1]).all():
        grid = grid[..., 0]
    if grid.dtype.kind not in "iu":
        raise ValueError(f"{path}: mask values are {grid.dtype}, expected whole numbers; save it as 8-bit PNG")
    if grid.ndim == 3:
        return _colours(grid, path)
    if _is_lossy(path):
        grid = _cut(grid, path)
    return {str(value): grid == value for value in _values(grid, path) if value != 0}


def _opaque(grid: np.ndarray) -> np.ndarray:
    """The colours of a uint8 (H, W, C) grid, 0 where it is transparent; alpha that is constant says nothing."""
    colours = grid[..., :3] if grid.shape[2] >= 3 else grid[..., :1]
    alpha = grid[..., -1:]
    return np.where(alpha == 0, 0, colours) if grid.shape[2] in (2, 4) and np.ptp(alpha) else colours


def _colours(grid: np.ndarray, path: Path) -> ClassMasks:
    """One mask per colour of a uint8 (H, W, 3) grid."""
    codes = grid.astype(np.int64) @ np.array([2**16, 2**8, 1])
    return {_colour_name(code): codes == code for code in _values(codes, path) if code != 0}


def _colour_name(code: int) -> str:
    """ "#rrggbb", or the value of a grey, as in files without any other colour."""
    return str(code & 255) if len(set(code.to_bytes(3, "big"))) == 1 else f"#{code:06x}"


def _values(grid: np.ndarray, path: Path) -> list[int]:
    """The distinct values of a grid; ValueError if they are too many for classes."""
    values: list[int] = np.unique(grid).tolist()
    if len(values) > MAX_CLASSES:
        raise ValueError(
            f"{path}: holds {len(values)} values or colours, which is a picture, a soft mask or a lossy file; expected"
            f" at most {MAX_CLASSES} classes: threshold it and save it as PNG"
        )
    return values


def _is_lossy(path: Path) -> bool:
    """Whether it is JPEG, or WebP without a lossless chunk (RFC 9649)."""
    suffix = path.suffix.lower()
    return suffix in JPEG or (suffix == ".webp" and b"VP8L" not in path.read_bytes())


def _cut(grid: np.ndarray, path: Path) -> np.ndarray:
    """A lossy mask of black and white as 0 and 255; ValueError for other values, e.g. 0 and 1."""
    clear = (grid <= NEARLY) | (grid >= 255 - NEARLY)
    blurred = 5  # pixels, side of a square that the grey border of black and white does not fill
    no_white = grid.any() and grid.max() < 128
    if no_white or clear.mean() < 0.95 or ndimage.binary_erosion(~clear, np.ones((blurred, blurred))).any():
        raise ValueError(f"{path}: a lossy file that is not of black and white; save masks as PNG")
    return np.where(grid >= 128, 255, 0)


def chosen_classes(label: str | None, classes: Iterable[str], class_ids: dict[str, str]) -> list[str] | None:
    """The classes whose union is the mask; None where the user has to choose.

    Args:
        label: a class by name, number or colour; several with commas between; "all"; None: the only class there is.
        classes: the classes that occur.
        class_ids: number -> name, see `Found`.

    Raises:
        ValueError: no class of that name.
    """
    known = sorted({*classes, *class_ids.values()}, key=class_order)
    if label is None:
        return known if len(known) <= 1 else None
    if label == ALL and ALL not in known:
        return known
    parts = [label] if _named(label, known, class_ids) else [part.strip() for part in label.split(",")]
    chosen = [_named(part, known, class_ids) for part in parts]
    if unknown := [part for part, name in zip(parts, chosen, strict=True) if name is None]:
        raise ValueError(
            f"label {unknown[0]!r} is no class of the masks; they hold {', '.join(known) or 'nothing'}; --label all is"
            " the union"
        )
    return [name for name in chosen if name is not None]


def _named(label: str, known: list[str], class_ids: dict[str, str]) -> str | None:
    """The class of a name, a colour or a number, names first; None without one."""
    alike = [name for name in known if name.lower() == label.lower()]
    return label if label in known else alike[0] if len(alike) == 1 else class_ids.get(label)


def class_order(name: str) -> tuple[bool, int, str]:
    """Numbers by value, before names."""
    return (not name.isdecimal(), int(name) if name.isdecimal() else 0, name)
