import json
import os
import re
import struct
import zlib

import cv2
import numpy as np
import pytest
from PIL import ExifTags, Image

from rl_reward_network.data import images
from rl_reward_network.data.images import (
    DATA_SET,
    decode_image,
    given_levels,
    grey_histogram,
    image_header,
    image_size,
    load_for_model,
    load_grid,
    load_image,
    measured_levels,
    saved_levels,
)
from rl_reward_network.depth import Levels, robust_levels

UPRIGHT = np.arange(6, dtype=np.uint8).reshape(2, 3) * 40  # (2, 3): no two turns of it are equal
STORED = {  # how the camera stored it, for each EXIF orientation (EXIF 2.32, table 6)
    1: UPRIGHT,
    2: UPRIGHT[:, ::-1],
    3: UPRIGHT[::-1, ::-1],
    4: UPRIGHT[::-1],
    5: UPRIGHT.T,
    6: np.rot90(UPRIGHT, 1),
    7: np.rot90(UPRIGHT, 2).T,
    8: np.rot90(UPRIGHT, -1),
}


def exif(orientation):
    tags = Image.Exif()
    tags[ExifTags.Base.Orientation] = orientation
    return tags


@pytest.mark.parametrize("suffix", ["png", "tif", "webp"])
@pytest.mark.parametrize("orientation", STORED)
def test_every_exif_orientation_is_turned_upright_in_header_and_pixels(tmp_path, suffix, orientation):
    path = tmp_path / f"x.{suffix}"
    rgb = np.repeat(STORED[orientation][:, :, None], 3, axis=2)
    Image.fromarray(np.ascontiguousarray(rgb)).save(path, exif=exif(orientation), lossless=True)
    assert image_size(path) == (2, 3)
    for image in (load_image(path), decode_image(path.read_bytes(), "x")):
        assert image.dtype == np.uint8
        assert np.array_equal(image, np.repeat(UPRIGHT[:, :, None], 3, axis=2))


def test_phone_photograph_with_a_second_picture_inside_is_a_still_image(tmp_path):
    preview = Image.new("RGB", (5, 4))
    Image.new("RGB", (20, 10), (255, 255, 255)).save(
        tmp_path / "x.jpg", format="MPO", save_all=True, append_images=[preview]
    )
    assert image_size(tmp_path / "x.jpg") == (10, 20)
    assert load_image(tmp_path / "x.jpg").min() == 255


def test_exif_after_the_pixels_of_a_png_still_turns_them(tmp_path):
    path = tmp_path / "x.png"
    Image.fromarray(STORED[3].copy()).save(path)
    block = b"eXIf" + exif(3).tobytes().removeprefix(b"Exif\0\0")
    chunk = struct.pack(">I", len(block) - 4) + block + struct.pack(">I", zlib.crc32(block))
    data = path.read_bytes()
    path.write_bytes(data[:-12] + chunk + data[-12:])  # 12 bytes: the IEND chunk
    assert np.array_equal(load_image(path)[:, :, 0], UPRIGHT)


@pytest.mark.parametrize(
    ("mode", "pixel", "expected"),
    [
        ("RGB", (1, 2, 3), (1, 2, 3)),
        ("L", 7, (7, 7, 7)),
        ("1", 1, (255, 255, 255)),
        ("LA", (7, 0), (7, 7, 7)),
        ("RGBA", (10, 20, 30, 0), (10, 20, 30)),  # alpha is dropped, even where fully transparent
        ("P", 1, (9, 8, 7)),
        ("CMYK", (0, 255, 255, 0), (255, 0, 0)),
    ],
)
def test_every_mode_becomes_rgb(tmp_path, mode, pixel, expected):
    picture, path = Image.new(mode, (3, 2), pixel), tmp_path / ("x.tif" if mode == "CMYK" else "x.png")
    if mode == "P":
        picture.putpalette([0, 0, 0, 9, 8, 7])
    picture.save(path)
    image = load_image(path)
    assert image.dtype == np.uint8
    assert image.shape == (2, 3, 3)
    assert (image == expected).all()


