"""Layouts with one file of labels per image: nnU-Net's raw format, YOLO polygons, LabelMe.

- nnU-Net: imagesTr/CASE_0000.png, labelsTr/CASE.png, dataset.json; two-dimensional images only.
- YOLO: images/ and labels/*.txt, a line per object: class, x1, y1, x2, y2, ... as shares of the size.
- LabelMe: a JSON file with shapes, imagePath, imageWidth and imageHeight.
"""

import os
from collections import Counter
from functools import partial
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
import yaml

from rl_reward_network.atomic_io import read_json
from rl_reward_network.data.images import IMAGE_SUFFIXES
from rl_reward_network.data.masks import VOLUMES, ClassMasks, Size, load_class_masks
from rl_reward_network.data_import import files
from rl_reward_network.data_import.items import NUMBER, Found, Outline, OutlineMasks, declared_size, file_item, id_text

# ---- nnU-Net --------------------------------------------------------------------------------------------------------

CHANNEL = "_0000"
FOLDS = "splits_final.json"


def recognise_nnunet(source: Path) -> str:
    """ "nnU-Net raw data"; "" without imagesTr and labelsTr."""
    both = (source / "imagesTr").is_dir() and (source / "labelsTr").is_dir()
    return "nnU-Net raw data (imagesTr, labelsTr)" if both else ""


def read_nnunet(source: Path, frames: str = "") -> Found:
    """One item per case of imagesTr (and of imagesTs, unlabelled without labelsTs); ValueError for volumes."""
    volumes = [path for path in files.files_below(source) if path.name.lower().endswith(VOLUMES)]
    if volumes:
        raise ValueError(
            f"{volumes[0]}: a volume, expected single images; write each slice or frame as PNG (file_ending .png in"
            " dataset.json) and import that"
        )
    values, validation = _class_values(source), _validation_cases(source)
    items, faults = [], list[str]()
    for images, labels, part in (("imagesTr", "labelsTr", "train"), ("imagesTs", "labelsTs", "test")):
        cases: dict[str, Path] = {}
        masks = files.grouped(files.files_below(source / labels, *IMAGE_SUFFIXES), lambda path: path.stem)
        for path in files.files_below(source / images, *IMAGE_SUFFIXES):
            if path.stem[-5:-4] == "_" and path.stem[-4:].isdecimal() and not path.stem.endswith(CHANNEL):
                faults.append(f"{path}: a second channel of its case; merge the channels into one RGB image")
                continue
            case = path.stem.removesuffix(CHANNEL)
            if case in cases:
                faults.append(f"{path}: an image of the case of {cases[case].name}; keep one of them")
                continue
            cases[case] = path
            found = masks.pop(case, [])
            faults += files.several_masks(found, source)
            name = case + path.suffix if images == "imagesTr" else f"{images}/{case}{path.suffix}"
            masks_of = partial(load_named_masks, found[0], values) if found else None
            items.append(file_item(source, path, name, masks_of, "val" if case in validation else part))
        lost = [mask for found in masks.values() for mask in found]
        faults += [f"{mask}: a label map without an image {mask.stem}{CHANNEL} in {images}" for mask in lost]
    named = {str(number[0]): name for name, number in values.items() if len(number) == 1}
    notes = [f"val is that of the first fold of {FOLDS}: {len(validation)} case(s)"] if validation else []
    return Found(items, named, faults, notes, read=(source / "dataset.json", source / FOLDS))


def _validation_cases(source: Path) -> set[str]:
    """The cases of nnU-Net's own first fold; none without its file, which it writes beside its preprocessed data."""
    path = source / FOLDS
    try:
        return {str(case) for case in read_json(path)[0]["val"]} if path.is_file() else set()
    except (LookupError, TypeError) as error:
        raise ValueError(f"{path}: expected [{{train: [...], val: [...]}}, ...], got {error!r}; delete it") from error


def _class_values(source: Path) -> dict[str, list[int]]:
    """Class -> its values in the label maps; {} without dataset.json, and then the values are the classes."""
    path = source / "dataset.json"
    if not path.is_file():
        return {}
    content = read_json(path)
    labels: Any = content.get("labels", {}) if isinstance(content, dict) else {}
    if not isinstance(labels, dict):
        raise ValueError(f"{path}: `labels` must be {{name: value}}, got {labels!r:.60}; correct it")
    if labels and all(str(key).isdecimal() and isinstance(name, str) for key, name in labels.items()):
        labels = {name: int(value) for value, name in labels.items()}  # version 1: value -> name
    values = {}
    for name, given in labels.items():
        numbers = given if isinstance(given, list) else [given]
        whole = all(one.isdecimal() if isinstance(one, str) else type(one) is int and one >= 0 for one in numbers)
        if not numbers or not whole or (len(numbers) > 1 and 0 in map(int, numbers)):
            raise ValueError(
                f"{path}: `labels` must be {{name: value}}, or {{name: [value, ...]}} with values above 0, but {name!r}"
                f" is {given!r:.40}; correct it"
            )
        values[name] = [int(number) for number in numbers]
    return {name: numbers for name, numbers in values.items() if numbers != [0]}


