"""Images to segment, and the files of their masks, which replace only masks of the same prompt."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from rl_reward_network.atomic_io import whole_file
from rl_reward_network.data.images import IMAGE_SUFFIXES, image_size
from rl_reward_network.report.overlays import ORANGE, paint_mask

PROMPT_KEY = "sa2va_prompt"  # of the text in a PNG that holds the prompt of the mask
NO_MASK = "there is no mask, which is not an empty one: ask for a segmentation, or see sa2va-rl doctor"
MAX_LETTERS = 60  # of a prompt in a file name


@dataclass(frozen=True)
class Target:
    """An image, and the paths of its mask and overlay."""

    image: Path
    mask: Path
    overlay: Path


def image_files(paths: Sequence[Path]) -> list[Path]:
    """The images among files and folders, in this order; those of a folder by name, without masks written here.

    Raises:
        ValueError: a path does not exist, a folder holds no image, or a file is not an image.
    """
    if not paths:
        raise ValueError("no image: name images, or a folder of them")
    return [file for path in paths for file in (_images_in(path) if path.is_dir() else [_checked(path)])]


def _images_in(folder: Path) -> list[Path]:
    files = (path for path in sorted(folder.iterdir()) if path.suffix.lower() in IMAGE_SUFFIXES and path.name[0] != ".")
    if images := [path for path in files if prompt_of(_checked(path)) is None]:
        return images
    raise ValueError(f"{folder}: holds no image ({', '.join(IMAGE_SUFFIXES)}); name the folder that holds them")


def _checked(path: Path) -> Path:
    if not (path.exists() or path.is_symlink()):
        raise ValueError(f"{path}: no such file or folder; name images, or a folder of them")
    image_size(path)
    return path


def targets(images: Sequence[Path], output: Path | None, prompt: str | None) -> list[Target]:
    """The files to write: beside each image, in the folder `output`, or, for one image, the PNG `output`.

    Args:
        images: files.
        output: folder or PNG file.
        prompt: its words become part of the names; None adds nothing.

    Raises:
        ValueError: `output` is a file for several images, or not a PNG, or two masks would have the same name.
    """
    if output is not None and output.suffix.lower() in IMAGE_SUFFIXES and not output.is_dir():
        if len(images) > 1 or output.suffix.lower() != ".png":
            raise ValueError(f"--output {output}: give a folder, or, for a single image, a file name that ends in .png")
        return [Target(images[0], output, output.with_name(f"{output.stem}_overlay.png"))]
    result = [_target(image, output or image.parent, prompt) for image in images]
    shared = [mask for mask, count in Counter(target.mask for target in result).items() if count > 1]
    if shared:
        both = ", ".join(str(target.image) for target in result if target.mask == shared[0])
        raise ValueError(f"{both}: their masks would have the same name, {shared[0]}; give each an --output of its own")
    return result


def _target(image: Path, folder: Path, prompt: str | None) -> Target:
    return Target(image, *(folder / f"{image.stem}_{words_of(prompt)}{kind}.png" for kind in ("mask", "overlay")))


def words_of(prompt: str | None) -> str:
    """The words of a prompt as part of a file name, with an underscore at the end; "" for None."""
    return "" if prompt is None else ("-".join(re.findall(r"\w+", prompt.lower()))[:MAX_LETTERS] or "prompt") + "_"


def check_free(target: Target, prompt: str) -> None:
    """Check that only a mask of the same prompt would be replaced.

    Raises:
        ValueError: a file exists that was not written here, or holds the mask of another prompt.
    """
    for path in (target.mask, target.overlay):
        if path.exists() and (existing := prompt_of(path)) != prompt:
            what = "was not written by segment" if existing is None else f"is of another prompt, {existing!r}"
            raise ValueError(f"{path}: exists already and {what}; choose another place by --output, or move the file")


def prompt_of(path: Path) -> str | None:
    """The prompt of a mask or overlay written here; None for any other file, an unreadable one, too."""
    return text_of(path, PROMPT_KEY)


def text_of(path: Path, name: str) -> str | None:
    """A text in a PNG file; None where there is none, or the file is unreadable."""
    try:
        with Image.open(path) as image:
            return image.info.get(name)
    except (OSError, Image.DecompressionBombError):
        return None


def write_mask(target: Target, image: np.ndarray, mask: np.ndarray, prompt: str) -> None:
    """Write the mask, bool (H, W), and its outline on the image, uint8 (H, W, 3), with the prompt in the files."""
    save_mask(target.mask, mask, prompt)
    save_mask(target.overlay, paint_mask(image, mask, ORANGE, opacity=0), prompt)


def remove_mask(target: Target) -> None:
    """Remove the files of an earlier mask: the answer of now has none, which is not an empty mask."""
    for path in (target.mask, target.overlay):
        path.unlink(missing_ok=True)


def save_mask(path: Path, pixels: np.ndarray, prompt: str, more: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write a mask, bool (H, W), as 0 and 255, or a picture, uint8 (H, W, 3), with its prompt and `more` texts."""
    text = PngInfo()
    for name, value in {PROMPT_KEY: prompt, **more}.items():
        text.add_itxt(name, value)
    values = np.where(pixels, np.uint8(255), np.uint8(0)) if pixels.dtype == bool else pixels
    with whole_file(path) as temporary:
        Image.fromarray(values).save(temporary, "PNG", pnginfo=text)
