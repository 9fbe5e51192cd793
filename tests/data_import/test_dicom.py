"""DICOM: files and frames, what a frame looks like, hashes, and no name anywhere."""

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

from rl_reward_network.data.annotations import read_annotations
from rl_reward_network.data_import.dicom import load_frame, read_dicom, read_header, recognise_dicom, stored_values
from rl_reward_network.data_import.survey import ImportOptions, report_lines, survey_source
from rl_reward_network.data_import.write import import_notes, write_import
from tests.data_import.sources import SECRET, SIZE, as_255, save, series_uid, truth, write_dicom


def grid(high: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, high + 1, SIZE)


def test_the_window_is_applied(tmp_path: Path) -> None:
    """PS3.3, C.11.2.1.2.1: linear between centre - 0.5 - (width - 1) / 2 and that plus width - 1."""
    stored = np.tile(np.arange(0, 4096, 128), (24, 1))
    window: dict[str, Any] = {"WindowCenter": 1024, "WindowWidth": 1025}
    expected = np.clip((stored - (1024 - 0.5 - 512)) / 1024, 0, 1) * 4095
    for more in ({}, {"VOILUTFunction": ""}):
        assert np.abs(load_frame(write_dicom(tmp_path / "a.dcm", stored, **window, **more), 0) - expected).max() <= 1


def functional_group(name: str, **tags: Any) -> pydicom.Dataset:
    item, group = pydicom.Dataset(), pydicom.Dataset()
    for tag, value in tags.items():
        setattr(item, tag, value)
    setattr(group, name, [item])
    return group


def test_the_transforms_of_enhanced_files_are_applied_for_all_frames_or_for_each(tmp_path: Path) -> None:
    stored = np.stack([grid(4095), grid(4095)])
    rescale = functional_group("PixelValueTransformationSequence", RescaleSlope=2, RescaleIntercept=-1024)
    windows = [{"WindowCenter": centre, "WindowWidth": 900} for centre in (1000, 3000)]
    own = [functional_group("FrameVOILUTSequence", **window) for window in windows]
    groups = {"SharedFunctionalGroupsSequence": [rescale], "PerFrameFunctionalGroupsSequence": own}
    path = write_dicom(tmp_path / "enhanced.dcm", stored, **groups)
    for frame, window in enumerate(windows):
        plain = {"RescaleSlope": 2, "RescaleIntercept": -1024, **window}
        expected = load_frame(write_dicom(tmp_path / "plain.dcm", stored, **plain), frame)
        assert (load_frame(path, frame) == expected).all()
        assert (expected != stored[frame]).mean() > 0.9
    cut = write_dicom(tmp_path / "cut.dcm", stored, **{**groups, "PerFrameFunctionalGroupsSequence": own[:1]})
    with pytest.raises(ValueError, match=r"cut\.dcm: its window or table is not usable"):
        load_frame(cut, 1)


@pytest.mark.parametrize(("frames", "chosen"), [("first", [1]), ("middle", [3]), ("all", [1, 2, 3, 4, 5])])
def test_frames_are_chosen(tmp_path: Path, frames: str, chosen: list[int]) -> None:
    write_dicom(tmp_path / "images/run.dcm", np.stack([np.full(SIZE, 100 * frame) for frame in range(1, 6)]))
    save(tmp_path / "masks/run_3.png", as_255(truth(3)))
    found = read_dicom(tmp_path, frames)
    assert found.faults == []
    assert [item.name for item in found.items] == [f"dicom_00001_frame_{frame:04d}.png" for frame in chosen]
    assert [int(item.load_image()[0, 0]) for item in found.items] == [100 * frame for frame in chosen]
    assert [item.load_masks is not None for item in found.items] == [frame == 3 for frame in chosen]
    assert len({item.series for item in found.items}) == 1


def test_a_mask_of_an_unknown_frame_and_an_unknown_choice_are_refused(tmp_path: Path) -> None:
    write_dicom(tmp_path / "images/run.dcm", np.zeros((3, *SIZE)))
    save(tmp_path / "masks/run.png", as_255(truth(3)))
    (fault,) = read_dicom(tmp_path, "all").faults
    assert "run.png is the mask of one of 3 frames; name it run_<n>" in fault
    assert read_dicom(tmp_path, "middle").items[0].load_masks is not None
    with pytest.raises(ValueError, match="frames is 'last', expected first, middle, all"):
        read_dicom(tmp_path, "last")


