"""DICOM: frames, photometric interpretation, window, depth, hashes, and no name anywhere."""

from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest

from rl_reward_network.data.annotations import read_annotations
from rl_reward_network.data_import.dicom import load_frame, read_dicom, recognise_dicom
from rl_reward_network.data_import.survey import ImportOptions, report_lines, survey_source
from rl_reward_network.data_import.write import import_notes, write_import
from tests.data_import.sources import SECRET, SIZE, as_255, save, series_uid, truth, write_dicom


def grid(high: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, high + 1, SIZE)


@pytest.mark.parametrize(("bits", "kind"), [(8, np.uint8), (12, np.uint16), (16, np.uint16)])
def test_stored_values_are_kept_and_monochrome1_is_inverted(tmp_path: Path, bits: int, kind: type) -> None:
    high = 2**bits - 1
    stored = grid(high)
    image = load_frame(write_dicom(tmp_path / "a.dcm", stored, bits), 0)
    assert image.dtype == kind
    assert (image == stored).all()
    inverted = write_dicom(tmp_path / "b.dcm", stored, bits, PhotometricInterpretation="MONOCHROME1")
    assert (load_frame(inverted, 0) == high - stored).all()


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
    run = np.stack([np.full(SIZE, 100 * frame) for frame in range(1, 6)])
    write_dicom(tmp_path / "images/run.dcm", run)
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
        assert survey.groups_from == "layout"
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
    assert survey.groups is None, "no PatientID"
    lines = "\n".join(report_lines(survey))
    assert "dicom_00001.png and dicom_00002.png" in lines
    assert SECRET not in lines
    rows = "".join(f"{SECRET}_{n}.dcm,DOE {n % 2}\n" for n in range(4))
    (tmp_path / "p.csv").write_text(f"image,group\n{rows}")
    write_import(survey_source(tmp_path / "source", ImportOptions(str(tmp_path / "p.csv"))), tmp_path / "to")
    assert len({sample.group for sample in read_annotations(tmp_path / "to")}) == 2
    assert "DOE" not in (tmp_path / "to/annotations.json").read_text()


def test_what_cannot_be_decoded_is_a_fault_with_its_file(tmp_path: Path) -> None:
    (write_dicom(tmp_path / "cut.dcm", grid(4095))).write_bytes((tmp_path / "cut.dcm").read_bytes()[:-500])
    with pytest.raises(ValueError, match=r"cut\.dcm: pixels cannot be decoded"):
        load_frame(tmp_path / "cut.dcm", 0)
    (tmp_path / "no.dcm").write_bytes(b"nothing")
    fault = read_dicom(tmp_path).broken["dicom_00002"]
    assert "no.dcm: not a DICOM file (it begins otherwise); copy it again" in fault


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


@pytest.mark.parametrize(
    ("tags", "inverted"),
    [
        ({"RescaleSlope": 2, "RescaleIntercept": -1024}, False),
        ({"RescaleSlope": 4}, False),
        ({"RescaleSlope": None, "RescaleIntercept": None}, False),
        ({"VOILUTSequence": [table_of_values()]}, True),
    ],
)
def test_a_transform_of_all_values_keeps_their_range(tmp_path: Path, tags: dict[str, Any], inverted: bool) -> None:
    stored = grid(4095)
    seen = load_frame(write_dicom(tmp_path / "a.dcm", stored, **tags), 0)
    assert (seen == (4095 - stored if inverted else stored)).all()


@pytest.mark.parametrize("tags", [{"WindowCenter": 0, "WindowWidth": 0}, {"RescaleSlope": 0, "RescaleIntercept": 0}])
def test_a_transform_that_is_none_is_a_fault_with_its_file(tmp_path: Path, tags: dict[str, Any]) -> None:
    path = write_dicom(tmp_path / "a.dcm", grid(4095), **tags)
    with pytest.raises(ValueError, match=r"a\.dcm: its window or table is not usable"):
        load_frame(path, 0)


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
    assert item.load_masks is not None
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
def test_pixels_that_are_no_squares_are_told_by_import_and_by_every_report(
    tmp_path: Path, tags: dict[str, Any], aspect: str
) -> None:
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
