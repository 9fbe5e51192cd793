"""Rendered X-ray angiograms: patients x series x frames, each series in one of six looks.

A look is the appearance of a series: contrast, thin branches, calibre, noise, motion blur, polarity, catheter. It is
the hidden property on which the best prompt depends, see `nano.prompt_targets`.

The picture is absorption, as on an X-ray detector: tissue, ribs, spine and diaphragm, then contrast medium along the
rays through round tubes, motion blur of the heart alone, detector blur and noise, display window, polarity. The ground
truth is the vessel tree, never the catheter.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from PIL import Image
from scipy.ndimage import convolve1d, gaussian_filter, rotate

from rl_reward_network.embedded.vessel_tree import (
    BRANCH,
    CATHETER,
    THIN,
    TRUNK,
    Tube,
    catheter,
    depth,
    grow_tree,
    moved,
    pacing_lead,
    part_map,
    turned,
)

SIDE = 256  # pixels
TREE = TRUNK | BRANCH | THIN  # bits of the ground truth


@dataclass(frozen=True)
class Look:
    """Rendering settings of a series; ranges are (low, high), drawn once per series.

    Args:
        contrast: absorption of contrast medium, 1 / (100 pixels).
        thin: number of thin branches that are attempted.
        calibre: factor on the radii of trunk and branches.
        noise: standard deviation of the detector's noise, share of full exposure.
        blur: length in pixels of the heart's motion during the exposure.
        bright: vessels are brighter than the background, as after subtraction.
        with_catheter: draw a catheter and two pacemaker leads.
    """

    contrast: tuple[float, float] = (2.9, 3.8)
    thin: tuple[int, int] = (4, 6)
    calibre: tuple[float, float] = (0.9, 1.15)
    noise: tuple[float, float] = (0.012, 0.018)
    blur: tuple[float, float] = (0.0, 2.0)
    bright: bool = False
    with_catheter: bool = False


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
    """One frame.

    Args:
        image: uint8 (H, W), grey.
        parts: uint8 (H, W), bits TRUNK, BRANCH, THIN, CATHETER; the ground truth is `parts & TREE > 0`.
        look: key of `LOOKS`.
    """

    image: np.ndarray
    parts: np.ndarray
    look: str


def render_series(rng: Generator, look: str, frames: int) -> Iterator[Angiogram]:
    """Frames of one series: equal tree, tissue and settings; position of the heart, filling and noise vary.

    Args:
        rng: random generator; equal generators give equal frames.
        look: key of `LOOKS`.
        frames: number of frames.
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
        vessels = _smear(vessels, blur, angle)
    return np.exp(-filling / 100 * vessels - 0.22 * wires)


def _smear(picture: np.ndarray, length: float, angle: float) -> np.ndarray:
    """Motion blur of `length` pixels along `angle` degrees."""
    kernel = np.ones(int(np.rint(length)) | 1)
    along_x = rotate(picture, angle, reshape=False, order=1, mode="nearest")
    return rotate(convolve1d(along_x, kernel / kernel.sum(), axis=1), -angle, reshape=False, order=1, mode="nearest")


def _tissue(rng: Generator) -> np.ndarray:
    """(H, W) share of light behind the vessels: soft tissue, ribs, spine, diaphragm, vignette."""
    rows, cols = np.mgrid[0:SIDE, 0:SIDE] / SIDE
    light = rng.uniform(0.62, 0.78) + 0.10 * _smooth(rng, 4) + 0.035 * _smooth(rng, 12) + 0.012 * _smooth(rng, 48)
    light = light * _ribs(rng, rows, cols) * _diaphragm(rng, rows, cols)
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
    edge = np.exp(-(((gap - width / 2) / 0.008) ** 2))
    return 1 - rng.uniform(0.02, 0.09) * (band + 0.6 * edge)


def _diaphragm(rng: Generator, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
    """(H, W) factor: a dome at the lower edge, visible in some pictures."""
    top = rng.uniform(0.72, 1.15) + rng.uniform(0.3, 0.9) * (cols - rng.uniform(0.2, 0.8)) ** 2
    return 1 - rng.uniform(0.1, 0.3) / (1 + np.exp((top - rows) / 0.012))
