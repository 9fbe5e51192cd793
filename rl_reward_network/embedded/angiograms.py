"""Rendered X-ray angiograms: patients x series x frames, each series in one of six looks.

A look is the appearance of a series, on which the best prompt depends, see `tools/nano`. The picture is absorption, as
on an X-ray detector: tissue, ribs, spine and diaphragm, then contrast medium along the rays through round tubes, motion
blur of the heart alone, detector blur and noise, display window, polarity. The ground truth is the vessel tree, never
the catheter.

Vessels are tapering tubes. Coordinates are (x, y) in pixels, pixel centres at whole numbers. No radius is below
`THINNEST_RADIUS`, so the mask of the thinnest vessel is at least 8 pixels wide wherever it lies between pixel centres:
two cells of the 64 x 64 mask grid of `sa2va-nano`, whose input is 256 pixels wide.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.random import Generator
from PIL import Image
from scipy.ndimage import convolve1d, gaussian_filter, rotate

THINNEST_RADIUS = 4.25  # pixels at a side of 256
TRUNK, BRANCH, THIN, CATHETER = 1, 2, 4, 8  # bits of a part map
LENGTHS = {TRUNK: (170.0, 240.0), BRANCH: (80.0, 140.0), THIN: (38.0, 72.0)}  # pixels
RADII = {TRUNK: (8.2, 9.6), BRANCH: (5.6, 6.8), THIN: (4.4, 4.7)}  # pixels, at the root of each tube
TAPER = {TRUNK: 0.68, BRANCH: 0.78, THIN: THINNEST_RADIUS / 4.4}  # radius at the tip / radius at the root
BENDING = {TRUNK: 0.30, BRANCH: 0.36, THIN: 0.42}  # radians, standard deviation of each wave of the heading
CLEARANCE = 5.0  # pixels between the walls of two tubes, so that they remain distinguishable


@dataclass(frozen=True, eq=False)
class Tube:
    """One vessel, or the catheter."""

    points: np.ndarray  # float64 (n, 2), x and y of its centre line, about a pixel apart
    radius: np.ndarray  # float64 (n,), pixels
    part: int


SIDE = 256  # pixels
TREE = TRUNK | BRANCH | THIN  # bits of the ground truth


@dataclass(frozen=True)
class Look:
    """Rendering settings of a series; ranges are (low, high), drawn once per series."""

    contrast: tuple[float, float] = (2.9, 3.8)  # absorption of contrast medium, 1 / (100 pixels)
    thin: tuple[int, int] = (4, 6)  # number of thin branches that are attempted
    calibre: tuple[float, float] = (0.9, 1.15)  # factor on the radii of trunk and branches
    noise: tuple[float, float] = (0.012, 0.018)  # standard deviation of the detector's noise, share of full exposure
    blur: tuple[float, float] = (0.0, 2.0)  # length in pixels of the heart's motion during the exposure
    bright: bool = False  # vessels are brighter than the background, as after subtraction
    with_catheter: bool = False  # and two pacemaker leads


LOOKS: dict[str, Look] = {
    "plain": Look(thin=(1, 3), calibre=(1.0, 1.2)),
    "bright": Look(bright=True),
    "catheter": Look(with_catheter=True),
    "faint": Look(contrast=(1.0, 1.35)),
    "branching": Look(contrast=(4.8, 5.6), thin=(14, 19), calibre=(0.85, 1.0)),
    "blurred": Look(blur=(11.0, 15.0)),
}


@dataclass(frozen=True, eq=False)
class Angiogram:
    """One frame."""

    image: np.ndarray  # uint8 (H, W), grey
    parts: np.ndarray  # uint8 (H, W), bits TRUNK, BRANCH, THIN, CATHETER; the ground truth is `parts & TREE > 0`
    look: str


def render_series(rng: Generator, look: str, frames: int) -> Iterator[Angiogram]:
    """Frames of one series: equal tree, tissue and settings; position of the heart, filling and noise vary.

    `look` is a key of `LOOKS`; equal generators give equal frames.
    """
    kind = LOOKS[look]
    tubes = _series_tubes(rng, kind)
    tissue = _tissue(rng)
    settings = {name: rng.uniform(*getattr(kind, name)) for name in ("contrast", "noise", "blur")}
    angle, sharpness = rng.uniform(0, 180), rng.uniform(0.6, 1.0)
    low, high = rng.uniform(0.02, 0.08), rng.uniform(0.86, 0.97)
    shift, swell = rng.normal(0, 1.2, 2), rng.normal(0, 1.5, 2)
    for _ in range(frames):
        beat = rng.uniform(-1, 1)
        now = moved(tubes, beat * shift, beat * swell)
        filling = settings["contrast"] * rng.uniform(0.95, 1.05)
        light = tissue * _contrast(now, filling, settings["blur"], angle)
        noise = gaussian_filter(rng.normal(0, 1, (SIDE, SIDE)), 0.5)  # a little correlated between neighbours
        light = gaussian_filter(light, sharpness) + noise * settings["noise"] * 1.8
        window = np.clip(low + (high - low) * light, 0, 1)
        image = (255 * (1 - window if kind.bright else window)).round().astype(np.uint8)
        yield Angiogram(image, part_map(now), look)


def _series_tubes(rng: Generator, kind: Look) -> list[Tube]:
    """The vessel tree of one view, with catheter and leads where the look has them."""
    thin_branches = int(rng.integers(kind.thin[0], kind.thin[1] + 1))
    tree = grow_tree(rng, int(rng.integers(3, 6)), thin_branches, rng.uniform(*kind.calibre))
    trunk = tree[0].points
    if kind.with_catheter:
        direction = trunk[6] - trunk[0]
        tree += [catheter(rng, trunk[0], float(np.arctan2(direction[1], direction[0])))]
        tree += [pacing_lead(rng), pacing_lead(rng)]
    return turned(tree, rng.uniform(-0.5, 0.5) + rng.integers(4) * np.pi / 2, bool(rng.integers(2)))


def _contrast(tubes: list[Tube], filling: float, blur: float, angle: float) -> np.ndarray:
    """(H, W) share of light that passes contrast medium and catheter; only the vessels move during the exposure."""
    vessels = 2 * np.sqrt(depth([tube for tube in tubes if tube.part != CATHETER]))
    wires = 2 * np.sqrt(depth([tube for tube in tubes if tube.part == CATHETER]))
    if blur >= 1:
        kernel = np.ones(int(np.rint(blur)) | 1)
        along_x = rotate(vessels, angle, reshape=False, order=1, mode="nearest")
        smeared = convolve1d(along_x, kernel / kernel.sum(), axis=1)
        vessels = rotate(smeared, -angle, reshape=False, order=1, mode="nearest")
    return np.exp(-filling / 100 * vessels - 0.22 * wires)


def _tissue(rng: Generator) -> np.ndarray:
    """(H, W) share of light behind the vessels: soft tissue, ribs, spine, diaphragm, vignette."""
    rows, cols = np.mgrid[0:SIDE, 0:SIDE] / SIDE
    light = rng.uniform(0.62, 0.78) + 0.10 * _smooth(rng, 4) + 0.035 * _smooth(rng, 12) + 0.012 * _smooth(rng, 48)
    light = light * _ribs(rng, rows, cols)
    dome = rng.uniform(0.72, 1.15) + rng.uniform(0.3, 0.9) * (cols - rng.uniform(0.2, 0.8)) ** 2  # the diaphragm's
    light = light * (1 - rng.uniform(0.1, 0.3) / (1 + np.exp((dome - rows) / 0.012)))
    spine, width = rng.uniform(-0.2, 1.2), rng.uniform(0.08, 0.14)
    light *= 1 - rng.uniform(0.05, 0.16) / (1 + np.exp((np.abs(cols - spine + 0.1 * rows) - width) / 0.02))
    radius = np.hypot(rows - 0.5, cols - 0.5)
    light *= 1 - rng.uniform(0.1, 0.3) * np.clip(radius - 0.35, 0, None) / 0.35
    if rng.random() < 0.3:  # the round field of an image intensifier
        light = np.where(radius > rng.uniform(0.53, 0.62), 0.16, light)
    return gaussian_filter(light, 1.0)


def _smooth(rng: Generator, cells: int) -> np.ndarray:
    """(H, W) smooth noise, about -1 to 1, whose waves are SIDE / cells pixels long."""
    grid = rng.normal(0, 0.5, (cells + 2, cells + 2)).astype(np.float32)
    return np.asarray(Image.fromarray(grid).resize((SIDE, SIDE), Image.Resampling.BICUBIC), dtype=np.float64)


def _ribs(rng: Generator, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
    """(H, W) factor: curved bands with denser edges, as ribs seen from the front."""
    period, width = rng.uniform(0.24, 0.38), rng.uniform(0.07, 0.11)
    slope, bend = rng.uniform(-0.5, 0.5), rng.uniform(-0.5, 0.5)
    height = rows + slope * cols + bend * (cols - 0.5) ** 2 + rng.uniform(0, 1)
    gap = np.abs((height % period) - period / 2)
    band = 1 / (1 + np.exp((gap - width / 2) / 0.006))
    return 1 - rng.uniform(0.02, 0.09) * (band + 0.6 * np.exp(-(((gap - width / 2) / 0.008) ** 2)))


def grow_tree(rng: Generator, branches: int, thin_branches: int, calibre: float = 1.0) -> list[Tube]:
    """A trunk across a 256 x 256 picture, branches from it, and thin branches from either; the trunk comes first.

    A branch without a free place is left out; `calibre` is a factor on all radii but those of thin branches.
    """
    start = rng.uniform((50, 44), (96, 84))
    tree = [_tube(rng, start, rng.uniform(0.45, 1.1), TRUNK, calibre)]
    for _ in range(branches):
        _sprout(rng, tree, tree[:1], BRANCH, calibre)
    stems = list(tree)
    for _ in range(thin_branches):
        _sprout(rng, tree, stems, THIN, 1.0)
    return tree


def _tube(rng: Generator, start: np.ndarray, heading: float, part: int, calibre: float) -> Tube:
    """A tube from `start` along `heading` (radians) that bends slowly and tapers."""
    count = int(rng.uniform(*LENGTHS[part]))
    along = np.linspace(0, 1, count)
    waves = rng.normal(0, 1, 3) @ np.sin(np.outer((1, 2, 3.5), np.pi * along) + rng.uniform(0, 6, (3, 1)))
    headings = heading + (waves - waves[0]) * BENDING[part]
    steps = np.stack([np.cos(headings), np.sin(headings)], axis=1)
    radius = rng.uniform(*RADII[part]) * calibre * np.linspace(1, TAPER[part], count)
    return Tube(start + np.cumsum(steps, axis=0), np.maximum(radius, THINNEST_RADIUS), part)


def _sprout(rng: Generator, tree: list[Tube], parents: list[Tube], part: int, calibre: float, tries: int = 24) -> None:
    """Append a side branch, if one is found that keeps `CLEARANCE` and lies mostly inside the picture."""
    for _ in range(tries):
        parent = parents[rng.integers(len(parents))]
        at = int(rng.uniform(0.06, 0.94) * (len(parent.points) - 2))
        direction = parent.points[at + 1] - parent.points[at]
        side = rng.choice((-1, 1)) * rng.uniform(0.6, 1.15)  # radians off the parent's direction
        tube = _tube(rng, parent.points[at], np.arctan2(direction[1], direction[0]) + side, part, calibre)
        root = int(parent.radius[at] + tube.radius[0] + 10)  # the first points are inside or beside the parent
        inside = ((tube.points > 6) & (tube.points < 250)).all(axis=1).mean()  # share of points inside the picture
        if inside > 0.8 and all(_clear(tube, other, root if other is parent else 0) for other in tree):
            tree.append(tube)
            return


def _clear(tube: Tube, other: Tube, skip: int) -> bool:
    """Whether all but the first `skip` points keep `CLEARANCE` from the other tube's wall."""
    gaps = np.linalg.norm(tube.points[skip::3, None] - other.points[None, ::3], axis=2)
    return bool((gaps > tube.radius[skip::3, None] + other.radius[None, ::3] + CLEARANCE).all())


