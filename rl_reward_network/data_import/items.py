"""What a layout yields: the images of a source, nothing of them decoded yet, and outlines as masks."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rl_reward_network.data.images import image_header, load_deep, load_image
from rl_reward_network.data.masks import ClassMasks, MaskParts, Size, check_outline, parse_polygon, parse_rle, rasterise

OBLONG = (
    "image(s) whose pixels are no squares (height / width {}): the model sees them squashed, and distances such as hd95"
    " are in pixels of two lengths; resample images and masks to square pixels"
)
KEPT = (".png", ".jpg", ".jpeg", ".webp")  # copied as they are; others become PNG, 16-bit ones of 16 bit


@dataclass(frozen=True)
class Item:
    """One image of a source.

    Attributes:
        name: of the written image below `images/`, with forward slashes, e.g. "train/1.png"; differs between items.
        found_as: file in the source, for --patients_csv, --group_regex and messages; may hold a patient's name.
        load_image: uint8 (H, W, 3), uint8 (H, W) or uint16 (H, W), upright.
        load_masks: from the image's (H, W) to its `ClassMasks`; None where the image is not annotated.
        file: the image file, where it is written as it is.
        group, series: where the layout gives them; may name a patient.
        aspect: gives the height of a pixel, in multiples of its width.
    """

    name: str
    found_as: str
    load_image: Callable[[], np.ndarray]
    load_masks: Callable[[Size], ClassMasks] | None
    file: Path | None = None
    group: str | None = None
    series: str | None = None
    aspect: Callable[[], float] = lambda: 1.0


@dataclass(frozen=True)
class Found:
    """The content of a source.

    Attributes:
        items: the images.
        class_ids: number of a class in the source -> its name, where the source names its classes.
        faults: what is wrong, each with its file and remedy; nothing is written while there is one.
        notes: what is left out, or was decided.
        read: files that were read beside pictures; others are named in a note.
        remarks: notes that reports on the imported data repeat; they name no file.
        private: whether names of groups and series are written as keyed hashes only.
        broken: name -> fault of an image or its drawing that cannot be read; `items` lacks it, --skip leaves it out.
    """

    items: list[Item]
    class_ids: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    private: bool = False
    broken: dict[str, str] = field(default_factory=dict)
    read: tuple[Path, ...] = ()
    remarks: list[str] = field(default_factory=list)


def file_item(source: Path, path: Path, name: str, load_masks: Callable[[Size], ClassMasks] | None) -> Item:
    """The item of an image file below `source`; `name` is that of the written image, with the suffix of `path`."""
    kept = path.suffix.lower() in KEPT
    written = name if kept else f"{name.removesuffix(path.suffix)}.png"
    relative = path.relative_to(source).as_posix()
    file = path if kept else None
    return Item(written, relative, partial(load_pixels, path), load_masks, file, aspect=partial(file_aspect, path))


def load_pixels(path: Path) -> np.ndarray:
    """uint16 (H, W) of grey of more than 8 bit, else uint8 (H, W, 3) RGB, upright. Raises as `load_image`."""
    _, deep = image_header(path)
    return load_deep(path) if deep else load_image(path)


NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?")


def id_text(value: Any) -> str:
    """An id, or the name of a class, as text; a whole number that a table has written as float without its decimals.

    >>> [id_text(value) for value in (0.0, "3.000000000000000000e+00", "2E+00", "07", 7, "vessel 2.0")]
    ['0', '3', '2', '07', '7', 'vessel 2.0']
    """
    text = str(value).strip()
    is_float = NUMBER.fullmatch(text) and not text.lstrip("+-").isdecimal() and float(text).is_integer()
    return str(int(float(text))) if is_float else text


SQUARE = 0.01  # relative difference of the sides of a pixel, from which on it is no square


def oblong_remark(aspects: Iterable[float]) -> list[str]:
    """A remark on pixels that are no squares, by the height of each image's pixels in multiples of their width."""
    oblong = [f"{aspect:.3g}" for aspect in aspects if abs(aspect - 1) > SQUARE]
    some_of = ", ".join(sorted({*oblong})[:3])
    return [f"{len(oblong)} {OBLONG.format(some_of)}"] if oblong else []


def file_aspect(path: Path) -> float:
    """Height of a pixel of an image file, in multiples of its width; 1.0 where the file does not tell."""
    with Image.open(path) as image:
        density = image.info.get("dpi") or image.info.get("jfif_density") or image.info.get("aspect") or (1, 1)
    across, down = map(float, density)
    return across / down if across > 0 and down > 0 else 1.0


@dataclass(frozen=True)
class Outline:
    """One object of an image.

    Attributes:
        class_name: its class.
        parts: flat polygons [x1, y1, x2, y2, ...] in pixels (or in shares of the size), or COCO RLEs.
        where: file and object, for messages.
    """

    class_name: str
    parts: list[Any]
    where: str


def declared_size(height: Any, width: Any, where: str) -> Size:
    """The (H, W) of an image by the file with its outlines; ValueError for what is no size."""
    if not all(type(side) in (int, float) and side > 0 and side == int(side) for side in (height, width)):
        raise ValueError(
            f"{where}: height, width are {height!r}, {width!r}, expected the image's size in pixels; export it again"
        )
    return int(height), int(width)


@dataclass(frozen=True)
class OutlineMasks:
    """Called with an image's size (H, W), the masks of its classes: the union of the outlines of each.

    Attributes:
        outlines: of one image.
        declared: (H, W) of the image on which they were drawn, if the source gives it.
        where: the file with the outlines, for messages.
        shares: whether coordinates are shares of width and height (YOLO).
    """

    outlines: tuple[Outline, ...]
    declared: Size | None = None
    where: str = ""
    shares: bool = False

    def __call__(self, size: Size) -> ClassMasks:
        """Class -> bool (H, W).

        Raises:
            ValueError: the outlines were drawn on another size, or one is not an outline or covers no pixel.
        """
        if self.declared is not None and self.declared != size:
            drawn = f"{self.declared[1]} x {self.declared[0]}"
            raise ValueError(
                f"{self.where}: drawn on {drawn}, but the image is {size[1]} x {size[0]} (width x height, after EXIF"
                " rotation); export it again for this image"
            )
        classes: ClassMasks = {}
        for outline in self.outlines:
            mask = self._drawn(outline, size)
            classes[outline.class_name] = mask | classes.get(outline.class_name, False)
        return classes

    def _drawn(self, outline: Outline, size: Size) -> np.ndarray:
        """bool (H, W) of an object; ValueError for one without a pixel, which would become "no object"."""
        parts = sum((self._parsed(part, size, outline.where) for part in outline.parts), MaskParts())
        try:
            check_outline(parts, size, self.shares)
        except ValueError as error:
            raise ValueError(f"{outline.where}: {error}") from error
        mask = rasterise(parts, size)
        if not mask.any():
            raise ValueError(f"{outline.where}: the outline covers no pixel; draw it as a polygon, or delete it")
        return mask

    def _parsed(self, part: Any, size: Size, where: str) -> MaskParts:
        """A polygon or RLE as parts of a mask."""
        try:
            if isinstance(part, dict):
                return parse_rle(part, size)
            return parse_polygon(self._scaled(part, size) if self.shares else part, size)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    def _scaled(self, part: list[float], size: Size) -> list[float]:
        """Shares of width and height as pixels."""
        if outside := [share for share in part if not -0.01 <= share <= 1.01]:
            raise ValueError(f"a polygon reaches {outside[0]:g}, expected shares of width and height in 0..1")
        return [share * size[1 - place % 2] for place, share in enumerate(part)]
