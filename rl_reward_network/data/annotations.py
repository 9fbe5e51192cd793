"""Reader of `annotations.json` + `images/`: polygons, COCO RLE and PNG masks, and Sa2VA's fine-tuning format.

The file is a list of records. `image` (a file under `images/`, with or without that folder's name before it) and `text`
(a phrase, or a list of them) are required.

| key | meaning |
|---|---|
| `mask`, 2 levels `[[x1, y1, ...], ...]` | user format: one phrase for all polygons, or one phrase per polygon |
| `mask`, 3 levels `[[[x1, y1, ...], ...], ...]` | official format: a list of polygons per phrase, as many as phrases |
| `mask`, RLE | COCO RLE (compressed or not) wherever a polygon can stand, or alone |
| `mask_png` | a file under the data folder, or a list with one per phrase; wins over `mask` |
| `to_draw` | true: a file of `mask_png` that is not there yet leaves its phrase unlabelled, else it is an error |
| `group`, `series` | patient (see `splits.py`), and sequence of nearly identical frames; else from the file name |
| `split` | `train`, `val` or `test`, in all records or none; else the patients are split by a seed |
| `width`, `height` (or labelme's `imageWidth`, `imageHeight`) | checked against the image after EXIF rotation |

Phrases of a record that differ only in case or a final dot are one object, the union of their masks. The same image
and phrase in two records is an error: the masks may be of two observers, and their union of neither. A phrase without a
mask, or whose polygons were all dropped, is unlabelled; an empty mask is given by an RLE or a PNG of zeros.
Polygons that cover no pixel, or are shares of the size, are an error: they do not say that the object is absent.
"""

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from typing import Any

from rl_reward_network.atomic_io import read_json
from rl_reward_network.data.images import image_header
from rl_reward_network.data.items import Sample, pseudonym, with_windows
from rl_reward_network.data.masks import MaskParts, check_mask_size, check_outline, parse_polygon, parse_rle
from rl_reward_network.data.patients import FILES, picture_name, propose_patients
from rl_reward_network.data.splits import OWN_SPLITS, one_spelling

# <patient>(<digits>)_<series>_frame_<number>.jpg, also <patient>^(<digits>)... and <patient>__<digits>__...
# The group is the number, not the video: a patient with two videos stays in one split.
VESSEL_NAME = r"^(?P<name>.+?)(?:\^?\(|__)(?P<group>\d{6,})(?:\)_|__)(?P<series>.+)_frame_(?P<frame>\d+)\.\w+$"
SIZE_KEYS = {"height": 0, "imageHeight": 0, "width": 1, "imageWidth": 1}
KNOWN_KEYS = {"image", "text", "mask", "mask_png", "to_draw", "group", "series", "split", *SIZE_KEYS}
NEST = {2: "2 levels (user format)", 3: "3 levels (official format)"}
MAX_FAULTS_LISTED = 10


def recognise_annotations(folder: Path) -> str:
    """ "annotated images"; "" where `folder` has no annotations.json."""
    return "annotated images" if (folder / "annotations.json").is_file() else ""


@dataclass
class _Notes:
    """Remarks on an annotation file: keys that are not read, dropped polygons, images of more than 8 bit."""

    other_keys: set[str] = field(default_factory=set)
    dropped: int = 0
    left_bare: int = 0
    undrawn: int = 0
    deep: dict[Path, str | None] = field(default_factory=dict)  # image of more than 8 bit -> series of its record
    patients: dict[str, str] = field(default_factory=dict)  # name -> the spelling that stands for all of them
    proposed: dict[str, tuple[str, str]] = field(default_factory=dict)  # image -> its patient, and what shows it

    def warn(self, file: str) -> None:
        """At most one warning of each kind; none names an image."""
        if self.other_keys:
            warnings.warn(f"{file}: keys that are not read: {', '.join(sorted(self.other_keys))}", stacklevel=3)
        if self.undrawn:
            warnings.warn(f"{file}: {self.undrawn} mask(s) are still to be drawn (`to_draw`): unlabelled", stacklevel=3)
        if self.dropped:
            bare = f"; {self.left_bare} phrase(s) of those records have no other part: unlabelled"
            message = f"{file}: dropped {self.dropped} polygon(s) of fewer than 3 points"
            warnings.warn(message + bare * bool(self.left_bare), stacklevel=3)


