"""Paired folders: `images/` and `masks/` (or `labels/`, `annotations/`, `gt/`), equal stems; also in subfolders.

Also `X.png` beside `X_mask.png`. A mask's stem may have one of `AFFIXES` more than its image's.
"""

import unicodedata
from functools import partial
from pathlib import Path, PurePosixPath

from rl_reward_network.data.images import IMAGE_SUFFIXES
from rl_reward_network.data_import.classes import load_class_masks
from rl_reward_network.data_import.files import (
    SHOWN,
    files_below,
    grouped,
    listed,
    names_of,
    relative_path,
    role_of,
    several_masks,
    without_role,
)
from rl_reward_network.data_import.items import Found, file_item

AFFIXES = ("mask", "masks", "gt", "label", "labels", "seg", "segmentation")


def recognise_paired_folders(source: Path) -> str:
    """ "images/ with masks/"; "" where images and masks are not told apart by folders or affixes."""
    images, masks, how = _by_role(files_below(source, *IMAGE_SUFFIXES), source)
    return how if images and masks else ""


def read_paired_folders(source: Path, frames: str = "") -> Found:
    """One item per image; images without a mask are unlabelled.

    Args:
        source: the folder.
        frames: of no use here.

    Raises:
        ValueError: no image has a mask.
    """
    files = files_below(source, *IMAGE_SUFFIXES)
    images, masks, _ = _by_role(files, source)
    pairs, faults = pair_by_stem(images, masks, source)
    if not any(pairs.values()):
        names = [", ".join(str(relative_path(p, source)) for p in files[:SHOWN]) for files in (images, masks)]
        raise ValueError(
            f"{source}: no annotations.json, and no image has a mask of equal stem; images are {names[0]}; masks are"
            f" {names[1]}; rename the masks, or write annotations.json (docs/your-data.md)"
        )
    names_written = names_of(images, source)
    items = [
        file_item(source, image, names_written[image], partial(load_class_masks, mask) if mask else None)
        for image, mask in pairs.items()
    ]
    rest = sorted({*files} - {*images, *masks})
    outside = [f"{len(rest)} picture(s) outside of these folders, left out: {listed(rest, source)}"] if rest else []
    return Found(items, faults=faults, notes=[*unmatched_notes(pairs, masks, source), *outside])


def pair_by_stem(images: list[Path], masks: list[Path], source: Path) -> tuple[dict[Path, Path | None], list[str]]:
    """Image -> its mask, and the faults: two images or two masks of one stem.

    Args:
        images, masks: files below `source`.
        source: folder; two files fit if their paths below it differ in the folder "images" / "masks", in the suffix and
            in an affix of the mask at most.
    """
    by_key = grouped(images, lambda path: _key(path, source))
    fitting: dict[Path, list[Path]] = {image: [] for image in images}
    for mask in masks:
        key = _key(mask, source)
        keys = [key] if key in by_key else [key.with_name(base) for base in _bases(key.name)]
        for image in next((by_key[k] for k in keys if k in by_key), []):
            fitting[image].append(mask)
    double = [files for files in by_key.values() if len(files) > 1 and fitting[files[0]]]
    faults = [f"{listed(files, source)}: images of one name, with one mask for both; rename one" for files in double]
    faults += [fault for found in fitting.values() for fault in several_masks(found, source)]
    return {image: found[0] if found else None for image, found in fitting.items()}, list(dict.fromkeys(faults))


def unmatched_notes(pairs: dict[Path, Path | None], masks: list[Path], source: Path) -> list[str]:
    """Images without masks and masks without images, counted, the first of them named."""
    bare = [image for image, mask in pairs.items() if mask is None]
    used = set(pairs.values())
    lost = [mask for mask in masks if mask not in used]
    notes = [f"{len(bare)} image(s) without a mask, imported as unlabelled: {listed(bare, source)}"] if bare else []
    return notes + ([f"{len(lost)} mask(s) without an image, left out: {listed(lost, source)}"] if lost else [])


def _by_role(files: list[Path], source: Path) -> tuple[list[Path], list[Path], str]:
    """Images, masks, and how they were told apart; by folder where some folder names masks, else by affix."""
    roles = {path: role_of(relative_path(path, source)) for path in files}
    masks = [path for path, role in roles.items() if role == "mask"]
    if masks:
        images = [path for path, role in roles.items() if role == "image"]
        images = images or [path for path, role in roles.items() if not role]
        folders = [sorted({path.parent.name for path in part}) for part in (images, masks)]
        return images, masks, f"paired folders ({' with '.join(', '.join(names[:SHOWN]) for names in folders)})"
    keys = {_key(path, source) for path in files}
    masks = [p for p in files if any(_key(p, source).with_name(base) in keys for base in _bases(p.stem))]
    images = [path for path in files if path not in set(masks)]
    affixes = sorted({m.stem.removeprefix(base) for m in masks for base in _bases(m.stem)})
    return images, masks, f"images beside their masks (X and X{' or X'.join(affixes)})"


def _bases(stem: str) -> list[str]:
    """The stem without an affix, if it has one."""
    return [stem[: -len(affix) - 1] for affix in AFFIXES if stem.lower().endswith((f"_{affix}", f"-{affix}"))]


def _key(path: Path, source: Path) -> PurePosixPath:
    """The path without role and suffix; an umlaut that a Mac wrote as two characters is one."""
    key = without_role(relative_path(path, source)).with_suffix("")
    return PurePosixPath(unicodedata.normalize("NFC", str(key)))
