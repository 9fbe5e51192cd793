"""Image files: upright RGB of every mode and depth, levels of a data set, and what each unusable file is told."""

import os
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import ExifTags, Image

from rl_reward_network.bit_depth import GreyWindow, robust_window
from rl_reward_network.data.images import (
    decode_image,
    image_header,
    image_size,
    load_deep,
    load_for_model,
    load_grid,
    load_image,
)

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
READERS = (image_size, load_image, load_grid)


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[ExifTags.Base.Orientation] = orientation
    return tags


def save(path: Path, array: Any, kind: Any = np.uint8, **options: Any) -> Path:
    Image.fromarray(np.ascontiguousarray(np.asarray(array, dtype=kind))).save(path, **options)
    return path


@pytest.mark.parametrize("suffix", ["png", "tif", "webp"])
@pytest.mark.parametrize("orientation", STORED)
def test_every_exif_orientation_is_turned_upright_in_header_and_pixels(tmp_path, suffix, orientation):
    rgb = np.repeat(STORED[orientation][:, :, None], 3, axis=2)
    path = save(tmp_path / f"x.{suffix}", rgb, exif=exif(orientation), lossless=True)
    assert image_size(path) == (2, 3)
    for image in (load_image(path), decode_image(path.read_bytes(), "x")):
        assert image.dtype == np.uint8
        assert np.array_equal(image, np.repeat(UPRIGHT[:, :, None], 3, axis=2))


def test_exif_after_the_pixels_of_a_png_still_turns_them(tmp_path: Path) -> None:
    path = save(tmp_path / "x.png", STORED[3])
    block = b"eXIf" + exif(3).tobytes().removeprefix(b"Exif\0\0")
    chunk = struct.pack(">I", len(block) - 4) + block + struct.pack(">I", zlib.crc32(block))
    data = path.read_bytes()
    path.write_bytes(data[:-12] + chunk + data[-12:])  # 12 bytes: the IEND chunk
    assert np.array_equal(load_image(path)[:, :, 0], UPRIGHT)


def test_phone_photograph_with_a_second_picture_inside_is_a_still_image(tmp_path: Path) -> None:
    white, path = Image.new("RGB", (20, 10), (255, 255, 255)), tmp_path / "x.jpg"
    white.save(path, format="MPO", save_all=True, append_images=[Image.new("RGB", (5, 4))])
    assert image_size(path) == (10, 20)
    assert load_image(path).min() == 255


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
def test_every_mode_becomes_rgb_and_8_bit_has_no_window(tmp_path: Path, mode: str, pixel: Any, expected: Any) -> None:
    picture, path = Image.new(mode, (9, 8), pixel), tmp_path / ("x.tif" if mode == "CMYK" else "x.png")
    if mode == "P":
        picture.putpalette([0, 0, 0, 9, 8, 7])
    picture.save(path)
    assert image_header(path) == ((8, 9), False)
    for image in (
        load_image(path),
        load_image(path, GreyWindow(50, 100)),
        load_for_model(path, GreyWindow(50, 100))[0],
    ):
        assert (image.dtype, image.shape) == (np.uint8, (8, 9, 3))
        assert (image == expected).all()
    assert load_for_model(path)[1] == ""


@pytest.mark.parametrize("suffix", ["png", "tif"])
@pytest.mark.parametrize(
    ("values", "grey", "expected"),
    [
        ([0, 100, 255], None, [0, 100, 255]),  # 8 bit in a 16-bit file
        ([0, 2048, 4095], None, [0, 128, 255]),  # 12 bit: 2048 * 255 / 4095 = 127.53
        ([0, 257, 65535], None, [0, 1, 255]),  # 16 bit
        ([0, 512, 1023], None, [0, 128, 255]),  # 10 bit
        ([30_000, 33_500], None, [0, 255]),  # black is not at 0
        ([0, 512, 1023, 65535], GreyWindow(0, 1023), [0, 128, 255, 255]),
        ([0, 512, 1023, 65535], GreyWindow(0, 65535), [0, 2, 4, 255]),
        ([0, 512, 1023, 65535], GreyWindow(512, 1023), [0, 0, 255, 255]),
    ],
)
def test_grey_above_8_bit_is_scaled_by_its_window(tmp_path, values, grey, expected, suffix):
    path = save(tmp_path / f"x.{suffix}", [values], np.uint16)
    assert load_image(path, grey)[0, :, 1].tolist() == expected
    bits = None if grey is None else int(np.log2(grey.white + 1))
    if grey is None or not grey.black:
        assert decode_image(path.read_bytes(), "x", bits)[0, :, 2].tolist() == expected


@pytest.mark.parametrize("bits", [10, 16])
def test_a_hot_pixel_does_not_make_a_picture_black(tmp_path: Path, bits: int) -> None:
    grey = np.linspace(0, 2**bits - 1, 64 * 64).reshape(64, 64)
    grey[5, 5] = 65535
    path = save(tmp_path / "x.png", grey, np.uint16)
    assert image_header(path) == ((64, 64), True)
    image, note = load_for_model(path)
    assert 126 < image.mean() < 130
    assert (image[5, 5] == 255).all()
    window = robust_window(np.bincount(load_deep(path).ravel()))
    assert 0.995 * 2**bits < window.white < 2**bits
    assert re.match(rf"x\.png: .*black is {window.black}, white is {window.white}, .*0\.1 %.*--bit_depth", note)
    assert np.array_equal(image, load_image(path))
    given, note = load_for_model(path, GreyWindow(0, 2 ** (bits - 1)))
    assert 189 < given.mean() < 193, "the brighter half is white"
    assert note == f"x.png: grey of more than 8 bit, black is 0, white is {2 ** (bits - 1)}"