def catheter(rng: Generator, tip: np.ndarray, heading: float) -> Tube:
    """A tube of constant width from the edge of the picture to `tip`, (x, y), where the trunk begins at `heading`."""
    turn = np.linspace(0, rng.choice((-1, 1)) * rng.uniform(0.3, 1.2), 330)
    return _wire(rng, tip, heading + np.pi + rng.uniform(-0.3, 0.3) + turn)


def pacing_lead(rng: Generator) -> Tube:
    """A tube of constant width that crosses the whole picture, as a pacemaker's lead does."""
    start, heading = np.array([rng.uniform(40, 216), -8.0]), rng.uniform(0.35, 0.65) * np.pi
    return _wire(rng, start, heading + 0.5 * np.sin(np.linspace(0, rng.uniform(2, 5), 330) + rng.uniform(0, 6)))


def _wire(rng: Generator, start: np.ndarray, headings: np.ndarray) -> Tube:
    """A tube of constant width from `start` along one heading (radians) per pixel."""
    steps = np.stack([np.cos(headings), np.sin(headings)], axis=1)
    return Tube(start + np.cumsum(steps, axis=0), np.full(len(steps), rng.uniform(4.3, 5.2)), CATHETER)


def turned(tubes: list[Tube], angle: float, flip: bool) -> list[Tube]:
    """The tubes turned about the picture's middle by `angle` radians, mirrored first if `flip`."""
    middle = (SIDE - 1) / 2
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    mirror = np.array([-1.0 if flip else 1.0, 1.0])
    return [replace(tube, points=(tube.points - middle) * mirror @ turn + middle) for tube in tubes]


