"""One region of an image with its caption: the training sample of the caption loops, for any data format."""

import hashlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from pycocotools import mask as coco

from rl_reward_network.data.masks import MaskParts, parse_rle, rasterise
from rl_reward_network.data.sample import pseudonym

KEY_BYTES = 4096  # at each end of a compressed image file: large data sets are grouped without reading them whole
COMPRESSED = (b"\x89PNG", b"\xff\xd8\xff")  # first bytes of formats in which other pixels give another size or end


@dataclass(frozen=True, eq=False)
class RegionSample:
    """One (image, mask, caption); nothing is decoded before `load`.

    Attributes:
        caption: as stored, stripped; never empty.
        group_id: pseudonym of the unit of the split (image, video or patient), 12 hex digits.
        series_id: pseudonym of a series of nearly identical images (a video); `group_id` without a video.
        image_id: pseudonym of the image, equal for all its regions, so that its features are computed once.
        sample_id: pseudonym of image and region.
        where: file and row or key, for messages, without the caption.
        mask_parts: how the mask is stored.
        open_image: decodes the image, uint8 (H, W, 3) RGB.
    """

    caption: str
    group_id: str
    series_id: str
    image_id: str
    sample_id: str
    where: str
    mask_parts: MaskParts = field(repr=False)
    open_image: Callable[[], np.ndarray] = field(repr=False)

    @property
    def labelled(self) -> bool:
        """Every region has a mask."""
        return True

    def load(self) -> tuple[np.ndarray, np.ndarray]:
        """Image, uint8 (H, W, 3) RGB, and mask, bool (H, W).

        Raises:
            ValueError: the image is damaged, or the mask is of another size, or empty.
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

    Args:
        caption: text; anything else counts as missing.
        rle: COCO RLE {"size": [H, W], "counts": ...}; `load` checks that it is the image's size.
        image_id: from `image_key`.
        where: file and row or key.
        open_image: decodes the image.
        group_id: pseudonym of group and series, such as a video; None: `image_id`.

    Raises:
        ValueError: the caption is missing or has no word, or the RLE is damaged; begins with `where`.
    """
    text = caption.strip() if isinstance(caption, str) else ""
    if not text:
        fault = "empty" if isinstance(caption, str) else f"missing ({type(caption).__name__})"
        raise ValueError(f"{where}: the caption is {fault}; write one there, or leave the region out")
    if not any(letter.isalnum() for letter in text):
        raise ValueError(f"{where}: the caption {text!r} has no word; write one there, or leave the region out")
    try:
        parts = parse_rle(rle, _stated_size(rle))
    except ValueError as error:
        raise ValueError(f"{where}: mask_rle: {error}") from error
    group = group_id or image_id
    sample_id = pseudonym("region", image_id, parts.digest(), text)
    return RegionSample(text, group, group, image_id, sample_id, where, parts, open_image)


def _stated_size(rle: Any) -> tuple[int, int]:
    """The size (H, W) in an RLE."""
    if not isinstance(rle, dict):
        raise ValueError(f'expected an RLE {{"size": [H, W], "counts": ...}}, got {type(rle).__name__}')
    size = rle.get("size", [1, 1])  # `parse_rle` reports a missing key
    if not isinstance(size, list) or len(size) != 2 or not all(type(side) is int and side > 0 for side in size):
        raise ValueError(f"RLE size is {size}, expected [H, W], two numbers above 0")
    return size[0], size[1]


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

    Args:
        regions: consumed up to the limit.
        limit: at least 1.
        left_out: reason -> count; updated.

    Raises:
        ValueError: `limit` is below 1.
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
    """One warning that counts what was left out of `source`.

    Raises:
        ValueError: there is no region at all.
    """
    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items()) if count)
    if not regions:
        raise ValueError(
            f"{source}: no region with a mask and a caption (left out: {counts or 'nothing'}); name other data"
        )
    if counts:
        warnings.warn(f"{source}: left out {counts}", stacklevel=3)
