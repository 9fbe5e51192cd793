"""YOLO polygons: images/ and labels/*.txt, a line per object: class, x1, y1, x2, y2, ... as shares of the size."""

from collections import Counter
from pathlib import Path

import yaml

from rl_reward_network.data.images import IMAGE_SUFFIXES
from rl_reward_network.data_import.files import (
    files_below,
    grouped,
    listed,
    names_of,
    pictures_below,
    relative_path,
    role_of,
    several_masks,
    without_role,
)
from rl_reward_network.data_import.items import NUMBER, Found, Outline, OutlineMasks, file_item, id_text

NAME_FILES = ("data.yaml", "data.yml", "dataset.yaml", "classes.txt", "obj.names")


def recognise_yolo(source: Path) -> str:
    """ "YOLO polygons"; "" without a text file of an image in a folder "labels"."""
    images, labels = files_below(source, *IMAGE_SUFFIXES), _label_files(source)
    fitting = {_key(path, source) for path in images} & {_key(path, source) for path in labels}
    return f"YOLO polygons (images with {len(labels)} text files)" if fitting else ""


def read_yolo(source: Path, frames: str = "") -> Found:
    """One item per image; an empty text file is an empty mask, an image without text file is unlabelled.

    Raises:
        ValueError: data.yaml cannot be read.
    """
    names = _class_names(source)
    images, mask_files = pictures_below(source)
    labels = grouped(_label_files(source), lambda path: _key(path, source))
    keys = Counter(_key(path, source) for path in images)
    faults = [f"{source / key}: {count} images of one name; rename one" for key, count in keys.items() if count > 1]
    written = names_of(images, source)
    items, broken = [], dict[str, str]()
    for path in images:
        texts, masks = labels.pop(_key(path, source), []), None
        faults += several_masks(texts, source)
        if texts:
            try:
                masks = OutlineMasks(tuple(_outlines(texts[0], names)), where=str(texts[0]), shares=True)
            except ValueError as error:
                broken[written[path]] = str(error)
                continue
        items.append(file_item(source, path, written[path], masks))
    notes = [f"{len(labels)} text file(s) without an image, left out"] if labels else []
    notes += [f"{len(mask_files)} picture(s) of masks, left out: {listed(mask_files, source)}"] if mask_files else []
    read = (*_label_files(source), *(path for path in files_below(source) if path.name in NAME_FILES))
    return Found(items, names, faults, notes, broken=broken, read=read)


def _label_files(source: Path) -> list[Path]:
    """Text files in a folder "labels", without a list of the classes."""
    files = [path for path in files_below(source, ".txt") if path.name not in NAME_FILES]
    return [path for path in files if role_of(relative_path(path, source)) == "mask"]


def _key(path: Path, source: Path) -> str:
    return str(without_role(relative_path(path, source)).with_suffix(""))


def _class_names(source: Path) -> dict[str, str]:
    """Number -> name, from data.yaml or classes.txt; {} without them, and then the numbers are the classes."""
    places = [source, *sorted({path.parent for path in _label_files(source)})]  # labelImg writes classes.txt there
    file = next((place / name for place in places for name in NAME_FILES if (place / name).is_file()), None)
    if file is None:
        return {}
    text = _text_of(file)
    if file.suffix in (".txt", ".names"):
        return {str(number): id_text(name) for number, name in enumerate(text.splitlines()) if name.strip()}
    try:
        names = (yaml.safe_load(text) or {}).get("names") or {}
    except (yaml.YAMLError, AttributeError) as error:
        raise ValueError(f"{file}: not valid YAML with `names` ({error}); correct it") from error
    if not isinstance(names, dict | list):
        raise ValueError(f"{file}: `names` is {names!r}, expected a list, or {{number: name}}; correct it")
    pairs = names.items() if isinstance(names, dict) else enumerate(names)
    return {id_text(number): id_text(name) for number, name in pairs}


def _outlines(path: Path, names: dict[str, str]) -> list[Outline]:
    """The objects of a text file; ValueError for lines that are no polygons."""
    outlines = []
    for number, line in enumerate(_text_of(path).splitlines(), 1):
        where = f"{path}: line {number}"
        index, *numbers = line.split() or [""]
        if not index:
            continue
        index = id_text(index)
        if names and index not in names:
            raise ValueError(f"{where}: class {index} is not in data.yaml or classes.txt; add it")
        if NUMBER.fullmatch(index) and not index.isdecimal():
            raise ValueError(f"{where}: class {index} is not a whole number of 0 or more; correct it")
        if len(numbers) < 6 or len(numbers) % 2:
            box = ", which is a box" if len(numbers) == 4 else ""
            raise ValueError(f"{where}: {len(numbers)} numbers{box}, expected 3 or more pairs x, y; export polygons")
        try:
            outlines.append(Outline(names.get(index, index), [[float(value) for value in numbers]], where))
        except ValueError:
            raise ValueError(f"{where}: not a line of numbers; export it again") from None
    return outlines


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text in UTF-8 ({error}); export it again") from error
