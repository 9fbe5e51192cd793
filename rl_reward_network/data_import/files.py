"""The files of a source: what is there, what of it is not read, and the names under which images are written."""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, TypeVar

from rl_reward_network.artefacts import read_json
from rl_reward_network.data.images import IMAGE_SUFFIXES, check_name
from rl_reward_network.data.mask_files import VOLUMES
from rl_reward_network.data.roles import without_role
from rl_reward_network.data_import.dicom_pixels import SUFFIXES

HIDDEN = (".", "__MACOSX")
NAMED = (*IMAGE_SUFFIXES, *SUFFIXES, "")  # pictures; no suffix: DICOM
READ = (*IMAGE_SUFFIXES, *SUFFIXES, ".json", ".txt", ".yaml", ".yml", *VOLUMES)  # or named, where it is there
PICTURES = (".gif", ".ppm", ".pgm", ".pbm", ".jp2", ".jfif", ".heic", ".avif", ".svg", ".npy", ".npz", ".mat", ".h5")
UNREAD = {
    PICTURES: "save them as PNG",
    VOLUMES: "volumes: write each slice as PNG, masks with the name of their image in masks/",
}  # kinds of files that hold images or masks -> what to do

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
    """Refuse files that are named but cannot be used: links without a target, and pictures by their names.

    The name of a picture must be UTF-8, and the same on Windows, since annotations.json may be written there.

    Raises:
        ValueError: names the first few and the remedy.
    """
    files = sorted(path for path in _walk(folder) if not path.name.startswith(HIDDEN))
    for path in files:
        if path.suffix.lower() in NAMED:
            check_name(path)
            _check_separators(path, folder)
    lost = [path for path in files if path.name.lower().endswith(READ) and path.is_symlink() and not path.exists()]
    if lost:
        raise ValueError(
            f"{folder}: {len(lost)} link(s) whose target is missing: {listed(lost, folder)}; fetch the files (git annex"
            " get, datalad get), or delete the links"
        )


def _check_separators(path: Path, folder: Path) -> None:
    """Refuse a backslash in a name, which archives made by Windows leave, and a letter with a colon before it."""
    relative = path.relative_to(folder)
    if PureWindowsPath(relative).parts != relative.parts:
        raise ValueError(
            f"{path}: a name with a backslash, or with a colon after its first letter, is read as folders; unpack"
            " the archive again by another program (7z, bsdtar), or rename it"
        )


def _refuse(error: OSError) -> None:
    """Refuse a folder that is there and cannot be listed."""
    if not isinstance(error, FileNotFoundError):
        raise ValueError(f"{error.filename}: folder not read ({error.strerror}); check its permissions") from error


def unread_note(folder: Path, named: bool = True) -> list[str]:
    """How many images and masks are of kinds that are not read; [] without any.

    Args:
        folder: holds them, also in subfolders.
        named: whether the first of them are named.
    """
    notes = []
    for kinds, remedy in UNREAD.items():
        found = [path for path in files_below(folder) if path.name.lower().endswith(kinds)]
        counts = Counter(next(kind for kind in kinds if path.name.lower().endswith(kind)) for path in found)
        counted = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        names = f" ({listed(found, folder)})" if named else ""
        notes += [f"files of kinds that are not read, left out: {counted}{names}; {remedy}"] if found else []
    return notes


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