@pytest.mark.parametrize("other", ["gt/run.png", "masks/run.bmp", "masks/run_1.png"])
def test_two_masks_of_one_image_are_a_fault(tmp_path: Path, other: str) -> None:
    write_dicom(tmp_path / "images/run.dcm", np.zeros(SIZE))
    save(tmp_path / "masks/run.png", as_255(truth(1)))
    save(tmp_path / other, as_255(truth(2)))
    (fault,) = read_dicom(tmp_path).faults
    assert other in fault
    assert "masks/run.png" in fault
    assert "masks of one image; delete all but one" in fault


def test_patients_are_groups_by_a_keyed_hash_and_nothing_names_them(tmp_path: Path) -> None:
    source, groups = tmp_path / "source", []
    for number in range(4):
        name = f"{SECRET}_{number}.dcm" if number else "IM0000"  # archives often leave the suffix out
        write_dicom(source / "images" / name, grid(4095) + number, patient=f"patient {number // 2}")
    save(source / "masks" / f"{SECRET}_1.png", as_255(truth(1)))
    assert recognise_dicom(source) == "4 DICOM files"
    for out in (tmp_path / "a/one", tmp_path / "a/two", tmp_path / "b/three"):
        survey = survey_source(source, ImportOptions())
        assert survey.groups_from == "the files themselves"
        write_import(survey, out)
        samples = read_annotations(out)
        groups.append([sample.group for sample in samples])
        assert [sample.labelled for sample in samples].count(True) == 1
        for file in filter(Path.is_file, out.rglob("*")):
            assert not any(word in str(file).lower() for word in ("doe", "4711"))
            content = file.read_bytes()
            names = [SECRET, "patient 0", "patient 1", series_uid("patient 0"), series_uid("patient 1")]
            assert not any(name.encode() in content for name in names), file
    for found in groups:
        assert found[0] == found[3] != found[1] == found[2], "IM0000 is the last by name"
    assert groups[0] == groups[1], "imports into one folder share a key"
    assert not set(groups[0]) & set(groups[2]), "another folder has another key"


@pytest.mark.parametrize("groups", [None, "none"])
def test_patients_keep_their_groups_when_a_file_is_added(tmp_path: Path, groups: str | None) -> None:
    """Otherwise a patient in the training of one import could be in the test of the next."""
    found = []
    for first in (1, 0):
        for number in range(first, 4):
            write_dicom(tmp_path / f"source/{number}.dcm", np.roll(grid(4095), number), patient=f"patient {number}")
        write_import(survey_source(tmp_path / "source", ImportOptions(groups)), tmp_path / f"to_{first}")
        found.append({s.load_image().tobytes(): s.group_id for s in read_annotations(tmp_path / f"to_{first}")})
    before, after = found
    assert len(set(after.values())) == 4
    assert before == {image: after[image] for image in before}


def test_names_in_a_table_are_hashed_too_and_the_report_on_leaks_names_no_file(tmp_path: Path) -> None:
    for number in range(4):
        write_dicom(tmp_path / f"source/{SECRET}_{number}.dcm", grid(4095), patient="")
    survey = survey_source(tmp_path / "source", ImportOptions())
    assert survey.groups_from == "none", "no PatientID, and nothing in names"
    lines = "\n".join(report_lines(survey))
    assert "dicom_00001.png and dicom_00002.png" in lines
    assert SECRET not in lines
    rows = "".join(f"{SECRET}_{n}.dcm,DOE {n % 2}\n" for n in range(4))
    (tmp_path / "p.csv").write_text(f"image,group\n{rows}")
    write_import(survey_source(tmp_path / "source", ImportOptions(str(tmp_path / "p.csv"))), tmp_path / "to")
    assert len({sample.group for sample in read_annotations(tmp_path / "to")}) == 2
    assert "DOE" not in (tmp_path / "to/annotations.json").read_text()


def test_a_palette_gives_its_colours(tmp_path: Path) -> None:
    tables = {}
    for name, step in (("Red", 1), ("Green", 2), ("Blue", 3)):
        tables[f"{name}PaletteColorLookupTableDescriptor"] = [256, 0, 16]
        tables[f"{name}PaletteColorLookupTableData"] = (np.arange(256) * step % 256 * 257).astype("<u2").tobytes()
    path = write_dicom(tmp_path / "a.dcm", grid(255), 8, PhotometricInterpretation="PALETTE COLOR", **tables)
    assert (load_frame(path, 0) == grid(255)[..., None] * [1, 2, 3] % 256).all()


