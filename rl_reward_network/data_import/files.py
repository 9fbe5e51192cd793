"""The files of a source, and which of their folders name a role ("images", "masks") instead of a part or a patient."""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import TypeVar

from rl_reward_network.data.images import IMAGE_SUFFIXES, check_name
from rl_reward_network.data_import.dicom_pixels import SUFFIXES

IMAGE_FOLDERS = ("images", "image", "imgs", "img")
MASK_FOLDERS = ("masks", "mask", "labels", "label", "annotations", "annotation", "gt", "groundtruth", "ground_truth")
HIDDEN = (".", "__MACOSX")
PICTURES = (*IMAGE_SUFFIXES, *SUFFIXES, "")  # no suffix: DICOM
UNREAD = (".gif", ".ppm", ".pgm", ".pbm", ".jp2", ".jfif", ".heic", ".npy")  # of pictures

SHOWN = 3  # names in a message
Key = TypeVar("Key", bound=Hashable)


def files_below(folder: Path, *suffixes: str) -> list[Path]:
    """The files below a folder with one of these suffixes (any, if none is given), sorted.

    Hidden ones are left out. Links to folders are followed, except to one that holds the link.
    """
    return sorted(
        path
        for path in _walk(folder)
        if (not suffixes or path.suffix.lower() in suffixes) and not path.name.startswith(HIDDEN) and path.is_file()
    )


def _walk(folder: Path) -> Iterator[Path]:
    """All files below a folder, those of hidden folders left out."""
    for place, folders, files in os.walk(folder, followlinks=True, onerror=_refuse):
        here, real = Path(place), Path(place).resolve()
        links = [name for name in folders if (here / name).is_symlink()]
        circles = [name for name in links if real.is_relative_to((here / name).resolve())]
        folders[:] = [name for name in folders if not name.startswith(HIDDEN) and name not in circles]
        yield from (here / name for name in files)


def check_files(folder: Path) -> None:
    """Refuse pictures that are named but cannot be used: links without a target, names that are not UTF-8.

    Raises:
        ValueError: names the first few and the remedy.
    """
    named = sorted(path for path in _walk(folder) if path.suffix.lower() in PICTURES and path.name[0] != ".")
    for path in named:
        check_name(path)
    if lost := [path for path in named if path.suffix and path.is_symlink() and not path.exists()]:
        raise ValueError(
            f"{folder}: {len(lost)} link(s) whose target is missing: {listed(lost, folder)}; fetch the files (git annex"
            " get, datalad get), or delete the links"
        )


def _refuse(error: OSError) -> None:
    """Refuse a folder that is there and cannot be listed."""
    if not isinstance(error, FileNotFoundError):
        raise ValueError(f"{error.filename}: folder not read ({error.strerror}); check its permissions") from error


def unread_note(folder: Path) -> list[str]:
    """How many pictures are of kinds that are not read; [] without any."""
    kinds = Counter(path.suffix.lower() for path in files_below(folder, *UNREAD))
    listed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return [f"files of kinds that are not read, left out: {listed}; save them as PNG"] if kinds else []


def role_of(relative: PurePosixPath) -> str:
    """ "image" or "mask", by the deepest folder that names a role; "" without one."""
    folders = [part.lower() for part in reversed(relative.parts[:-1])]
    named = next((name for name in folders if name in (*IMAGE_FOLDERS, *MASK_FOLDERS)), "")
    return "" if not named else "image" if named in IMAGE_FOLDERS else "mask"


def without_role(relative: PurePosixPath) -> PurePosixPath:
    """The path without the deepest folder that names a role: "train/images/1.png" is "train/1.png".

    >>> str(without_role(PurePosixPath("train/images/1.png"))), str(without_role(PurePosixPath("a/1.png")))
    ('train/1.png', 'a/1.png')
    """
    parts = relative.parts
    for place in reversed(range(len(parts) - 1)):
        if parts[place].lower() in (*IMAGE_FOLDERS, *MASK_FOLDERS):
            return PurePosixPath(*parts[:place], *parts[place + 1 :])
    return relative


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


def listed(paths: list[Path], source: Path) -> str:
    """The first few paths below the source, and how many more there are."""
    more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return ", ".join(str(relative_path(path, source)) for path in paths[:SHOWN]) + more


def names_of(paths: list[Path], source: Path) -> dict[Path, str]:
    """Image file -> name to write: its path below `source` without the folder "images", or whole where two would agree.

    Files that will be of one name as PNG ("a.tif", "a.png") keep their suffix before ".png".

    Raises:
        ValueError: two files would be written as one.
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