def read_annotations(
    root: Path, group_regex: str | None = None, annotations: str = "annotations.json", bit_depth: int | None = None
) -> list[Sample]:
    """Every (image, phrase) of the annotation file in `root`, in its order.

    Only image headers are read, and the pixels of some images of more than 8 bit, to measure their window: per series
    that records name by the field `series`, and for all other images together; `bit_depth` gives its whole range
    instead. `group_regex` is searched in `image` for what a record's fields do not give; its named group `group` is the
    patient, the optional `series` the sequence. Default: `VESSEL_NAME`; where no record has a group and not every name
    gives one, `propose_patients`, and an image that shows none is its own. A series is one image by default.

    ValueError where the file is not as described above: up to ten faulty records with index (from 0), image, field,
    value and remedy, and their number. One warning lists keys that are not read, one counts dropped polygons.
    """
    path = root / annotations
    pattern = compile_group_regex(group_regex)
    records = _read_records(path)
    proposed = {} if group_regex else _proposed(records, pattern)
    named = [*_groups_named(records, pattern), *(patient for patient, _ in proposed.values())]
    notes = _Notes(patients=one_spelling(named), proposed=proposed)
    samples: dict[str, Sample] = {}
    series_of: dict[Path, str] = {}
    nesting: dict[int, int] = {}
    faults = []
    for index, record in enumerate(records):
        try:
            _check_nesting(record, index, nesting)
            for sample in _read_record(record, root, pattern, notes):
                if samples.setdefault(sample.sample_id, sample) is not sample:
                    raise ValueError("this image and phrase came before; join the parts in one record or delete one")
                if series_of.setdefault(sample.image_path, sample.series_id) != sample.series_id:
                    raise ValueError("this image came before with another `group` or `series`; make them equal")
        except ValueError as error:
            name = record.get("image") if isinstance(record, dict) else None
            faults.append(f"record {index}{f' (image {name!r})' if isinstance(name, str) else ''}: {error}")
    if faults:
        told = [f"{len(faults)} records have faults", *first_faults(faults)] if len(faults) > 1 else faults
        raise ValueError("\n  ".join([f"{path}: {told[0]}", *told[1:]]))
    if bare := sum(record.get("split") is None for record in records) % len(records):
        raise ValueError(f"{path}: {bare} of {len(records)} records have no `split`; give it to all or to none")
    notes.warn(annotations)
    return with_windows(list(samples.values()), notes.deep, bit_depth)


def first_faults(faults: list[str]) -> list[str]:
    """At most `MAX_FAULTS_LISTED` faults, and a line that counts the others."""
    more = [f"... and {len(faults) - MAX_FAULTS_LISTED} more"] if len(faults) > MAX_FAULTS_LISTED else []
    return [*faults[:MAX_FAULTS_LISTED], *more]


def compile_group_regex(group_regex: str | None) -> re.Pattern[str]:
    """The pattern that finds groups in file names, with a named group `group`; None: `VESSEL_NAME`."""
    try:
        pattern = re.compile(group_regex or VESSEL_NAME)
    except re.error as error:
        raise ValueError(f"group_regex {group_regex!r} is not a regular expression: {error}") from error
    if "group" not in pattern.groupindex:
        raise ValueError(f"group_regex {group_regex!r} has no named group 'group'; write it as (?P<group>...)")
    return pattern


def _read_records(path: Path) -> list[Any]:
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent}: no such folder; check the path (--data_root)")
    if not path.is_file():
        raise ValueError(
            f"{path}: file not found; a data folder holds annotations.json and images/: name one by DATA_ROOT "
            "(--data_root)"
        )
    records = read_json(path)
    if not isinstance(records, list) or not records:
        kind = "an empty list" if records == [] else type(records).__name__
        raise ValueError(
            f"{path}: expected a list of records {{image, mask, text}}, got {kind}; see docs/how-to/your-data.md"
        )
    return records


def _check_nesting(record: Any, index: int, nesting: dict[int, int]) -> None:
    """Raise on a nesting other than 2 or 3, or other than that of earlier records (`nesting`: depth -> first one)."""
    if not isinstance(record, dict):
        raise ValueError(f"a record must be an object {{image, mask, text}}, got {type(record).__name__}")
    first_records = dict(nesting)
    for depth in [] if record.get("mask_png") else _depths(record.get("mask")):
        if depth not in NEST:
            raise ValueError(f"mask has its numbers {depth} list(s) deep, expected {' or '.join(NEST.values())}")
        first_records.setdefault(depth, index)
    if len(first_records) > 1:
        both = " and ".join(f"{NEST[depth]} in record {first}" for depth, first in sorted(first_records.items()))
        raise ValueError(f"masks of different nesting in one file: {both}; write the whole file in one format")
    nesting.update(first_records)  # not before the check: later records are not at fault


