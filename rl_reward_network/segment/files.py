"""The files of `segment`: the images, and the mask, overlay and soft mask of each, which replace only their own kind.

Each picture that is written holds the prompt of its mask, by which it is known again.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from rl_reward_network.atomic_io import whole_file
from rl_reward_network.bit_depth import WHITEST
from rl_reward_network.data.images import IMAGE_SUFFIXES, PROMPT_KEY, SEEN_KEY, image_size, text_of
from rl_reward_network.data_import.files import pictures_below
from rl_reward_network.report.overlays import AFTER, paint_mask

KINDS = ("mask", "overlay", "soft")  # of pictures, as their names end
MAX_LETTERS = 60  # of a prompt in a file name


class Target(NamedTuple):
    """An image, and the paths of its mask, its overlay and its soft mask."""

    image: Path
    mask: Path
    overlay: Path
    soft: Path


def image_files(paths: Sequence[Path]) -> list[Path]:
    """The images among files and folders, in this order.

    Of a folder these are all pictures below it, by name, that are no masks of others and were not written here.
    """
    if not paths:
        raise ValueError("no image: name images, or a folder of them")
    images: list[Path] = []
    for path in paths:
        if not path.is_dir():
            images.append(_checked(path))
            continue
        links = [file for file in sorted(path.iterdir()) if file.suffix.lower() in IMAGE_SUFFIXES and file.is_symlink()]
        found = pictures_below(path)[0]
        for file in (*links, *found):
            _checked(file)
        if not found:
            raise ValueError(f"{path}: holds no image ({', '.join(IMAGE_SUFFIXES)}); name the folder that holds them")
        images += found
    return images


def _checked(path: Path) -> Path:
    if not (path.exists() or path.is_symlink()):
        raise ValueError(f"{path}: no such file or folder; name images, or a folder of them")
    image_size(path)
    return path


def targets(images: Sequence[Path], output: Path | None, prompt: str | None) -> list[Target]:
    """The files to write: beside each image, in the folder `output`, or, for one image, the PNG `output`.

    The words of the prompt, where it is given, become part of the names. A ValueError for an `output` that is a file
    for several images or no PNG, and for two masks of one name.
    """
    if output is not None and output.suffix.lower() in IMAGE_SUFFIXES and not output.is_dir():
        if len(images) > 1 or output.suffix.lower() != ".png":
            raise ValueError(f"--output {output}: give a folder, or, for a single image, a file name that ends in .png")
        return [Target(images[0], output, *(output.with_name(f"{output.stem}_{kind}.png") for kind in KINDS[1:]))]
    result = []
    for image in images:
        paths = (f"{image.stem}_{words_of(prompt)}{kind}.png" for kind in KINDS)
        result.append(Target(image, *((output or image.parent) / path for path in paths)))
    check_apart(result, [target.mask for target in result])
    return result


def check_apart(targets: Sequence[Target], paths: Sequence[Path]) -> None:
    """Raise a ValueError if two of the paths to write, one for each target, are the same."""
    path, count = Counter(paths).most_common(1)[0]
    if count > 1:
        both = ", ".join(str(target.image) for target, own in zip(targets, paths, strict=True) if own == path)
        raise ValueError(
            f"{both}: their masks would have the same name, {path}; give each an --output of its own, or of two classes"
            " rename one"
        )


def words_of(prompt: str | None) -> str:
    """The words of a prompt as part of a file name, with an underscore at the end; "" for None."""
    return "" if prompt is None else ("-".join(re.findall(r"\w+", prompt.lower()))[:MAX_LETTERS] or "prompt") + "_"


def check_free(target: Target, prompt: str) -> None:
    """Raise a ValueError if a file exists that was not written here, or holds the mask of another prompt."""
    for path in target[1:]:
        if path.exists() and (existing := prompt_of(path)) != prompt:
            what = "was not written by segment" if existing is None else f"is of another prompt, {existing!r}"
            raise ValueError(f"{path}: exists already and {what}; choose another place by --output, or move the file")


def prompt_of(path: Path) -> str | None:
    """The prompt of a mask or overlay written here; None for any other file, an unreadable one, too."""
    return text_of(path, PROMPT_KEY)


def write_mask(
    target: Target,
    image: np.ndarray,
    mask: np.ndarray | None,
    prompt: str,
    soft: np.ndarray | None = None,
    seen: bool = False,
) -> None:
    """Write the mask, bool (H, W), its outline on the image, uint8 (H, W, 3), and, if given, the soft mask.

    The soft mask, float (H, W) in [0, 1], becomes 16 bit: 0 to 65535. What is None has its file of an earlier run
    removed: that is of another mask. Without a mask, which is not an empty one, all are removed. `seen`: whether the
    model has seen the image in training, which makes its mask better than others.
    """
    for path, there in zip(target[1:], (mask, mask, soft), strict=True):
        if there is None or mask is None:
            path.unlink(missing_ok=True)
    if mask is None:
        return
    save_mask(target.mask, mask, prompt, {SEEN_KEY: "yes"} if seen else {})
    save_mask(target.overlay, paint_mask(image, mask, AFTER, opacity=0), prompt)
    if soft is not None:
        save_mask(target.soft, (soft * WHITEST).round().astype(np.uint16), prompt)


def save_mask(path: Path, pixels: np.ndarray, prompt: str, more: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write a mask, bool (H, W), as 0 and 255, or a picture as it is, with its prompt and `more` texts."""
    text = PngInfo()
    for name, value in {PROMPT_KEY: prompt, **more}.items():
        text.add_itxt(name, value)
    values = np.where(pixels, np.uint8(255), np.uint8(0)) if pixels.dtype == bool else pixels
    with whole_file(path) as temporary:
        Image.fromarray(values).save(temporary, "PNG", pnginfo=text)
