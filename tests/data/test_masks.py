"""Masks as they are stored: polygons and RLE by one rasteriser, and mask files of every kind."""

import contextlib
import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from PIL import Image

from rl_reward_network.data.masks import (
    MaskParts,
    check_mask_size,
    load_class_masks,
    load_mask,
    parse_polygon,
    parse_rle,
    rasterise,
    to_rle,
)
from tests.data_import.sources import SIZE as SMALL
from tests.data_import.sources import as_255, save, truth

SIZE = (32, 40)  # H, W: not square, so that swapped axes show
SQUARE = [10, 10, 20, 10, 20, 20, 10, 20]
EXPECTED = np.zeros(SIZE, dtype=bool)
EXPECTED[10:20, 10:20] = True  # 100 px; rasterisers that add the outline give 121
MASK, OTHER = truth(1), np.roll(truth(2), 14, axis=1) & ~truth(1)
LARGE = np.kron(MASK, np.ones((9, 9), bool))  # edges lie inside the blocks of a JPEG


def runs_of(mask: np.ndarray) -> list[int]:
    """Uncompressed COCO runs of a mask, counted from its pixels."""
    flat = mask.ravel(order="F").astype(int)
    return np.diff(np.flatnonzero(np.diff(flat, prepend=0)), prepend=0, append=flat.size).tolist()


@pytest.mark.parametrize(
    ("polygons", "pixels"),
    [
        ([SQUARE], 100),
        ([[3, 5, 35, 5, 35, 12, 3, 12]], 32 * 7),
        ([[5, 5, 25, 5, 25, 25, 5, 25], SQUARE], 400),  # a union, not a hole
        ([[-1, -1, 41, -1, 41, 33, -1, 33]], 32 * 40),  # an overshoot of one pixel is cut at the border
        *[([values], None) for values in ([], [1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 1, 2])],  # 4 numbers: a box to COCO
    ],
)
def test_polygons_cover_their_area(polygons: list[list[float]], pixels: int | None) -> None:
    parts = sum((parse_polygon(list(polygon), SIZE) for polygon in polygons), MaskParts())
    assert bool(parts) == (pixels is not None)
    mask = rasterise(parts, SIZE)
    assert mask.dtype == bool
    assert mask.sum() == (pixels or 0)
    assert pixels != 100 or (mask == EXPECTED).all()


