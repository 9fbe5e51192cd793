"""What a layout yields: images, nothing of them decoded yet, outlines as masks, and the group of each image."""

import csv
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from rl_reward_network.data.annotations import compile_group_regex
from rl_reward_network.data.images import image_header, load_deep, load_image
from rl_reward_network.data.masks import ClassMasks, MaskParts, Size, check_outline, parse_polygon, parse_rle, rasterise
from rl_reward_network.data.patients import FILES, NONE, picture_name, propose_patients, proposed_from
from rl_reward_network.data.splits import one_spelling
from rl_reward_network.data_import.files import some, without_role

OBLONG = (
    "image(s) whose pixels are no squares (height / width {}): the model sees them squashed, and distances such as hd95"
    " are in pixels of two lengths; resample images and masks to square pixels"
)
KEPT = (".png", ".jpg", ".jpeg", ".webp")  # copied as they are; others become PNG


@dataclass(frozen=True)
class Item:
    """One image of a source."""

    name: str  # of the written image below `images/`, with forward slashes, e.g. "train/1.png"; differs between items
    found_as: str  # file in the source, for --patients_csv, --group_regex and messages; may hold a patient's name
    load_image: Callable[[], np.ndarray]  # uint8 (H, W, 3), uint8 (H, W) or uint16 (H, W), upright
    load_masks: Callable[[Size], ClassMasks] | None  # from the image's (H, W); None: not annotated
    file: Path | None = None  # where it is written as it is
    group: str | None = None  # where the layout gives it; may name a patient
    series: str | None = None
    aspect: Callable[[], float] = lambda: 1.0  # height of a pixel, in multiples of its width
    part: str | None = None  # train, val or test of the source's own split, "" in none of them; None: by its folders


@dataclass(frozen=True)
class Found:
    """The content of a source."""

    items: list[Item]
    class_ids: dict[str, str] = field(default_factory=dict)  # number of a class -> its name, where the source names it
    faults: list[str] = field(default_factory=list)  # with file and remedy; nothing is written while there is one
    notes: list[str] = field(default_factory=list)  # what is left out, or was decided
    private: bool = False  # names of groups and series are written as keyed hashes only
    # Name -> fault of an image or its drawing that cannot be read; `items` lacks it, --skip leaves it out.
    broken: dict[str, str] = field(default_factory=dict)
    read: tuple[Path, ...] = ()  # files that were read beside pictures; others are named in a note
    remarks: list[str] = field(default_factory=list)  # notes that reports on the data repeat; they name no file


def file_item(
    source: Path, path: Path, name: str, load_masks: Callable[[Size], ClassMasks] | None, part: str | None = None
) -> Item:
    """The item of an image file below `source`; `name` is that of the written image, with the suffix of `path`."""
    kept = path.suffix.lower() in KEPT
    written = name if kept else f"{name.removesuffix(path.suffix)}.png"
    relative = path.relative_to(source).as_posix()
    file = path if kept else None
    load, aspect = partial(load_pixels, path), partial(file_aspect, path)
    return Item(written, relative, load, load_masks, file, aspect=aspect, part=part)


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
    """One object of an image."""

    class_name: str
    parts: list[Any]  # flat polygons [x1, y1, x2, y2, ...] in pixels (or in shares of the size), or COCO RLEs
    where: str  # file and object, for messages


def declared_size(height: Any, width: Any, where: str) -> Size:
    """The (H, W) of an image by the file with its outlines; ValueError for what is no size."""
    if not all(type(side) in (int, float) and side > 0 and side == int(side) for side in (height, width)):
        raise ValueError(
            f"{where}: height, width are {height!r}, {width!r}, expected the image's size in pixels; export it again"
        )
    return int(height), int(width)


@dataclass(frozen=True)
class OutlineMasks:
    """Called with an image's size (H, W), the masks of its classes: the union of the outlines of each."""

    outlines: tuple[Outline, ...]
    declared: Size | None = None  # (H, W) of the image on which they were drawn, if the source gives it
    where: str = ""  # their file, for messages
    shares: bool = False  # whether coordinates are shares of width and height (YOLO)

    def __call__(self, size: Size) -> ClassMasks:
        """ValueError for outlines on another size, or one that is none or covers no pixel."""
        if self.declared is not None and self.declared != size:
            drawn = f"{self.declared[1]} x {self.declared[0]}"
            raise ValueError(
                f"{self.where}: drawn on {drawn}, but the image is {size[1]} x {size[0]} (width x height, after EXIF"
                " rotation); export it again for this image"
            )
        classes: ClassMasks = {}
        for outline in self.outlines:
            try:
                parts = sum((self._parsed(part, size) for part in outline.parts), MaskParts())
                check_outline(parts, size, self.shares)
                mask = rasterise(parts, size)
                if not mask.any():  # it would become "no object"
                    raise ValueError("the outline covers no pixel; draw it as a polygon, or delete it")
            except ValueError as error:
                raise ValueError(f"{outline.where}: {error}") from error
            classes[outline.class_name] = mask | classes.get(outline.class_name, False)
        return classes

    def _parsed(self, part: Any, size: Size) -> MaskParts:
        if isinstance(part, dict):
            return parse_rle(part, size)
        if self.shares:
            if outside := [share for share in part if not -0.01 <= share <= 1.01]:
                raise ValueError(f"a polygon reaches {outside[0]:g}, expected shares of width and height in 0..1")
            part = [share * size[1 - place % 2] for place, share in enumerate(part)]
        return parse_polygon(part, size)


# ---- groups ---------------------------------------------------------------------------------------------------------

