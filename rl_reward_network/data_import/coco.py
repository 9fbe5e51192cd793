"""COCO instances: JSON files with images, annotations and categories (CVAT, Label Studio, Roboflow, ARCADE, ...).

The mask of a category is the union of its instances. Several JSON files are parts of one data set.
"""

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from rl_reward_network.data.images import IMAGE_SUFFIXES
from rl_reward_network.data_import import files
from rl_reward_network.data_import.items import Found, Outline, OutlineMasks, declared_size, file_item, id_text

MAX_FILES = 20  # JSON files of a data set; folders with more hold one file per image
KEYS = {"images", "annotations", "categories"}
NAMES = ("file_name", "coco_url", "filename", "path", "flickr_url")  # of an image; LVIS has addresses alone
KNOWN = {
    "": {"info", "licenses", "images", "annotations", "categories", "type"},
    "images": {"id", "height", "width", "license", "date_captured", *NAMES},
    "annotations": {"id", "image_id", "category_id", "segmentation", "bbox", "area", "iscrowd", "ignore"},
}
IGNORE = "ignore"  # a key of annotations, and the class of those that have it
Parts = tuple[str, ...]


def recognise_coco(source: Path) -> str:
    """ "COCO instances (train.json, val.json)"; "" where no JSON file has images, annotations and categories."""
    ours, _ = _coco_files(source)
    return f"COCO instances ({', '.join(sorted({path.name for path in ours}))})" if ours else ""


def read_coco(source: Path, frames: str = "") -> Found:
    """One item per image of the JSON files; images without any annotation are unlabelled."""
    pictures = {
        _composed(files.relative_path(path, source)).parts: path for path in files.files_below(source, *IMAGE_SUFFIXES)
    }
    found: dict[Path, tuple[Path, OutlineMasks]] = {}
    parts: dict[Path, str | None] = {}
    class_ids: dict[str, str] = {}
    notes, ambiguous = list[str](), set[str]()
    contents, faults = _coco_files(source)
    for file, content in contents.items():
        names = _category_names(content, file)
        for number in [number for number, name in names.items() if class_ids.get(number, name) != name]:
            here, there = names[number], class_ids[number]
            notes.append(f"category {number} is {here!r} in {file.name}, but {there!r} in another file: use names")
            ambiguous.add(number)
        class_ids |= names
        part = files.part_said(files.words_of(file.stem)) or files.part_of(files.relative_path(file, source)) or None
        try:
            for image, masks in _images(source, file, content, names, pictures):
                if image in found:
                    faults.append(f"{image}: an image of {found[image][0].name} and of {file.name}; keep one of them")
                found[image] = (file, masks)
                parts[image] = part
        except ValueError as error:
            faults.extend(str(error).split("\n"))
    written = files.names_of(sorted(found), source)
    outlined = {path: masks if masks.outlines else None for path, (_, masks) in found.items()}
    items = [file_item(source, path, name, outlined[path], parts[path]) for path, name in written.items()]
    left = len(pictures) - len(found)
    notes += [f"{left} image file(s) that no JSON file names, left out"] if left else []
    notes += files.unread_keys(contents.values(), KNOWN)
    named = {number: name for number, name in class_ids.items() if number not in ambiguous}
    return Found(items, named, faults, notes, read=tuple(contents))


def _coco_files(source: Path) -> tuple[dict[Path, dict[str, Any]], list[str]]:
    """JSON file -> content, of the files of COCO's form, and the faults of files that hold no JSON."""
    paths = files.files_below(source, ".json")
    if len(paths) > MAX_FILES:
        paths = [path for path in paths if path.parent == source or path.parent.name.lower() == "annotations"]
    contents, faults = files.json_files(paths[:MAX_FILES])
    ours = {path: content for path, content in contents.items() if isinstance(content, dict) and content.keys() >= KEYS}
    return ours, list(faults.values())


def _category_names(content: dict[str, Any], file: Path) -> dict[str, str]:
    """Number -> name of the categories."""
    try:
        return {
            id_text(one["id"]): id_text(one["id"] if one["name"] in (None, "") else one["name"])
            for one in content["categories"]
        }
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{file}: `categories` must be a list of {{id, name}}, got {error!r}; export it again"
        ) from error


def _images(
    source: Path, file: Path, content: dict[str, Any], names: dict[str, str], pictures: dict[Parts, Path]
) -> Iterator[tuple[Path, OutlineMasks]]:
    """Image file and its outlines; ValueError with one line per fault."""
    for key in ("images", "annotations"):
        if not (isinstance(content[key], list) and all(isinstance(record, dict) for record in content[key])):
            raise ValueError(f"{file}: `{key}` must be a list of objects; export it again")
    outlines, faults = outlines_of(file, content, names)
    named = [next((str(image[key]) for key in NAMES if image.get(key)), "") for image in content["images"]]
    places = _places(named, files.relative_path(file, source), pictures)
    for image, name in zip(content["images"], named, strict=True):
        where, place = f"{file}: image {name or image.get('id')!r}", places.get(name)
        try:
            if not name:
                raise ValueError(f"{where}: it has no `file_name`, but {', '.join(map(str, image))}; export it again")
            if place is None:
                raise ValueError(
                    f"{where}: there is no such file; put it into images/ beside the JSON file, or delete its record"
                )
            height, width = image.get("height"), image.get("width")
            declared = declared_size(height, width, where) if height or width else None
            yield place, OutlineMasks(tuple(outlines.get(id_text(image.get("id")), ())), declared, where)
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise ValueError("\n".join(faults))


