"""The group (patient) and series of each image: from the layout, a table, a regular expression, or none."""

import csv
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from rl_reward_network.data.annotations import compile_group_regex
from rl_reward_network.data.splits import one_spelling
from rl_reward_network.data_import.files import some
from rl_reward_network.data_import.items import Item

NONE = "none"  # --patients_csv none: each image is a group of its own
VERSION = re.compile(r"\.rf\.[0-9A-Za-z]+(?=\.\w+$)")  # of one picture, as Roboflow names its augmented copies
REMEDIES = (
    "give --patients_csv patients.csv (columns image, group), --group_regex '(?P<group>...)' that finds the patient in"
    " the file's name, or --patients_csv none where nothing is known: each image is then a group of its own"
)
Groups = list[tuple[str, str | None]]


def groups_of(
    items: Sequence[Item], groups: str | None, group_regex: str | None, own: bool = False
) -> tuple[Groups, str]:
    """Group and series of each item, a patient in one spelling, and where they are from.

    Args:
        items: the images.
        groups: a CSV file, "none", or None.
        group_regex: with a named group `group` and perhaps `series`; searched in the path below the source; by default
            `VESSEL_NAME`, where the layout does not give all groups.
        own: whether an image whose group is not known is a group of its own, instead of an error.

    Raises:
        ValueError: both are given, an image has no group, or the table does not fit the images.
    """
    if groups is not None and group_regex is not None:
        raise ValueError(f"groups is {groups!r} and group_regex is {group_regex!r}: leave one of them out")
    if groups == NONE:
        return [(picture_name(item.found_as), item.series) for item in items], NONE
    if groups is not None:
        found, source = _from_table(items, Path(groups)), "table"
    elif group_regex is None and items and all(item.group for item in items):
        found, source = [(item.group or "", item.series) for item in items], "layout"
    else:
        found, source = _from_names(items, group_regex, own), NONE if own else "file names"
    patients = one_spelling(group for group, _ in found)
    return [(patients[group], series) for group, series in found], source


def _from_names(items: Sequence[Item], group_regex: str | None, own: bool) -> Groups:
    """From the names; with `own`, else from the layout, else the image itself."""
    pattern = compile_group_regex(group_regex)
    named = [match.groupdict() if (match := pattern.search(item.found_as)) else {} for item in items]
    layout_knows = [group_regex is None and bool(item.group) for item in items]
    known = [bool(name.get("group")) or of_layout for name, of_layout in zip(named, layout_knows, strict=True)]
    bare = [item.found_as for item, is_known in zip(items, known, strict=True) if not is_known]
    if bare and not own:
        fault = f"group_regex {group_regex!r} finds no group in" if group_regex else "no group (patient) is known for"
        raise ValueError(f"{fault} {_some(bare, len(items))}; {REMEDIES}")
    return [
        (name.get("group") or item.group or picture_name(item.found_as), name.get("series") or item.series)
        for name, item in zip(named, items, strict=True)
    ]


def picture_name(path: str) -> str:
    """What all versions of one picture share: the name without its hash, wherever the file lies; else the path.

    >>> picture_name("train/a_png.rf.0f1e.jpg") == picture_name("valid/a_png.rf.77aa.jpg") == "a_png.jpg"
    True
    """
    name = PurePosixPath(path).name
    return VERSION.sub("", name) if VERSION.search(name) else path


def _from_table(items: Sequence[Item], path: Path) -> Groups:
    """From a table with the columns image, group and perhaps series; `image` with or without folders and suffix."""
    rows = _read_table(path)
    names = [_name_in(item, rows) for item in items]
    shared = _shared_names(items)
    for item, name in zip(items, names, strict=True):
        if name in shared and name != _plain(item.found_as):
            raise ValueError(
                f"{path}: column image holds {name!r}, which is the name of several images, {item.found_as} among"
                " them; give their paths below the source"
            )
    found = [rows.get(name) for name in names]
    bare = [item.found_as for item, row in zip(items, found, strict=True) if row is None]
    if bare:
        raise ValueError(f"{path}: column image has no row for {_some(bare, len(items))}; add them")
    return [(row["group"], row.get("series") or item.series) for item, row in zip(items, found, strict=True) if row]


def _read_table(path: Path) -> dict[str, dict[str, str]]:
    """Image -> row; ValueError if it is no such table."""
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


def _name_in(item: Item, rows: dict[str, dict[str, str]]) -> str:
    """The first name of an item that has a row; "" without one."""
    return next((name for name in _names(item) if name in rows), "")


def _names(item: Item) -> list[str]:
    """The path of an item, that without suffix, its written name, that without suffix, its file name, its stem."""
    found, written = PurePosixPath(_plain(item.found_as)), PurePosixPath(_plain(item.name))
    names = [str(name) for path in (found, written) for name in (path, path.with_suffix(""))]
    return list(dict.fromkeys([*names, found.name, found.stem]))


def _shared_names(items: Sequence[Item]) -> set[str]:
    """Names that are those of several files; frames of one file share theirs rightly."""
    files = {item.found_as: item for item in items}
    counts = Counter(name for item in files.values() for name in _names(item))
    return {name for name, count in counts.items() if count > 1}


def _some(names: list[str], total: int) -> str:
    """How many, and the first of them."""
    return f"{len(names)} of {total} images ({some(names)})"