def table_of_values() -> pydicom.Dataset:
    table = pydicom.Dataset()
    table.LUTDescriptor, table.LUTData = [4096, 0, 12], (4095 - np.arange(4096)).astype("<u2").tobytes()
    table["LUTDescriptor"].VR, table["LUTData"].VR = "US", "OW"
    return table


def test_files_without_a_picture_masks_without_a_frame_and_burned_in_text_are_told(tmp_path: Path) -> None:
    path = write_dicom(tmp_path / "run.dcm", np.zeros((3, *SIZE)), BurnedInAnnotation="YES")
    (tmp_path / "cut.dcm").write_bytes(path.read_bytes()[:300])
    save(tmp_path / "masks/run.png", as_255(truth(3)))
    notes = "\n".join(read_dicom(tmp_path).notes)
    assert "1 file(s) without a picture" in notes
    assert "1 mask(s) without a frame, taken for the middle one" in notes
    assert "burned into the picture" in notes


def masks_of(source: Path, frames: str = "middle") -> list[Any]:
    found = read_dicom(source, frames)
    assert found.faults == []
    return [item.load_masks and item.load_masks(SIZE) for item in found.items]


@pytest.mark.parametrize(
    ("image", "mask"), [("images/{}.dcm", "masks/{}.dcm"), ("{}.dcm", "{}_mask.dcm"), ("{}.dcm", "{}_mask.png")]
)
@pytest.mark.parametrize(
    "tags", [{}, {"PhotometricInterpretation": "MONOCHROME1"}, {"WindowCenter": 9, "WindowWidth": 3}]
)
def test_dicom_masks_are_read_by_their_stored_values(tmp_path: Path, image: str, mask: str, tags: Any) -> None:
    for number in range(3):
        write_dicom(tmp_path / image.format(number), grid(4095))
        path = tmp_path / mask.format(number)
        save(path, truth(number)) if path.suffix == ".png" else write_dicom(path, truth(number), 8, **tags)
    masks = masks_of(tmp_path)
    assert [list(classes) for classes in masks] == [["1"]] * 3
    assert all((classes["1"] == truth(number)).all() for number, classes in enumerate(masks))


def test_a_dicom_mask_has_one_frame_or_those_of_its_image(tmp_path: Path) -> None:
    write_dicom(tmp_path / "a.dcm", np.stack([grid(4095)] * 3))
    write_dicom(tmp_path / "masks/a.dcm", np.stack([truth(number) for number in range(3)]), 8)
    (middle,) = masks_of(tmp_path)
    assert (middle["1"] == truth(1)).all()
    write_dicom(tmp_path / "masks/a.dcm", np.stack([truth(0)] * 2), 8)
    (item,) = read_dicom(tmp_path).items
    with pytest.raises(ValueError, match=r"masks.a\.dcm: mask has 2 frame\(s\) .* its image has 3"):
        item.load_masks(SIZE)


@pytest.mark.parametrize(
    "tags", [{"Modality": "SEG"}, {"SOPClassUID": "1.2.840.10008.5.1.4.1.1.66.4"}, {"Modality": "RTDOSE"}]
)
def test_segmentations_and_other_objects_are_no_images(tmp_path: Path, tags: dict[str, str]) -> None:
    write_dicom(tmp_path / "a.dcm", grid(4095))
    write_dicom(tmp_path / "b.dcm", truth(0), 8, **tags)
    found = read_dicom(tmp_path)
    assert [item.found_as for item in found.items] == ["a.dcm"]
    kind = tags.get("Modality", "SEG")
    assert any(f"1 DICOM object(s) of modality {kind}, which are no images, left out" in note for note in found.notes)
    assert any("as PNG in masks/" in note for note in found.notes) == (kind == "SEG")


