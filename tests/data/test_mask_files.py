"""Masks of every kind: 0/1, 0/255, palettes, colours, label maps, JPEG."""

from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from rl_reward_network.data.masks import load_class_masks, load_joined_masks, load_mask
from tests.data_import.sources import SIZE, as_255, save, truth

MASK, OTHER = truth(1), np.roll(truth(2), 14, axis=1) & ~truth(1)


def test_zero_and_one_and_zero_and_255(tmp_path: Path) -> None:
    for value in (1, 255):
        masks = load_class_masks(save(tmp_path / "m.png", MASK.astype(np.uint8) * np.uint8(value)), SIZE)
        assert list(masks) == [str(value)]
        assert (masks[str(value)] == MASK).all()
    bilevel = load_class_masks(save(tmp_path / "m.png", MASK), SIZE)
    assert list(bilevel) == ["1"]
    assert (bilevel["1"] == MASK).all()


def save_palette(path: Path, indices: np.ndarray, *colours: list[int]) -> Path:
    image = Image.fromarray(indices.astype(np.uint8), "P")
    image.putpalette([value for colour in colours for value in colour])
    image.save(path)
    return path


def test_a_class_of_a_palette_has_one_name_in_every_file_whatever_its_index(tmp_path: Path) -> None:
    """Optimised palettes hold the colours that a file uses, in any order."""
    black, red, green, grey = [0, 0, 0], [128, 0, 0], [0, 128, 0], [128, 128, 128]
    one = save_palette(tmp_path / "1.png", MASK + 2 * OTHER, black, red, green)
    two = save_palette(tmp_path / "2.png", 2 * MASK + OTHER, black, green, red)
    rgb = save(tmp_path / "3.png", np.asarray(Image.open(one).convert("RGB")))
    for path in (one, two, rgb):
        masks = load_class_masks(path, SIZE)
        assert sorted(masks) == ["#008000", "#800000"]
        assert (masks["#800000"] == MASK).all()
        assert (masks["#008000"] == OTHER).all()
    assert list(load_class_masks(save_palette(tmp_path / "4.png", MASK, black, grey, red), SIZE)) == ["128"]
    mixed = load_class_masks(save_palette(tmp_path / "5.png", MASK + 2 * OTHER, black, grey, red), SIZE)
    assert sorted(mixed) == ["#800000", "128"], "the same grey beside a colour"
    assert sorted(load_class_masks(one, SIZE, palette_colours=False)) == ["1", "2"]


@pytest.mark.parametrize("alpha", [False, True])
def test_colours_are_named_by_their_hex_digits(tmp_path: Path, alpha: bool) -> None:
    colours = MASK[..., None] * np.array([255, 0, 16]) + OTHER[..., None] * np.array([0, 128, 0])
    grid = np.concatenate([colours, np.full((*SIZE, 1), 255)], axis=2) if alpha else colours
    masks = load_class_masks(save(tmp_path / "m.png", grid.astype(np.uint8)), SIZE)
    assert sorted(masks) == ["#008000", "#ff0010"]
    assert (masks["#ff0010"] == MASK).all()
    assert (masks["#008000"] == OTHER).all()


def test_16_bit_label_maps(tmp_path: Path) -> None:
    masks = load_class_masks(save(tmp_path / "m.png", MASK * np.uint16(1000) + OTHER * np.uint16(7)), SIZE)
    assert sorted(masks) == ["1000", "7"]
    assert (masks["1000"] == MASK).all()


def test_a_jpeg_of_black_and_white_is_cut_in_the_middle(tmp_path: Path) -> None:
    large = np.kron(MASK, np.ones((9, 9), bool))
    path = save(tmp_path / "m.jpg", large.astype(np.uint8) * 255, quality=95)
    assert len(np.unique(Image.open(path))) > 2, "lossy"
    masks = load_class_masks(path, large.shape)
    assert list(masks) == ["255"]
    assert (masks["255"] == large).mean() > 0.999
    save(path, (large * 100).astype(np.uint8))
    with pytest.raises(ValueError, match=r"m\.jpg: a lossy file.*PNG"):
        load_class_masks(path, large.shape)