def test_the_union_of_polygon_rle_and_png_and_a_digest_of_its_content(tmp_path: Path) -> None:
    png, rle = np.zeros((2, *SIZE), dtype=bool)
    png[0, :5], rle[31, 30:] = True, True
    path = save(tmp_path / "m.png", png)
    parts = parse_polygon(SQUARE, SIZE) + MaskParts(pngs=(path,))
    parts += parse_rle({"size": list(SIZE), "counts": runs_of(rle)}, SIZE)
    assert rasterise(parts, SIZE).sum() == 100 + 5 + 10
    before = parts.digest()
    save(path, png)
    assert parts.digest() == before
    save(path, ~png)
    moved = parse_polygon([SQUARE[0] + 0.25, *SQUARE[1:]], SIZE)
    assert len({before, parts.digest(), moved.digest(), parse_polygon(list(SQUARE), SIZE).digest()}) == 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, 2, 3, 4, 5, 6, 7], "has 7 numbers.*pairs"),
        *(([1, 2, bad, 4, 5, 6], "finite numbers") for bad in (float("nan"), float("inf"), None)),
        (["1", "2", "3", "4", "5", "6"], "finite numbers"),
        ([[1, 2], [3, 4], [5, 6]], "finite numbers"),
        ([1, 2, [3, 4], 5, 6], "finite numbers"),
        ("1,2,3,4,5,6", "flat list"),
        ([0, 0, 42, 0, 0, 30], "image is 40 x 32 .*rescale"),
        ([0, 0, 30, 0, 0, 34], "y 0..34.*rescale"),
        ([-2, 0, 30, 0, 0, 30], "x -2..30.*rescale"),
    ],
)
def test_bad_polygon_is_refused(values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_polygon(values, SIZE)


@given(arrays(bool, array_shapes(min_dims=2, max_dims=2, max_side=40)))
def test_all_rle_forms_give_any_mask_back(mask: np.ndarray) -> None:
    written = json.loads(json.dumps(to_rle(mask)))  # plain JSON
    for counts in (written["counts"], written["counts"].encode(), runs_of(mask)):
        parts = parse_rle({"size": list(mask.shape), "counts": counts}, mask.shape)
        assert parts, "an empty mask is no missing one"
        assert np.array_equal(rasterise(parts, mask.shape), mask)


NUMBERS = st.integers(-(2**70), 2**70) | st.floats() | st.integers(-1, 41)
JSON = st.recursive(st.none() | st.booleans() | NUMBERS | st.text(), lambda part: st.lists(part, max_size=8))


@given(st.lists(NUMBERS, max_size=12) | JSON)
def test_whatever_json_holds_is_a_mask_or_a_value_error(value: Any) -> None:
    for parse in (parse_polygon, lambda counts, size: parse_rle({"size": list(size), "counts": counts}, size)):
        with contextlib.suppress(ValueError):
            assert rasterise(parse(value, SIZE), SIZE).shape == SIZE


def test_long_runs_survive_the_compressed_form() -> None:
    size = (3000, 2000)
    mask = np.zeros(size, dtype=bool)
    mask[7, 3] = mask[-1, -1] = True
    assert np.array_equal(rasterise(parse_rle(to_rle(mask), size), size), mask)


@pytest.mark.parametrize(
    ("rle", "message"),
    [
        ({"size": [32, 40]}, "needs the keys"),
        ({"size": [40, 32], "counts": [1280]}, r"size is \[40, 32\].*\[32, 40\]"),
        ({"size": [32, 40], "counts": [1279]}, "sum to H . W = 1280, got a sum of 1279"),
        ({"size": [32, 40], "counts": [1300, -20]}, "must be >= 0"),
        ({"size": [32, 40], "counts": [640.0, 640.0]}, "list of integers"),
        ({"size": [32, 40], "counts": None}, "compressed string or a list"),
        ({"size": [32, 40], "counts": to_rle(np.ones((20, 20), bool))["counts"]}, "got a sum of 400"),
        *(({"size": [32, 40], "counts": text}, "cut off") for text in ("", "no RLE!", "o")),  # "o": more should follow
    ],
)
def test_bad_rle_is_refused(rle: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_rle(rle, SIZE)


@pytest.mark.parametrize("mode", ["1", "L", "RGB", "RGBA", "LA", "P", "CMYK"])
@pytest.mark.parametrize("foreground", [1, 255])
def test_a_binary_file_of_any_mode_is_read(tmp_path: Path, mode: str, foreground: int) -> None:
    expected = np.random.default_rng(1).random(SIZE) < 0.3
    image = Image.fromarray(np.where(expected, foreground, 0).astype(np.uint8))
    image = image.convert("RGB") if mode == "CMYK" else image  # whose fourth channel is black ink, not alpha
    image.convert(mode, dither=None).save(tmp_path / f"m.{'tif' if mode == 'CMYK' else 'png'}")
    if mode == "1" and foreground == 1:
        expected[:] = False  # Pillow's own threshold of 128 leaves nothing
    assert np.array_equal(load_mask(next(tmp_path.iterdir()), SIZE), expected)


def layers(colours: Any, alpha: np.ndarray, channels: int = 3) -> np.ndarray:
    colour = np.broadcast_to(colours, (*alpha.shape, channels))
    return np.concatenate([colour, alpha[..., None]], axis=2).astype(np.uint8)


RED_GREEN = MASK[..., None] * np.array([255, 0, 16]) + OTHER[..., None] * np.array([0, 128, 0])
EDGE = MASK & ~np.roll(MASK, 1, axis=0)  # half-transparent
BOTH = {"#ff0010": MASK, "#008000": OTHER}


@pytest.mark.parametrize(
    ("grid", "expected"),
    [
        (MASK, {"1": MASK}),
        (MASK * np.uint8(1), {"1": MASK}),
        (as_255(MASK), {"255": MASK}),
        (MASK * np.uint8(0), {}),
        (MASK * np.uint16(1000) + OTHER * np.uint16(7), {"1000": MASK, "7": OTHER}),
        (RED_GREEN.astype(np.uint8), BOTH),
        (layers(RED_GREEN, np.full(SMALL, 255)), BOTH),
        (layers(255, MASK * 200), {"255": MASK}),  # transparent pixels are background
        (layers(255, MASK * 200, channels=1), {"255": MASK}),
        (layers(0, MASK * 255), {"255": MASK}),  # black strokes on a transparent ground
        (layers(0, MASK * 100, channels=1), {"255": MASK}),
        (layers(0, np.where(EDGE, 60, MASK * 255)), {"255": MASK & ~EDGE}),
        *((layers(colour, MASK * 0), {}) for colour in (0, 255)),  # an empty layer
        (layers(as_255(MASK)[..., None], MASK * 0), {"255": MASK}),  # alpha that is constant says nothing
    ],
)
def test_the_classes_of_a_png(tmp_path: Path, grid: np.ndarray, expected: dict[str, np.ndarray]) -> None:
    masks = load_class_masks(save(tmp_path / "m.png", grid), SMALL)
    assert masks.keys() == expected.keys()
    assert all((masks[name] == mask).all() for name, mask in expected.items())


def save_palette(path: Path, indices: np.ndarray, *colours: list[int], **options: Any) -> Path:
    image = Image.fromarray(indices.astype(np.uint8), "P")
    image.putpalette([value for colour in colours for value in colour])
    image.save(path, **options)
    return path


BLACK, RED, GREEN, GREY, WHITE = [0, 0, 0], [128, 0, 0], [0, 128, 0], [128] * 3, [255] * 3


@pytest.mark.parametrize(
    ("indices", "colours", "expected"),
    [
        (MASK + 2 * OTHER, (BLACK, RED, GREEN), {"#800000": MASK, "#008000": OTHER}),
        (2 * MASK + OTHER, (BLACK, GREEN, RED), {"#800000": MASK, "#008000": OTHER}),  # optimised: any order
        (MASK, (BLACK, GREY, RED), {"128": MASK}),
        (MASK + 2 * OTHER, (BLACK, GREY, RED), {"128": MASK, "#800000": OTHER}),  # the same grey beside a colour
        (~MASK, (RED, BLACK), {"#800000": MASK}),
        (~MASK, (WHITE, BLACK), {"255": MASK}),
    ],
)
def test_a_class_of_a_palette_has_one_name_in_every_file(tmp_path, indices, colours, expected):
    masks = load_class_masks(save_palette(tmp_path / "m.png", indices, *colours), SMALL)
    assert masks.keys() == expected.keys()
    assert all((masks[name] == mask).all() for name, mask in expected.items())


def test_the_indices_of_a_palette_may_be_the_classes_and_its_transparent_colour_is_background(tmp_path: Path) -> None:
    path = save_palette(tmp_path / "m.png", MASK + 2 * OTHER, BLACK, RED, GREEN)
    assert sorted(load_class_masks(path, SMALL, palette_colours=False)) == ["1", "2"]
    assert (load_mask(save_palette(path, MASK, BLACK, RED), SMALL) == MASK).all(), "by index"
    assert (load_mask(save_palette(path, MASK, WHITE, BLACK), SMALL) == ~MASK).all(), "by colour, since grey"
    for strokes in (BLACK, [255, 0, 0]):
        (mask,) = load_class_masks(save_palette(path, MASK, WHITE, strokes, transparency=0), SMALL).values()
        assert (mask == MASK).all()


@pytest.mark.parametrize("channels", [None, 3])
def test_soft_edges_are_cut_at_half_and_classes_are_not(tmp_path: Path, channels: int | None) -> None:
    fine = np.zeros((8 * SMALL[0], 8 * SMALL[1]), np.uint8)
    cv2.line(fine, (20, 30), (200, 150), 255, 40)
    cv2.circle(fine, (180, 60), 35, 255, -1)
    soft = fine.reshape(SMALL[0], 8, SMALL[1], 8).mean(axis=(1, 3)).round().astype(np.uint8)
    assert len(np.unique(soft)) > 10
    classes = np.zeros(SMALL, np.uint8)
    for number, value in enumerate((50, 100, 150, 255)):
        classes[2:20, 2 + 7 * number : 8 + 7 * number] = value
    grids = [np.repeat(grid[..., None], channels, 2) if channels else grid for grid in (soft, classes)]
    assert (load_mask(save(tmp_path / "m.png", grids[0]), SMALL) == (soft >= 128)).all()
    assert sorted(load_class_masks(save(tmp_path / "m.png", grids[1]), SMALL)) == ["100", "150", "255", "50"]


def test_labels_of_thin_objects_with_a_rim_of_255_are_no_soft_edges(tmp_path: Path) -> None:
    grid = np.zeros(SMALL, np.uint8)
    for column, number in ((4, 1), (10, 2), (16, 3)):
        grid[:, column - 1 : column + 2], grid[:, column] = 255, number
    assert sorted(load_class_masks(save(tmp_path / "m.png", grid), SMALL)) == ["1", "2", "255", "3"]


@pytest.mark.parametrize("name", ["m.webp", "m.jpg"])
def test_a_lossy_file_is_of_black_and_white_or_refused(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / name, as_255(LARGE), quality=95)
    assert name == "m.webp" or len(np.unique(Image.open(path))) > 2, "lossy"
    assert (load_class_masks(path, LARGE.shape)["255"] == LARGE).mean() > 0.999
    assert load_class_masks(save(path, as_255(LARGE) * 0), LARGE.shape) == {}
    grey = np.zeros((100, 100), np.uint8)
    grey[10:90, 40:60], grey[5:17, 5:17] = 255, 128  # a small grey class: 1.4 % of the pixels
    for grid in (LARGE * np.uint8(20), LARGE * np.uint8(100), grey):
        with pytest.raises(ValueError, match=rf"{name}: a lossy file.*PNG"):
            load_class_masks(save(path, grid, quality=95), grid.shape)


@pytest.mark.parametrize("values", [(1, 0), (255, 0), (1, 2), (255, 1)])
def test_a_lossless_webp_keeps_its_values(tmp_path: Path, values: tuple[int, int]) -> None:
    grid = np.repeat((MASK * values[0] + OTHER * values[1]).astype(np.uint8)[..., None], 3, axis=2)
    masks = load_class_masks(save(tmp_path / "m.webp", grid, lossless=True), SMALL)
    assert set(masks) == {str(value) for value in values if value}
    assert (masks[str(values[0])] == MASK).all()


ROW = np.array([[0, 128, 255], [0, 1, 255], [0, 2, 0]], np.uint8)


@pytest.mark.parametrize(
    ("read", "grid", "size", "message"),
    [
        *((load_mask, row[None], (1, 3), "a mask must hold 0 and 1, or 0 and 255.*threshold") for row in ROW),
        (load_mask, np.full((1, 3, 3), [255, 0, 0], np.uint8), (1, 3), "got 0, #ff0000"),
        *((read, EXPECTED.T, SIZE, "mask is 32 x 40 .* image is 40 x 32") for read in (check_mask_size, load_mask)),
        (load_class_masks, np.arange(768, dtype=np.uint8).reshape(SMALL), SMALL, "holds 256 values"),
        (load_class_masks, layers(0, ~MASK * 255), SMALL, "black covers 9.% of the picture.*black and white"),
    ],
)
def test_what_is_no_mask_is_refused(tmp_path: Path, read: Any, grid: np.ndarray, size: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"m\.png: .*{message}"):
        read(save(tmp_path / "m.png", grid), size)
