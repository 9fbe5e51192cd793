"""One training sample: an image and a phrase, with the ground-truth mask if there is one."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from rl_reward_network.data.grey_levels import DATA_SET, level_of
from rl_reward_network.data.images import load_image
from rl_reward_network.data.masks import MaskParts, rasterise
from rl_reward_network.depth import Levels

SALT = "rl_reward_network/data/v1"


def pseudonym(*names: str) -> str:
    """12 hex digits in place of names that may identify a person; equal names give equal digits on every machine.

    The salt is public, so this is pseudonymisation, not anonymisation: it keeps names out of files and logs, but a list
    of candidate names can be hashed and compared.

    >>> pseudonym("group", "patient 7") == pseudonym("group", "patient 7") != pseudonym("group", "patient 8")
    True
    """
    return hashlib.sha256("\0".join((SALT, *names)).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Sample:
    """One (image, phrase).

    Attributes:
        image_path: the image file. Its name may contain a patient's name: never write it to a file or log.
        text: the phrase, e.g. "blood vessel".
        group_id: pseudonym of the patient or group, 12 hex digits, safe to write.
        series_id: pseudonym of the series, whose frames are nearly identical, safe to write.
        sample_id: pseudonym of image name and phrase, safe to write.
        size: (H, W) in pixels after EXIF rotation.
        mask_parts: how the mask is stored; None when unlabelled.
        group: the original group name; in memory only.
        levels: in grey of more than 8 bit, the values that are mapped to 0 and 255; None for 8-bit images.
        levels_key: key of these levels, a `series_id` or `DATA_SET`, see `grey_levels`.
    """

    image_path: Path = field(repr=False)
    text: str
    group_id: str
    series_id: str
    sample_id: str
    size: tuple[int, int]
    mask_parts: MaskParts | None = field(repr=False, compare=False)
    group: str = field(repr=False)
    levels: Levels | None = None
    levels_key: str = DATA_SET

    @property
    def labelled(self) -> bool:
        """Whether there is a ground-truth mask (which may be empty)."""
        return self.mask_parts is not None

    def load_image(self) -> np.ndarray:
        """The image, uint8 (H, W, 3) RGB.

        Raises:
            ValueError: the file cannot be read, or its size has changed since the annotations were read.
        """
        image = load_image(self.image_path, self.levels)
        if image.shape[:2] != self.size:
            raise ValueError(
                f"{self.image_path}: image is {image.shape[:2]} (H, W), its header gave {self.size};"
                " the file changed, or its EXIF data follow the pixels: save it again"
            )
        return image

    def load_mask(self) -> np.ndarray | None:
        """The ground truth, bool (H, W); None when unlabelled.

        Raises:
            ValueError: a PNG mask cannot be read, has another size, or is not binary.
        """
        return None if self.mask_parts is None else rasterise(self.mask_parts, self.size)


def with_levels(samples: list[Sample], deep: Mapping[Path, str], levels: Mapping[str, Levels]) -> list[Sample]:
    """The samples, those with images of more than 8 bit with their levels.

    Args:
        samples: of any images.
        deep: image of more than 8 bit -> key of its levels, a `series_id` or `DATA_SET`.
        levels: key -> levels, as `grey_levels.measured_levels` gives them.
    """
    keys = [deep.get(sample.image_path) for sample in samples]
    return [
        sample if key is None else replace(sample, levels=level_of(levels, key), levels_key=key)
        for sample, key in zip(samples, keys, strict=True)
    ]
