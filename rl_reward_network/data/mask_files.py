"""The one reader of mask files: which pixels of a picture are which object.

Values 0/1 and 0/255, label maps, palettes, colours, drawings on a transparent ground, soft edges, lossy files of black
and white. Black and 0 are background.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy import ndimage

from rl_reward_network.data.images import image_size, load_grid

ClassMasks = dict[str, np.ndarray]
"""Class -> bool (H, W); classes that an image does not have may be missing."""
Size = tuple[int, int]

MAX_CLASSES = 64  # in one file; a picture has more
JPEG = (".jpg", ".jpeg")
NEARLY = 40  # values that near to 0 or 255 are taken for it in a JPEG
WHITE = 192  # of a soft mask, since thin lines need not be quite white
SOFT = 3  # grey values between black and white from which on they may be soft edges, not classes
VOLUMES = (".nii.gz", ".nii", ".mha", ".mhd", ".nrrd", ".nhdr", ".mgz")


def load_class_masks(path: Path, size: Size, palette_colours: bool = True) -> ClassMasks:
    """The classes of a mask file: "1", "2" ... of its values, "#rrggbb" of its colours; 0 and black are background.

    A grey among colours has the name of its value. Transparent pixels are background; where all others are black, these
    are the object, "255". Soft edges of black and white, and lossy masks of these, are cut at 128.

    Args:
        path: the mask.
        size: (H, W) of its image, after EXIF rotation.
        palette_colours: see `load_grid`; False where the indices of all files have one meaning.

    Raises:
        ValueError: unreadable, of another size, or a picture rather than a mask.
    """
    check_mask_size(path, size)
    return classes_of(load_grid(path, palette_colours), path, _is_lossy(path))


def load_joined_masks(paths: Sequence[Path], size: Size) -> ClassMasks:
    """The union, class by class, of the masks in several files; as `load_class_masks`."""
    joined: ClassMasks = {}
    for path in paths:
        for name, mask in load_class_masks(path, size).items():
            joined[name] = mask | joined.get(name, False)
    return joined


def load_mask(path: Path, size: Size) -> np.ndarray:
    """bool (H, W) from a file of 0 and 1, or 0 and 255, which `load_class_masks` reads.

    Raises:
        ValueError: as `load_class_masks`, or other values: they may be classes, which differ from file to file.
    """
    classes = load_class_masks(path, size, palette_colours=False)
    if len(classes) > 1 or not classes.keys() <= {"1", "255"}:
        raise ValueError(
            f"{path}: a mask must hold 0 and 1, or 0 and 255, got 0, {', '.join(sorted(classes)[:5])}; threshold it, or"
            " import the masks by sa2va-rl data import --label"
        )
    return next(iter(classes.values()), np.zeros(size, bool))


def check_mask_size(path: Path, size: Size) -> None:
    """Check the header of a mask.

    Raises:
        ValueError: the file is missing or unreadable, a volume, or its size is not (H, W) of the image.
    """
    if path.name.lower().endswith(VOLUMES):
        raise ValueError(f"{path}: a volume, which is not read; write each slice as PNG")
    own = image_size(path)
    if own != tuple(size):
        raise ValueError(
            f"{path}: mask is {own[1]} x {own[0]} (width x height), but its image is {size[1]} x {size[0]} "
            "after EXIF rotation; resize the mask with nearest neighbour"
        )


def classes_of(grid: np.ndarray, path: Path, lossy: bool = False) -> ClassMasks:
    """`load_class_masks` of stored values, bool or integer (H, W) or uint8 (H, W, C); `path` is for messages."""
    if grid.dtype == bool:
        grid = grid.astype(np.uint8)
    if grid.dtype.kind not in "iu":
        raise ValueError(f"{path}: mask values are {grid.dtype}, expected whole numbers; save it as 8-bit PNG")
    if grid.ndim == 3:
        grid = _opaque(grid, path)
    if grid.ndim == 3 and (grid == grid[..., :1]).all():
        grid = grid[..., 0]
    if grid.ndim == 3:
        return _colours(grid, path)
    if lossy:
        grid = _cut(grid, path)
    elif grid.size and grid.min() >= 0:
        grid = without_soft_edges(grid)
    return {str(value): grid == value for value in _values(grid, path) if value != 0}


def _opaque(grid: np.ndarray, path: Path) -> np.ndarray:
    """The colours of a uint8 (H, W, C) grid, 0 where it is transparent; white where all that is seen is black."""
    colours = grid[..., :3] if grid.shape[2] >= 3 else grid[..., :1]
    alpha = grid[..., -1]
    if grid.shape[2] not in (2, 4) or not np.ptp(alpha):
        blank = grid.shape[2] in (2, 4) and not alpha.any() and not np.ptp(colours)
        return np.zeros_like(colours) if blank else colours  # else alpha that is constant says nothing
    seen = alpha >= alpha.max() / 2  # half, for soft edges
    if colours[seen].any():
        return np.where(seen[..., None], colours, 0)
    if seen.mean() > 0.5:
        raise ValueError(
            f"{path}: black covers {seen.mean():.0%} of the picture, the rest is transparent, so what is the object"
            " cannot be told; save it as PNG of black and white without transparency"
        )
    return seen[..., None].astype(np.uint8) * 255


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


def without_soft_edges(grid: np.ndarray) -> np.ndarray:
    """A grey grid of black and white whose edges only are grey, as 0 and 255; others as they are.

    Every grey pixel must have both black and white within two pixels, which the pixels of a class seldom have.
    """
    grey = (grid > 0) & (grid < WHITE)
    if not WHITE <= grid.max(initial=0) <= 255 or len(np.unique(grid[grey])) < SOFT:
        return grid
    near = (ndimage.binary_dilation(side, np.ones((5, 5))) for side in (grid == 0, grid >= WHITE))
    return np.where(grid >= 128, 255, 0) if all(side[grey].all() for side in near) else grid


def _cut(grid: np.ndarray, path: Path) -> np.ndarray:
    """A lossy mask of black and white as 0 and 255; ValueError for other values, e.g. 0 and 1."""
    clear = (grid <= NEARLY) | (grid >= 255 - NEARLY)
    blurred = 5  # pixels, side of a square that the grey border of black and white does not fill
    no_white = grid.any() and grid.max() < 128
    if no_white or clear.mean() < 0.95 or ndimage.binary_erosion(~clear, np.ones((blurred, blurred))).any():
        raise ValueError(f"{path}: a lossy file that is not of black and white; save masks as PNG")
    return np.where(grid >= 128, 255, 0)