def _depths(value: Any, depth: int = 0) -> set[int]:
    """Depths of nesting of the numbers; those of RLE counts are ignored."""
    if not isinstance(value, list):
        return set()
    if value and not isinstance(value[0], list | dict):
        return {depth + 1}
    return {found for part in value for found in _depths(part, depth + 1)}


def _read_record(record: dict[str, Any], root: Path, pattern: re.Pattern[str], notes: _Notes) -> list[Sample]:
    """One sample per different phrase of a record."""
    notes.other_keys |= record.keys() - KNOWN_KEYS
    name, path = _image_file(root / "images", record.get("image"))
    shown, shown_by = notes.proposed.get(record["image"], ("", ""))
    group, series = _group_and_series(record, name, pattern, shown)
    if (split := record.get("split")) not in (None, *OWN_SPLITS):
        raise ValueError(f"`split` is {split!r}, expected {', '.join(OWN_SPLITS)}; correct it, or leave it out of all")
    size, deep = image_header(path)
    for key, axis in SIZE_KEYS.items():
        if record.get(key) is not None and record[key] != size[axis]:  # its masks were drawn on another picture
            raise ValueError(
                f"`{key}` is {record[key]!r}, but the image is {size[1]} x {size[0]} (width x height, after EXIF"
                " rotation); rescale the mask to this image, or correct the field"
            )
    text = record.get("text")
    phrases = [text] if isinstance(text, str) else text
    if not isinstance(phrases, list) or not phrases or not all(isinstance(p, str) and phrase_key(p) for p in phrases):
        raise ValueError('`text` must be a phrase or a list of phrases, none empty, e.g. ["blood vessel"]')
    phrases = [phrase.strip() for phrase in phrases]
    objects: dict[str, MaskParts] = {}
    dropped_before = notes.dropped
    for phrase, parts in zip(phrases, _masks(record, root, len(phrases), size, notes), strict=True):
        objects[phrase_key(phrase)] = objects.get(phrase_key(phrase), MaskParts()) + parts
    if notes.dropped > dropped_before:
        notes.left_bare += sum(not parts for parts in objects.values())
    spelling = {phrase_key(phrase): phrase for phrase in reversed(phrases)}  # the first spelling stays
    patient = notes.patients.get(group, group)
    series_id = pseudonym("series", patient, series)
    if deep:
        notes.deep[path] = None if record.get("series") is None else series_id
    group_id = pseudonym("group", patient)
    ids = {key: (group_id, series_id, pseudonym("sample", name, key)) for key in objects}
    return [
        Sample(path, spelling[key], *ids[key], size, parts or None, group, split=split, shown_by=shown_by)
        for key, parts in objects.items()
    ]


def _image_file(images: Path, value: Any) -> tuple[str, Path]:
    """Name below `images` and path of an image; the name may begin with that of the folder."""
    name, path = _inside(images, value, "image")
    if name.startswith(f"{images.name}/") and not path.exists():
        return _inside(images, name.removeprefix(f"{images.name}/"), "image")
    return name, path


