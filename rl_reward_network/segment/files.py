"""Which images a user named, and where their masks go: never over a mask of another prompt, nor over any other file."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.PngImagePlugin import PngInfo

from rl_reward_network.artefacts import whole_file
from rl_reward_network.data.images import IMAGE_SUFFIXES, image_size
from rl_reward_network.evaluation.overlays import ORANGE, paint_mask

PROMPT = "sa2va_prompt"  # the text in our PNGs that says which prompt the mask is of
LONGEST = 60  # characters of a prompt in a file name


@dataclass(frozen=True)
class Target:
    """An image and where its mask and overlay go."""

    image: Path
    mask: Path
    overlay: Path


def image_files(named: Sequence[Path]) -> list[Path]:
    """The images among files and folders, in that order; a folder's by name, without the masks written here.

    Raises:
        ValueError: nothing of that name, a folder without an image, or a file that is no image.
    """
    if not named:
        raise ValueError("no image: name images, or a folder of them")
    return [file for path in named for file in (_images_in(path) if path.is_dir() else [_checked(path)])]


def _images_in(folder: Path) -> list[Path]:
    files = (path for path in sorted(folder.iterdir()) if path.suffix.lower() in IMAGE_SUFFIXES and path.name[0] != ".")
    if found := [path for path in files if prompt_of(_checked(path)) is None]:
        return found
    raise ValueError(f"{folder}: no image in it ({', '.join(IMAGE_SUFFIXES)}); name the folder that holds them")


def _checked(path: Path) -> Path:
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder; name images, or a folder of them")
    image_size(path)
    return path


def targets(images: Sequence[Path], output: Path | None, prompt: str | None) -> list[Target]:
    """Where the masks go: beside each image, into the folder `output`, or, of one image, to the PNG of that name.

    Args:
        images: files.
        output: folder or PNG file.
        prompt: the prompt asked for by name, whose words then stand in the names.

    Raises:
        ValueError: `output` is a file for several images or no PNG, or two masks would have one name.
    """
    if output is not None and output.suffix.lower() in IMAGE_SUFFIXES and not output.is_dir():
        if len(images) > 1 or output.suffix.lower() != ".png":
            raise ValueError(f"--output {output}: give a folder, or, for a single image, a file name that ends in .png")
        return [Target(images[0], output, output.with_name(f"{output.stem}_overlay.png"))]
    made = [_target(image, output or image.parent, prompt) for image in images]
    twice = [mask for mask, count in Counter(target.mask for target in made).items() if count > 1]
    if twice:
        both = ", ".join(str(target.image) for target in made if target.mask == twice[0])
        raise ValueError(f"{both}: their masks would have one name, {twice[0]}; segment them one after the other")
    return made


def _target(image: Path, folder: Path, prompt: str | None) -> Target:
    said = "" if prompt is None else ("-".join(re.findall(r"\w+", prompt.lower()))[:LONGEST] or "prompt") + "_"
    return Target(image, *(folder / f"{image.stem}_{said}{kind}.png" for kind in ("mask", "overlay")))


def check_free(target: Target, prompt: str) -> None:
    """Raise a ValueError where a file is in the way that is not of this very prompt."""
    for path in (target.mask, target.overlay):
        if path.exists() and (found := prompt_of(path)) != prompt:
            what = "no mask made here" if found is None else f"of another prompt, {found!r}"
            raise ValueError(f"{path}: is there already, and {what}; name another place by --output, or move it away")


def prompt_of(path: Path) -> str | None:
    """The prompt of a mask or overlay; None of any other file."""
    try:
        with Image.open(path) as image:
            return image.info.get(PROMPT)
    except UnidentifiedImageError:
        return None


def write_mask(target: Target, image: np.ndarray, mask: np.ndarray, prompt: str) -> None:
    """Write the mask, 0 or 255, and its outline on the image.

    Args:
        target: where.
        image: uint8 (H, W, 3).
        mask: bool (H, W).
        prompt: what was asked.
    """
    overlay = paint_mask(image, mask, ORANGE, opacity=0)
    said = PngInfo()
    said.add_itxt(PROMPT, prompt)
    for pixels, path in ((np.where(mask, 255, 0), target.mask), (overlay, target.overlay)):
        with whole_file(path) as temporary:
            Image.fromarray(pixels.astype(np.uint8)).save(temporary, "PNG", pnginfo=said)