@pytest.mark.parametrize("load", [load_image, load_grid, load_for_model, image_size])
def test_a_deep_tiff_whose_zero_is_white_is_refused(tmp_path, load):
    path = tmp_path / "x.tif"
    Image.fromarray(np.array([[0, 1000]], dtype=np.uint16)).save(path)
    load(path)
    black, white = (struct.pack("<HHIH", 262, 3, 1, value) for value in (1, 0))
    assert path.read_bytes().count(black) == 1
    path.write_bytes(path.read_bytes().replace(black, white))
    with pytest.raises(ValueError, match=r"x\.tif: .*0 is white; save it as PNG, with 0 as black"):
        load(path)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0, 100, 255], [0, 100, 255]),  # 8 bit in a 16-bit file
        ([0, 2048, 4095], [0, 128, 255]),  # 12 bit: 2048 * 255 / 4095 = 127.53
        ([0, 257, 65535], [0, 1, 255]),  # 16 bit
        ([0, 512, 1023], [0, 128, 255]),  # 10 bit
    ],
)
@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_an_image_above_8_bit_that_comes_alone_has_a_white_of_its_own(tmp_path, values, expected, suffix):
    Image.fromarray(np.array([values], dtype=np.uint16)).save(tmp_path / f"x.{suffix}")
    assert load_image(tmp_path / f"x.{suffix}")[0, :, 1].tolist() == expected


@pytest.mark.parametrize("suffix", ["png", "tif"])
@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        (Levels(0, 1023), [0, 128, 255, 255]),
        (Levels(0, 4095), [0, 32, 64, 255]),
        (Levels(0, 65535), [0, 2, 4, 255]),
        (Levels(512, 1023), [0, 0, 255, 255]),
        (Levels(1, 1023), [0, 128, 255, 255]),
    ],
)
def test_grey_above_8_bit_is_scaled_by_the_levels_that_are_given(tmp_path, levels, expected, suffix):
    Image.fromarray(np.array([[0, 512, 1023, 65535]], dtype=np.uint16)).save(tmp_path / f"x.{suffix}")
    assert load_image(tmp_path / f"x.{suffix}", levels)[0, :, 2].tolist() == expected
    assert decode_image((tmp_path / f"x.{suffix}").read_bytes(), "x", levels)[0, :, 2].tolist() == expected


@pytest.mark.parametrize("mode", ["L", "RGB", "P", "1", "LA"])
def test_8_bit_images_have_no_levels(tmp_path, mode):
    Image.fromarray(np.tile(UPRIGHT, (4, 3))).convert(mode).save(tmp_path / "x.png")
    assert np.array_equal(load_image(tmp_path / "x.png", Levels(50, 100)), load_image(tmp_path / "x.png"))
    assert image_header(tmp_path / "x.png") == ((8, 9), False)
    image, note = load_for_model(tmp_path / "x.png", Levels(50, 100))
    assert np.array_equal(image, load_image(tmp_path / "x.png"))
    assert note == ""


@pytest.mark.parametrize("bits", [10, 12, 14, 16])
def test_a_hot_pixel_does_not_make_a_picture_black(tmp_path, bits):
    grey = np.linspace(0, 2**bits - 1, 64 * 64).astype(np.uint16).reshape(64, 64)
    grey[5, 5] = 65535
    Image.fromarray(grey).save(tmp_path / "x.png")
    assert image_header(tmp_path / "x.png") == ((64, 64), True)
    image, note = load_for_model(tmp_path / "x.png")
    assert 126 < image.mean() < 130
    assert (image[5, 5] == 255).all()
    levels = robust_levels(grey_histogram(tmp_path / "x.png"))
    assert 0.995 * 2**bits < levels.white < 2**bits
    assert re.match(rf"x\.png: .*black is {levels.black}, white is {levels.white}, .*0\.1 %.*--bit_depth", note)
    assert np.array_equal(image, load_image(tmp_path / "x.png"))
    given, note = load_for_model(tmp_path / "x.png", Levels(0, 2 ** (bits - 1)))
    assert 189 < given.mean() < 193, "the brighter half is white"
    assert note == f"x.png: grey of more than 8 bit, black is 0, white is {2 ** (bits - 1)}"


def test_an_8_bit_picture_in_a_16_bit_file_is_not_stretched(tmp_path):
    Image.fromarray(np.full((8, 8), 100, dtype=np.uint16)).save(tmp_path / "x.png")
    assert (load_image(tmp_path / "x.png") == 100).all()


@pytest.mark.parametrize("value", [-1, 70000, 0.5])
def test_grey_outside_16_bit_is_refused(tmp_path, value):
    Image.fromarray(np.array([[value]], dtype=np.float32 if value == 0.5 else np.int32)).save(tmp_path / "x.tif")
    with pytest.raises(ValueError, match=r"x\.tif: grey values .* convert it to 8-bit"):
        load_image(tmp_path / "x.tif")


