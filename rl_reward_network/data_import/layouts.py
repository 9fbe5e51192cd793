"""The layouts that are imported, in one table, how a folder's layout is recognised, and the layout by names alone.

A new layout is a module of this package with two functions, and one line of `LAYOUTS` beside its import:

- `recognise(source)` returns a short description of what the folder holds, "" if it is of another layout;
- `read(source, frames)` returns its images as `Found`, nothing decoded; ValueError with file and remedy.

Paired folders are `images/` and `masks/` (or `labels/`, `annotations/`, `gt/`, ...) with equal stems, also in
subfolders, or `X.png` beside `X_mask.png`. The names that tell images from masks are in `files.py`.
"""

import re
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from rl_reward_network.data.images import IMAGE_SUFFIXES
from rl_reward_network.data.masks import load_joined_masks
from rl_reward_network.data_import import files, per_image
from rl_reward_network.data_import.coco import read_coco, recognise_coco
from rl_reward_network.data_import.dicom import read_dicom, recognise_dicom
from rl_reward_network.data_import.items import Found, file_item

# ---- paired folders -------------------------------------------------------------------------------------------------

SEPARATOR = re.compile(r"[ _.-]")
FIRST_OBSERVER = re.compile(r"1st_?manual|manual1?/|manual_?1?$|1stho$")
SECOND_OBSERVER = re.compile(r"2nd_?manual|manual2/|manual_?2$|2ndho$")
Pairs = dict[Path, list[Path]]
"""Image -> the files whose union is its mask; none: unlabelled."""


def recognise_paired_folders(source: Path) -> str:
    """ "images/ with masks/"; "" where images and masks are not told apart by folders or affixes."""
    images, masks = files.images_and_masks(files.files_below(source, *IMAGE_SUFFIXES), source)
    if not images or not masks:
        return ""
    in_folders = [path for path in masks if files.role_of(files.relative_path(path, source)) == "mask"]
    if not in_folders:
        affixes = sorted({f"X_{files.affix_of(path)}" for path in masks})
        return f"images beside their masks (X and {' or '.join(affixes)})"
    relative = [[files.relative_path(path, source) for path in part] for part in (images, in_folders)]
    folders = [sorted({files.role_folder(path) for path in part}) for part in relative]
    return f"paired folders ({' with '.join(', '.join(names[: files.SHOWN]) for names in folders)})"


def read_paired_folders(source: Path, frames: str = "") -> Found:
    """One item per image; images without a mask are unlabelled."""
    pictures = files.files_below(source, *IMAGE_SUFFIXES)
    images, masks = files.images_and_masks(pictures, source)
    pairs, faults, notes = pair_by_name(images, masks, source)
    if not any(pairs.values()):
        names = [
            ", ".join(str(files.relative_path(p, source)) for p in part[: files.SHOWN]) for part in (images, masks)
        ]
        raise ValueError(
            f"{source}: no annotations.json, and no image has a mask of equal name; images are {names[0]}; masks are"
            f" {names[1]}; rename the folders to images/ and masks/ and each mask as its image, or write"
            " annotations.json (docs/how-to/your-data.md)"
        )
    names_written = files.names_of(images, source)
    items = [
        file_item(source, image, names_written[image], partial(load_joined_masks, tuple(found)) if found else None)
        for image, found in pairs.items()
    ]
    rest = sorted({*pictures} - {*images, *masks})
    outside = (
        [f"{len(rest)} picture(s) outside of these folders, left out: {files.listed(rest, source)}"] if rest else []
    )
    return Found(items, faults=faults, notes=[*notes, *outside])


def pair_by_name(images: list[Path], masks: list[Path], source: Path) -> tuple[Pairs, list[str], list[str]]:
    """The masks of each image, the faults (two images or two masks of one name), and notes.

    Two files fit if their paths below `source` differ in the folder "images" / "masks", in the suffix and in an affix
    of the mask at most. Where that fits no mask of a folder, see `_loosely`.
    """
    keys = {path: files.pair_key(files.relative_path(path, source)) for path in (*images, *masks)}
    by_key = files.grouped(images, keys.__getitem__)
    pairs: Pairs = {image: [] for image in images}
    faults, notes = list[str](), list[str]()
    for inside in files.grouped(masks, lambda path: path.parent).values():
        wanted = {mask: [keys[mask], *reversed(files.image_keys(files.relative_path(mask, source)))] for mask in inside}
        equal = {mask: next((by_key[key][0] for key in names if key in by_key), None) for mask, names in wanted.items()}
        found = {mask: image for mask, image in equal.items() if image}
        if not found and (found := _loosely(wanted, by_key)):
            mask, image = next(iter(found.items()))
            notes.append(f"paired by parts of their names, look: {files.listed([image, mask], source)}, ...")
        for mask, image in found.items():
            pairs[image].append(mask)
    double = [same for same in by_key.values() if len(same) > 1 and pairs[same[0]]]
    faults += [
        f"{files.listed(same, source)}: images of one name, with one mask for both; rename one" for same in double
    ]
    lost = sorted({*masks} - {mask for found in pairs.values() for mask in found})
    notes += [f"{len(lost)} mask(s) without an image, left out: {files.listed(lost, source)}"] if lost else []
    left_out: list[tuple[Path, str]] = []
    for image, fitting in pairs.items():
        # A first observer's drawing comes before all others; beside it, mask/ is the field of view in DRIVE and HRF.
        best = min(map(_rank, fitting), default=0)
        pairs[image] = [mask for mask in fitting if _rank(mask) == best]
        if others := [mask for mask in fitting if _rank(mask) != best]:
            left_out.append((others[0], files.listed(pairs[image][:1], source)))
        parts = [files.AFFIX.fullmatch(mask.stem) for mask in pairs[image]]  # X_mask, X_mask_1, X_mask_2 ... as in BUSI
        wholes = {(mask.parent, m and (m["base"], m["word"])) for mask, m in zip(pairs[image], parts, strict=True)}
        numbered = {m["number"] for m in parts if m and m["word"].lower().startswith("mask")}
        faults += [] if len(wholes) == 1 and len(numbered) == len(parts) else files.several_masks(pairs[image], source)
    for other, taken in left_out[:1]:
        of = f"such as {files.listed([other], source)}"
        notes.append(f"masks of {len(left_out)} image(s) left out, {of}, since each has one such as {taken}")
    joined = [found for found in pairs.values() if len(found) > 1]
    notes += [f"{len(joined)} mask(s) joined of several files: {files.listed(joined[0], source)}"] if joined else []
    return pairs, list(dict.fromkeys(faults)), list(dict.fromkeys(notes))