def _places(names: list[str], file: PurePosixPath, pictures: dict[Parts, Path]) -> dict[str, Path]:
    """The image of each `file_name` of a JSON file; names without one are missing.

    All images of a JSON file lie below one folder, so that a lost image is not replaced by another one of its name.
    Where no name is there as a whole, the first folders of all names are left out, one by one.
    """
    whole = {name: _composed(PurePosixPath(PureWindowsPath(name).as_posix())).parts for name in names}
    whole = {name: tuple(part for part in parts if part not in ("..", ".", "/")) for name, parts in whole.items()}
    by_name: dict[str, list[Parts]] = defaultdict(list)
    for parts in pictures:
        by_name[parts[-1]].append(parts)
    stem = file.stem.removeprefix("instances_")
    for dropped in range(max(map(len, whole.values()), default=0)):
        rests = {name: parts[dropped:] or parts[-1:] for name, parts in whole.items() if parts}
        told = _said((stem, *(word for parts in whole.values() for word in parts[:dropped])))
        hits = Counter(
            path[: -len(rest)] for rest in rests.values() for path in by_name[rest[-1]] if path[-len(rest) :] == rest
        )
        places = [place for place, _ in hits.most_common()]  # of places alike, that with the most images
        fitting = [place for place in places if not (told and (said := _said(place)) and not told & said)]
        if fitting:
            best = max(fitting, key=lambda place: _rank(place, file))
            return {name: pictures[best + rest] for name, rest in rests.items() if best + rest in pictures}
    return {}


def _rank(place: Parts, file: PurePosixPath) -> tuple[bool, bool, int]:
    """How likely the images of a JSON file lie below a folder: one of its name, of no masks, near to it."""
    named = file.stem.removeprefix("instances_") in place
    near = takewhile(lambda pair: pair[0] == pair[1], zip(place, file.parent.parts, strict=False))
    return named, files.role_of(PurePosixPath(*place, "x")) != "mask", len(list(near))


def _said(words: Iterable[str]) -> set[str]:
    return {files.PARTS[word.lower()] for word in words if word.lower() in files.PARTS}


def outlines_of(
    file: Path, content: dict[str, Any], names: dict[str, str]
) -> tuple[dict[str, list[Outline]], list[str]]:
    """Image id -> its outlines, and the faults of the annotations; `names` are of the categories, number -> name."""
    outlines: dict[str, list[Outline]] = defaultdict(list)
    known = Counter(id_text(image.get("id")) for image in content["images"])
    double = [(number, count) for number, count in known.items() if count > 1]
    faults = [f"{file}: id {number} is that of {count} images; export it again" for number, count in double]
    for annotation in content["annotations"]:
        where = f"{file}: annotation {annotation.get('id')}"
        image, category = (id_text(annotation.get(key)) for key in ("image_id", "category_id"))
        parts = annotation.get("segmentation")
        if image not in known:
            faults.append(f"{where}: no image has its image_id {image}; export it again")
        elif category not in names:
            faults.append(f"{where}: no category has its category_id {category}; export it again")
        elif not parts:
            faults.append(f"{where}: no `segmentation`, only a box; draw outlines, or delete it")
        elif not isinstance(parts, dict | list):
            expected = "expected outlines [[x1, y1, ...], ...] or an RLE; export it again"
            faults.append(f"{where}: segmentation is {parts!r:.40}, {expected}")
        else:
            name = IGNORE if annotation.get(IGNORE) else names[category]
            outlines[image].append(Outline(name, _parts(parts), where))
    return outlines, faults


def _parts(segmentation: dict[str, Any] | list[Any]) -> list[Any]:
    """The polygons, each flat, and RLEs of an object; points in pairs are joined."""

    def is_pairs(part: Any) -> bool:
        return isinstance(part, list) and len(part) > 2 and all(isinstance(p, list) and len(p) == 2 for p in part)

    bare = isinstance(segmentation, dict) or not any(isinstance(part, list | dict) for part in segmentation)
    parts = [segmentation] if bare or is_pairs(segmentation) else list(segmentation)
    return [[value for point in part for value in point] if is_pairs(part) else part for part in parts]


def _composed(path: PurePosixPath) -> PurePosixPath:
    """The path with each umlaut as one character, as a Mac may not write it."""
    return PurePosixPath(unicodedata.normalize("NFC", str(path)))
