"""What is found out before anything is written: faults, classes, groups, leaks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rl_reward_network.atomic_io import read_json
from rl_reward_network.data.annotations import read_annotations
from rl_reward_network.data_import.survey import (
    NAME,
    ImportOptions,
    Survey,
    chosen_classes,
    report_lines,
    survey_source,
)
from rl_reward_network.data_import.write import write_import
from tests.data_import.sources import SIZE, as_255, picture, save, truth, write_dicom, write_pairs

OWN = ImportOptions(patients_csv="none")


def points_of(source: Path, options: ImportOptions = OWN) -> str:
    survey = survey_source(source, options)
    with pytest.raises(ValueError) as error:
        survey.check()
    assert str(error.value) == "\n".join(survey.open_points)
    return str(error.value)


def lines_of(survey: Survey) -> str:
    return "\n".join(report_lines(survey))


def test_a_good_source_has_no_open_point(tmp_path: Path) -> None:
    survey = survey_source(write_pairs(tmp_path), OWN)
    survey.check()
    assert (survey.classes, survey.phrase, survey.leaks) == (["255"], "blood vessel", [])
    share = np.mean([truth(number) for number in range(5)])
    assert lines_of(survey).splitlines() == [
        "layout: paired folders (images with masks)",
        "images: 5, 5 with a mask; 32 x 24 (5)",
        f"class 255: in 5 images, {share:.2%} of the pixels, the mask",
        "phrase: blood vessel; note: the default, which `sa2va-rl data import --phrase` changes",
        "patients: none is named, so each image is one of its own, which every report repeats as a possible leak; "
        + NAME,
    ]


def test_the_patients_that_folders_show_are_told_with_an_example(tmp_path: Path) -> None:
    write_pairs(tmp_path, "Patient {:02}/img.png", "Patient {:02}/img_mask.png")
    save(tmp_path / "Patient 03/other.png", picture(7))
    survey = survey_source(tmp_path, ImportOptions())
    survey.check()
    said = "patients by folder names: 5, e.g. 'Patient 03': 2 images; proposed, not confirmed; if they are wrong, "
    assert said + NAME in lines_of(survey)
    save(tmp_path / "loose.png", picture(8))
    assert "; 1 images name no patient, each is one of its own; " in lines_of(survey_source(tmp_path, ImportOptions()))


@pytest.mark.parametrize("orientation", [3, 6, 8])
def test_a_photograph_is_turned_upright_before_its_mask_is_compared(tmp_path: Path, orientation: int) -> None:
    """The mask is drawn on the picture as viewers show it; one drawn on the pixels as they are stored is a fault."""
    write_pairs(tmp_path)
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = (SIZE[1], SIZE[0]) if orientation > 4 else SIZE
    (tmp_path / "images/2.png").unlink()
    save(tmp_path / "images/2.jpg", picture(2), exif=exif)
    save(tmp_path / "masks/2.png", truth(2, upright))
    survey = survey_source(tmp_path, ImportOptions("none", label="all"))
    survey.check()
    assert [one.size for one in survey.seen if one.item.name == "2.jpg"] == [upright]
    if orientation > 4:
        save(tmp_path / "masks/2.png", truth(2))
        assert "mask is 32 x 24 (width x height), but its image is 24 x 32" in points_of(
            tmp_path, ImportOptions("none", label="all")
        )


def test_all_broken_files_are_listed_up_to_ten(tmp_path: Path) -> None:
    write_pairs(tmp_path, count=14)
    for number in range(12):
        path = tmp_path / f"{'images' if number % 2 else 'masks'}/{number}.png"
        path.write_bytes(path.read_bytes()[:60])
    text = points_of(tmp_path)
    assert "12 faults" in text
    assert text.count("not a readable image") == 10
    assert "... and 2 more" in text
    assert "images: 14, 14 with a mask; 32 x 24 (2)" in lines_of(survey_source(tmp_path, OWN))


def test_several_classes_are_listed_with_counts_until_one_is_chosen(tmp_path: Path) -> None:
    write_pairs(tmp_path, stored=lambda mask: np.zeros_like(mask, np.uint8))
    assert "all masks are empty in every image; the masks hold zeros only" in points_of(tmp_path)
    write_pairs(tmp_path, stored=lambda mask: mask.astype(np.uint8))
    save(tmp_path / "masks/4.png", 3 * truth(4).astype(np.uint8))
    assert (
        "2 classes: 1 (4 images), 3 (1 images); choose one by --label NAME, or --label all for their union:"
        f" sa2va-rl doctor --data_root {tmp_path} --label 1"
    ) in points_of(tmp_path)
    survey = survey_source(tmp_path, ImportOptions("none", label="3"))
    survey.check()
    assert survey.classes == ["3"]
    assert "empty masks: 4" in lines_of(survey)
    assert "label '2' is no class" in points_of(tmp_path, ImportOptions("none", label="2"))
    (tmp_path / "images/0.png").write_bytes(b"")
    faults, groups, classes = survey_source(tmp_path, ImportOptions("p.csv")).open_points
    assert ("the file is empty" in faults, "p.csv: file not found" in groups, "2 classes" in classes) == (
        True,
        True,
        True,
    )


IDS = {"1": "vessel", "2": "catheter", "3": "1"}


@pytest.mark.parametrize(
    ("label", "classes", "ids", "chosen"),
    [
        (None, ["255"], {}, ["255"]),
        (None, ["1", "2"], {}, None),
        ("all", ["2", "10", "1"], {}, ["1", "2", "10"]),
        ("all", ["all", "b"], {}, ["all"]),  # a class of that name
        ("2", ["1", "2"], {}, ["2"]),
        ("2, 1", ["1", "2"], {}, ["2", "1"]),
        ("#FF0000", ["#ff0000", "#00ff00"], {}, ["#ff0000"]),
        ("2", ["vessel"], IDS, ["catheter"]),  # by number
        ("1", ["vessel"], IDS, ["1"]),  # names come before numbers
        ("Vessel", ["Vessel", "vessel"], {}, ["Vessel"]),
        ("VESSEL", ["vessel"], {}, ["vessel"]),
        ("VESSEL", ["Vessel", "vessel"], {}, "'VESSEL' is no class"),
        ("tree", ["vessel", "catheter"], {}, r"label 'tree' is no class .* catheter, vessel.*--label all"),
    ],
)
def test_the_only_class_is_chosen_and_several_are_asked_for(label: Any, classes: Any, ids: Any, chosen: Any) -> None:
    if isinstance(chosen, str):
        with pytest.raises(ValueError, match=chosen):
            chosen_classes(label, classes, ids)
    else:
        assert chosen_classes(label, classes, ids) == chosen


def test_suspected_leaks_are_listed_by_name(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    save(tmp_path / "images/3.png", np.clip(picture(1).astype(int) + 5, 0, 255).astype(np.uint8))
    survey = survey_source(tmp_path, OWN)
    assert len(survey.leaks) == 1
    assert "1 pairs of images in two groups whose" in lines_of(survey)
    assert "images/1.png and images/3.png (" in lines_of(survey)
    assert "(no groups are known yet)" in lines_of(survey_source(tmp_path, ImportOptions("nowhere.csv")))
    one_group = ImportOptions(group_regex=r"images/(?P<group>[024]|)")
    assert survey_source(tmp_path, one_group).leaks[0][:2] == (1, 3), "groups that are open: each image is its own"
    (tmp_path / "p.csv").write_text("image,group\n0,a\n1,b\n2,c\n3,b\n4,d\n")
    assert survey_source(tmp_path, ImportOptions(str(tmp_path / "p.csv"))).leaks == []


@pytest.mark.parametrize(
    ("label", "phrase", "expected"),
    [("vessel_tree", None, "vessel tree"), ("all", None, "blood vessel"), ("catheter", "wire", "wire")],
)
def test_the_phrase_is_the_name_of_the_class(tmp_path: Path, label: str, phrase: str | None, expected: str) -> None:
    write_pairs(tmp_path, "imagesTr/{}_0000.png", "labelsTr/{}.png", stored=lambda mask: mask.astype(np.uint8))
    save(tmp_path / "labelsTr/4.png", 2 * truth(4).astype(np.uint8))
    (tmp_path / "dataset.json").write_text('{"labels": {"background": 0, "vessel_tree": 1, "catheter": 2}}')
    survey = survey_source(tmp_path, ImportOptions("none", label=label, phrase=phrase))
    survey.check()
    assert survey.phrase == expected
    assert ("--phrase` changes" in lines_of(survey)) == (label == "all"), "the default is told"


def test_broken_files_are_skipped_up_to_a_limit_and_listed(tmp_path: Path) -> None:
    source = write_pairs(tmp_path / "source", count=8)
    (source / "images/1.png").write_bytes((source / "images/1.png").read_bytes()[:200])
    (source / "masks/2.png").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    for limit in (0, 1):
        survey = survey_source(source, ImportOptions("none", skip=limit))
        with pytest.raises(
            ValueError, match=r"2 faults[\s\S]*1\.png[\s\S]*2\.png[\s\S]*--skip 2 of sa2va-rl data import"
        ):
            survey.check()
    survey = survey_source(source, ImportOptions("none", skip=2))
    lines = "\n".join(report_lines(survey))
    assert "images: 6, 6 with a mask" in lines
    assert "skipped: 2 broken file(s), left out by --skip 2" in lines
    assert "git lfs pull" in lines
    write_import(survey, tmp_path / "to")
    assert len(read_annotations(tmp_path / "to")) == 6
    first, second = (tmp_path / "to/skipped.txt").read_text().splitlines()
    assert "images/1.png: not a readable image" in first
    assert "masks/2.png" in second
    assert read_json(tmp_path / "to/import.json")["skipped"] == 2
    with pytest.raises(ValueError, match="skip is -1, expected 0 or more"):
        ImportOptions(skip=-1)


def test_what_is_skipped_of_dicom_names_no_file(tmp_path: Path) -> None:
    for number in range(5):
        write_dicom(tmp_path / f"source/DOE_{number}.dcm", np.arange(24 * 32).reshape(24, 32) + number)
    (tmp_path / "source/DOE_1.dcm").write_bytes(b"rubbish")
    (tmp_path / "source/DOE_2.dcm").write_bytes((tmp_path / "source/DOE_2.dcm").read_bytes()[:-500])
    write_import(survey_source(tmp_path / "source", ImportOptions(skip=2)), tmp_path / "to")
    listed = (tmp_path / "to/skipped.txt").read_text()
    assert "dicom_00002: not a DICOM file" in listed
    assert "dicom_00003.png: pixels cannot be decoded" in listed
    assert "DOE" not in listed


def test_sides_below_8_pixels_are_refused_as_in_training_and_can_be_skipped(tmp_path: Path) -> None:
    source = write_pairs(tmp_path / "source")
    save(source / "images/small.png", picture(1, (7, 30)))
    assert "30 x 7 pixels (width x height), expected at least 8 x 8" in points_of(source)
    for number, rows in ((1, 24), (2, 6)):
        write_dicom(tmp_path / f"dicom/{number}.dcm", np.arange(rows * 32).reshape(rows, 32))
    survey = survey_source(tmp_path / "dicom", ImportOptions("none", skip=1))
    survey.check()
    assert "dicom_00002: the image has 32 x 6 pixels" in survey.skipped[0]


def test_images_without_a_mask_that_look_like_masks_are_a_fault(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    save(tmp_path / "images/lesion.png", as_255(truth(3)))
    (point,) = survey_source(tmp_path, ImportOptions("none")).open_points
    assert "1 image(s) without a mask hold a few flat colours, as masks do (images/lesion.png)" in point
