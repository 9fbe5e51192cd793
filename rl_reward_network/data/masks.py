"""Masks: how they are stored, the one reader of mask files, and the one rasteriser of polygons, pycocotools.

Mask files hold values 0/1 and 0/255, label maps, palettes, colours, drawings on a transparent ground, soft edges, or
are lossy files of black and white. Black and 0 are background.

Rasterisers differ, above all on thin vessels: the square (10, 10)-(20, 20) has 100 pixels in pycocotools, and 121 in
OpenCV and Pillow, which add the outline. No other code of this project rasterises polygons.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pycocotools import mask as coco
from scipy import ndimage

from rl_reward_network.data.images import as_array, image_size, load_grid

ClassMasks = dict[str, np.ndarray]
"""Class -> bool (H, W); classes that an image does not have may be missing."""
Size = tuple[int, int]

MAX_CLASSES = 64  # in one file; a picture has more
JPEG = (".jpg", ".jpeg")
NEARLY = 40  # values that near to 0 or 255 are taken for it in a JPEG
WHITE = 192  # of a soft mask, since thin lines need not be quite white
SOFT = 3  # grey values between black and white from which on they may be soft edges, not classes
VOLUMES = (".nii.gz", ".nii", ".mha", ".mhd", ".nrrd", ".nhdr", ".mgz")

IGNORED = {
    *("void", "unlabeled", "unlabelled", "unannotated", "notlabeled", "notlabelled", "notannotated"),
    *("dontcare", "donotcare", "outofroi"),
}
"""Names of pixels that nobody has judged, without spaces and signs; so are all with "ignore" in them."""
IGNORED_BESIDE_OTHERS = {"#e0e0c0", "-1"}  # the former is 255 in VOC's palette
FULL = "255"  # beside numbers up to MAX_CLASSES in one file it is no class, but the "ignore" of VOC and Cityscapes
BACKGROUND = {"background", "bg", "nolabel", "noobject"}
FLAT_VALUES = 8  # colours, up to which a picture is no photograph


def looks_like_mask(image: np.ndarray) -> bool:
    """Whether a picture, uint8 (H, W, 3) or grey (H, W), holds two to eight flat colours.

    A picture of one colour does not look like a mask: a recording may begin with a blank frame.
    """
    codes = image if image.ndim == 2 else image.astype(np.uint32) @ np.array([2**16, 2**8, 1], np.uint32)
    some = codes.ravel()[:: max(1, codes.size // 4096)]
    return len(np.unique(some)) <= FLAT_VALUES and 2 <= len(np.unique(codes)) <= FLAT_VALUES


def ignored_classes(files: Iterable[Iterable[str]]) -> tuple[set[str], set[str]]:
    """The classes that no mask is made of: those of pixels that are to be ignored, and those of the background.

    `files` are the classes of each image. A number or colour alone is the mask, whatever it is.
    """
    each = [set(names) for names in files]
    every = set().union(*each)
    words = {name: "".join(filter(str.isalnum, name.lower())) for name in every}
    ignored = {name for name, word in words.items() if "ignore" in word or word in IGNORED}
    ignored |= IGNORED_BESIDE_OTHERS & every if len(every) > 1 else set()
    others = every - ignored - {FULL}
    labels = all(name.isdecimal() and int(name) <= MAX_CLASSES for name in others)
    beside = [bool(names & others) for names in each if FULL in names]
    if labels and sum(beside) > len(beside) / 2:  # else binary masks of 255, of which a few have stray pixels
        ignored.add(FULL)
    return ignored, {name for name, word in words.items() if word in BACKGROUND}


def load_class_masks(path: Path, size: Size, palette_colours: bool = True) -> ClassMasks:
    """The classes of a mask file: "1", "2" ... of its values, "#rrggbb" of its colours; 0 and black are background.

    A grey among colours has the name of its value. Transparent pixels are background; where all others are black, these
    are the object, "255". Soft edges of black and white, and lossy masks of these, are cut at 128.

    `size` is that of its image, after EXIF rotation; `palette_colours` is False where the indices of all files have one
    meaning, see `load_grid`. ValueError if it is unreadable, of another size, or a picture rather than a mask.
    """
    check_mask_size(path, size)
    suffix = path.suffix.lower()
    # WebP without a lossless chunk (RFC 9649)
    lossy = suffix in JPEG or (suffix == ".webp" and b"VP8L" not in path.read_bytes())
    return classes_of(load_grid(path, palette_colours), path, lossy)


def load_joined_masks(paths: Sequence[Path], size: Size) -> ClassMasks:
    """The union, class by class, of the masks in several files; as `load_class_masks`."""
    joined: ClassMasks = {}
    for path in paths:
        for name, mask in load_class_masks(path, size).items():
            joined[name] = mask | joined.get(name, False)
    return joined


def load_mask(path: Path, size: Size) -> np.ndarray:
    """bool (H, W) from a file of 0 and 1, or 0 and 255; ValueError for others, which may be classes of each file."""
    classes = load_class_masks(path, size, palette_colours=False)
    if len(classes) > 1 or not classes.keys() <= {"1", FULL}:
        ignored, _ = ignored_classes([classes])
        void = f" ({', '.join(sorted(ignored))} may mark pixels to be ignored)" if ignored else ""
        raise ValueError(
            f"{path}: a mask must hold 0 and 1, or 0 and 255, got 0, {', '.join(sorted(classes)[:5])}{void}; threshold"
            " it, or import the masks by sa2va-rl data import --label"
        )
    return next(iter(classes.values()), np.zeros(size, bool))


def as_mask(mask: Any, size: Size) -> np.ndarray:
    """Whatever stands for a mask of an image of this size as float32 (H, W): a path, a picture, an array or a tensor.

    It holds True and False, 0 and 1, 0 and 255, or, in floats, probabilities in [0, 1], which stay as they are; a
    further axis may have the length 1. ValueError, in one sentence, for anything else.
    """
    if isinstance(mask, str | Path):
        return load_mask(Path(mask), size).astype(np.float32)
    values = np.asarray(mask) if isinstance(mask, Image.Image) else as_array(mask)
    if values.size != size[0] * size[1] or values.squeeze().shape != np.empty(size, bool).squeeze().shape:
        raise ValueError(f"the mask has shape {values.shape}, but its image is {size[0]} x {size[1]} (H x W)")
    values = values.reshape(size)
    binary = values.dtype == bool or (values.dtype.kind in "iu" and set(np.unique(values)) <= {0, values.max()})
    if binary and (values.dtype == bool or values.max() in (0, 1, 255)):
        return (values > 0).astype(np.float32)
    if values.dtype.kind != "f" or not 0 <= values.min() <= values.max() <= 1:  # also NaN
        raise ValueError(
            f"the mask holds {values.dtype} in {values.min()}..{values.max()}, expected True and False, 0 and 1, 0 and"
            " 255, or floats in 0..1"
        )
    return values.astype(np.float32)


def check_mask_size(path: Path, size: Size) -> None:
    """Refuse, by its header, a mask that is missing, unreadable, a volume, or not of the image's size (H, W)."""
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
        codes = grid.astype(np.int64) @ np.array([2**16, 2**8, 1])
        names = {  # "#rrggbb", or the value of a grey, as in files without any other colour
            code: str(code & 255) if len(set(code.to_bytes(3, "big"))) == 1 else f"#{code:06x}"
            for code in _values(codes, path)
        }
        return {name: codes == code for code, name in names.items() if code != 0}
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


