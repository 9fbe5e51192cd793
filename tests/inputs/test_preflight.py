"""Statistics of images and masks, on masks with known answers."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.ndimage import binary_dilation, binary_fill_holes

from rl_reward_network.data.annotations import read_annotations
from rl_reward_network.data.mask_checks import mask_shape
from rl_reward_network.data.masks import MaskParts, parse_polygon, rasterise
from rl_reward_network.data.readers import read_region_data
from rl_reward_network.embedded.regions import write_regions
from rl_reward_network.inputs import doctor as preflight
from rl_reward_network.inputs.doctor import (
    bulge_of,
    duplicates,
    image_statistics,
    region_statistics,
    sample_statistics,
)
from tests.conftest import write_tiny_data

CHASE = Path(__file__).parents[3] / "shared" / "realdata" / "chase_db1"
ROWS, COLS = np.mgrid[0:200, 0:200]
GREY = np.zeros((200, 200, 3), np.uint8)


def disc(row: float, col: float, radius: float) -> np.ndarray:
    return (ROWS - row) ** 2 + (COLS - col) ** 2 <= radius**2


def tree() -> np.ndarray:
    """Crossing branches, 5 pixels wide, that enclose background."""
    mask = np.zeros((200, 200), bool)
    for place in (40, 100, 160):
        mask[place - 2 : place + 3, 5:195] = mask[5:195, place - 2 : place + 3] = True
    return mask


def filled(mask: np.ndarray) -> bool:
    return image_statistics("a", "g", GREY, mask, outlined=True).filled


def test_shares_and_border() -> None:
    mask = np.zeros((200, 200), bool)
    mask[:100] = True
    result = image_statistics("a.png", "group", GREY, mask)
    assert (result.name, result.group_id, result.share, result.bulge) == ("a.png", "group", 0.5, (1.0, 0.0))
    assert result.mask is not None
    assert result.mask.border == 0.5
    assert image_statistics("a.png", "group", GREY, None).share is None


def test_a_background_that_was_drawn_looks_inverted_and_an_object_does_not() -> None:
    assert mask_shape(~tree()).inverted
    assert mask_shape(~disc(100, 100, 70)).inverted
    for mask in (tree(), disc(100, 100, 98), np.zeros((200, 200), bool), disc(100, 100, 30), ROWS > 80):
        assert not mask_shape(mask).inverted


def test_loops_that_were_filled_are_seen() -> None:
    assert not filled(tree())
    assert filled(binary_fill_holes(tree()))
    ring = (np.abs(np.hypot(ROWS - 100, COLS - 100) - 60) < 3) | ((np.abs(ROWS - 100) < 3) & (np.abs(COLS - 100) > 60))
    assert not filled(ring)
    assert filled(binary_fill_holes(ring)), "one loop is enough"
    assert not filled(tree() & (ROWS < 150)), "open ends"


@pytest.mark.parametrize(
    "mask",
    [
        disc(100, 100, 80),
        disc(100, 100, 80) | disc(15, 15, 3) | disc(185, 15, 3) | disc(15, 185, 4),  # lesions, large and small
        (ROWS > 20) & (ROWS < 180) & (COLS > 60) & (COLS < 140),
        disc(100, 100, 80) & ~disc(100, 100, 60),  # a ring
        np.abs(ROWS - 100 - 40 * np.sin(COLS / 30)) < 6,  # a vessel
        np.abs(ROWS - 100) < 1 + COLS / 8,  # a vessel that tapers to a tenth
        disc(100, 100, 12) | (np.abs(ROWS - 100) < 3),  # an aneurysm
        disc(100, 100, 1),
        np.eye(200, dtype=bool),
    ],
)
def test_other_shapes_are_no_filled_trees(mask: np.ndarray) -> None:
    assert not filled(mask)


def test_one_pixel_has_a_width() -> None:
    assert bulge_of(disc(100, 100, 0)) == (1.0, 0.0)


def test_large_outlines_are_thinned_out(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = bulge_of(binary_fill_holes(tree()))
    large = binary_fill_holes(np.kron(tree(), np.ones((3, 3), bool)))
    monkeypatch.setattr(preflight, "PIXELS", 200 * 200)
    assert bulge_of(large) == pytest.approx(whole, rel=0.3)


@pytest.mark.skipif(not CHASE.is_dir(), reason="CHASE_DB1 photographs are not beside this checkout")
@pytest.mark.parametrize(("file", "expected"), [("annotations.json", False), ("annotations_outer.json", True)])
def test_outer_outlines_of_real_vessels_are_seen(file: str, expected: bool) -> None:
    with pytest.warns(UserWarning, match="keys that are not read"):
        sample, *_ = read_annotations(CHASE, annotations=file)
    polygons = json.loads((CHASE / file).read_text())[0]["mask"]
    parts = sum((parse_polygon(polygon, sample.size) for polygon in polygons), MaskParts())
    assert image_statistics("a", "g", GREY, rasterise(parts, sample.size), outlined=True).filled is expected


def test_equal_pictures_in_two_groups_are_found() -> None:
    other = GREY.copy()
    other[3, 4, 0] = 1
    images = [
        image_statistics(name, group, image, None)
        for name, group, image in [
            ("a", "g1", GREY),
            ("b", "g1", GREY),  # one patient may have a picture twice
            ("c", "g2", other),
            ("d", "g3", GREY.copy()),
            ("e", "g4", GREY[:100]),
            ("f", "g5", GREY),
        ]
    ]
    assert [(first.name, second.name) for first, second in duplicates(images)] == [("a", "d"), ("a", "f")]
    assert duplicates(images[:3]) == []


def test_every_sample_is_looked_at_once_and_outlines_only_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = read_annotations(write_tiny_data(tmp_path / "data", images=8, size=48))
    assert {image.bulge for image in sample_statistics(samples, tmp_path / "data" / "images")} == {(1.0, 0.0)}, "PNG"
    square = MaskParts(polygons=(np.array([4.0, 4, 40, 4, 40, 40, 4, 40]),))
    outlined = [replace(samples[0], mask_parts=None), *(replace(s, mask_parts=square) for s in samples[1:])]
    calls: list[tuple[str, bool]] = []
    lock = threading.Lock()

    def noted(name: str, group: str, image: np.ndarray, mask: np.ndarray | None, outline: bool) -> str:
        with lock:
            calls.append((name, outline))
        return name

    monkeypatch.setattr(preflight, "image_statistics", noted)
    monkeypatch.setattr(preflight, "OUTLINED", 4)
    names = [sample.image_path.name for sample in outlined]
    assert sample_statistics(outlined, tmp_path / "data" / "images") == names, "in their order"
    assert sorted(name for name, _ in calls) == sorted(names)
    assert [outline for _, outline in sorted(calls)] == [False, True, False, True, False, True, False, True]


def test_damaged_files_are_counted(tmp_path: Path) -> None:
    samples = read_annotations(write_tiny_data(tmp_path / "data", images=8, size=48))
    for sample in samples[2:5]:
        sample.image_path.write_bytes(sample.image_path.read_bytes()[:80])
    with pytest.raises(ValueError, match=r"P0002.*: not a readable image .* \(and 2 more of 8 checked\)"):
        sample_statistics(samples, tmp_path / "data" / "images")


def test_regions_are_looked_at_up_to_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_regions(tmp_path / "scenes", 4, 3, 96)
    regions, _ = read_region_data(tmp_path / "scenes")
    images = region_statistics(regions)
    assert [image.name for image in images] == [region.where for region in regions]
    assert all(image.share is not None and 0 < image.share < 0.5 for image in images)
    monkeypatch.setattr(preflight, "CHECKED", 3)
    assert len(region_statistics(regions)) <= 3
    assert len(region_statistics(regions[:3])) == 3


def test_a_tree_whose_branches_touch_is_thick_not_filled() -> None:
    assert not filled(binary_dilation(tree(), iterations=6))


def test_pictures_are_compared_by_their_pixels_not_their_files(tmp_path: Path) -> None:
    Image.fromarray(GREY).save(tmp_path / "a.png", compress_level=0)
    Image.fromarray(GREY).save(tmp_path / "a.bmp")
    one, other = (
        image_statistics("a", "g", np.array(Image.open(tmp_path / f"a.{end}")), None) for end in ("png", "bmp")
    )
    assert one.pixels == other.pixels
