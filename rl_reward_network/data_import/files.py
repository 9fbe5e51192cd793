"""The files of a source: images or masks by name, what is not read, and the names under which images are written."""

import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, TypeVar

from rl_reward_network.atomic_io import read_json
from rl_reward_network.data.images import IMAGE_SUFFIXES, PROMPT_KEY, SHEET, check_name
from rl_reward_network.data.masks import VOLUMES

HIDDEN = (".", "__MACOSX")
DICOM_SUFFIXES = (".dcm", ".dicom", ".ima")
NAMED = (*IMAGE_SUFFIXES, *DICOM_SUFFIXES, "")  # pictures; no suffix: DICOM
READ = (*IMAGE_SUFFIXES, *DICOM_SUFFIXES, ".json", ".txt", ".yaml", ".yml", *VOLUMES)  # or named, where it is there
PICTURES = (".gif", ".ppm", ".pgm", ".pbm", ".jp2", ".jfif", ".heic", ".avif", ".svg", ".npy", ".npz", ".mat", ".h5")
UNREAD = {
    PICTURES: "save them as PNG",
    VOLUMES: "volumes: write each slice as PNG, masks with the name of their image in masks/",
}  # kinds of files that hold images or masks -> what to do

SILENT = ("readme", "license", "licence", "copying", "citation", "thumbs.db", "desktop.ini", "dicomdir")
TEXTS_WITHIN = 512  # bytes: in the first ones of a PNG that `segment` has written stands the key of its prompt
SHOWN = 3  # names in a message
Key = TypeVar("Key", bound=Hashable)


def files_below(folder: Path, *suffixes: str, predictions: bool = False) -> list[Path]:
    """The files below a folder with one of these suffixes (any, if none is given), sorted.

    Hidden ones are left out and, without `predictions`, pictures that `segment` has written: a model must not learn its
    own masks. Links to folders are followed, except to one that holds the link.
    """
    return sorted(
        path
        for path in _walk(folder)
        if (not suffixes or path.suffix.lower() in suffixes) and not path.name.startswith(HIDDEN) and path.is_file()
        if predictions or not is_written(path)
    )


def is_written(path: Path) -> bool:
    """Whether a picture, under whatever name, was written by `segment`; reads its beginning alone."""
    if path.suffix.lower() != ".png":
        return False
    with path.open("rb") as file:
        return PROMPT_KEY.encode() in file.read(TEXTS_WITHIN)


def _walk(folder: Path) -> Iterator[Path]:
    """All files below a folder, those of hidden folders left out."""
    for place, folders, files in os.walk(folder, followlinks=True, onerror=_refuse):
        here, real = Path(place), Path(place).resolve()
        links = [name for name in folders if (here / name).is_symlink()]
        circles = [name for name in links if real.is_relative_to((here / name).resolve())]
        folders[:] = [name for name in folders if not name.startswith(HIDDEN) and name not in circles]
        yield from (here / name for name in files)


def check_files(folder: Path) -> None:
    """Refuse links without a target, and pictures whose name cannot be used.

    It must be UTF-8, and the same on Windows, since annotations.json may be written there.
    """
    files = sorted(path for path in _walk(folder) if not path.name.startswith(HIDDEN))
    for path in files:
        if path.suffix.lower() in NAMED:
            check_name(path)
            relative = path.relative_to(folder)
            if PureWindowsPath(relative).parts != relative.parts:
                raise ValueError(
                    f"{path}: a name with a backslash, or with a colon after its first letter, is read as folders;"
                    " unpack the archive again by another program (7z, bsdtar), or rename it"
                )
    lost = [path for path in files if path.name.lower().endswith(READ) and path.is_symlink() and not path.exists()]
    if lost:
        raise ValueError(
            f"{folder}: {len(lost)} link(s) whose target is missing: {listed(lost, folder)}; fetch the files (git annex"
            " get, datalad get), or delete the links"
        )