def moved(tubes: list[Tube], shift: np.ndarray, swell: np.ndarray) -> list[Tube]:
    """The tubes at another phase of the heart beat: shifted by (x, y) pixels, stretched smoothly by `swell` pixels."""
    wave = [np.sin(np.pi * tube.points[:, ::-1] / SIDE) for tube in tubes]
    return [replace(tube, points=tube.points + shift + w * swell) for tube, w in zip(tubes, wave, strict=True)]


def depth(tubes: list[Tube]) -> np.ndarray:
    """float64 (SIDE, SIDE): squared half-thickness of the tubes above each pixel centre, 0 outside.

    The union of discs: radius^2 - distance^2, largest over all points; a ray through a round tube is twice its root.
    """
    grid = np.zeros((SIDE, SIDE))
    for tube in tubes:
        reach = int(np.ceil(tube.radius.max())) + 1
        offsets = np.arange(-reach, reach + 1)
        corner = np.round(tube.points).astype(int)
        xs, ys = corner[:, :1] + offsets, corner[:, 1:] + offsets  # (n, k)
        gap = (ys - tube.points[:, 1:])[:, :, None] ** 2 + (xs - tube.points[:, :1])[:, None, :] ** 2  # (n, k, k)
        value = tube.radius[:, None, None] ** 2 - gap
        rows, cols = np.broadcast_to(ys[:, :, None], value.shape), np.broadcast_to(xs[:, None, :], value.shape)
        inside = (value > 0) & (rows >= 0) & (rows < SIDE) & (cols >= 0) & (cols < SIDE)
        np.maximum.at(grid, (rows[inside], cols[inside]), value[inside])
    return grid


def part_map(tubes: list[Tube]) -> np.ndarray:
    """uint8 (SIDE, SIDE): the parts that cover each pixel, as bits; 0 is background."""
    bits = np.zeros((SIDE, SIDE), dtype=np.uint8)
    for part in sorted({tube.part for tube in tubes}):
        bits[depth([tube for tube in tubes if tube.part == part]) > 0] |= part
    return bits
