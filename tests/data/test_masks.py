import json

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco

from rl_reward_network.data.masks import (
    MaskParts,
    check_mask_size,
    load_mask,
    parse_polygon,
    parse_rle,
    rasterise,
    to_rle,
)

SIZE = (32, 40)  # H, W: not square, so that swapped axes show
SQUARE = [10, 10, 20, 10, 20, 20, 10, 20]


def encoded(mask):
    return coco.encode(np.asfortranarray(mask, dtype=np.uint8))


def runs_of(mask):
    """Uncompressed COCO runs of a mask, counted from its pixels."""
    flat = mask.ravel(order="F").astype(int)
    edges = np.flatnonzero(np.diff(flat, prepend=0))
    return np.diff(edges, prepend=0, append=flat.size).tolist()


def test_square_is_its_area_and_lies_where_it_was_drawn():
    mask = rasterise(parse_polygon(SQUARE, SIZE), SIZE)
    expected = np.zeros(SIZE, dtype=bool)
    expected[10:20, 10:20] = True  # 100 px; rasterisers that add the outline give 121
    assert mask.dtype == bool
    assert np.array_equal(mask, expected)


def test_rectangle_area_is_its_closed_form():
    assert rasterise(parse_polygon([3, 5, 35, 5, 35, 12, 3, 12], SIZE), SIZE).sum() == 32 * 7


def test_polygons_inside_each_other_are_a_union_not_a_hole():
    outer, inner = (parse_polygon(p, SIZE) for p in ([5, 5, 25, 5, 25, 25, 5, 25], SQUARE))
    assert rasterise(outer + inner, SIZE).sum() == 400


def test_union_over_polygon_rle_and_png(tmp_path):
    png, rle = np.zeros((2, *SIZE), dtype=bool)
    png[0, :5], rle[31, 30:] = True, True
    Image.fromarray(png).save(tmp_path / "m.png")
    parts = parse_polygon(SQUARE, SIZE) + MaskParts(pngs=(tmp_path / "m.png",))
    parts += parse_rle({"size": list(SIZE), "counts": runs_of(rle)}, SIZE)
    assert rasterise(parts, SIZE).sum() == 100 + 5 + 10


@pytest.mark.parametrize("values", [[], [1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 1, 2]])
def test_polygon_of_fewer_than_3_points_has_no_part(values):
    """4 numbers are a trap: pycocotools takes them for a box x, y, width, height."""
    assert not parse_polygon(values, SIZE)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, 2, 3, 4, 5, 6, 7], "has 7 numbers.*pairs"),
        ([1, 2, float("nan"), 4, 5, 6], "finite numbers"),
        ([1, 2, float("inf"), 4, 5, 6], "finite numbers"),
        ([1, 2, None, 4, 5, 6], "finite numbers"),
        (["1", "2", "3", "4", "5", "6"], "finite numbers"),
        ([[1, 2], [3, 4], [5, 6]], "finite numbers"),
        ([1, 2, [3, 4], 5, 6], "finite numbers"),
        ("1,2,3,4,5,6", "flat list"),
        ([0, 0, 42, 0, 0, 30], "image is 40 x 32 .*rescale"),
        ([0, 0, 30, 0, 0, 34], "y 0..34.*rescale"),
        ([-2, 0, 30, 0, 0, 30], "x -2..30.*rescale"),
    ],
)
def test_bad_polygon_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        parse_polygon(values, SIZE)


def test_overshoot_of_one_pixel_is_cut_at_the_border():
    assert rasterise(parse_polygon([-1, -1, 41, -1, 41, 33, -1, 33], SIZE), SIZE).all()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.5, 0.97, 1.0])
def test_all_rle_forms_give_the_mask_back(share):
    mask = np.random.default_rng(3).random(SIZE) < share
    counts = encoded(mask)["counts"]
    for form in (counts, counts.decode(), runs_of(mask)):
        parts = parse_rle({"size": list(SIZE), "counts": form}, SIZE)
        assert np.array_equal(rasterise(parts, SIZE), mask)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_written_rle_is_plain_json_and_reads_back(share):
    mask = np.random.default_rng(4).random(SIZE) < share
    written = json.loads(json.dumps(to_rle(mask)))
    assert np.array_equal(rasterise(parse_rle(written, SIZE), SIZE), mask)


def test_long_runs_survive_the_compressed_form():
    size = (3000, 2000)
    mask = np.zeros(size, dtype=bool)
    mask[7, 3] = mask[-1, -1] = True
    parts = parse_rle({"size": list(size), "counts": encoded(mask)["counts"].decode()}, size)
    assert np.array_equal(rasterise(parts, size), mask)