def white_is_zero(path: Path) -> Path:
    save(path, [[0, 1000]], np.uint16)
    black, white = (struct.pack("<HHIH", 262, 3, 1, value) for value in (1, 0))
    path.write_bytes(path.read_bytes().replace(black, white))
    return path


def truncated(path: Path) -> Path:
    save(path, np.random.default_rng(0).integers(0, 256, (64, 64, 3)))
    path.write_bytes(path.read_bytes()[:3000])
    return path


def colour_of_16_bit(path: Path, channels: int) -> Path:
    path.write_bytes(cv2.imencode(path.suffix, np.full((9, 9, channels), 3000, np.uint16))[1].tobytes())
    return path


def animated(path: Path) -> Path:
    Image.new("L", (4, 4)).save(path, save_all=True, append_images=[Image.new("L", (4, 4), 255)])
    return path


def bytes_of(data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "x.png").write_bytes(data)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 12\n"
UNUSABLE: list[tuple[Callable[[Path], object], Any, str]] = [  # what makes it, who reads it, what is said
    (lambda folder: None, READERS, "not found"),
    (lambda folder: (folder / "x.png").mkdir(), READERS, "not found"),
    (lambda folder: (folder / "x.png").symlink_to(".git/x.png"), READERS, "a link whose target is.*git annex get"),
    (bytes_of(b"no picture"), READERS, "save it again as PNG"),
    (bytes_of(b""), READERS, "the file is empty.*download it again$"),
    (bytes_of(LFS), READERS, "Git LFS pointer.*git lfs pull$"),
    (
        bytes_of(b"/annex/objects/SHA256E-s12--4d.png\n"),
        READERS,
        r"git-annex pointer.*git annex get \(or datalad get\)$",
    ),
    (bytes_of(b"\n<!DOCTYPE html><html>login</html>"), READERS, "a web page .*download it again"),
    (bytes_of(b"<?xml version='1.0'?><Error>AccessDenied</Error>"), READERS, "a web page .*download it again"),
    (bytes_of(bytes(128) + b"DICM\2\0\0\0"), READERS, "a DICOM file.*sa2va-rl data import$"),
    (bytes_of(b"\x1f\x8b\x08\0"), READERS, "a gzip file, perhaps a volume.*write each slice as PNG$"),
    (lambda folder: animated(folder / "x.gif"), READERS, "holds 2 frames.*save each frame"),
    (
        lambda folder: truncated(folder / "x.png"),
        READERS[1:],
        "OSError: .*; copy or download it again, or save it again",
    ),
    (lambda folder: white_is_zero(folder / "x.tif"), (*READERS, load_for_model), "0 is white; save it as PNG"),
    (lambda folder: save(folder / "x.tif", [[-1]], np.int32), [load_image], "grey values .* convert it to 8-bit PNG$"),
    (lambda folder: save(folder / "x.tif", [[70000]], np.int32), [load_image], "grey values .* convert it to 8-bit"),
    (lambda folder: save(folder / "x.tif", [[0.5]], np.float32), [load_image], "grey values .* convert it to 8-bit"),
    *(
        (
            lambda folder, name=name, channels=channels: colour_of_16_bit(folder / name, channels),
            (image_header, load_image, load_for_model, load_grid),
            "16 bit per channel, .*scale it to 8-bit colour",
        )
        for name in ("x.png", "x.tif")
        for channels in (3, 4)
    ),
    (lambda folder: save(folder / "x.png", np.zeros((20, 7))), [image_header], "7 x 20 pixels.*at least 8 x 8"),
    (lambda folder: save(folder / "x.png", np.zeros((7, 20))), [image_header], "20 x 7 pixels.*at least 8 x 8"),
]


@pytest.mark.parametrize(("make", "readers", "message"), UNUSABLE)
def test_what_is_no_usable_image_is_told_with_its_remedy(tmp_path: Path, make: Any, readers: Any, message: str) -> None:
    make(tmp_path)
    path = next(tmp_path.iterdir(), tmp_path / "x.png")
    for read in readers:
        with pytest.raises(ValueError, match=rf"x\.\w+: .*{message}"):
            read(path)
    if path.is_file() and load_image in readers:
        with pytest.raises(ValueError, match=f"^shard 3: row 7: .*{message}"):
            decode_image(path.read_bytes(), "shard 3: row 7")


def test_what_is_too_large_is_to_be_made_smaller_before_it_is_decoded(tmp_path: Path) -> None:
    Image.new("1", (14_000, 13_500)).save(tmp_path / "x.png")
    with pytest.raises(ValueError, match=r"x\.png: .*189000000 pixels.*make it smaller, at most 178 million pixels$"):
        image_size(tmp_path / "x.png")
    Image.new("1", (200, 100)).save(tmp_path / "y.png")
    (tmp_path / "y.png").write_bytes((tmp_path / "y.png").read_bytes()[:60])  # decoding would fail
    with pytest.raises(ValueError, match=r"y\.png: 200 x 100 pixels, expected at most 0 million; make it smaller"):
        load_for_model(tmp_path / "y.png", most_pixels=19_999)


def test_a_name_that_is_not_utf_8_is_refused_in_words_that_can_be_printed(tmp_path: Path) -> None:
    path = save(tmp_path / os.fsdecode(b"gef\xe4ss.png"), UPRIGHT)
    with pytest.raises(ValueError, match="gef\ufffdss\\.png: its name is not UTF-8; rename it") as error:
        image_size(path)
    str(error.value).encode()