def _values(grid: np.ndarray, path: Path) -> list[int]:
    values: list[int] = np.unique(grid).tolist()
    if len(values) > MAX_CLASSES:
        raise ValueError(
            f"{path}: holds {len(values)} values or colours, which is a picture, a soft mask or a lossy file; expected"
            f" at most {MAX_CLASSES} classes: threshold it and save it as PNG"
        )
    return values


def without_soft_edges(grid: np.ndarray) -> np.ndarray:
    """A grey grid of black and white whose edges only are grey, as 0 and 255; others as they are.

    Every grey pixel must have both black and white within two pixels, which the pixels of a class seldom have; labels
    of thin objects with a rim of 255 have, but are low numbers.
    """
    grey = (grid > 0) & (grid < WHITE)
    few = len(np.unique(grid[grey])) < SOFT or grid[grey].max() <= MAX_CLASSES
    if not WHITE <= grid.max(initial=0) <= 255 or few:
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


OVERSHOOT = 1.0  # pixels a polygon may leave the image: annotation tools clamp to the border with this much slack
LONGEST_RUN_CODE = 7  # characters of 5 bits: enough for any 32-bit run length


@dataclass(frozen=True, eq=False)
class MaskParts:
    """How one mask is stored. The mask is the union of all parts; no part at all means unlabelled, not empty."""

    polygons: tuple[np.ndarray, ...] = ()  # each float64 (2n,), x1, y1, x2, y2, ... in original pixels, n >= 3
    rles: tuple[dict[str, Any], ...] = ()  # compressed COCO RLE, each {"size": [H, W], "counts": bytes}, runs checked
    pngs: tuple[Path, ...] = ()  # image files, see `load_mask`

    def __add__(self, other: "MaskParts") -> "MaskParts":
        return MaskParts(self.polygons + other.polygons, self.rles + other.rles, self.pngs + other.pngs)

    def __bool__(self) -> bool:
        return bool(self.polygons or self.rles or self.pngs)

    def digest(self) -> str:
        """SHA-256 (hex) of what is stored, bytes of PNG files included."""
        blobs = [p.tobytes() for p in self.polygons] + [r["counts"] for r in self.rles]
        blobs += [path.read_bytes() for path in self.pngs]
        return hashlib.sha256(b"".join(hashlib.sha256(blob).digest() for blob in blobs)).hexdigest()