@pytest.mark.parametrize(
    ("tags", "aspect"),
    [
        ({"PixelAspectRatio": [2, 1]}, "2"),
        ({"PixelSpacing": [0.3, 0.6], "PixelAspectRatio": [1, 1]}, "0.5"),
        ({"ImagerPixelSpacing": [0.4, 0.3]}, "1.33"),
        ({"SharedFunctionalGroupsSequence": [functional_group("PixelMeasuresSequence", PixelSpacing=[1, 2])]}, "0.5"),
        ({"PixelSpacing": [0.3, 0.3], "ImagerPixelSpacing": None}, ""),
        ({}, ""),
    ],
)
def test_pixels_that_are_no_squares_are_told_by_import_and_by_every_report(tmp_path, tags, aspect):
    for number in range(2):
        write_dicom(tmp_path / f"s/{number}.dcm", grid(4000) + number, **tags)
        save(tmp_path / f"s/masks/{number}.png", as_255(truth(number)))
    survey = survey_source(tmp_path / "s", ImportOptions("none"))
    write_import(survey, tmp_path / "out")
    told = [
        line for line in (*report_lines(survey), *import_notes(tmp_path / "out")) if "pixels are no squares" in line
    ]
    assert len(told) == (2 if aspect else 0)
    assert all(f"2 image(s) whose pixels are no squares (height / width {aspect})" in line for line in told)


@pytest.mark.parametrize(
    ("bits", "tags", "inverted"),
    [
        *((bits, {}, False) for bits in (8, 12, 16)),
        *((bits, {"PhotometricInterpretation": "MONOCHROME1"}, True) for bits in (8, 12, 16)),
        (12, {"RescaleSlope": 2, "RescaleIntercept": -1024}, False),
        (12, {"RescaleSlope": 4}, False),
        (12, {"RescaleSlope": None, "RescaleIntercept": None}, False),
        (12, {"VOILUTSequence": [table_of_values()]}, True),
    ],
)
def test_grey_keeps_the_range_of_its_bits(tmp_path: Path, bits: int, tags: dict[str, Any], inverted: bool) -> None:
    high = 2**bits - 1
    seen = load_frame(write_dicom(tmp_path / "a.dcm", grid(high), bits, **tags), 0)
    assert seen.dtype == (np.uint8 if bits == 8 else np.uint16)
    assert (seen == (high - grid(high) if inverted else grid(high))).all()


@pytest.mark.parametrize("tags", [{"WindowCenter": 0, "WindowWidth": 0}, {"RescaleSlope": 0, "RescaleIntercept": 0}])
def test_a_transform_that_is_none_is_a_fault_with_its_file(tmp_path: Path, tags: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"a\.dcm: its window or table is not usable"):
        load_frame(write_dicom(tmp_path / "a.dcm", grid(4095), **tags), 0)


def test_a_sign_codecs_and_deeper_words_give_the_values(tmp_path: Path) -> None:
    signed = write_dicom(tmp_path / "s.dcm", ((grid(4095) - 2048) & 0xFFF) << 4, HighBit=15, PixelRepresentation=1)
    assert (stored_values(signed) == grid(4095) - 2048).all()
    assert (load_frame(signed, 0) == grid(4095)).all()
    path = write_dicom(tmp_path / "a.dcm", grid(4095))
    dataset = pydicom.dcmread(path)
    compressed(path, RLELossless)
    assert (load_frame(path, 0) == grid(4095)).all()
    dataset.file_meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian
    dataset.save_as(path)
    assert (load_frame(path, 0) == grid(4095)).all()
    for sign in (0, 1):
        path = write_dicom(tmp_path / "d.dcm", grid(3000), 16, PixelRepresentation=sign)
        expected, dataset = load_frame(path, 0), pydicom.dcmread(path)
        dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit = 32, 32, 31
        dataset.PixelData = grid(3000).astype("<u4").tobytes()
        dataset.save_as(path)
        assert (load_frame(path, 0) == expected).all(), "values of 16 bit keep their contrast"
        dataset.PixelRepresentation, dataset.PixelData = 0, (grid(65535).astype(np.uint32) << 16).tobytes()
        dataset.save_as(path)
        assert np.abs(load_frame(path, 0) - grid(65535)).max() <= 1, "more are brought to 16"


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
def test_files_of_any_encoding_and_suffix_are_read_without_preamble_and_meta_too(tmp_path, syntax, suffix, kept):
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
def test_a_negative_slope_without_a_whole_window_keeps_contrast_and_polarity(tmp_path, photometric, lone, signed):
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
