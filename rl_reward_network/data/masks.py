"""How masks are stored (polygons, COCO RLE, PNG) and the one rasteriser that turns them into pixels: pycocotools.

Rasterisers differ, above all on thin vessels: the square (10, 10)-(20, 20) has 100 pixels in pycocotools, and 121 in
OpenCV and Pillow, which add the outline. No other code of this project rasterises polygons.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pycocotools import mask as coco

from rl_reward_network.data.mask_files import check_mask_size, load_mask

OVERSHOOT = 1.0  # pixels a polygon may leave the image: annotation tools clamp to the border with this much slack
LONGEST_RUN_CODE = 7  # characters of 5 bits: enough for any 32-bit run length


@dataclass(frozen=True, eq=False)
class MaskParts:
    """How one mask is stored. The mask is the union of all parts; no part at all means unlabelled, not empty.

    Attributes:
        polygons: each float64 (2n,), x1, y1, x2, y2, ... in original pixels, n >= 3.
        rles: compressed COCO RLE, each {"size": [H, W], "counts": bytes}, runs checked.
        pngs: image files of 0 and 1, or 0 and 255, see `mask_files.load_mask`.
    """

    polygons: tuple[np.ndarray, ...] = ()
    rles: tuple[dict[str, Any], ...] = ()
    pngs: tuple[Path, ...] = ()

    def __add__(self, other: "MaskParts") -> "MaskParts":
        """The union of two masks."""
        return MaskParts(self.polygons + other.polygons, self.rles + other.rles, self.pngs + other.pngs)

    def __bool__(self) -> bool:
        """Whether there is any part."""
        return bool(self.polygons or self.rles or self.pngs)

    def digest(self) -> str:
        """SHA-256 (hex) of what is stored, bytes of PNG files included."""
        blobs = [p.tobytes() for p in self.polygons] + [r["counts"] for r in self.rles]
        blobs += [path.read_bytes() for path in self.pngs]
        return hashlib.sha256(b"".join(hashlib.sha256(blob).digest() for blob in blobs)).hexdigest()


def rasterise(parts: MaskParts, size: tuple[int, int]) -> np.ndarray:
    """The union of all parts, as pixels.

    Args:
        parts: what is stored; polygons inside each other are a union too, not a hole.
        size: (H, W) of the image.

    Returns:
        bool (H, W).

    Raises:
        ValueError: a PNG is unreadable, of another size, or not binary.
    """
    mask = np.zeros(size, dtype=bool)
    drawn = coco.frPyObjects(list(parts.polygons), *size) if parts.polygons else []
    if encoded := [*drawn, *parts.rles]:
        mask |= coco.decode(coco.merge(encoded)).astype(bool)
    for path in parts.pngs:
        mask |= load_mask(path, size)
    return mask


def parse_polygon(values: Any, size: tuple[int, int]) -> MaskParts:
    """One flat polygon [x1, y1, x2, y2, ...] in pixels; no part if it has fewer than 3 different points.

    pycocotools reads 4 numbers as a box, so polygons of 2 points are dropped first.

    Raises:
        ValueError: not a flat list of finite numbers of even length, or a point more than 1 px outside the image.
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
    _check_inside(points, size)
    return MaskParts(polygons=(points.ravel(),)) if len(np.unique(points, axis=0)) >= 3 else MaskParts()


def _check_inside(points: np.ndarray, size: tuple[int, int]) -> None:
    """Raise if a point (x, y) lies more than OVERSHOOT outside an image of size (H, W)."""
    height, width = size
    low, high = points.min(axis=0), points.max(axis=0)
    if (low < -OVERSHOOT).any() or high[0] > width + OVERSHOOT or high[1] > height + OVERSHOOT:
        raise ValueError(
            f"a polygon reaches x {low[0]:g}..{high[0]:g}, y {low[1]:g}..{high[1]:g}, but the image is {width} x"
            f" {height} (width x height, after EXIF rotation); it was drawn at another scale: rescale it to this image"
        )


def parse_rle(value: dict[str, Any], size: tuple[int, int]) -> MaskParts:
    """One COCO RLE {"size": [H, W], "counts": ...}, counts compressed (str, bytes) or a list of runs.

    The sum of the runs is checked, since only some releases of pycocotools do so.

    Raises:
        ValueError: a key is missing, `size` is not the image's, `counts` is damaged or does not sum to H * W.
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
    uncompressed = {"size": list(size), "counts": runs.tolist()}
    return MaskParts(rles=(coco.frPyObjects(uncompressed, *size),))


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


def parse_png(path: Path, size: tuple[int, int]) -> MaskParts:
    """A mask in an image file; only the header is read, `load_mask` reads the pixels.

    Raises:
        ValueError: as `check_mask_size`.
    """
    check_mask_size(path, size)
    return MaskParts(pngs=(path,))
