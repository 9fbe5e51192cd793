"""An import of several classes that are asked for by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from rl_reward_network.data.annotations import read_annotations
from rl_reward_network.data.names import classes_of
from rl_reward_network.data_import.survey import ImportOptions, report_lines, survey_source
from rl_reward_network.data_import.write import write_import
from tests.data_import.sources import annotation, coco_content, picture, save, truth, write_json

CLASSES: list[dict[str, Any]] = [
    {"name": "vessel", "phrases": ["the vessel"], "held_out": "every vessel", "ids": "all"},
    {
        "name": "right artery",
        "phrases": ["the right artery", "the RCA"],
        "held_out": "the artery of the right side",
        "ids": [1, "1b"],
        "absent_with": ["2"],
    },
    {
        "name": "left artery",
        "phrases": ["the left artery"],
        "held_out": "the artery of the left side",
        "ids": ["2"],
        "asked_only_with": ["2b"],
        "absent_with": ["1"],
    },
]


def write_source(folder: Path, classes: list[dict[str, Any]]) -> ImportOptions:
    """Five images: both parts of the right artery; the left one with its branch, and alone; a branch alone; none."""
    for number in range(5):
        save(folder / "coco" / "images" / f"{number}.png", picture(number))
    drawn = [(0, 0, 1), (1, 0, 2), (2, 1, 3), (3, 1, 4), (4, 2, 3), (5, 3, 4)]  # outline, image, category
    annotations = [annotation(outline, image, category) for outline, image, category in drawn]
    names = [f"{number}.png" for number in range(5)]
    write_json(folder / "coco" / "result.json", coco_content(names, annotations, ["1", "1b", "2", "2b"]))
    (folder / "classes.json").write_text(json.dumps(classes))
    return ImportOptions(patients_csv="none", classes=folder / "classes.json")


def test_each_class_has_its_mask_and_a_certain_absence_an_empty_one(tmp_path: Path) -> None:
    survey = survey_source(tmp_path / "coco", write_source(tmp_path, CLASSES))
    lines = report_lines(survey)
    assert "asked for by name: right artery: 1 images, certainly absent in 2; 2 wordings, 1 held out" in lines
    assert "asked for by name: left artery: 1 images, certainly absent in 1; 1 wordings, 1 held out" in lines
    assert "note: 1 image(s) in which no class is asked for, left out" in lines
    assert not any(line.startswith("phrase:") for line in lines)
    write_import(survey, tmp_path / "out")
    samples = read_annotations(tmp_path / "out", None)
    masks = {(sample.image_path.name, sample.text): sample.load_mask() for sample in samples}
    right, left = truth(0) | truth(1), truth(2)
    expected = {
        ("0.png", "vessel"): right,
        ("0.png", "right artery"): right,
        ("0.png", "left artery"): right & False,
        ("1.png", "vessel"): left | truth(3),
        ("1.png", "right artery"): right & False,
        ("1.png", "left artery"): left,
        ("2.png", "vessel"): truth(4),
        ("2.png", "right artery"): right & False,
        ("3.png", "vessel"): truth(5),
    }
    assert masks.keys() == expected.keys()
    for key, mask in masks.items():
        assert (mask == expected[key]).all(), key
    assert classes_of(tmp_path / "out")["right artery"].ids == ("1", "1b")


@pytest.mark.parametrize(("field", "value"), [("absent_with", "9"), ("asked_only_with", "all")])
def test_a_category_that_is_not_there_is_refused_with_class_and_field(tmp_path: Path, field: str, value: str) -> None:
    options = write_source(tmp_path, [CLASSES[0], CLASSES[1] | {field: [value]}])
    message = rf"classes.json: class 1 \('right artery'\): `{field}` has '{value}', but the masks hold 1, 2, 1b, 2b"
    with pytest.raises(ValueError, match=message):
        survey_source(tmp_path / "coco", options).check()


@pytest.mark.parametrize(("flag", "value"), [("label", "all"), ("phrase", "vessel")])
def test_one_class_beside_a_file_of_classes_is_refused(tmp_path: Path, flag: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{flag} is '{value}', but .*classes.json names the classes: leave it out"):
        ImportOptions(**{flag: value}, classes=tmp_path / "classes.json")  # type: ignore[arg-type]


def test_a_class_without_categories_is_refused(tmp_path: Path) -> None:
    options = write_source(tmp_path, [{key: value for key, value in CLASSES[0].items() if key != "ids"}])
    with pytest.raises(ValueError, match=r"class 0 \('vessel'\): `ids` is missing; give the categories"):
        survey_source(tmp_path / "coco", options).check()


def test_images_that_hold_both_of_two_classes_that_are_never_together_are_counted(tmp_path: Path) -> None:
    left = CLASSES[2] | {"never_with": ["right artery", "vessel"]}
    lines = report_lines(survey_source(tmp_path / "coco", write_source(tmp_path, [*CLASSES[:2], left])))
    said = [line for line in lines if line.startswith("`never_with`")]
    assert said == ["`never_with`: 1 image(s) hold vessel and left artery; correct masks or classes"]