def broken_file(folder, kind):
    path = folder / "bad.png"
    if kind == "text":
        path.write_text("no picture")
    elif kind == "empty":
        path.touch()
    elif kind == "folder":
        path.mkdir()
    elif kind == "animated":
        path = folder / "bad.gif"
        Image.new("L", (4, 4)).save(path, save_all=True, append_images=[Image.new("L", (4, 4), 255)])
    elif kind == "truncated":
        noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(noise).save(path)
        path.write_bytes(path.read_bytes()[:3000])
    return path


@pytest.mark.parametrize("read", [image_size, load_image, load_grid])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "not found"),
        ("folder", "not found"),
        ("text", "save it again as PNG"),
        ("empty", "the file is empty"),
        ("animated", "holds 2 frames.*save each frame"),
    ],
)
def test_what_is_no_still_image_is_one_error_with_a_remedy(tmp_path, read, kind, message):
    with pytest.raises(ValueError, match=rf"bad\.\w+: .*{message}"):
        read(broken_file(tmp_path, kind))


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 12\n", "Git LFS pointer.*git lfs pull"),
        (b"/annex/objects/SHA256E-s12--4d.png\n", "git-annex pointer.*git annex get"),
        (b"../.git/annex/objects/x/y/SHA256E-s12--4d.png", "git-annex pointer.*git annex get"),
        (b"\n<!DOCTYPE html><html>login</html>", r"a web page .*download it again"),
        (b"<?xml version='1.0'?><Error>AccessDenied</Error>", r"a web page .*download it again"),
        (b"", "the file is empty.*download it again"),
        (bytes(128) + b"DICM\2\0\0\0", "a DICOM file.*sa2va-rl data import"),
        (b"\x1f\x8b\x08\0", "a gzip file, perhaps a volume.*write each slice as PNG"),
    ],
)
@pytest.mark.parametrize("read", [image_size, load_image, load_grid])
def test_the_remedy_is_that_of_what_the_file_is(tmp_path, read, start, message):
    (tmp_path / "x.png").write_bytes(start)
    with pytest.raises(ValueError, match=rf"x\.png: not a readable image .*{message}") as error:
        read(tmp_path / "x.png")
    assert "PNG or JPEG" not in str(error.value)


def test_a_link_to_nowhere_is_said_to_be_one(tmp_path):
    (tmp_path / "x.png").symlink_to(".git/annex/objects/x.png")
    with pytest.raises(ValueError, match=r"x\.png: a link whose target is missing; .*git annex get"):
        load_image(tmp_path / "x.png")


def test_what_is_too_large_is_to_be_made_smaller_before_it_is_decoded(tmp_path):
    Image.new("1", (14_000, 13_500)).save(tmp_path / "x.png")
    with pytest.raises(ValueError, match=r"x\.png: .*189000000 pixels.*make it smaller, at most 178 million pixels$"):
        image_size(tmp_path / "x.png")
    Image.new("1", (200, 100)).save(tmp_path / "y.png")
    (tmp_path / "y.png").write_bytes((tmp_path / "y.png").read_bytes()[:60])  # decoding would fail
    with pytest.raises(ValueError, match=r"y\.png: 200 x 100 pixels, expected at most 0 million; make it smaller"):
        load_for_model(tmp_path / "y.png", most_pixels=19_999)


@pytest.mark.parametrize("suffix", [".png", ".tif"])
@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("read", [image_header, load_image, load_for_model, load_grid])
def test_colour_of_16_bit_is_refused_for_pillow_drops_half_of_it(tmp_path, read, channels, suffix):
    path = tmp_path / f"x{suffix}"
    path.write_bytes(cv2.imencode(suffix, np.full((9, 9, channels), 3000, np.uint16))[1].tobytes())
    with pytest.raises(ValueError, match=r"x\..*: 16 bit per channel, .*scale it to 8-bit colour"):
        read(path)


def test_an_image_that_begins_at_30000_has_full_contrast(tmp_path):
    grey = np.linspace(30_000, 33_500, 64 * 64).astype(np.uint16).reshape(64, 64)
    Image.fromarray(grey).save(tmp_path / "x.png")
    image = load_image(tmp_path / "x.png")
    assert (image.min(), image.max()) == (0, 255)