def _refuse(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise ValueError(f"{error.filename}: folder not read ({error.strerror}); check its permissions") from error


def unread_note(folder: Path, named: bool = True, read: Iterable[Path] | None = None) -> list[str]:
    """How many files are not read: images and masks of other kinds, and files that may say something; [] without any.

    With `named` the first of them are named. `read` are files that are read beside pictures; None: no others than
    images and masks are counted.
    """
    there = grouped(files_below(folder, predictions=True), is_written)
    kinds, ours = grouped(there.get(False, []), _kind), [path for path in there.get(True, []) if path.name != SHEET]
    notes, rest = list[str](), {*IMAGE_SUFFIXES}
    if ours:
        pictures = f"{len(ours)} picture{'s' * (len(ours) > 1)}"
        notes.append(
            f"{pictures} that `segment` has written, left out ({listed(ours, folder)}): no model learns its"
            " own masks; one that you have corrected counts once another program has saved it"
        )
    for names, remedy in UNREAD.items():
        found = [path for kind in names for path in kinds.get(kind, [])]
        notes += _counted("files of kinds", found, folder, named, remedy)
        rest |= {*names}
    if read is not None:
        used = {path.resolve() for path in read}
        others = [path for kind in kinds.keys() - rest for path in kinds[kind] if path.resolve() not in used]
        others = sorted(path for path in others if not path.name.lower().startswith(SILENT))
        notes += _counted("files", others, folder, named, "phrases, splits or names of patients in them are not used")
    return notes


def _kind(path: Path) -> str:
    """The suffix in lower case; both of ".nii.gz"."""
    return next((kind for kind in VOLUMES if path.name.lower().endswith(kind)), path.suffix.lower())


def _counted(what: str, files: list[Path], folder: Path, named: bool, remedy: str) -> list[str]:
    """A note on files that are not read; [] without any."""
    counts = Counter(_kind(path) or "without suffix" for path in files)
    counted = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    names = f" ({listed(files, folder)})" if named else ""
    return [f"{what} that are not read, left out: {counted}{names}; {remedy}"] if files else []


def unread_keys(contents: Iterable[Any], known: dict[str, set[str]]) -> list[str]:
    """A note on the keys of JSON files that say something and are not read; [] without any.

    `known` is the name of a list of records in a file, "" of the file itself -> the keys that are known.
    """
    counts = Counter[str]()
    for content in contents:
        for place, names in known.items():
            records = [content] if not place else content.get(place) if isinstance(content, dict) else []
            for record in records if isinstance(records, list) else []:
                said = [key for key, value in record.items() if value] if isinstance(record, dict) else []
                counts.update(f"{place}.{key}".strip(".") for key in said if key not in names)
    keys = ", ".join(f"{key} ({count})" for key, count in counts.most_common())
    return [f"keys that are not read: {keys}"] if keys else []


def json_files(paths: Iterable[Path]) -> tuple[dict[Path, Any], dict[Path, str]]:
    """File -> content, and file -> fault of those that hold no JSON, which may be of no concern."""
    contents: dict[Path, Any] = {}
    faults: dict[Path, str] = {}
    for path in paths:
        try:
            contents[path] = read_json(path)
        except ValueError as error:
            faults[path] = f"{error}, or move it out of the folder"
    return contents, faults


def relative_path(path: Path, source: Path) -> PurePosixPath:
    """The path below `source`, with forward slashes."""
    return PurePosixPath(path.relative_to(source).as_posix())


def grouped(paths: Iterable[Path], key: Callable[[Path], Key]) -> dict[Key, list[Path]]:
    """Key -> the files that have it."""
    groups: dict[Key, list[Path]] = defaultdict(list)
    for path in paths:
        groups[key(path)].append(path)
    return dict(groups)


def several_masks(masks: list[Path], source: Path) -> list[str]:
    """The fault that one image has several masks (or files of labels); [] if it has one or none."""
    return [f"{listed(masks, source)}: masks of one image; delete all but one"] if len(masks) > 1 else []


def some(names: list[str]) -> str:
    """The first few names."""
    return ", ".join([*names[:SHOWN], *["..."] * (len(names) > SHOWN)])


def listed(paths: list[Path], source: Path) -> str:
    """The first few paths below the source, and how many more there are."""
    more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return ", ".join(str(relative_path(path, source)) for path in paths[:SHOWN]) + more


def names_of(paths: list[Path], source: Path) -> dict[Path, str]:
    """Image file -> name to write: its path below `source` without the folder "images", or whole where two would agree.

    Files that will be of one name as PNG ("a.tif", "a.png") keep their suffix before ".png". ValueError where two files
    would still be written as one.
    """
    short = {path: without_role(relative_path(path, source)) for path in paths}
    stems = Counter(name.with_suffix("") for name in short.values())
    names = {}
    for path, name in short.items():
        whole = relative_path(path, source)
        if stems[name.with_suffix("")] == 1:
            names[path] = str(name)
        else:
            names[path] = str(whole.with_name(f"{whole.stem}_{whole.suffix[1:]}{whole.suffix}"))
    for name, same in grouped(paths, lambda path: PurePosixPath(names[path]).with_suffix("")).items():
        if len(same) > 1:
            raise ValueError(f"{source}: {listed(same, source)} would be written as one file, {name}.png; rename one")
    return names


IMAGES = {"image", "images", "img", "imgs", "jpegimages", "input", "inputs"}
MASKS = {
    *("mask", "masks", "label", "labels", "annotation", "annotations", "ann", "gt", "groundtruth", "manual"),
    *("target", "targets"),
    *("seg", "segmentation", "segmentations", "segmentationclass", "segmentationobject"),
}
PARTS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val"} | {
    name: "test" for name in ("test", "testing")
}
AFFIX = re.compile(
    r"(?P<base>.+?)[ _.-]+(?P<word>masks?|gt|labels?|seg|segmentation|manual|1stHO|2ndHO)(?P<number>[ _.-]?\d+)?",
    re.IGNORECASE,
)
"""A mask's name: the image's name, a word, and perhaps a number, as in "benign (4)_mask_1" and "21_manual1"."""


