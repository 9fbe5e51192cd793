"""COCO instances: JSON files with images, annotations and categories (CVAT, Label Studio, Roboflow, ARCADE, ...).

The mask of a category is the union of its instances. Several JSON files are parts of one data set; images are looked
for beside the file, in `images/`, and in folders that have the part's name.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath
from typing import Any

from rl_reward_network.artefacts import read_json
from rl_reward_network.data.images import IMAGE_SUFFIXES
from rl_reward_network.data_import.files import files_below, names_of
from rl_reward_network.data_import.items import Found, file_item
from rl_reward_network.data_import.polygons import Outline, OutlineMasks

MAX_FILES = 20  # JSON files of a data set; folders with more hold one file per image
KEYS = {"images", "annotations", "categories"}


def recognise_coco(source: Path) -> str:
    """ "COCO instances (train.json, val.json)"; "" where no JSON file has images, annotations and categories."""
    files = _coco_files(source)
    return f"COCO instances ({', '.join(sorted({path.name for path in files}))})" if files else ""


def read_coco(source: Path, frames: str = "") -> Found:
    """One item per image of the JSON files; images without any annotation are unlabelled.

    Args:
        source: the folder.
        frames: of no use here.
    """
    finder = _Finder(source)
    found: dict[Path, tuple[Path, OutlineMasks]] = {}
    class_ids: dict[str, str] = {}
    faults, notes, ambiguous = list[str](), list[str](), set[str]()
    for file, content in _coco_files(source).items():
        names = _category_names(content, file)
        for number in [number for number, name in names.items() if class_ids.get(number, name) != name]:
            here, there = names[number], class_ids[number]
            notes.append(f"category {number} is {here!r} in {file.name}, but {there!r} in another file: use names")
            ambiguous.add(number)
        class_ids |= names
        try:
            for image, masks in _images(file, content, names, finder):
                if image in found:
                    faults.append(f"{image}: an image of {found[image][0].name} and of {file.name}; keep one of them")
                found[image] = (file, masks)
        except ValueError as error:
            faults.extend(str(error).split("\n"))
    known = {number: name for number, name in class_ids.items() if number not in ambiguous}
    return _found(source, found, known, (faults, notes), finder)


def _found(
    source: Path,
    found: dict[Path, tuple[Path, OutlineMasks]],
    class_ids: dict[str, str],
    faults_and_notes: tuple[list[str], list[str]],
    finder: "_Finder",
) -> Found:
    """The items of the images, and notes on those that are left out."""
    faults, notes = faults_and_notes
    names = names_of(sorted(found), source)
    masks = {path: outlines if outlines.outlines else None for path, (_, outlines) in found.items()}
    items = [file_item(source, path, names[path], masks[path]) for path in names]
    bare = sum(item.load_masks is None for item in items)
    left = len(finder.files) - len(found)
    notes += [f"{bare} image(s) without any annotation, imported as unlabelled"] if bare else []
    notes += [f"{left} image file(s) that no JSON file names, left out"] if left else []
    return Found(items, class_ids, faults, notes)


def _coco_files(source: Path) -> dict[Path, dict[str, Any]]:
    """JSON file -> content, of the files of COCO's form."""
    files = files_below(source, ".json")
    if len(files) > MAX_FILES:
        files = [path for path in files if path.parent == source or path.parent.name.lower() == "annotations"]
    contents = {path: read_json(path) for path in files[:MAX_FILES]}
    return {path: content for path, content in contents.items() if isinstance(content, dict) and content.keys() >= KEYS}


def _category_names(content: dict[str, Any], file: Path) -> dict[str, str]:
    """Number -> name of the categories."""
    try:
        return {str(category["id"]): str(category["name"]) for category in content["categories"]}
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{file}: `categories` must be a list of {{id, name}}, got {error!r}; export it again"
        ) from error


def _images(
    file: Path, content: dict[str, Any], names: dict[str, str], finder: "_Finder"
) -> Iterator[tuple[Path, OutlineMasks]]:
    """Image file and its outlines; ValueError with one line per fault."""
    for key in ("images", "annotations"):
        if not (isinstance(content[key], list) and all(isinstance(record, dict) for record in content[key])):
            raise ValueError(f"{file}: `{key}` must be a list of objects; export it again")
    outlines, faults = _outlines(file, content, names)
    for image in content["images"]:
        try:
            path = finder.find(str(image["file_name"]), file)
            size = (image["height"], image["width"]) if image.get("height") and image.get("width") else None
            where = f"{file}: image {image['file_name']!r}"
            yield path, OutlineMasks(tuple(outlines.get(str(image["id"]), ())), size, where)
        except KeyError as error:
            faults.append(f"{file}: an image has no {error}; export it again")
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise ValueError("\n".join(faults))


def _outlines(file: Path, content: dict[str, Any], names: dict[str, str]) -> tuple[dict[str, list[Outline]], list[str]]:
    """Image id -> its outlines, and the faults of the annotations."""
    outlines: dict[str, list[Outline]] = defaultdict(list)
    faults = []
    known = Counter(str(image.get("id")) for image in content["images"])
    faults += [
        f"{file}: id {number} is that of {count} images; export it again"
        for number, count in known.items()
        if count > 1
    ]
    for annotation in content["annotations"]:
        where = f"{file}: annotation {annotation.get('id')}"
        image, category, parts = (annotation.get(key) for key in ("image_id", "category_id", "segmentation"))
        if str(image) not in known or str(category) not in names:
            faults.append(f"{where}: image_id {image!r} or category_id {category!r} is unknown; export it again")
        elif not parts:
            faults.append(f"{where}: no `segmentation`, only a box; draw outlines, or delete it")
        else:
            outlines[str(image)].append(
                Outline(names[str(category)], [parts] if isinstance(parts, dict) else parts, where)
            )
    return outlines, faults


class _Finder:
    """Finds the image files that the JSON files name."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.files = set(files_below(source, *IMAGE_SUFFIXES))
        self.by_name: dict[str, list[Path]] = defaultdict(list)
        for path in self.files:
            self.by_name[path.name].append(path)

    def find(self, file_name: str, file: Path) -> Path:
        """The image that a JSON file calls `file_name`; ValueError if there is none, or several that it may be."""
        parts = [part for part in PureWindowsPath(file_name).parts if part not in ("..", ".", "/", "\\")]
        part = file.stem.removeprefix("instances_")
        places = [place for near in (file.parent, file.parent.parent, self.source) for place in (near, near / "images")]
        places += [place / part / deeper for place in places for deeper in ("", "images")]
        for place in places:
            if (path := place.joinpath(*parts)) in self.files:
                return path
        named = self.by_name.get(parts[-1] if parts else "", [])
        if len(named) == 1:
            return named[0]
        wrong = f"{len(named)} files have that name" if named else "there is no such file"
        raise ValueError(f"{file}: image {file_name!r}: {wrong}; put the images into images/ beside the JSON file")