def test_a_small_grey_class_of_a_jpeg_is_not_merged_with_the_white_one(tmp_path: Path) -> None:
    grid = np.zeros((100, 100), np.uint8)
    grid[10:90, 40:60] = 255
    grid[5:17, 5:17] = 128  # 1.4 % of the pixels
    with pytest.raises(ValueError, match=r"m\.jpg: a lossy file.*PNG"):
        load_class_masks(save(tmp_path / "m.jpg", grid, quality=95), grid.shape)


@pytest.mark.parametrize("values", [(1, 0), (255, 0), (1, 2), (255, 1)])
def test_a_lossless_webp_keeps_its_values(tmp_path: Path, values: tuple[int, int]) -> None:
    grid = np.repeat((MASK * values[0] + OTHER * values[1]).astype(np.uint8)[..., None], 3, axis=2)
    masks = load_class_masks(save(tmp_path / "m.webp", grid, lossless=True), SIZE)
    assert set(masks) == {str(value) for value in values if value}
    assert (masks[str(values[0])] == MASK).all()


@pytest.mark.parametrize("name", ["m.webp", "m.jpg"])
def test_a_lossy_mask_of_zero_and_one_is_refused_and_an_empty_one_is_not(tmp_path: Path, name: str) -> None:
    large = np.kron(MASK, np.ones((16, 16), np.uint8))
    with pytest.raises(ValueError, match=rf"{name}: a lossy file.*PNG"):
        load_class_masks(save(tmp_path / name, large * np.uint8(20), quality=95), large.shape)
    assert load_class_masks(save(tmp_path / name, large * np.uint8(0)), large.shape) == {}
    white = load_class_masks(save(tmp_path / name, large * np.uint8(255), quality=95), large.shape)
    assert (white["255"] == large).mean() > 0.999


def test_an_empty_mask_has_no_class(tmp_path: Path) -> None:
    assert load_class_masks(save(tmp_path / "m.png", np.zeros(SIZE, np.uint8)), SIZE) == {}


def test_a_picture_or_another_size_is_no_mask(tmp_path: Path) -> None:
    ramp = np.arange(SIZE[0] * SIZE[1], dtype=np.uint8).reshape(SIZE)
    with pytest.raises(ValueError, match=r"m\.png: holds 256 values"):
        load_class_masks(save(tmp_path / "m.png", ramp), SIZE)
    with pytest.raises(ValueError, match=r"m\.png: mask is 24 x 32 .* image is 32 x 24"):
        load_class_masks(save(tmp_path / "m.png", MASK.T), SIZE)


@pytest.mark.parametrize("first", [[255, 0, 0], [255, 255, 255]])
def test_a_palette_that_does_not_begin_with_black_gives_its_colours(tmp_path: Path, first: list[int]) -> None:
    image = Image.fromarray((~MASK).astype(np.uint8), "P")
    image.putpalette([*first, 0, 0, 0])
    image.save(tmp_path / "m.png")
    ((name, mask),) = load_class_masks(tmp_path / "m.png", SIZE).items()
    assert name == ("255" if first[1] else "#ff0000")
    assert (mask == MASK).all()


@pytest.mark.parametrize("channels", [2, 4])
def test_transparent_pixels_are_background(tmp_path: Path, channels: int) -> None:
    grid = np.full((*SIZE, channels), 255, np.uint8)
    grid[..., -1] = MASK * np.uint8(200)
    masks = load_class_masks(save(tmp_path / "m.png", grid), SIZE)
    assert list(masks) == ["255"]
    assert (masks["255"] == MASK).all()


def transparent(path: Path, colours: np.ndarray, alpha: np.ndarray) -> Path:
    return save(path, np.concatenate([colours, alpha[..., None]], axis=2).astype(np.uint8))


