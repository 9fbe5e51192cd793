"""Uploads: from the folder of the server alone, shrunk, and refused by messages that name no folder."""

import os
import zlib
from pathlib import Path
from struct import pack

import numpy as np
import pytest
from PIL import Image

from rl_reward_network.demo.uploads import open_layer, open_upload


def refused(path: Path, folder: Path) -> str:
    with pytest.raises(ValueError) as error:
        open_upload(str(path), folder, None)
    assert str(folder) not in str(error.value)
    return str(error.value)


def test_a_file_elsewhere_is_refused_whether_it_exists_or_not(tmp_path: Path) -> None:
    folder = tmp_path / "uploads"
    folder.mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "patient.png")
    os.symlink(tmp_path / "patient.png", folder / "link.png")
    other = tmp_path / "uploads_of_others"  # its name begins as that of the folder
    other.mkdir()
    Image.new("L", (8, 8)).save(other / "patient.png")
    elsewhere = (tmp_path / "patient.png", folder / ".." / "patient.png", folder / "link.png", other / "patient.png")
    messages = {refused(path, folder) for path in (*elsewhere, tmp_path / "missing.png")}
    assert messages == {"the image is no upload and no example: upload it"}
    Image.new("L", (8, 8)).save(folder / "mine.png")
    assert open_upload(str(folder / "mine.png"), folder, None).image.shape == (8, 8, 3)


def test_files_that_are_no_images_are_named_without_their_folder(tmp_path: Path) -> None:
    (tmp_path / "words.png").write_text("no image")
    assert refused(tmp_path / "words.png", tmp_path).startswith("words.png: not a readable image")
    (tmp_path / "empty.png").touch()
    assert "empty.png: not a readable image (the file is empty)" in refused(tmp_path / "empty.png", tmp_path)
    Image.effect_noise((64, 64), 50).save(tmp_path / "whole.png")
    (tmp_path / "broken.png").write_bytes((tmp_path / "whole.png").read_bytes()[:500])
    assert refused(tmp_path / "broken.png", tmp_path).startswith("broken.png: not a readable image")
    assert "gone.png: uploads are deleted after an hour or two; upload it" in refused(tmp_path / "gone.png", tmp_path)


def test_the_size_is_checked_before_pixels_are_decoded(tmp_path: Path) -> None:
    header = b"IHDR" + pack(">IIBBBBB", 10_000, 6_000, 8, 0, 0, 0, 0)
    pixels = b"IDAT" + b"damaged"  # decoding would fail with another message
    parts = [pack(">I", len(part) - 4) + part + pack(">I", zlib.crc32(part)) for part in (header, pixels)]
    (tmp_path / "huge.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    assert "10000 x 6000 pixels, expected at most 50 million; make it smaller" in refused(
        tmp_path / "huge.png", tmp_path
    )


def test_a_large_image_is_shrunk_and_a_small_one_kept(tmp_path: Path) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (1024, 600, 3), dtype=np.uint8)
    Image.fromarray(picture).save(tmp_path / "kept.png")
    kept = open_upload(str(tmp_path / "kept.png"), tmp_path, None)
    np.testing.assert_array_equal(kept.image, picture)
    assert kept.note == ""
    Image.new("RGB", (300, 2048), (9, 8, 7)).save(tmp_path / "large.png")
    large = open_upload(str(tmp_path / "large.png"), tmp_path, None)
    np.testing.assert_array_equal(large.image, np.full((1024, 150, 3), (9, 8, 7)))
    assert large.note == "300 x 2048 pixels, shrunk to 150 x 1024"


def test_a_deep_image_is_shown(tmp_path: Path) -> None:
    deep = (np.linspace(0, 4095, 128 * 128).reshape(128, 128)).astype(np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    opened = open_upload(str(tmp_path / "deep.png"), tmp_path, None).image
    assert opened.dtype == np.uint8
    assert opened.max() == 255


def test_a_layer_is_checked_before_it_is_decoded(tmp_path: Path) -> None:
    Image.new("1", (12_000, 12_000)).save(tmp_path / "huge.png")
    for layer in (str(tmp_path / "huge.png"), (tmp_path / "huge.png").read_bytes()):
        with pytest.raises(ValueError, match="the drawing: 12000 x 12000 pixels, expected at most 1 million"):
            open_layer(layer, tmp_path)
    (tmp_path / "uploads").mkdir()
    with pytest.raises(ValueError, match="no upload and no example"):
        open_layer(str(tmp_path / "huge.png"), tmp_path / "uploads")
    Image.new("L", (9, 9)).save(tmp_path / "grey.png")
    with pytest.raises(ValueError, match="expected an image with transparency"):
        open_layer(str(tmp_path / "grey.png"), tmp_path)