REMEDIES = (
    "correct it, or leave it out: names of folders and files then propose the patients (sa2va-rl doctor --data_root"
    " DATA tells them); a table is named by sa2va-rl doctor --data_root DATA --patients_csv patients.csv"
)
LAYOUT = "the files themselves"  # such as the PatientID of DICOM
TABLE = "--patients_csv"
Groups = list[tuple[str, str | None]]


def groups_of(
    items: Sequence[Item], patients_csv: str | None, group_regex: str | None, own: bool = False
) -> tuple[Groups, str]:
    """Group and series of each item, a patient in one spelling, and where they are from.

    `patients_csv` is a CSV file, "none", or None. `group_regex` has a group named `group` and perhaps `series`; it is
    searched in the path below the source. Where neither is given, nor the layout or `VESSEL_NAME` gives all groups,
    they are `PROPOSED`, and an image of which nothing shows a patient is a group of its own, as it is with `own`.
    ValueError where both are given, the expression finds no group, or the table does not fit the images.
    """
    if patients_csv is not None and group_regex is not None:
        raise ValueError(f"patients_csv is {patients_csv!r} and group_regex is {group_regex!r}: leave one of them out")
    if patients_csv == NONE:
        return [(picture_name(item.found_as), item.series) for item in items], NONE
    if patients_csv is not None:
        found, source = _from_table(items, Path(patients_csv)), TABLE
    elif group_regex is None and items and all(item.group for item in items):
        found, source = [(item.group or "", item.series) for item in items], LAYOUT
    else:
        found, source = _from_names(items, group_regex, own)
    patients = one_spelling(group for group, _ in found)
    return [(patients[group], series) for group, series in found], source


def _from_names(items: Sequence[Item], group_regex: str | None, own: bool) -> tuple[Groups, str]:
    """From the names, else from the layout, else as they are proposed, else the image itself."""
    pattern = compile_group_regex(group_regex)
    named = [match.groupdict() if (match := pattern.search(item.found_as)) else {} for item in items]
    known = [name.get("group") or item.group for name, item in zip(named, items, strict=True)]
    bare = [item.found_as for item, name in zip(items, named, strict=True) if not name.get("group")]
    source = FILES
    if bare and group_regex is None:
        paths = [str(without_role(PurePosixPath(item.found_as))) for item in items]
        given = [FILES if name.get("group") else LAYOUT for name in named]
        shown = [
            (group, by) if group else proposed
            for group, by, proposed in zip(known, given, propose_patients(paths), strict=True)
        ]
        known, source = [patient for patient, _ in shown], proposed_from(shown)
    elif bare and not own:
        raise ValueError(f"group_regex {group_regex!r} finds no group in {_some(bare, len(items))}; {REMEDIES}")
    return [
        (group or picture_name(item.found_as), name.get("series") or item.series)
        for group, name, item in zip(known, named, items, strict=True)
    ], source


def _from_table(items: Sequence[Item], path: Path) -> Groups:
    """From a table with the columns image, group and perhaps series; `image` with or without folders and suffix."""
    rows = _read_table(path)
    # Frames of one file share its names rightly.
    shared = Counter(name for item in {item.found_as: item for item in items}.values() for name in _names(item))
    found, bare = Groups(), list[str]()
    for item in items:
        name = next((name for name in _names(item) if name in rows), "")
        if shared[name] > 1 and name != _plain(item.found_as):
            raise ValueError(
                f"{path}: column image holds {name!r}, which is the name of several images, {item.found_as} among"
                " them; give their paths below the source"
            )
        if name:
            found.append((rows[name]["group"], rows[name].get("series") or item.series))
        else:
            bare.append(item.found_as)
    if bare:
        raise ValueError(f"{path}: column image has no row for {_some(bare, len(items))}; add them")
    return found


def _read_table(path: Path) -> dict[str, dict[str, str]]:
    if not path.is_file():
        raise ValueError(f"patients_csv: {path}: file not found; {REMEDIES}")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            text = file.read()
        dialect = csv.Sniffer().sniff(text.splitlines()[0], ",;\t") if text.strip() else csv.excel
        reader = csv.DictReader(text.splitlines(), dialect=dialect, restkey="", restval="")
        rows = [{(key or "").strip().lower(): str(value).strip() for key, value in row.items()} for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: not a table ({error}); save it as CSV in UTF-8") from error
    columns = sorted(rows[0]) if rows else []
    if not {"image", "group"} <= set(columns):
        raise ValueError(f"{path}: columns are {columns}, expected image, group (and series); name them in line 1")
    for number, row in enumerate(rows, 2):
        if bool(row["image"]) != bool(row["group"]):
            raise ValueError(f"{path}: line {number}: image is {row['image']!r}, group is {row['group']!r}; fill both")
    rows = [{**row, "image": _plain(row["image"])} for row in rows if row["image"]]  # spreadsheets append empty rows
    if double := [name for name, count in Counter(row["image"] for row in rows).items() if count > 1]:
        raise ValueError(f"{path}: column image holds {double[0]!r} more than once; keep one row")
    return {row["image"]: row for row in rows}


def _plain(name: str) -> str:
    """A name with forward slashes and each umlaut as one character, as tables and files may not both have it."""
    return unicodedata.normalize("NFC", name.replace("\\", "/"))


def _names(item: Item) -> list[str]:
    """The path of an item, that without suffix, its written name, that without suffix, its file name, its stem."""
    found, written = PurePosixPath(_plain(item.found_as)), PurePosixPath(_plain(item.name))
    names = [str(name) for path in (found, written) for name in (path, path.with_suffix(""))]
    return list(dict.fromkeys([*names, found.name, found.stem]))


def _some(names: list[str], total: int) -> str:
    return f"{len(names)} of {total} images ({some(names)})"