@pytest.mark.parametrize("size", [(7, 20), (20, 7)])
def test_an_image_to_work_on_has_8_pixels_a_side(tmp_path, size):
    Image.new("L", size).save(tmp_path / "x.png")
    with pytest.raises(ValueError, match=rf"x\.png: the image has {size[0]} x {size[1]} pixels.*at least 8 x 8"):
        image_header(tmp_path / "x.png")


def test_a_name_that_is_not_utf_8_is_refused_in_words_that_can_be_printed(tmp_path):
    path = tmp_path / os.fsdecode(b"gef\xe4ss.png")
    Image.new("L", (9, 9)).save(path)
    with pytest.raises(ValueError, match="gef\ufffdss\\.png: its name is not UTF-8; rename it") as error:
        image_size(path)
    str(error.value).encode()


def test_truncated_image_is_an_error_when_its_pixels_are_read(tmp_path):
    path = broken_file(tmp_path, "truncated")
    assert image_size(path) == (64, 64)
    with pytest.raises(
        ValueError, match=r"bad\.png: not a readable image \(OSError: .*\); copy or download it again, or save it again"
    ):
        load_image(path)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("text", "not a readable image .*save it again"),
        ("empty", "the file is empty"),
        ("animated", "holds 2 frames"),
        ("truncated", "OSError"),
    ],
)
def test_bytes_that_are_no_still_image_are_an_error_that_names_where_they_lie(tmp_path, kind, message):
    data = broken_file(tmp_path, kind).read_bytes()
    with pytest.raises(ValueError, match=f"^shard 3: row 7: .*{message}"):
        decode_image(data, "shard 3: row 7")


@pytest.fixture
def write(tmp_path):
    def write(name, value, hot=65535):
        grey = np.full((40, 50), value, dtype=np.uint16)
        grey[7, 7] = hot  # one pixel in 2000
        Image.fromarray(grey).save(tmp_path / name)
        return tmp_path / name

    return write


def test_a_data_set_has_one_level_that_hot_pixels_do_not_move(write):
    images = {write(f"{n}.png", value): DATA_SET for n, value in enumerate([300, 1000, 600])}
    assert measured_levels(images) == {DATA_SET: (300, 1000)}
    assert measured_levels(dict(reversed(images.items()))) == {DATA_SET: (300, 1000)}


def test_series_have_their_own_and_their_median_is_the_data_sets(write):
    images = {write(f"{n}.png", 1000 * (n + 1)): f"s{n % 3}" for n in range(6)}
    assert measured_levels(images) == {
        DATA_SET: (2000, 5000),
        "s0": (1000, 4000),
        "s1": (2000, 5000),
        "s2": (3000, 6000),
    }
    mixed = images | {write("alone.png", 900): DATA_SET}
    assert measured_levels(mixed) == {**measured_levels(images), DATA_SET: (900, 1155)}


def test_without_deep_images_there_is_nothing(write):
    assert measured_levels({}) == {}


def test_few_images_are_read(write, monkeypatch):
    measured = []

    def histogram(path):
        measured.append(path.name)
        return np.bincount([1000])

    monkeypatch.setattr(images, "grey_histogram", histogram)
    monkeypatch.setattr(images, "MAX_IMAGES", 8)
    names = [write(f"{n:03d}.png", 1000) for n in range(33)]
    measured_levels(dict.fromkeys(names, DATA_SET))
    assert sorted(measured) == [f"{n:03d}.png" for n in range(0, 33, 5)]
    measured.clear()
    measured_levels(dict.fromkeys(names, "series"))
    assert len(measured) == 4


def test_a_damaged_image_is_named(write):
    path = write("x.png", 1000)
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(ValueError, match=r"x\.png: not a readable image"):
        measured_levels({path: DATA_SET})


def test_levels_of_a_run_go_before_bits(write):
    assert given_levels(None, None) is None
    assert given_levels(10, None) == {DATA_SET: (0, 1023)}
    saved = {DATA_SET: Levels(3, 700)}
    assert given_levels(10, saved) == given_levels(None, saved) == saved
    with pytest.raises(ValueError, match="bit_depth: got 3; give 8 to 16"):
        given_levels(3, None)


def test_levels_of_a_run_are_read_back_those_of_version_0_11_with_black_at_0():
    levels = {DATA_SET: Levels(30, 4000)}
    assert saved_levels(json.loads(json.dumps({"grey_levels": levels}))) == levels
    assert saved_levels({"white_levels": {DATA_SET: 4000}}) == {DATA_SET: Levels(0, 4000)}
    assert saved_levels({"white_levels": None}) is saved_levels({"grey_levels": None}) is saved_levels({}) is None
