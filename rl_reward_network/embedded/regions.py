"""Regions: rendered scenes of coloured objects, each with a mask and a caption, in GAR's Arrow layout on disk.

Captions are "a <size> <colour> <shape> at the <place>", but "in the centre": "a small red circle at the top left".
Coordinates are (x, y) with pixel centres at halves; constants in pixels hold at a side of 256 and scale with it.
"""

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rl_reward_network.atomic_io import whole_folder
from rl_reward_network.data.masks import to_rle

COLOURS = {
    "red": (214, 30, 36),
    "green": (36, 158, 62),
    "blue": (34, 82, 214),
    "yellow": (244, 228, 40),
    "purple": (146, 48, 176),
    "orange": (246, 132, 18),
}
SHAPES = ("circle", "square", "triangle", "cross")
SIZES = ("small", "large")
PLACES = ("top left", "top", "top right", "left", "centre", "right", "bottom left", "bottom", "bottom right")
REFERENCE_SIDE, SMALLEST_SIDE = 256, 96  # below, a small shape is under 10 pixels wide and cannot be recognised
WIDTHS = {"small": (27.0, 33.0), "large": (49.0, 59.0)}  # diameter of a circle; other shapes have a similar area
OUTER_RADII = {"circle": 0.5, "square": 0.594, "triangle": 0.635, "cross": 0.567}  # of the corners, in widths
CELL_MARGIN = 0.15  # of a cell: an object's centre stays that far from the next cell, so its place is unambiguous
CLEARANCE = 3.0  # pixels between two objects, and to the border
TRIES = 64  # arrangements drawn at once; 85 % are good on average, but only 15 % in the most crowded case
KINDS = [(colour, shape, size) for colour in COLOURS for shape in SHAPES for size in SIZES]
QUESTION = "Describe the region in detail."
DAYLIGHT, LAMPLIGHT = (1.0, 1.0, 1.0), (1.0, 0.75, 0.5)  # share of red, green and blue light that reaches the camera
SHARD_ROWS = 256
LONGEST_FIRST = tuple(sorted(PLACES, key=len, reverse=True))  # so that "top left" is not parsed as "top"
WORDS = {"colour": tuple(COLOURS), "shape": SHAPES, "size": SIZES, "place": LONGEST_FIRST}


@dataclass(frozen=True, eq=False)
class RegionObject:
    """One object: words of COLOURS, SHAPES, SIZES and PLACES, and a mask, bool (H, W): pixels with a covered centre."""

    colour: str
    shape: str
    size: str
    place: str
    mask: np.ndarray

    @property
    def caption(self) -> str:
        """E.g. "a small red circle at the top left"."""
        where = "in the centre" if self.place == "centre" else f"at the {self.place}"
        return f"a {self.size} {self.colour} {self.shape} {where}"


@dataclass(frozen=True, eq=False)
class Scene:
    """An image, uint8 (H, W, 3) RGB, 0..255, and 3 or 4 objects: masks disjoint, all of different kinds and places."""

    image: np.ndarray
    objects: tuple[RegionObject, ...]


def render_scene(rng: np.random.Generator, side: int = REFERENCE_SIDE) -> Scene:
    """A random scene of `side` x `side` pixels; ValueError below 96, too small to distinguish the shapes."""
    if side < SMALLEST_SIDE:
        raise ValueError(f"side is {side} pixels, expected at least {SMALLEST_SIDE}; render a larger picture")
    canvas = _background(rng, side)
    kinds = [KINDS[index] for index in rng.choice(len(KINDS), int(rng.integers(3, 5)), replace=False)]
    cells = rng.choice(len(PLACES), len(kinds), replace=False)
    widths = np.array([rng.uniform(*WIDTHS[size]) for _, _, size in kinds]) * side / REFERENCE_SIDE
    centres = _arrange(rng, cells, widths * [OUTER_RADII[shape] for _, shape, _ in kinds], side)
    drawn = zip(kinds, cells, widths, centres, strict=True)
    objects = tuple(_add_object(rng, canvas, kind, PLACES[cell], width, at) for kind, cell, width, at in drawn)
    canvas += rng.uniform(1, 5) * rng.standard_normal(canvas.shape, dtype=np.float32)
    return Scene(np.clip(canvas, 0, 255).round().astype(np.uint8), objects)


def make_scenes(count: int, seed: int, side: int = REFERENCE_SIDE) -> Iterator[Scene]:
    """`count` scenes; the i-th depends on `seed`, i and `side` only, so a longer run begins with a shorter one."""
    yield from (render_scene(np.random.default_rng([seed, index]), side) for index in range(count))


def parse_caption(text: str) -> dict[str, str] | None:
    """The words for "colour", "shape", "size" and "place" in free text; case, punctuation and other words are ignored.

    None when an attribute is missing or has two different words ("left" and "top left" differ).
    """
    plain = " ".join(re.findall("[a-z]+", text.lower()))
    words_of = {name: set(re.findall(rf"\b(?:{'|'.join(words)})\b", plain)) for name, words in WORDS.items()}
    if any(len(words) != 1 for words in words_of.values()):
        return None
    return {name: words.pop() for name, words in words_of.items()}


def caption_correct(text: str, obj: RegionObject) -> bool:
    """Whether `text` names all four attributes of `obj` and nothing that contradicts them."""
    return parse_caption(text) == {name: getattr(obj, name) for name in WORDS}