def rasterise(parts: MaskParts, size: tuple[int, int]) -> np.ndarray:
    """The union of all parts, bool (H, W); polygons inside each other are a union too, not a hole.

    ValueError for a PNG that is unreadable, of another size, or not binary.
    """
    drawn = parts.polygons or parts.rles
    mask = coco.decode(_encoded(parts, size)).astype(bool) if drawn else np.zeros(size, bool)
    for path in parts.pngs:
        mask |= load_mask(path, size)
    return mask


def _encoded(parts: MaskParts, size: Size) -> dict[str, Any]:
    """The union of polygons and RLEs, of which there is one at least, as RLE."""
    drawn = coco.frPyObjects(list(parts.polygons), *size) if parts.polygons else []
    return coco.merge([*drawn, *parts.rles])


def check_outline(parts: MaskParts, size: Size, shares: bool = False) -> None:
    """Refuse an outline without a pixel, which would say that the object is absent; an RLE of zeros does say that.

    Polygons in 0..1 are refused, too, unless they were given as `shares` of the size (H, W).
    """
    if not parts.polygons or parts.pngs:
        return
    flat = np.concatenate(parts.polygons)
    if not shares and flat.min() >= -0.01 and flat.max() <= 1.01 and (flat % 1).any():
        raise ValueError(
            f"coordinates are {flat.min():g}..{flat.max():g}, all in 0..1, as shares of width and height are; expected"
            f" pixels: multiply x by {size[1]} and y by {size[0]}"
        )
    if not coco.area(_encoded(parts, size)):
        x, y = flat[::2], flat[1::2]
        raise ValueError(
            f"the outline covers no pixel; it reaches x {x.min():g}..{x.max():g}, y {y.min():g}..{y.max():g}: draw it"
            " round its pixels, or delete it"
        )


