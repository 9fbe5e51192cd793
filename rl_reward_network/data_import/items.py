"""What a layout yields: the images of a source, nothing of them decoded yet."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from rl_reward_network.data.images import image_header, load_deep, load_image
from rl_reward_network.data.mask_files import ClassMasks, Size

KEPT = (".png", ".jpg", ".jpeg", ".webp")  # copied as they are; others become PNG, 16-bit ones of 16 bit


@dataclass(frozen=True)
class Item:
    """One image of a source.

    Attributes:
        name: of the written image below `images/`, with forward slashes, e.g. "train/1.png"; differs between items.
        found_as: file in the source, for --groups, --group_regex and messages; may hold a patient's name.
        load_image: uint8 (H, W, 3), uint8 (H, W) or uint16 (H, W), upright.
        load_masks: from the image's (H, W) to its `ClassMasks`; None where the image is not annotated.
        file: the image file, where it is written as it is.
        group, series: where the layout gives them; may name a patient.
    """

    name: str
    found_as: str
    load_image: Callable[[], np.ndarray]
    load_masks: Callable[[Size], ClassMasks] | None
    file: Path | None = None
    group: str | None = None
    series: str | None = None


@dataclass(frozen=True)
class Found:
    """The content of a source.

    Attributes:
        items: the images.
        class_ids: number of a class in the source -> its name, where the source names its classes.
        faults: what is wrong, each with its file and remedy; nothing is written while there is one.
        notes: what is left out, or was decided.
        private: whether names of groups and series are written as keyed hashes only.
        broken: name -> fault of an image or its drawing that cannot be read; `items` lacks it, --skip leaves it out.
    """

    items: list[Item]
    class_ids: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    private: bool = False
    broken: dict[str, str] = field(default_factory=dict)


def file_item(source: Path, path: Path, name: str, load_masks: Callable[[Size], ClassMasks] | None) -> Item:
    """The item of an image file.

    Args:
        source: the folder that is imported.
        path: image file below `source`.
        name: of the written image, with the suffix of `path`.
        load_masks: see `Item`.
    """
    kept = path.suffix.lower() in KEPT
    written = name if kept else f"{name.removesuffix(path.suffix)}.png"
    relative = path.relative_to(source).as_posix()
    return Item(written, relative, partial(load_pixels, path), load_masks, path if kept else None)


def load_pixels(path: Path) -> np.ndarray:
    """uint16 (H, W) of grey of more than 8 bit, else uint8 (H, W, 3) RGB, upright.

    Raises:
        ValueError: as `load_image`.
    """
    _, deep = image_header(path)
    return load_deep(path) if deep else load_image(path)
