"""Pixels of DICOM files: depth, sign, unused bits, polarity, encodings, and what is damaged."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEGLSLossless,
    RLELossless,
)

from rl_reward_network.data_import.dicom import load_frame, read_header, recognise_dicom, stored_values
from tests.data_import.sources import SIZE, write_dicom
from tests.data_import.test_dicom import grid


@pytest.mark.parametrize("high", [11, 13, 15])
@pytest.mark.parametrize("encoded", [ExplicitVRLittleEndian, RLELossless])
def test_bits_above_and_below_the_used_ones_are_dropped(tmp_path: Path, high: int, encoded: pydicom.uid.UID) -> None:
    values = grid(4095)
    noise = np.random.default_rng(1).integers(0, 2**16, SIZE)
    used = 0xFFF << (high - 11)
    path = write_dicom(tmp_path / "a.dcm", values << (high - 11) | noise & ~used & 0xFFFF, HighBit=high)
    if encoded == RLELossless:
        compressed(path, encoded)
    assert (stored_values(path) == values).all()
    assert (load_frame(path, 0) == values).all()


def test_a_sign_is_that_of_the_used_bits(tmp_path: Path) -> None:
    values = grid(4095) - 2048
    path = write_dicom(tmp_path / "a.dcm", (values & 0xFFF) << 4, HighBit=15, PixelRepresentation=1)
    assert (stored_values(path) == values).all()
    assert (load_frame(path, 0) == values + 2048).all()


@pytest.mark.parametrize("bits", [8, 12, 16])
@pytest.mark.parametrize("window", [{}, {"WindowCenter": 0, "WindowWidth": 2000}])
def test_a_negative_slope_turns_dark_and_bright(tmp_path: Path, bits: int, window: dict[str, Any]) -> None:
    high = 2**bits - 1
    up = write_dicom(tmp_path / "up.dcm", grid(high), bits, RescaleSlope=1, RescaleIntercept=-1000, **window)
    falling = {"RescaleSlope": -1, "RescaleIntercept": high - 1000}
    down = write_dicom(tmp_path / "down.dcm", high - grid(high), bits, **falling, **window)
    assert (load_frame(up, 0) == load_frame(down, 0)).all()


def compressed(path: Path, syntax: pydicom.uid.UID) -> None:
    dataset = pydicom.dcmread(path)
    dataset.compress(syntax, generate_instance_uid=False)
    dataset.save_as(path)


def test_a_lossless_codec_and_a_deflated_file_give_the_values(tmp_path: Path) -> None:
    path = write_dicom(tmp_path / "a.dcm", grid(4095))
    dataset = pydicom.dcmread(path)
    compressed(path, RLELossless)
    assert (load_frame(path, 0) == grid(4095)).all()
    dataset.file_meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian
    dataset.save_as(path)
    assert (load_frame(path, 0) == grid(4095)).all()


def test_a_codec_that_no_package_decodes_is_named_with_the_remedy(tmp_path: Path) -> None:
    path = write_dicom(tmp_path / "a.dcm", grid(4095))
    dataset = pydicom.dcmread(path)
    dataset.file_meta.TransferSyntaxUID = JPEGLSLossless
    dataset.PixelData = pydicom.encaps.encapsulate([b"\xff\xd8\xff\xd9"])
    dataset["PixelData"].is_undefined_length = True
    dataset.save_as(path)
    with pytest.raises(ValueError, match=r"a\.dcm: pixels cannot be decoded .*gdcmconv --raw") as error:
        load_frame(path, 0)
    assert "force" not in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("syntax", [ImplicitVRLittleEndian, ExplicitVRLittleEndian, ExplicitVRBigEndian])
@pytest.mark.parametrize("suffix", [".dcm", ".IMA", ""])
@pytest.mark.parametrize("kept", ["all", "meta", "none"])
def test_files_of_any_encoding_and_suffix_are_read_without_preamble_and_meta_too(
    tmp_path: Path, syntax: pydicom.uid.UID, suffix: str, kept: str
) -> None:
    if kept == "none" and syntax == ExplicitVRBigEndian:
        pytest.skip("nothing tells it from other files")
    path = write_dicom(tmp_path / f"images/a{suffix}", grid(4095))
    dataset = pydicom.dcmread(path)
    if syntax == ExplicitVRBigEndian:
        dataset.PixelData = grid(4095).astype(">u2").tobytes()
    dataset.file_meta.TransferSyntaxUID = syntax
    pydicom.dcmwrite(path, dataset, implicit_vr=syntax.is_implicit_VR, little_endian=syntax.is_little_endian)
    whole = path.read_bytes()
    meta = 12 + int.from_bytes(whole[140:144], "little")  # (0002,0000) and what it counts
    path.write_bytes({"all": whole, "meta": whole[132:], "none": whole[132 + meta :]}[kept])
    assert recognise_dicom(tmp_path) == "1 DICOM files"
    assert (load_frame(path, 0) == grid(4095)).all()
    path.unlink()
    (tmp_path / "LICENSE").write_text("words")
    (tmp_path / "index.bin").write_bytes(b"\x08\0\x05\0 numbers")
    assert recognise_dicom(tmp_path) == "", "other files are not taken for DICOM"


@pytest.mark.filterwarnings("ignore")
def test_any_damage_is_a_value_error_or_none(tmp_path: Path) -> None:
    """Each byte of the header, and the length of the file."""
    path = write_dicom(tmp_path / "a.dcm", grid(4095)[:8, :8])
    whole = path.read_bytes()
    for place in range(132, len(whole) - 120, 7):
        for data in (whole[:place], whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :]):
            path.write_bytes(data)
            with suppress(ValueError):  # none where only the patient's name is damaged
                load_frame(path, 0)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer.*git lfs pull"),
        (b"<html>", "a web page"),
        (b"", "the file is empty"),
        (b"\x1f\x8b\x08\x00 zipped", "it begins otherwise.*export it again"),
    ],
)
def test_what_is_no_dicom_file_is_named(tmp_path: Path, start: bytes, message: str) -> None:
    (tmp_path / "a.dcm").write_bytes(start)
    with pytest.raises(ValueError, match=rf"a\.dcm: not a DICOM file .*{message}"):
        read_header(tmp_path / "a.dcm")


def test_more_than_16_bit_are_brought_to_16(tmp_path: Path) -> None:
    path = write_dicom(tmp_path / "a.dcm", grid(65535), 16)
    dataset = pydicom.dcmread(path)
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit = 32, 32, 31
    dataset.PixelData = (grid(65535).astype(np.uint32) << 16).tobytes()
    dataset.save_as(path)
    assert np.abs(load_frame(path, 0) - grid(65535)).max() <= 1


def framed(values: np.ndarray) -> np.ndarray:
    """bool: a rim of two pixels."""
    inside = np.zeros(values.shape, bool)
    inside[2:-2, 2:-2] = True
    return ~inside


@pytest.mark.parametrize(
    "tags",
    [
        {"PixelPaddingValue": 0},
        {"PixelPaddingValue": 4095},
        {"PixelPaddingValue": 4000, "PixelPaddingRangeLimit": 4095},
        {"PixelPaddingValue": 4095, "PixelPaddingRangeLimit": 4000},
        {"PixelPaddingValue": 4095, "PhotometricInterpretation": "MONOCHROME1"},
        {"PixelPaddingValue": 0, "PhotometricInterpretation": "MONOCHROME1"},
        {"PixelPaddingValue": 4095, "RescaleSlope": -1, "RescaleIntercept": 0},
    ],
)
def test_declared_padding_is_as_dark_as_the_darkest_of_the_picture(tmp_path: Path, tags: dict[str, Any]) -> None:
    values = 1000 + grid(500)
    rim = framed(values)
    rest = {key: value for key, value in tags.items() if "Padding" not in key}
    expected = load_frame(write_dicom(tmp_path / "plain.dcm", values, **rest), 0)
    padded = np.where(rim, tags["PixelPaddingValue"], values)
    seen = load_frame(write_dicom(tmp_path / "a.dcm", padded, **tags), 0)
    assert (seen[~rim] == expected[~rim]).all()
    assert (seen[rim] == expected[~rim].min()).all()


def test_padding_without_its_sign_is_known(tmp_path: Path) -> None:
    values = np.where(framed(grid(500)), -2000, grid(500)) & 0xFFFF
    path = write_dicom(tmp_path / "a.dcm", values, 16, PixelRepresentation=1)
    dataset = pydicom.dcmread(path)
    dataset.add_new("PixelPaddingValue", "US", 2**16 - 2000)
    dataset.save_as(path)
    assert load_frame(path, 0).min() == 2**15 + grid(500)[~framed(values)].min()


@pytest.mark.parametrize("photometric", ["MONOCHROME1", "MONOCHROME2"])
@pytest.mark.parametrize("lone", [{}, {"WindowWidth": 900}, {"WindowCenter": 900}])
@pytest.mark.parametrize("signed", [0, 1])
def test_a_negative_slope_without_a_whole_window_keeps_contrast_and_polarity(
    tmp_path: Path, photometric: str, lone: dict[str, Any], signed: int
) -> None:
    values = grid(2000)
    tags = {"RescaleSlope": -1, "PhotometricInterpretation": photometric, "PixelRepresentation": signed, **lone}
    seen = load_frame(write_dicom(tmp_path / "a.dcm", values, 16, **tags), 0).astype(int)
    expected = values if photometric == "MONOCHROME1" else -values
    assert (seen - seen.min() == expected - expected.min()).all()


def test_a_picture_that_a_window_makes_constant_is_refused(tmp_path: Path) -> None:
    tags = {"RescaleSlope": -1, "RescaleIntercept": 0, "WindowCenter": 2000, "WindowWidth": 3000}
    path = write_dicom(tmp_path / "a.dcm", 600 + grid(3000), **tags)  # a window of stored values, after the slope
    with pytest.raises(ValueError, match=r"a\.dcm: its window or table is not usable \(all is of grey 0, but stored"):
        load_frame(path, 0)
    blank = write_dicom(tmp_path / "b.dcm", 600 + grid(20), **tags)
    assert (load_frame(blank, 0) == 0).all(), "a blank frame is one"


@pytest.mark.parametrize("signed", [0, 1])
def test_values_of_16_bit_in_deeper_files_keep_their_contrast(tmp_path: Path, signed: int) -> None:
    path = write_dicom(tmp_path / "a.dcm", grid(3000), 16, PixelRepresentation=signed)
    expected = load_frame(path, 0)
    dataset = pydicom.dcmread(path)
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit = 32, 32, 31
    dataset.PixelData = grid(3000).astype("<u4").tobytes()
    dataset.save_as(path)
    assert (load_frame(path, 0) == expected).all()
