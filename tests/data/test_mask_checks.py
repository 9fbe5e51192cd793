"""Labels that may be wrong: filled loops, and images that are masks; and tubes."""

import json

import numpy as np
import pytest
from scipy.ndimage import binary_dilation, binary_fill_holes, gaussian_filter
from skimage import filters

from rl_reward_network.data.annotations import read_annotations
from rl_reward_network.data.images import ridge_strength
from rl_reward_network.data.masks import MaskParts, looks_like_mask, parse_polygon, rasterise
from rl_reward_network.inputs.doctor import has_filled_loops
from tests.conftest import CHASE, needs_chase, smooth_image

ROWS, COLS = np.mgrid[0:200, 0:200]


def disc(row: float, col: float, radius: float) -> np.ndarray:
    return (ROWS - row) ** 2 + (COLS - col) ** 2 <= radius**2


def tree() -> np.ndarray:
    """Crossing branches, 5 pixels wide, that enclose background."""
    mask = np.zeros((200, 200), bool)
    for place in (40, 100, 160):
        mask[place - 2 : place + 3, 5:195] = mask[5:195, place - 2 : place + 3] = True
    return mask


RING = (np.abs(np.hypot(ROWS - 100, COLS - 100) - 60) < 3) | ((np.abs(ROWS - 100) < 3) & (np.abs(COLS - 100) > 60))


@pytest.mark.parametrize(
    ("mask", "filled"),
    [
        *[(tree(), False), (binary_fill_holes(tree()), True), (RING, False), (binary_fill_holes(RING), True)],
        (tree() & (ROWS < 150), False),  # open ends
        (binary_dilation(tree(), iterations=6), False),  # branches that touch are thick
        (np.kron(binary_fill_holes(tree()), np.ones((6, 6), bool)), True),  # thinned out
        (disc(100, 100, 80), False),
        (disc(100, 100, 80) | disc(15, 15, 3) | disc(185, 15, 3) | disc(15, 185, 4), False),  # lesions
        ((ROWS > 20) & (ROWS < 180) & (COLS > 60) & (COLS < 140), False),
        (np.abs(ROWS - 100 - 40 * np.sin(COLS / 30)) < 6, False),  # a vessel
        (np.abs(ROWS - 100) < 1 + COLS / 8, False),  # a vessel that tapers to a tenth
        (disc(100, 100, 12) | (np.abs(ROWS - 100) < 3), False),  # an aneurysm
        *[(disc(100, 100, 0), False), (np.eye(200, dtype=bool), False), (np.zeros((9, 9), bool), False)],
    ],
)
def test_loops_that_were_filled_are_seen(mask: np.ndarray, filled: bool) -> None:
    assert has_filled_loops(mask) == filled


@needs_chase
@pytest.mark.filterwarnings("ignore:.*keys that are not read")
@pytest.mark.parametrize(("file", "expected"), [("annotations.json", False), ("annotations_outer.json", True)])
def test_outer_outlines_of_real_vessels_are_seen(file: str, expected: bool) -> None:
    sample, *_ = read_annotations(CHASE, annotations=file)
    polygons = json.loads((CHASE / file).read_text())[0]["mask"]
    parts = sum((parse_polygon(polygon, sample.size) for polygon in polygons), MaskParts())
    assert has_filled_loops(rasterise(parts, sample.size)) is expected


def picture_of(mask: np.ndarray, blur: float = 0) -> np.ndarray:
    return np.asarray((gaussian_filter(mask.astype(float), blur) * 255).round().astype(np.uint8))


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        *[
            (picture_of(disc(100, 100, 50)), True),
            (np.repeat(picture_of(disc(99, 99, 50))[..., None], 3, axis=2), True),
        ],
        *[(np.zeros((64, 64), np.uint8), False), (smooth_image(64, 64), False), (smooth_image(64, 64)[..., 0], False)],
        (disc(100, 100, 50) * np.uint16(3), True),  # classes of more than 8 bit
    ],
)
def test_pictures_of_a_few_flat_colours_look_like_masks(image: np.ndarray, expected: bool) -> None:
    assert looks_like_mask(image) == expected


def test_ridges_of_both_polarities_equal_two_calls_of_the_filter_of_scikit_image() -> None:
    grey = np.random.default_rng(0).random((40, 50))
    for strength, black in zip(ridge_strength(grey, (1, 2, 3)), (True, False), strict=True):
        np.testing.assert_array_equal(strength, filters.sato(grey, sigmas=(1, 2, 3), black_ridges=black))