def parse_polygon(values: Any, size: tuple[int, int]) -> MaskParts:
    """One flat polygon [x1, y1, x2, y2, ...] in pixels; no part if it has fewer than 3 different points.

    pycocotools reads 4 numbers as a box, so polygons of 2 points are dropped first. ValueError for what is no flat list
    of finite numbers of even length, or a point more than 1 px outside the image.
    """
    if not isinstance(values, list):
        raise ValueError(f"a polygon must be a flat list [x1, y1, x2, y2, ...], got {type(values).__name__}")
    if not values:
        return MaskParts()
    try:
        flat = np.array(values)
    except ValueError:  # ragged nesting
        flat = np.array(None)
    if flat.ndim != 1 or flat.dtype.kind not in "iuf" or not np.isfinite(flat).all():
        wrong = next((v for v in values if isinstance(v, bool) or not isinstance(v, int | float) or v - v != 0), values)
        raise ValueError(f"a polygon holds {wrong!r}, expected finite numbers in a flat list [x1, y1, x2, y2, ...]")
    if len(flat) % 2:
        raise ValueError(f"a polygon has {len(flat)} numbers, expected pairs x, y; a coordinate is missing")
    points = flat.astype(np.float64).reshape(-1, 2)  # (n, 2) x, y
    (height, width), low, high = size, points.min(axis=0), points.max(axis=0)
    if (low < -OVERSHOOT).any() or high[0] > width + OVERSHOOT or high[1] > height + OVERSHOOT:
        raise ValueError(
            f"a polygon reaches x {low[0]:g}..{high[0]:g}, y {low[1]:g}..{high[1]:g}, but the image is {width} x"
            f" {height} (width x height, after EXIF rotation); it was drawn at another scale, or leaves the image:"
            " rescale it to this image, or cut it at the border"
        )
    return MaskParts(polygons=(points.ravel(),)) if len(np.unique(points, axis=0)) >= 3 else MaskParts()


def parse_rle(value: dict[str, Any], size: tuple[int, int]) -> MaskParts:
    """One COCO RLE {"size": [H, W], "counts": ...}, counts compressed (str, bytes) or a list of runs.

    The sum of the runs is checked, since only some releases of pycocotools do so. ValueError for a missing key, another
    size than the image's, and counts that are damaged or do not sum to H * W.
    """
    if not {"size", "counts"} <= value.keys():
        raise ValueError(f"an RLE needs the keys 'size' and 'counts', got {sorted(map(str, value))}")
    if value["size"] != list(size):
        raise ValueError(f"RLE size is {value['size']}, but the image is {list(size)} ([H, W], after EXIF rotation)")
    runs = _runs(value["counts"])
    if (runs < 0).any() or runs.sum() != size[0] * size[1]:
        raise ValueError(
            f"RLE runs must be >= 0 and sum to H * W = {size[0] * size[1]}, got a sum of {runs.sum()}; export it again"
        )
    return MaskParts(rles=(coco.frPyObjects({"size": list(size), "counts": runs.tolist()}, *size),))


def to_rle(mask: np.ndarray) -> dict[str, Any]:
    """A bool (H, W) mask as compressed COCO RLE, ready for JSON; `parse_rle` reads it back."""
    rle = coco.encode(np.asfortranarray(mask, dtype=np.uint8))
    return {"size": list(rle["size"]), "counts": rle["counts"].decode()}


def _runs(counts: Any) -> np.ndarray:
    """int64 run lengths (background first) from either form of `counts`."""
    if isinstance(counts, str | bytes):
        return _decode_counts(counts.encode() if isinstance(counts, str) else counts)
    runs = np.array(counts) if isinstance(counts, list) and all(type(run) is int for run in counts) else None
    if runs is None or runs.dtype.kind not in "iu":
        raise ValueError("RLE counts must be a compressed string or a list of integers")
    return runs.astype(np.int64)


def _decode_counts(text: bytes) -> np.ndarray:
    """int64 run lengths from COCO's compressed form.

    Each run is a signed number in groups of 5 bits, lowest first, a character being 48 + group (+ 32 when more follow);
    from the fourth run on it is the difference to the run two before. Source: pycocotools, maskApi.c, rleFrString.
    """
    codes = np.frombuffer(text, dtype=np.uint8).astype(np.int64) - 48
    last = np.flatnonzero(codes < 32)  # position of each number's last character
    lengths = np.diff(last, prepend=-1)
    if not len(codes) or codes.min() < 0 or codes.max() > 63 or codes[-1] >= 32 or lengths.max() > LONGEST_RUN_CODE:
        raise ValueError("RLE counts is not a compressed COCO string (cut off or re-encoded?)")
    starts = last - lengths + 1
    shifts = 5 * (np.arange(len(codes)) - np.repeat(starts, lengths))
    runs = np.add.reduceat((codes & 31) << shifts, starts)
    runs -= np.where(codes[last] & 16, np.int64(1) << (5 * lengths), 0)  # sign of the two's complement
    for first in (1, 2):
        runs[first::2] = np.cumsum(runs[first::2])
    return runs