@pytest.mark.parametrize(
    ("rle", "message"),
    [
        ({"size": [32, 40]}, "needs the keys"),
        ({"size": [40, 32], "counts": [1280]}, r"size is \[40, 32\].*\[32, 40\]"),
        ({"size": [32, 40], "counts": [1279]}, "sum to H . W = 1280, got a sum of 1279"),
        ({"size": [32, 40], "counts": [1300, -20]}, "must be >= 0"),
        ({"size": [32, 40], "counts": [640.0, 640.0]}, "list of integers"),
        ({"size": [32, 40], "counts": None}, "compressed string or a list"),
        ({"size": [32, 40], "counts": encoded(np.ones((20, 20)))["counts"]}, "got a sum of 400"),
        ({"size": [32, 40], "counts": ""}, "cut off"),
        ({"size": [32, 40], "counts": "no RLE!"}, "cut off"),
        ({"size": [32, 40], "counts": "o"}, "cut off"),  # says that more characters follow
    ],
)
def test_bad_rle_is_refused(rle, message):
    with pytest.raises(ValueError, match=message):
        parse_rle(rle, SIZE)


@pytest.mark.parametrize("mode", ["1", "L", "RGB", "RGBA", "LA", "P"])
@pytest.mark.parametrize("foreground", [1, 255])
def test_binary_png_of_any_mode_is_read(tmp_path, mode, foreground):
    expected = np.random.default_rng(1).random(SIZE) < 0.3
    Image.fromarray(np.where(expected, foreground, 0).astype(np.uint8)).convert(mode, dither=None).save(
        tmp_path / "m.png"
    )
    if mode == "1" and foreground == 1:
        expected[:] = False  # Pillow's own threshold of 128 leaves nothing
    assert np.array_equal(load_mask(tmp_path / "m.png", SIZE), expected)


@pytest.mark.parametrize(
    ("palette", "indices", "foreground"),
    [([255] * 3 + [0] * 3, [0, 1], [True, False]), ([0] * 3 + [128, 0, 0], [0, 1], [False, True])],
)
def test_palette_mask_is_read_by_colour_if_grey_and_else_by_index(tmp_path, palette, indices, foreground):
    image = Image.fromarray(np.array([indices], dtype=np.uint8)).convert("P")
    image.putdata(indices)
    image.putpalette(palette)
    image.save(tmp_path / "m.png")
    assert load_mask(tmp_path / "m.png", (1, 2)).tolist() == [foreground]


@pytest.mark.parametrize("values", [(0, 128, 255), (0, 1, 255), (0, 2, 0)])
def test_png_that_is_not_binary_is_refused(tmp_path, values):
    Image.fromarray(np.array([values], dtype=np.uint8)).save(tmp_path / "m.png")
    with pytest.raises(ValueError, match=r"m\.png: a mask must hold 0 and 1, or 0 and 255.*threshold"):
        load_mask(tmp_path / "m.png", (1, 3))


def test_coloured_png_is_refused(tmp_path):
    Image.new("RGB", (3, 1), (255, 0, 0)).save(tmp_path / "m.png")
    with pytest.raises(ValueError, match="got 0, #ff0000"):
        load_mask(tmp_path / "m.png", (1, 3))


@pytest.mark.parametrize("read", [check_mask_size, load_mask])
def test_png_of_another_size_is_refused(tmp_path, read):
    Image.new("L", (32, 40)).save(tmp_path / "m.png")
    with pytest.raises(ValueError, match=r"m\.png: mask is 32 x 40 .* image is 40 x 32 .*nearest"):
        read(tmp_path / "m.png", SIZE)


def test_no_part_is_false_and_an_empty_mask_is_not():
    assert not MaskParts()
    empty = parse_rle({"size": list(SIZE), "counts": [1280]}, SIZE)
    assert empty
    assert not rasterise(empty, SIZE).any()


def test_digest_follows_the_content(tmp_path):
    path = tmp_path / "m.png"
    Image.new("L", (40, 32)).save(path)
    first = MaskParts(pngs=(path,)).digest()
    assert first == MaskParts(pngs=(path,)).digest()
    Image.new("L", (40, 32), 255).save(path)
    assert first != MaskParts(pngs=(path,)).digest()
    moved = [SQUARE[0] + 0.25, *SQUARE[1:]]
    assert parse_polygon(SQUARE, SIZE).digest() != parse_polygon(moved, SIZE).digest()