def _inside(folder: Path, value: Any, key: str) -> tuple[str, Path]:
    """The relative name with forward slashes and the path of a file that must lie inside `folder`."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"`{key}` must be the name of a file in {folder.name}/, got {type(value).__name__}")
    name = PureWindowsPath(value)  # handles both slashes and drive letters on every system
    if name.drive or name.root or ".." in name.parts:
        raise ValueError(f"`{key}` must be relative and without '..'; put the file inside {folder.name}/")
    return name.as_posix(), folder.joinpath(*name.parts)


def _group_and_series(record: dict[str, Any], name: str, pattern: re.Pattern[str], shown: str) -> tuple[str, str]:
    """Original names of group and series, from the fields or the file name; by default a series is one image."""
    match = pattern.search(name)
    found = match.groupdict() if match else {}
    for key in ("group", "series"):
        if (value := record.get(key)) is None:
            continue
        if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
            raise ValueError(f"`{key}` must be a non-empty text or a whole number, got {type(value).__name__}")
        found[key] = str(value).strip()
    group, series = found.get("group") or shown, found.get("series")
    if not group:
        raise ValueError(
            "no group (patient) in the file name, nor a field `group`, which other records have; add it, or give an"
            " expression that finds it: sa2va-rl doctor --data_root DATA --group_regex '^(?P<group>[^_]+)_' for"
            " PATIENT_1.png, or '(?P<group>.+)' where each image is of another patient"
        )
    return group, f"series {series}" if series else f"image {name}"


def _groups_named(records: list[Any], pattern: re.Pattern[str]) -> Iterator[str]:
    """The groups of the records that name one; faults are found when the records are read."""
    for record in records:
        group, image = (record.get(key) if isinstance(record, dict) else None for key in ("group", "image"))
        if isinstance(group, str | int):
            yield str(group).strip()
        elif isinstance(image, str) and (match := pattern.search(image)) and match["group"]:
            yield match["group"]


def _proposed(records: list[Any], pattern: re.Pattern[str]) -> dict[str, tuple[str, str]]:
    """Image -> its patient and what shows it, where no record has a group and `pattern` does not find all."""
    if any(isinstance(record, dict) and record.get("group") is not None for record in records):
        return {}
    images = [record.get("image") for record in records if isinstance(record, dict)]
    names = list(dict.fromkeys(name for name in images if isinstance(name, str)))
    found = [match["group"] if (match := pattern.search(name)) else "" for name in names]
    if all(found):
        return {}
    shown = propose_patients([PureWindowsPath(name).as_posix().removeprefix("images/") for name in names])
    return {
        name: (group, FILES) if group else (patient or picture_name(name), by)
        for name, group, (patient, by) in zip(names, found, shown, strict=True)
    }


def phrase_key(phrase: str) -> str:
    """The phrase as in Sa2VA's question templates: lower case, no final dot; equal keys give equal questions."""
    return phrase.strip().lower().removesuffix(".").strip()


def _masks(record: dict[str, Any], root: Path, phrases: int, size: tuple[int, int], notes: _Notes) -> list[MaskParts]:
    """One mask per phrase, no parts where unlabelled."""
    if png := record.get("mask_png"):
        files = png if isinstance(png, list) else [png]
        _check_count("`mask_png` has ", len(files), phrases)
        paths = [_inside(root, file, "mask_png")[1] for file in files]
        drawn = [path for path in paths if record.get("to_draw") is not True or path.exists() or path.is_symlink()]
        for path in drawn:
            check_mask_size(path, size)
        notes.undrawn += len(paths) - len(drawn)
        return [MaskParts(pngs=(path,)) if path in drawn else MaskParts() for path in paths]
    mask = record.get("mask")
    if mask is None or mask == []:
        return [MaskParts()] * phrases
    try:
        return [_parse_object(parts, size, notes) for parts in _objects(mask, phrases)]
    except ValueError as error:
        raise ValueError(f"`mask`: {error}") from error


def _check_count(key: str, objects: int, phrases: int) -> None:
    if objects != phrases:
        raise ValueError(f"{key}{objects} object(s), but `text` has {phrases} phrase(s); give one per phrase")


def _objects(mask: Any, phrases: int) -> list[list[Any]]:
    """One list of parts (polygons, RLEs) per phrase."""
    parts = [mask] if isinstance(mask, dict) else mask
    if not isinstance(parts, list):
        raise ValueError(f"must be a list of polygons or an RLE, got {type(mask).__name__}")
    official = any(isinstance(part, list) and part and isinstance(part[0], list | dict) for part in parts)
    if not official and phrases == 1:
        return [parts]
    objects = [part if official and isinstance(part, list) else [part] for part in parts]
    _check_count("", len(objects), phrases)
    return objects


def _parse_object(parts: list[Any], size: tuple[int, int], notes: _Notes) -> MaskParts:
    """The union of an object's parts; polygons too short to have an area are counted in `notes`."""
    if len(parts) >= 3 and all(isinstance(part, list) and len(part) == 2 for part in parts):
        raise ValueError("a polygon is given as points [[x, y], ...]; write it flat, [x1, y1, x2, y2, ...]")
    parsed = [parse_rle(part, size) if isinstance(part, dict) else parse_polygon(part, size) for part in parts]
    notes.dropped += sum(not part for part in parsed)
    joined = sum(parsed, MaskParts())
    check_outline(joined, size)
    return joined