def _loosely(wanted: dict[Path, list[PurePosixPath]], by_key: dict[PurePosixPath, list[Path]]) -> dict[Path, Path]:
    """Mask -> image by a looser rule that gives every mask of a folder an image of its own; {} without one.

    All images, or all masks, may lie in a folder more, of any name, or have a longer name, cut at a separator.
    """
    images: dict[PurePosixPath, list[Path]] = defaultdict(list)
    for key, (image, *_) in by_key.items():
        for looser in _looser(key):
            images[looser].append(image)
    masks = {mask: [looser for name in names for looser in _looser(name)] for mask, names in wanted.items()}
    for index, tried in ((images, wanted), (by_key, masks)):
        found = {mask: next((index[name] for name in names if name in index), []) for mask, names in tried.items()}
        if all(len(one) == 1 for one in found.values()) and len({one[0] for one in found.values()}) == len(found):
            return {mask: image for mask, (image,) in found.items()}
    return {}


def _looser(key: PurePosixPath) -> list[PurePosixPath]:
    """The key without each of its folders in turn, then with its name cut at each separator, longest first."""
    folders = key.parts[:-1]
    higher = [PurePosixPath(*folders[:place], *folders[place + 1 :], key.name) for place in range(len(folders))]
    cuts = [cut.start() for cut in SEPARATOR.finditer(key.name) if cut.start()]
    return higher + [key.with_name(key.name[:cut]) for cut in reversed(cuts)]


def _rank(mask: Path) -> int:
    """0 of a first observer's drawing and of VOC's classes, 2 of a second observer's, 1 of all others."""
    name = f"{mask.parent.name}/{mask.stem}".lower()
    if SECOND_OBSERVER.search(name):
        return 2
    return 0 if FIRST_OBSERVER.search(name) or mask.parent.name.lower() == "segmentationclass" else 1


# ---- the table ------------------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """How a layout is recognised and read, see the module's docstring."""

    recognise: Callable[[Path], str]
    read: Callable[[Path, str], Found]
    words: str  # what it is, for messages
    private: bool = False  # whether names in the source may be those of patients, as `Found.private`


LAYOUTS: dict[str, Layout] = {
    "paired": Layout(recognise_paired_folders, read_paired_folders, "images/ and masks/ with equal names"),
    "coco": Layout(recognise_coco, read_coco, "COCO instances"),
    "nnunet": Layout(per_image.recognise_nnunet, per_image.read_nnunet, "nnU-Net (imagesTr, labelsTr)"),
    "yolo": Layout(per_image.recognise_yolo, per_image.read_yolo, "YOLO polygons (images/, labels/*.txt)"),
    "labelme": Layout(per_image.recognise_labelme, per_image.read_labelme, "LabelMe (one JSON per image)"),
    "dicom": Layout(recognise_dicom, read_dicom, "DICOM", private=True),
}
AUTO = "auto"


def recognise_layout(source: Path, layout: str = AUTO) -> tuple[str, str]:
    """Key of `LAYOUTS` for a folder, and the description of what it holds; a `layout` that is named is taken as it is.

    ValueError for no folder, no known layout, several, or an unknown `layout`.
    """
    if layout not in (AUTO, *LAYOUTS):
        raise ValueError(f"layout is {layout!r}, expected {AUTO}, {', '.join(LAYOUTS)}")
    if not source.is_dir():
        raise ValueError(f"{source}: no such folder; name the folder of your images")
    files.check_files(source)
    if layout != AUTO:
        return layout, LAYOUTS[layout].recognise(source) or layout
    found = {name: text for name, one in LAYOUTS.items() if (text := one.recognise(source))}
    if not found:
        *words, last = (one.words for one in LAYOUTS.values())
        expected = f"expected {', '.join(words)} or {last}"
        raise ValueError("; ".join([f"{source}: no known layout", *files.unread_note(source, read=()), expected]))
    if len(found) > 1:
        raise ValueError(
            f"{source}: holds {' and '.join(found.values())}; import one by sa2va-rl data import --layout"
            f" {' or '.join(found)}"
        )
    ((name, text),) = found.items()
    return name, text