def load_named_masks(path: Path, values: dict[str, list[int]], size: Size) -> ClassMasks:
    """The classes of a label map by the names of dataset.json.

    `values` are class -> its values; {}: the values are the classes. Raises as `load_class_masks`, and a ValueError for
    a value that dataset.json does not name.
    """
    masks = load_class_masks(path, size, palette_colours=False)
    if not values:
        return masks
    if unknown := sorted(masks.keys() - {str(value) for numbers in values.values() for value in numbers}):
        raise ValueError(f"{path}: holds {unknown[0]}, which dataset.json does not name; add it to `labels`")
    found = {name: [masks[str(value)] for value in numbers if str(value) in masks] for name, numbers in values.items()}
    return {name: np.logical_or.reduce(parts) for name, parts in found.items() if parts}


# ---- YOLO -----------------------------------------------------------------------------------------------------------

NAME_FILES = ("data.yaml", "data.yml", "dataset.yaml", "classes.txt", "obj.names")


def recognise_yolo(source: Path) -> str:
    """ "YOLO polygons"; "" without a text file of an image in a folder "labels"."""
    images, labels = files.files_below(source, *IMAGE_SUFFIXES), _label_files(source)
    fitting = {_key(path, source) for path in images} & {_key(path, source) for path in labels}
    return f"YOLO polygons (images with {len(labels)} text files)" if fitting else ""


def read_yolo(source: Path, frames: str = "") -> Found:
    """One item per image; an empty text file is an empty mask, an image without text file is unlabelled."""
    names = _class_names(source)
    images, mask_files = files.pictures_below(source)
    labels = files.grouped(_label_files(source), lambda path: _key(path, source))
    keys = Counter(_key(path, source) for path in images)
    faults = [f"{source / key}: {count} images of one name; rename one" for key, count in keys.items() if count > 1]
    written = files.names_of(images, source)
    parts, lists = _listed_parts(source, images)
    items, broken = [], dict[str, str]()
    for path in images:
        texts, masks = labels.pop(_key(path, source), []), None
        faults += files.several_masks(texts, source)
        if texts:
            try:
                masks = OutlineMasks(tuple(_outlines(texts[0], names)), where=str(texts[0]), shares=True)
            except ValueError as error:
                broken[written[path]] = str(error)
                continue
        items.append(file_item(source, path, written[path], masks, parts.get(path, "") if parts else None))
    notes = [f"{len(labels)} text file(s) without an image, left out"] if labels else []
    notes += (
        [f"{len(mask_files)} picture(s) of masks, left out: {files.listed(mask_files, source)}"] if mask_files else []
    )
    read = (*lists, *_label_files(source), *(path for path in files.files_below(source) if path.name in NAME_FILES))
    return Found(items, names, faults, notes, broken=broken, read=read)


def _listed_parts(source: Path, images: list[Path]) -> tuple[dict[Path, str], list[Path]]:
    """Image -> its part by `train`, `val` and `test` of data.yaml, the first that names it; and the lists it names."""
    file = next((source / name for name in NAME_FILES[:3] if (source / name).is_file()), None)
    content = (yaml.safe_load(_text_of(file)) if file else None) or {}
    parts, lists = dict[Path, str](), list[Path]()
    for key, part in files.PARTS.items():
        value = content.get(key) or []
        for place in filter(None, [_below(source, name) for name in (value if isinstance(value, list) else [value])]):
            if place.is_file():
                lists.append(place)
                named = {_below(source, line) for line in _text_of(place).splitlines()}
                inside = [image for image in images if image in named]
            else:
                inside = [image for image in images if image.is_relative_to(place)]
            parts = {image: part for image in inside} | parts
    return parts, lists


def _below(source: Path, name: Any) -> Path | None:
    """The file or folder of the source that a path of another place or machine means; None without one."""
    parts = [part for part in PureWindowsPath(str(name).strip()).parts if part not in ("..", ".", "\\", "/")]
    tails = (source.joinpath(*parts[first:]) for first in range(len(parts)))
    return next((tail for tail in tails if tail.exists()), None)


def _label_files(source: Path) -> list[Path]:
    """Text files in a folder "labels", without a list of the classes."""
    texts = [path for path in files.files_below(source, ".txt") if path.name not in NAME_FILES]
    return [path for path in texts if files.role_of(files.relative_path(path, source)) == "mask"]


def _key(path: Path, source: Path) -> str:
    return str(files.without_role(files.relative_path(path, source)).with_suffix(""))


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


# ---- LabelMe --------------------------------------------------------------------------------------------------------