@pytest.mark.parametrize("strength", [255, 100])
@pytest.mark.parametrize("channels", [1, 3])
def test_black_strokes_on_a_transparent_ground_are_the_mask(tmp_path: Path, channels: int, strength: int) -> None:
    path = transparent(tmp_path / "m.png", np.zeros((*SIZE, channels)), MASK * strength)
    ((name, mask),) = load_class_masks(path, SIZE).items()
    assert name == "255"
    assert (mask == MASK).all()
    assert (load_mask(path, SIZE) == MASK).all()


def test_transparent_edges_are_cut_at_half_and_an_empty_layer_is_empty(tmp_path: Path) -> None:
    alpha = MASK * 255
    alpha[truth(1) & ~np.roll(truth(1), 1, axis=0)] = 60
    mask = load_mask(transparent(tmp_path / "m.png", np.zeros((*SIZE, 3)), alpha), SIZE)
    assert (mask == (alpha == 255)).all()
    for colour in (0, 255):
        path = transparent(tmp_path / "m.png", np.full((*SIZE, 3), colour), np.zeros(SIZE))
        assert not load_mask(path, SIZE).any()
    opaque = transparent(tmp_path / "m.png", np.repeat(MASK[..., None] * 255, 3, 2), np.zeros(SIZE))
    assert (load_mask(opaque, SIZE) == MASK).all(), "alpha that is constant says nothing"


def test_black_that_covers_most_of_a_transparent_picture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"m\.png: black covers 9.% of the picture.*black and white"):
        load_class_masks(transparent(tmp_path / "m.png", np.zeros((*SIZE, 3)), ~MASK * 255), SIZE)


def test_a_transparent_colour_of_a_palette_is_background(tmp_path: Path) -> None:
    for strokes in ([0, 0, 0], [255, 0, 0]):
        image = Image.fromarray(MASK.astype(np.uint8), "P")
        image.putpalette([255, 255, 255, *strokes])
        image.save(tmp_path / "m.png", transparency=0)
        (mask,) = load_class_masks(tmp_path / "m.png", SIZE).values()
        assert (mask == MASK).all(), strokes


@pytest.mark.parametrize("channels", [None, 3])
def test_soft_edges_of_black_and_white_are_cut_at_half(tmp_path: Path, channels: int | None) -> None:
    fine = np.zeros((8 * SIZE[0], 8 * SIZE[1]), np.uint8)
    cv2.line(fine, (20, 30), (200, 150), 255, 40)
    cv2.circle(fine, (180, 60), 35, 255, -1)
    soft = fine.reshape(SIZE[0], 8, SIZE[1], 8).mean(axis=(1, 3)).round().astype(np.uint8)
    assert len(np.unique(soft)) > 10
    path = save(tmp_path / "m.png", np.repeat(soft[..., None], channels, 2) if channels else soft)
    assert (load_mask(path, SIZE) == (soft >= 128)).all()


def test_classes_are_no_soft_edges(tmp_path: Path) -> None:
    grid = np.zeros(SIZE, np.uint8)
    for number, value in enumerate((50, 100, 150, 255)):
        grid[2:20, 2 + 7 * number : 8 + 7 * number] = value
    assert sorted(load_class_masks(save(tmp_path / "m.png", grid), SIZE)) == ["100", "150", "255", "50"]


def test_masks_in_several_files_are_joined_class_by_class(tmp_path: Path) -> None:
    files = [save(tmp_path / f"{name}.png", as_255(mask)) for name, mask in (("a", MASK), ("b", OTHER))]
    assert (load_joined_masks(files, SIZE)["255"] == (MASK | OTHER)).all()


def test_a_volume_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.nii.gz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"m\.nii\.gz: a volume, which is not read; write each slice as PNG"):
        load_mask(tmp_path / "m.nii.gz", SIZE)


def test_a_cmyk_mask_has_no_alpha(tmp_path: Path) -> None:
    """Its fourth channel is black ink."""
    Image.fromarray(as_255(MASK)).convert("RGB").convert("CMYK").save(tmp_path / "m.tif")
    masks = load_class_masks(tmp_path / "m.tif", SIZE)
    assert list(masks) == ["255"]
    assert (masks["255"] == MASK).all()
