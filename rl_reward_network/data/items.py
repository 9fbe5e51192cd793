"""What a training sees: an image and a phrase (`Sample`), or a region of an image and its caption (`RegionSample`)."""

import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from pycocotools import mask as coco

from rl_reward_network.bit_depth import GreyWindow, recorded_window, windows_of
from rl_reward_network.data.images import decoded_once, file_stamp, load_deep, load_image
from rl_reward_network.data.masks import MaskParts, parse_rle, rasterise

SALT = "rl_reward_network/data/v1"


def first_names(names: Iterable[str], most: int = 3) -> str:
    """The first few names in sorted order, and how many more there are; on the screen only, if they name patients."""
    ordered = sorted(names)
    return ", ".join(ordered[:most]) + (f" and {len(ordered) - most} more" if len(ordered) > most else "")


def pseudonym(*names: str) -> str:
    """12 hex digits in place of names that may identify a person; equal names give equal digits on every machine.

    The salt is public, so this is pseudonymisation, not anonymisation: candidate names can be hashed and compared.

    >>> pseudonym("group", "patient 7") == pseudonym("group", "patient 7") != pseudonym("group", "patient 8")
    True
    """
    return hashlib.sha256("\0".join((SALT, *names)).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Sample:
    """One (image, phrase). Pseudonyms, 12 hex digits, are safe to write; names of files and `group` never are."""

    image_path: Path = field(repr=False)
    text: str
    group_id: str  # pseudonym of the patient or group
    series_id: str  # of the series, whose frames are nearly identical
    sample_id: str  # of image name and phrase
    size: tuple[int, int]  # (H, W) in pixels after EXIF rotation
    mask_parts: MaskParts | None = field(repr=False, compare=False)  # None when unlabelled
    group: str = field(repr=False)  # the original name
    grey: GreyWindow | None = None  # how grey of more than 8 bit becomes 8 bit; None for 8-bit images
    joined: bool = False  # whether it is of `--unlabelled_root`, whose masks are not read
    split: str | None = None  # train, val or test, where the data have a split of their own
    shown_by: str = field(default="", compare=False)  # what shows the patient, see `propose_patients`; "" where named

    @property
    def labelled(self) -> bool:
        """Whether there is a ground-truth mask (which may be empty)."""
        return self.mask_parts is not None

    def load_image(self) -> np.ndarray:
        """The image, uint8 (H, W, 3) RGB, decoded once per process.

        ValueError where it cannot be read, or its size has changed since the annotations were read.
        """
        key = file_stamp(self.image_path), self.grey
        image = decoded_once(key, lambda: load_image(self.image_path, self.grey))
        if image.shape[:2] != self.size:
            raise ValueError(
                f"{self.image_path}: image is {image.shape[:2]} (H, W), its header gave {self.size};"
                " the file changed, or its EXIF data follow the pixels: save it again"
            )
        return image

    def load_mask(self) -> np.ndarray | None:
        """The ground truth, bool (H, W); None when unlabelled. ValueError as `rasterise`."""
        parts = self.mask_parts
        if parts is None:
            return None
        drawn = parts if parts.polygons or parts.rles else None  # of files alone the files tell the content
        return decoded_once((drawn, self.size, *map(file_stamp, parts.pngs)), lambda: rasterise(parts, self.size))


def with_windows(samples: list[Sample], deep: Mapping[Path, str | None], bit_depth: int | None) -> list[Sample]:
    """The samples, those with images of more than 8 bit with their grey window; arguments as of `windows_of`."""
    windows = windows_of(deep, bit_depth, load_deep)
    return [replace(one, grey=windows[one.image_path]) if one.image_path in windows else one for one in samples]


def recorded_grey(samples: Iterable[Sample]) -> dict[str, list[int]] | None:
    """`recorded_window` of samples; None if all images are of 8 bit."""
    return recorded_window({one.series_id: one.grey for one in samples if not one.joined})


KEY_BYTES = 4096  # at each end of a compressed image file: large data sets are grouped without reading them whole
COMPRESSED = (b"\x89PNG", b"\xff\xd8\xff")  # first bytes of formats in which other pixels give another size or end


@dataclass(frozen=True, eq=False)
class RegionSample:
    """One (image, mask, caption); nothing is decoded before `load`. Ids are pseudonyms, 12 hex digits."""

    caption: str  # as stored, stripped; never empty
    group_id: str  # of the unit of the split (image, video or patient)
    series_id: str  # of a series of nearly identical images (a video); `group_id` without a video
    image_id: str  # equal for all regions of an image, so that its features are computed once
    sample_id: str  # of image, mask and caption
    where: str  # file and row or key, for messages, without the caption
    mask_parts: MaskParts = field(repr=False)
    open_image: Callable[[], np.ndarray] = field(repr=False)  # uint8 (H, W, 3) RGB

    @property
    def labelled(self) -> bool:
        """Every region has a mask."""
        return True

    def load(self) -> tuple[np.ndarray, np.ndarray]:
        """Image, uint8 (H, W, 3) RGB, and mask, bool (H, W).

        ValueError where the image is damaged, or the mask is of another size, or empty.
        """
        try:
            image = self.open_image()
        except (OSError, SyntaxError) as error:  # raised by Pillow for damaged bytes
            raise ValueError(f"{self.where}: the image cannot be decoded ({error}); download it again") from error
        size = image.shape[:2]
        if wrong := [rle["size"] for rle in self.mask_parts.rles if tuple(rle["size"]) != size]:
            raise ValueError(
                f"{self.where}: mask_rle has size {list(wrong[0])} (H, W), the image {list(size)}; resize the mask "
                "(nearest) or take the original image"
            )
        mask = rasterise(self.mask_parts, size)
        if not mask.any():
            raise ValueError(f"{self.where}: the region has no pixel; leave it out")
        return image, mask


def make_region(
    caption: Any, rle: Any, image_id: str, where: str, open_image: Callable[[], np.ndarray], group_id: str | None = None
) -> RegionSample:
    """A `RegionSample` of stored values; its `sample_id` depends on image, mask and caption, not on the file.

    `rle` is a COCO RLE {"size": [H, W], "counts": ...}, whose size `load` compares with the image; `group_id` is the
    pseudonym of group and series, such as a video, None: `image_id`. ValueError, which begins with `where`, for no
    caption, none with a word, or a damaged RLE.
    """
    text = caption.strip() if isinstance(caption, str) else ""
    if not text:
        fault = "empty" if isinstance(caption, str) else f"missing ({type(caption).__name__})"
        raise ValueError(f"{where}: the caption is {fault}; write one there, or leave the region out")
    if not any(letter.isalnum() for letter in text):
        raise ValueError(f"{where}: the caption {text!r} has no word; write one there, or leave the region out")
    try:
        if not isinstance(rle, dict):
            raise ValueError(f'expected an RLE {{"size": [H, W], "counts": ...}}, got {type(rle).__name__}')
        size = rle.get("size", [1, 1])  # `parse_rle` reports a missing key
        if not isinstance(size, list) or len(size) != 2 or not all(type(side) is int and side > 0 for side in size):
            raise ValueError(f"RLE size is {size}, expected [H, W], two numbers above 0")
        parts = parse_rle(rle, (size[0], size[1]))
    except ValueError as error:
        raise ValueError(f"{where}: mask_rle: {error}") from error
    group = group_id or image_id
    sample_id = pseudonym("region", image_id, parts.digest(), text)
    return RegionSample(text, group, group, image_id, sample_id, where, parts, open_image)


def image_key(file: BinaryIO, offset: int, size: int) -> str:
    """Pseudonym of the image file that fills `size` bytes of `file` from `offset` on.

    It depends on the length and the first and last 4096 bytes of a PNG or JPEG, and on all bytes of other formats, in
    which two images with equal margins may differ in the middle alone. Equal files have equal keys in all data sets;
    the same picture, encoded again, has another key.
    """
    digest = hashlib.sha256(str(size).encode())
    file.seek(offset)
    first = file.read(min(size, KEY_BYTES))
    rest = max(size - KEY_BYTES, 0) if first.startswith(COMPRESSED) else len(first)
    file.seek(offset + rest)
    for part in (first, file.read(size - rest)):
        digest.update(part)
    return pseudonym("image", digest.hexdigest())


def collect(regions: Iterable[RegionSample], limit: int | None, left_out: Counter[str]) -> list[RegionSample]:
    """The first `limit` regions (None: all), in order, without exact repeats and masks of no pixel.

    Regions are consumed up to the limit; `left_out` (reason -> count) is updated.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}, expected at least 1 region")
    samples: dict[str, RegionSample] = {}
    for region in regions:
        if not coco.area(list(region.mask_parts.rles)).any():
            left_out["mask(s) without a pixel"] += 1
        elif samples.setdefault(region.sample_id, region) is not region:
            left_out["exact repeat(s)"] += 1
        if len(samples) == limit:
            break
    return list(samples.values())


def report_left_out(source: Path | str, regions: list[RegionSample], left_out: Counter[str]) -> None:
    """One warning that counts what was left out of `source`; ValueError where there is no region at all."""
    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items()) if count)
    if not regions:
        raise ValueError(
            f"{source}: no region with a mask and a caption (left out: {counts or 'nothing'}); name other data"
        )
    if counts:
        warnings.warn(f"{source}: left out {counts}", stacklevel=3)


def data_fingerprint(samples: Iterable[Sample]) -> str:
    """64 hex digits that change with any image, phrase, mask, group, series, grey window or `split`, not with order."""
    rows = sorted(
        json.dumps(
            [
                *(s.sample_id, s.text, s.size, s.group_id, s.series_id, s.mask_parts and s.mask_parts.digest()),
                hashlib.sha256(s.image_path.read_bytes()).hexdigest(),
                *(() if s.grey is None else s.grey[:2] if s.grey.black else s.grey[1:2]),  # as in version 0.11
                *(() if s.split is None else [s.split]),  # as in version 1.0 without
            ]
        )
        for s in samples
    )
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def region_fingerprint(samples: Iterable[RegionSample]) -> str:
    """64 hex digits that change with any image, caption, mask, group or series, but not with their order."""
    rows = [
        [s.image_id, s.group_id, s.series_id, s.caption, [r["size"] for r in s.mask_parts.rles], s.mask_parts.digest()]
        for s in samples
    ]
    return hashlib.sha256("\n".join(sorted(map(json.dumps, rows))).encode()).hexdigest()
