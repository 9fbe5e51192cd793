"""Outlines of one class or several as masks, by the project's rasteriser."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_reward_network.data.mask_files import ClassMasks, Size
from rl_reward_network.data.masks import MaskParts, parse_polygon, parse_rle, rasterise


@dataclass(frozen=True)
class Outline:
    """One object of an image.

    Attributes:
        class_name: its class.
        parts: flat polygons [x1, y1, x2, y2, ...] in pixels (or in shares of the size), or COCO RLEs.
        where: file and object, for messages.
    """

    class_name: str
    parts: list[Any]
    where: str


@dataclass(frozen=True)
class OutlineMasks:
    """Called with an image's size (H, W), the masks of its classes: the union of the outlines of each.

    Attributes:
        outlines: of one image.
        declared: (H, W) of the image on which they were drawn, if the source gives it.
        where: the file with the outlines, for messages.
        shares: whether coordinates are shares of width and height (YOLO).
    """

    outlines: tuple[Outline, ...]
    declared: Size | None = None
    where: str = ""
    shares: bool = False

    def __call__(self, size: Size) -> ClassMasks:
        """Class -> bool (H, W).

        Raises:
            ValueError: the outlines were drawn on another size, or one is not an outline or covers no pixel.
        """
        if self.declared is not None and self.declared != size:
            drawn = f"{self.declared[1]} x {self.declared[0]}"
            raise ValueError(
                f"{self.where}: drawn on {drawn}, but the image is {size[1]} x {size[0]} (width x height, after EXIF"
                " rotation); export it again for this image"
            )
        classes: ClassMasks = {}
        for outline in self.outlines:
            mask = self._drawn(outline, size)
            classes[outline.class_name] = mask | classes.get(outline.class_name, False)
        return classes

    def _drawn(self, outline: Outline, size: Size) -> np.ndarray:
        """bool (H, W) of an object; ValueError for one without a pixel, which would become "no object"."""
        parts = (self._parsed(part, size, outline.where) for part in outline.parts)
        mask = rasterise(sum(parts, MaskParts()), size)
        if not mask.any():
            raise ValueError(f"{outline.where}: the outline covers no pixel; draw it as a polygon, or delete it")
        return mask

    def _parsed(self, part: Any, size: Size, where: str) -> MaskParts:
        """A polygon or RLE as parts of a mask."""
        try:
            if isinstance(part, dict):
                return parse_rle(part, size)
            return parse_polygon(self._scaled(part, size) if self.shares else part, size)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    def _scaled(self, part: list[float], size: Size) -> list[float]:
        """Shares of width and height as pixels."""
        if any(not -0.01 <= share <= 1.01 for share in part):
            raise ValueError(f"a polygon reaches {max(part):g}, expected shares of width and height in 0..1")
        return [share * size[1 - place % 2] for place, share in enumerate(part)]
