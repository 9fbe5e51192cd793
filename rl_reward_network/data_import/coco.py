"""COCO instances: JSON files with images, annotations and categories (CVAT, Label Studio, Roboflow, ARCADE, ...).

The mask of a category is the union of its instances. Several JSON files are parts of one data set; images are looked
for beside the file, in `images/`, and in folders that have the part's name.
"""

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath
from typing import Any

from rl_reward_network.data.images import IMAGE_SUFFIXES
from rl_reward_network.data.masks import Size
from rl_reward_network.data_import.files import PARTS, files_below, json_files, names_of
from rl_reward_network.data_import.items import Found, Outline, OutlineMasks, file_item

MAX_FILES = 20  # JSON files of a data set; folders with more hold one file per image
KEYS = {"images", "annotations", "categories"}


def recognise_coco(source: Path) -> str:
    """ "COCO instances (train.json, val.json)"; "" where no JSON file has images, annotations and categories."""
    files, _ = _coco_files(source)
    return f"COCO instances ({', '.join(sorted({path.name for path in files}))})" if files else ""


def read_coco(source: Path, frames: str = "") -> Found:
    """One item per image of the JSON files; images without any annotation are unlabelled."""
    finder = _Finder(source)
    found: dict[Path, tuple[Path, OutlineMasks]] = {}
    class_ids: dict[str, str] = {}
    notes, ambiguous = list[str](), set[str]()
    files, faults = _coco_files(source)
    for file, content in files.items():
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


def _coco_files(source: Path) -> tuple[dict[Path, dict[str, Any]], list[str]]:
    """JSON file -> content, of the files of COCO's form, and the faults of files that hold no JSON."""
    files = files_below(source, ".json")
    if len(files) > MAX_FILES:
        files = [path for path in files if path.parent == source or path.parent.name.lower() == "annotations"]
    contents, faults = json_files(files[:MAX_FILES])
    ours = {path: content for path, content in contents.items() if isinstance(content, dict) and content.keys() >= KEYS}
    return ours, list(faults.values())


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
    names_of_files = [str(image.get("file_name")) for image in content["images"]]
    places = finder.find(names_of_files, file)
    for image, name in zip(content["images"], names_of_files, strict=True):
        where, place = f"{file}: image {name!r}", places[name]
        try:
            if isinstance(place, str):
                raise ValueError(f"{where}: {place}; put it into images/ beside the JSON file, or delete its record")
            yield place, OutlineMasks(tuple(outlines.get(str(image.get("id")), ())), _declared(image, where), where)
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise ValueError("\n".join(faults))


def _declared(image: dict[str, Any], where: str) -> Size | None:
    """The (H, W) of an image by its record; None without it."""
    size: tuple[Any, Any] = (image.get("height"), image.get("width"))
    if not any(size):
        return None
    if not all(type(side) in (int, float) and side > 0 and side == int(side) for side in size):
        raise ValueError(f"{where}: height, width are {size}, expected the image's size in pixels; export it again")
    return int(size[0]), int(size[1])


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
        elif not isinstance(parts, dict | list):
            faults.append(
                f"{where}: segmentation is {parts!r:.40}, expected outlines [[x1, y1, ...], ...] or an RLE; export it"
                " again"
            )
        else:
            one = isinstance(parts, dict) or not any(isinstance(part, list | dict) for part in parts)
            several = [parts] if one else list(parts)
            outlines[str(image)].append(Outline(names[str(category)], several, where))
    return outlines, faults


class _Finder:
    """Finds the image files that the JSON files name."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.files = {_composed(path): path for path in files_below(source, *IMAGE_SUFFIXES)}
        self.folders = {part for path in self.files for part in path.relative_to(_composed(source)).parts[:-1]}
        self.by_name: dict[str, list[Path]] = defaultdict(list)
        for path in self.files:
            self.by_name[path.name].append(path)

    def find(self, names: list[str], file: Path) -> dict[str, Path | str]:
        """The image of each `file_name` of a JSON file, or why there is none.

        All images of a JSON file lie in one place, so that an image that is missing there is not replaced by another
        one of its name.
        """
        parts = {name: _parts(name) for name in names}
        known = {
            name: [(place, path) for place in self._places(file) if (path := place.joinpath(*rest)) in self.files]
            for name, rest in parts.items()
        }
        common = Counter(place for options in known.values() for place, _ in options[:1]).most_common(1)
        place = common[0][0] if common else None
        found = {name: path for name, options in known.items() for at, path in options if at == place}
        shared = Counter(rest[-1] for rest in parts.values() if rest)
        return {
            name: self.files[found[name]] if name in found else self._elsewhere(parts[name], file, found, shared)
            for name in names
        }

    def _places(self, file: Path) -> list[Path]:
        """Folders from which the names in a JSON file may count, best first."""
        part = file.stem.removeprefix("instances_")
        places = [place for near in (file.parent, file.parent.parent, self.source) for place in (near, near / "images")]
        places += [place / part / deeper for place in places for deeper in ("", "images")]
        return [_composed(place) for place in dict.fromkeys(places)]

    def _elsewhere(self, parts: list[str], file: Path, found: dict[str, Path], shared: Counter[str]) -> Path | str:
        """The only image of that bare name, unless it is plainly another one; else what is wrong."""
        named = self.by_name.get(parts[-1], []) if parts else []
        if len(named) != 1:
            return f"{len(named)} files have that name" if named else "there is no such file"
        (path,) = named
        folders = path.relative_to(_composed(self.source)).parts[:-1]
        others = {other.relative_to(_composed(self.source)).parts[:-1][:1] for other in found.values()}
        missed = [part for part in parts[:-1] if part not in folders and part in self.folders]
        told = {PARTS.get(word.lower()) for word in (*parts[:-1], file.stem.removeprefix("instances_"))} - {None}
        lies = {PARTS[part.lower()] for part in folders if part.lower() in PARTS}
        other_part = told and lies and not told & lies
        if missed or other_part or shared[parts[-1]] > 1 or (others and folders[:1] not in others):
            return f"there is no such file, and {path.relative_to(_composed(self.source))} is another one"
        return self.files[path]


def _parts(file_name: str) -> list[str]:
    """The folders and the name in a `file_name`, with either slash."""
    parts = PureWindowsPath(unicodedata.normalize("NFC", file_name)).parts
    return [part for part in parts if part not in ("..", ".", "/", "\\")]


def _composed(path: Path) -> Path:
    """The path with each umlaut as one character, as a Mac may not write it."""
    return Path(unicodedata.normalize("NFC", str(path)))