def part_of(relative: PurePosixPath) -> str:
    """train, val or test, by the deepest folder that names a part of the data and nothing else but a role; or "".

    >>> [part_of(PurePosixPath(path)) for path in ("Training/images/1.png", "valImages/1.png", "test patient/1.png")]
    ['train', 'val', '']
    """
    for folder in reversed(relative.parts[:-1]):
        words = words_of(folder)
        if (said := part_said(words)) and (_folder_role(folder) or set(words) <= PARTS.keys() | {"set", "data"}):
            return said
    return ""


def part_said(words: Iterable[str]) -> str:
    """The one part of the data that words name; "" for none or several."""
    said = {PARTS[word.lower()] for word in words if word.lower() in PARTS}
    return said.pop() if len(said) == 1 else ""


def role_of(relative: PurePosixPath) -> str:
    """ "image" or "mask", by the deepest folder that names a role; "" without one."""
    return _folder_role(role_folder(relative))


def role_folder(relative: PurePosixPath) -> str:
    """The name of the deepest folder that names a role, else that of the deepest folder."""
    return next((one for one in reversed(relative.parts[:-1]) if _folder_role(one)), relative.parent.name)


def words_of(name: str) -> list[str]:
    """The words in a name, in lower case; a capital in the last one begins another ("trainMasks")."""
    return re.findall(r"[^\W\d_]+", re.sub(r"(?<=[a-z])(?=[A-Z][a-z]+$)", " ", name).lower())


def _folder_role(name: str) -> str:
    """The role that the name of a folder says, by its first or last word ("train_masks", "1st_manual")."""
    words, parts = re.findall(r"[^\W\d_]+", name.lower()), words_of(name)
    said = {"".join(words), *words[:1], *words[-1:], *parts[-1:]}  # not the first part: "imagesTr" is a word
    return "mask" if said & MASKS else "image" if said & IMAGES else ""


def without_role(relative: PurePosixPath) -> PurePosixPath:
    """The path without the deepest folder that names a role; a part of the data that it also names stays.

    >>> [str(without_role(PurePosixPath(path))) for path in ("train/images/1.png", "a/1.png", "training_masks/1.png")]
    ['train/1.png', 'a/1.png', 'train/1.png']
    """
    parts = relative.parts
    for place in reversed(range(len(parts) - 1)):
        if _folder_role(parts[place]):
            kept = [PARTS[word] for word in words_of(parts[place]) if word in PARTS]
            return PurePosixPath(*parts[:place], *kept[:1], *parts[place + 1 :])
    return relative


def pair_key(relative: PurePosixPath) -> PurePosixPath:
    """What an image and its mask have in common: the path without role and suffix.

    An umlaut that a Mac wrote as two characters is one.
    """
    return PurePosixPath(unicodedata.normalize("NFC", str(without_role(relative).with_suffix(""))))


def image_keys(mask: PurePosixPath) -> list[PurePosixPath]:
    """The `pair_key` of the images that a mask may be of, by its name without an affix: 7, 7_1 of "7_mask_1"."""
    key = pair_key(mask)
    if not (match := AFFIX.fullmatch(key.name)):
        return []
    bases = [match["base"], *([match["base"] + match["number"]] if match["number"] else [])]
    return [key.with_name(base) for base in bases]


def images_and_masks(files: Iterable[Path], root: Path) -> tuple[list[Path], list[Path]]:
    """Pictures below `root` that are images, and those that are masks; the rest lies in folders that name no role.

    A mask lies in a folder of masks, or its name is that of a picture beside it and an affix. Where folders of images
    are named, pictures outside of these are neither.
    """
    relative = {path: PurePosixPath(path.relative_to(root).as_posix()) for path in files}
    roles = {path: role_of(place) for path, place in relative.items()}
    others = [path for path, role in roles.items() if role != "mask"]
    masks = {path for path, role in roles.items() if role == "mask"} | _affixed(others, relative)
    named = [path for path in others if roles[path] == "image" and path not in masks]
    images = named or [path for path in others if path not in masks]
    return images, [path for path in roles if path in masks]


def pictures_below(source: Path) -> tuple[list[Path], list[Path]]:
    """The image files below a folder that are no pictures of masks, and those that are."""
    pictures = files_below(source, *IMAGE_SUFFIXES)
    masks = set(images_and_masks(pictures, source)[1])
    return [path for path in pictures if path not in masks], [path for path in pictures if path in masks]


def _affixed(files: list[Path], relative: dict[Path, PurePosixPath]) -> set[Path]:
    """The files that are named as masks of others, and those with the same affix whose image is missing."""
    keys = {pair_key(relative[path]) for path in files}
    named = {path: bases for path in files if (bases := image_keys(relative[path]))}
    paired = {path for path, bases in named.items() if keys & set(bases)}
    words = {affix_of(path) for path in paired}
    theirs = {base for path in paired for base in named[path]}
    return paired | {path for path in named if affix_of(path) in words and pair_key(relative[path]) not in theirs}


def affix_of(path: Path) -> str:
    """The word of an affix in a file's name, in lower case; "" without one."""
    match = AFFIX.fullmatch(path.stem)
    return match["word"].lower() if match else ""