def write_regions(
    folder: Path, count: int, seed: int, side: int = REFERENCE_SIDE, light: tuple[float, float, float] = DAYLIGHT
) -> None:
    """Write the scenes of `make_scenes` in GAR's layout; `folder` appears whole or not at all, replacing an older.

    `sa2va-nano` was trained in DAYLIGHT; under other light captions still name the unlit colours. ValueError for a
    `count` below 1, or a `side` too small.

    A row holds `image` (PNG inside), `mask_rle` (compressed COCO RLE), `conversations` (the k-th answer is the caption
    of the k-th mask) and `catagory` (GAR's spelling; the shapes). All rows are in memory, about 0.25 MB each.
    """
    import datasets as hf  # a slow import (pandas, pyarrow) that only this function needs

    if count < 1:
        raise ValueError(f"count is {count}, expected at least one scene")
    text, number = hf.Value("string"), hf.Value("int64")
    masks, turns = [{"size": [number], "counts": text}], [{"from": text, "value": text}]
    columns = hf.Features({"image": hf.Image(), "mask_rle": masks, "conversations": turns, "catagory": text})
    hf.disable_progress_bars()
    # not `from_generator`, which would write into ~/.cache
    rows = [_to_row(scene, light) for scene in make_scenes(count, seed, side)]
    with whole_folder(folder) as temporary:
        hf.Dataset.from_list(rows, features=columns).save_to_disk(str(temporary), num_shards=-(-count // SHARD_ROWS))


def _to_row(scene: Scene, light: tuple[float, float, float]) -> dict[str, Any]:
    lit = (scene.image * np.array(light)).round().astype(np.uint8)
    Image.fromarray(lit).save(png := io.BytesIO(), "PNG", compress_level=1)  # noise hardly shrinks anyway
    pairs = [({"from": "human", "value": QUESTION}, {"from": "gpt", "value": obj.caption}) for obj in scene.objects]
    pairs[0][0]["value"] = f"<image>\n{QUESTION}"
    return {
        "image": {"bytes": png.getvalue(), "path": None},
        "mask_rle": [to_rle(obj.mask) for obj in scene.objects],
        "conversations": [turn for pair in pairs for turn in pair],
        "catagory": " ".join(obj.shape for obj in scene.objects),
    }


def _background(rng: np.random.Generator, side: int) -> np.ndarray:
    """float32 (side, side, 3): a nearly grey slope of any brightness, with soft blotches."""
    along = np.linspace(0, 1, side, dtype=np.float32)
    level = rng.uniform(70, 205) + rng.uniform(-35, 35) * along[:, None] + rng.uniform(-35, 35) * along
    knots = int(rng.integers(5, 17))
    hats = np.clip(1 - np.abs(along[:, None] * (knots - 1) - np.arange(knots)), 0, 1)  # linear interpolation
    level += rng.uniform(3, 14) * hats @ rng.normal(0, 1, (knots, knots)) @ hats.T
    return (level[:, :, None] + rng.uniform(-9, 9, 3)).astype(np.float32)


def _arrange(rng: np.random.Generator, cells: np.ndarray, radii: np.ndarray, side: int) -> np.ndarray:
    """float64 (n, 2): centres inside their cells, so that no two objects touch, nor the border.

    Rejection sampling of the positions alone: resampling the objects would make large neighbours rarer than small ones.
    """
    corners = np.stack([cells % 3, cells // 3], axis=1)  # (n, 2)
    low, high = (corners + CELL_MARGIN) * side / 3, (corners + 1 - CELL_MARGIN) * side / 3
    border = radii[:, None] + CLEARANCE * side / REFERENCE_SIDE
    low, high = np.maximum(low, border), np.minimum(high, side - border)
    first, second = np.triu_indices(len(cells), k=1)
    while True:
        centres = rng.uniform(low, high, (TRIES, *low.shape))
        distances = np.linalg.norm(centres[:, first] - centres[:, second], axis=2)  # (TRIES, pairs)
        if (free := (distances > (border + radii)[first, second]).all(axis=1)).any():
            return centres[free.argmax()]


def _add_object(
    rng: np.random.Generator, canvas: np.ndarray, kind: tuple[str, ...], place: str, width: float, centre: np.ndarray
) -> RegionObject:
    """Paint one object into `canvas`: random angle, slightly varied colour, edge anti-aliased over one pixel."""
    colour, shape, size = kind
    distance = _signed_distance(shape, float(width), centre, rng.uniform(0, 2 * np.pi), len(canvas))
    tint = np.array(COLOURS[colour]) * rng.uniform(0.86, 1.08) + rng.uniform(-9, 9, 3)
    cover = np.clip(0.5 - distance, 0, 1)[:, :, None]
    canvas += cover * (tint.astype(np.float32) - canvas)
    return RegionObject(colour, shape, size, place, distance <= 0)


def _signed_distance(shape: str, width: float, centre: np.ndarray, angle: float, side: int) -> np.ndarray:
    """float32 (side, side): pixels to the outline, negative inside (beyond a corner a little less than true)."""
    right, down = np.arange(side, dtype=np.float32) + np.float32(0.5) - centre.astype(np.float32)[:, None]
    cos, sin = np.float32(np.cos(angle)), np.float32(np.sin(angle))
    x, y = right * cos + down[:, None] * sin, down[:, None] * cos - right * sin
    if shape == "circle":
        return np.hypot(x, y) - 0.5 * width
    if shape == "triangle":  # equilateral, side 1.1 widths; the outline is 1 / (2 sqrt 3) sides from the middle
        return np.maximum(-y, np.abs(x) * np.float32(0.75**0.5) + y / 2) - 0.3175 * width
    longer, shorter = np.maximum(np.abs(x), np.abs(y)), np.minimum(np.abs(x), np.abs(y))
    return longer - 0.42 * width if shape == "square" else np.maximum(longer - 0.54 * width, shorter - 0.17 * width)
