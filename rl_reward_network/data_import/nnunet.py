"""nnU-Net's raw format: imagesTr/CASE_0000.png, labelsTr/CASE.png, dataset.json; two-dimensional images only."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_reward_network.atomic_io import read_json
from rl_reward_network.data.images import IMAGE_SUFFIXES
from rl_reward_network.data.masks import VOLUMES, ClassMasks, Size, load_class_masks
from rl_reward_network.data_import.files import files_below, grouped, several_masks
from rl_reward_network.data_import.items import Found, file_item

CHANNEL = "_0000"


def recognise_nnunet(source: Path) -> str:
    """ "nnU-Net raw data"; "" without imagesTr and labelsTr."""
    both = (source / "imagesTr").is_dir() and (source / "labelsTr").is_dir()
    return "nnU-Net raw data (imagesTr, labelsTr)" if both else ""


def read_nnunet(source: Path, frames: str = "") -> Found:
    """One item per case of imagesTr (and of imagesTs, unlabelled without labelsTs).

    Raises:
        ValueError: volumes, several channels per case, or a damaged dataset.json.
    """
    volumes = [path for path in files_below(source) if path.name.lower().endswith(VOLUMES)]
    if volumes:
        raise ValueError(
            f"{volumes[0]}: a volume, expected single images; write each slice or frame as PNG (file_ending .png in"
            " dataset.json) and import that"
        )
    values = _class_values(source)
    items, faults = [], list[str]()
    for images, labels in (("imagesTr", "labelsTr"), ("imagesTs", "labelsTs")):
        cases: dict[str, Path] = {}
        masks = grouped(files_below(source / labels, *IMAGE_SUFFIXES), lambda path: path.stem)
        for path in files_below(source / images, *IMAGE_SUFFIXES):
            if path.stem[-5:-4] == "_" and path.stem[-4:].isdecimal() and not path.stem.endswith(CHANNEL):
                faults.append(f"{path}: a second channel of its case; merge the channels into one RGB image")
                continue
            case = path.stem.removesuffix(CHANNEL)
            if case in cases:
                faults.append(f"{path}: an image of the case of {cases[case].name}; keep one of them")
                continue
            cases[case] = path
            found = masks.pop(case, [])
            faults += several_masks(found, source)
            name = case + path.suffix if images == "imagesTr" else f"{images}/{case}{path.suffix}"
            items.append(file_item(source, path, name, NamedMasks(found[0], values) if found else None))
        lost = [mask for found in masks.values() for mask in found]
        faults += [f"{mask}: a label map without an image {mask.stem}{CHANNEL} in {images}" for mask in lost]
    named = {str(number[0]): name for name, number in values.items() if len(number) == 1}
    return Found(items, named, faults, read=(source / "dataset.json",))


def _class_values(source: Path) -> dict[str, list[int]]:
    """Class -> its values in the label maps; {} without dataset.json, and then the values are the classes."""
    path = source / "dataset.json"
    if not path.is_file():
        return {}
    content = read_json(path)
    labels: Any = content.get("labels", {}) if isinstance(content, dict) else {}
    if not isinstance(labels, dict):
        raise ValueError(f"{path}: `labels` must be {{name: value}}, got {labels!r:.60}; correct it")
    if labels and all(str(key).isdecimal() and isinstance(name, str) for key, name in labels.items()):
        labels = {name: int(value) for value, name in labels.items()}  # version 1: value -> name
    values = {}
    for name, given in labels.items():
        numbers = given if isinstance(given, list) else [given]
        if not numbers or not all(map(_is_value, numbers)) or (len(numbers) > 1 and 0 in map(int, numbers)):
            raise ValueError(
                f"{path}: `labels` must be {{name: value}}, or {{name: [value, ...]}} with values above 0, but {name!r}"
                f" is {given!r:.40}; correct it"
            )
        values[name] = [int(number) for number in numbers]
    return {name: numbers for name, numbers in values.items() if numbers != [0]}


def _is_value(value: Any) -> bool:
    """Whether it is a whole number, as a number or as digits."""
    return str(value).isdecimal() if isinstance(value, str) else type(value) is int and value >= 0


@dataclass(frozen=True)
class NamedMasks:
    """Called with an image's size (H, W), the masks of its classes by the names of dataset.json.

    Attributes:
        path: the label map.
        values: class -> its values; {}: the values are the classes.
    """

    path: Path
    values: dict[str, list[int]]

    def __call__(self, size: Size) -> ClassMasks:
        """Class -> bool (H, W).

        Raises:
            ValueError: as `load_class_masks`, or the map has a value that dataset.json does not name.
        """
        masks = load_class_masks(self.path, size, palette_colours=False)
        if not self.values:
            return masks
        named = {str(value) for values in self.values.values() for value in values}
        if unknown := sorted(masks.keys() - named):
            raise ValueError(f"{self.path}: holds {unknown[0]}, which dataset.json does not name; add it to `labels`")
        return {
            name: np.logical_or.reduce(found)
            for name, values in self.values.items()
            if (found := [masks[str(value)] for value in values if str(value) in masks])
        }