CORNERS: dict[str, tuple[int, ...]] = {
    "polygon": (),
    "rectangle": (2, 4),  # X-AnyLabeling writes all corners
    "rotation": (4,),
    "quadrilateral": (4,),
}
"""shape_type -> number of points; () of any."""
KNOWN = {
    "": {"version", "shapes", "imagePath", "imageData", "imageHeight", "imageWidth", "lineColor", "fillColor"},
    "shapes": {"label", "points", "shape_type", "group_id", "direction", "mask", "line_color", "fill_color", "score"},
}
LOOKED_AT = 20  # JSON files that tell whether it is LabelMe


def recognise_labelme(source: Path) -> str:
    """ "LabelMe"; "" where no JSON file has shapes and imagePath (the first few are read)."""
    drawings = files.files_below(source, ".json")
    contents, _ = files.json_files(drawings[:LOOKED_AT])
    drawn = any(isinstance(one, dict) and one.keys() >= {"shapes", "imagePath"} for one in contents.values())
    return f"LabelMe ({len(drawings)} JSON files)" if drawn else ""


def read_labelme(source: Path, frames: str = "") -> Found:
    """One item per image; images without a JSON file are unlabelled."""
    images, masks = files.pictures_below(source)
    drawn: dict[Path, OutlineMasks] = {}
    contents, unreadable = files.json_files(files.files_below(source, ".json"))
    faults = list[str]()
    for path, content in contents.items():
        try:
            if not (isinstance(content, dict) and isinstance(content.get("shapes"), list)):
                raise ValueError(f"{path}: no list `shapes`; delete it, or save it again with LabelMe")
            image = _image_of(path, content, set(images))
            if image in drawn:
                raise ValueError(f"{path}: {image.name} has a JSON file already; keep one")
            sides = content.get("imageHeight"), content.get("imageWidth")
            size = None if sides == (None, None) else declared_size(*sides, str(path))  # old files have none
            drawn[image] = OutlineMasks(tuple(_shapes(path, content["shapes"])), size, str(path))
        except ValueError as error:
            faults.append(str(error))
    lost = {path.with_suffix("") for path in unreadable}  # their images are annotated: not imported as unlabelled
    images = [path for path in images if path in drawn or path.with_suffix("") not in lost]
    names = files.names_of(images, source)
    items = [file_item(source, path, names[path], drawn.get(path)) for path in images]
    notes = [f"{len(masks)} picture(s) of masks, left out: {files.listed(masks, source)}"] if masks else []
    notes += files.unread_keys(contents.values(), KNOWN)
    broken = {files.relative_path(path, source).as_posix(): fault for path, fault in unreadable.items()}
    return Found(items, {}, faults, notes, broken=broken, read=tuple(contents))


def _image_of(path: Path, content: dict[str, Any], images: set[Path]) -> Path:
    """The image of a JSON file: its imagePath, else a guess below the JSON file or beside it, else of the same stem."""
    named = PureWindowsPath(str(content.get("imagePath", ""))).parts
    exact = Path(os.path.normpath(path.parent.joinpath(*named)))
    parts = [part for part in named if part not in ("..", ".")]
    folders = [path.parent, path.parent.parent] if parts else []
    places = [folder.joinpath(*names) for folder in folders for names in (parts, parts[-1:])]
    for place in (exact, *places, *(path.with_suffix(suffix) for suffix in IMAGE_SUFFIXES)):
        if place not in images:
            continue
        near = [folder / f"{path.stem}{suffix}" for folder in (path.parent, place.parent) for suffix in IMAGE_SUFFIXES]
        if place.stem != path.stem and (own := [one for one in near if one in images]):
            raise ValueError(  # files were renamed, imagePath was not
                f"{path}: imagePath names {place.name}, but there is {own[0].name}; write the right one into imagePath,"
                " or give the file the name of its image"
            )
        return place
    raise ValueError(
        f"{path}: imagePath is {content.get('imagePath')!r}, no image of the source; put it beside the file"
    )


def _shapes(path: Path, shapes: list[Any]) -> list[Outline]:
    outlines = []
    for number, shape in enumerate(shapes):
        where = f"{path}: shape {number}"
        try:
            kind = str(shape.get("shape_type") or "polygon")
            points = [(float(x), float(y)) for x, y in shape["points"]]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{where}: no list `points` of pairs x, y ({error!r}); save it again with LabelMe"
            ) from error
        if shape.get("label") in (None, ""):
            raise ValueError(f"{where}: no `label`; name its class in LabelMe")
        if kind not in CORNERS:
            raise ValueError(f"{where}: shape_type is {kind!r}, expected {', '.join(CORNERS)}; draw it as a polygon")
        if CORNERS[kind] and len(points) not in CORNERS[kind]:
            counts = " or ".join(map(str, CORNERS[kind]))
            raise ValueError(f"{where}: a {kind} of {len(points)} points, expected {counts}; draw it as a polygon")
        if len(points) == 2 and kind == "rectangle":
            (left, top), (right, bottom) = points
            points = [(left, top), (right, top), (right, bottom), (left, bottom)]
        outlines.append(Outline(id_text(shape["label"]), [[value for point in points for value in point]], where))
    return outlines
