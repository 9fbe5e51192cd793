"""Which pictures of a folder are images and which are masks, by the names of folders and files.

The import, unlabelled images and the pre-flight check use these rules alone, so that no mask is taken for an image.
"""

import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

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


def role_of(relative: PurePosixPath) -> str:
    """ "image" or "mask", by the deepest folder that names a role; "" without one.

    >>> [role_of(PurePosixPath(path)) for path in ("JPEGImages/1.png", "Ground Truth/1.png", "a/1.png")]
    ['image', 'mask', '']
    """
    return next((role for folder in reversed(relative.parts[:-1]) if (role := _folder_role(folder))), "")


def _words(name: str) -> list[str]:
    """The words in the name of a folder, in lower case; a capital in the last one begins another ("trainMasks")."""
    return re.findall(r"[^\W\d_]+", re.sub(r"(?<=[a-z])(?=[A-Z][a-z]+$)", " ", name).lower())


def _folder_role(name: str) -> str:
    """The role that the name of a folder says, by its first or last word ("train_masks", "1st_manual")."""
    words, parts = re.findall(r"[^\W\d_]+", name.lower()), _words(name)
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
            kept = [PARTS[word] for word in _words(parts[place]) if word in PARTS]
            return PurePosixPath(*parts[:place], *kept[:1], *parts[place + 1 :])
    return relative


def pair_key(relative: PurePosixPath) -> PurePosixPath:
    """What an image and its mask have in common: the path without role and suffix.

    An umlaut that a Mac wrote as two characters is one.
    """
    return PurePosixPath(unicodedata.normalize("NFC", str(without_role(relative).with_suffix(""))))


def image_keys(mask: PurePosixPath) -> list[PurePosixPath]:
    """The `pair_key` of the images that a mask may be of, by its name without an affix; best first.

    >>> [str(key) for key in image_keys(PurePosixPath("a/7_mask_1.png"))]
    ['a/7', 'a/7_1']
    """
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
