"""nnU-Net, YOLO and LabelMe: what is theirs alone; test_layouts.py has what all layouts do."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rl_reward_network.data_import import per_image
from rl_reward_network.data_import.survey import ImportOptions, survey_source
from tests.data_import.sources import SIZE, drawing, line, picture, save, truth, write_json

NAMES = {"data.yaml": "train: images/train\nnames:\n  0: vessel\n  1: catheter\n", "classes.txt": "vessel\ncatheter\n"}


def write_labelme(source: Path, **changes: Any) -> Path:
    for number in range(3):
        save(source / f"{number}.png", picture(number))
    write_json(source / "0.json", drawing(0))
    write_json(source / "1.json", drawing(1, "rectangle", **changes))
    return source


@pytest.mark.parametrize("place", ["../images/1.png", "..\\images\\1.png", "elsewhere/1.png"])
def test_images_may_lie_beside_the_folder_of_the_drawings(tmp_path: Path, place: str) -> None:
    for number in range(2):
        save(tmp_path / f"images/{number}.png", picture(number))
        write_json(tmp_path / f"json/{number}.json", drawing(number, imagePath=f"../images/{number}.png"))
    write_json(tmp_path / "json/1.json", drawing(1, imagePath=place))
    found = per_image.read_labelme(tmp_path)
    if "elsewhere" in place:
        assert "1.json: imagePath is 'elsewhere/1.png'" in found.faults[0]
    else:
        assert found.faults == []
        assert found.items[1].load_masks is not None


@pytest.mark.parametrize("place", ["../images/1.png", "..\\images\\1.png", "../../source/images/1.png"])
def test_imagepath_itself_comes_before_a_picture_beside_the_drawing(tmp_path: Path, place: str) -> None:
    for folder, number in (("images", 1), ("json", 2)):
        save(tmp_path / f"source/{folder}/1.png", picture(number))
    write_json(tmp_path / "source/json/1.json", drawing(1, imagePath=place))
    drawn = [item for item in per_image.read_labelme(tmp_path / "source").items if item.load_masks]
    assert [item.found_as for item in drawn] == ["images/1.png"]


LINE = {"label": "v", "shape_type": "line", "points": [[1, 1], [2, 2]]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shapes": [{**LINE, "shape_type": [5]}]}, "shape_type is '[5]'"),
        ({"shapes": [{**LINE, "label": None}]}, "shape 0: no `label`"),
        ({"shapes": [LINE]}, "shape_type is 'line', expected polygon, rectangle, rotation, quadrilateral"),
        (
            {"shapes": [{**LINE, "shape_type": "rectangle", "points": [[1, 1]] * 3}]},
            "a rectangle of 3 points, expected 2 or",
        ),
        ({"imageHeight": None}, "height, width are None, 32"),
        ({"shapes": None}, "no list `shapes`"),
        ({"imagePath": "0.png"}, "imagePath names 0.png, but there is 1.png; write the right one"),
        *(
            ({"shapes": [shape]}, "shape 0: no list `points`")
            for shape in (None, {"label": "v"}, {"label": "v", "points": [1, 2]}, {"points": [["x", 1]]})
        ),
    ],
)
def test_drawings_that_cannot_be_read_are_faults(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_json(write_labelme(tmp_path, **changes) / "0 (copy).json", drawing(0))
    copy, fault = per_image.read_labelme(tmp_path).faults
    assert "0.png has a JSON file already" in copy
    assert "1.json" in fault
    assert message in fault


def test_a_drawing_on_another_size_is_refused(tmp_path: Path) -> None:
    write_labelme(tmp_path, imageHeight=SIZE[0] * 2, imageWidth=SIZE[1] * 2)
    load = per_image.read_labelme(tmp_path).items[1].load_masks
    with pytest.raises(ValueError, match=r"1\.json: drawn on 64 x 48, but the image is 32 x 24"):
        load(SIZE)


@pytest.mark.parametrize("folder", ["", "images/"])
def test_renumbered_files_are_a_fault_and_own_names_are_not(tmp_path: Path, folder: str) -> None:
    """Images and drawings were renamed together, imagePath still names the old image, which is now another one."""
    for number in range(4):
        save(tmp_path / f"{folder}{number}.png", picture(number))
    for number in range(1, 4):
        write_json(tmp_path / f"{number}.json", drawing(number, imagePath=f"{folder}{number - 1}.png"))
    faults = per_image.read_labelme(tmp_path).faults
    assert [f"but there is {number}.png" in fault for number, fault in enumerate(faults, 1)] == [True] * 3
    for number in range(1, 4):
        (tmp_path / f"{number}.json").rename(tmp_path / f"drawing {number}.json")
    assert per_image.read_labelme(tmp_path).faults == []


def test_pictures_of_masks_are_no_images_and_rubbish_is_a_fault(tmp_path: Path) -> None:
    save(write_labelme(tmp_path) / "0_mask.png", truth(0))
    (tmp_path / "a.json").write_text("// no JSON")
    assert per_image.recognise_labelme(tmp_path) == "LabelMe (3 JSON files)"
    found = per_image.read_labelme(tmp_path)
    assert [item.name for item in found.items] == ["0.png", "1.png", "2.png"]
    assert any("1 picture(s) of masks, left out: 0_mask.png" in note for note in found.notes)
    (fault,) = found.broken.values()
    assert "a.json: not valid JSON" in fault
    assert "move it out" in fault


def write_yolo(source: Path, part: str = "train/", names: str = "data.yaml") -> Path:
    """Images with one object, two objects, none, and without a text file."""
    for number in range(4):
        save(source / f"images/{part}{number}.png", picture(number))
    (source / f"labels/{part}").mkdir(parents=True)
    for number, text in enumerate([line(0), f"{line(1)}\n{line(8, 1)}\n", ""]):
        (source / f"labels/{part}{number}.txt").write_text(text)
    (source / names).write_text(NAMES[names])
    return source


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("part", ["", "train/"])
def test_polygons_are_read_with_the_names_of_their_classes(tmp_path: Path, part: str, names: str) -> None:
    write_yolo(tmp_path, part, names)
    assert per_image.recognise_yolo(tmp_path) == "YOLO polygons (images with 3 text files)"
    found = per_image.read_yolo(tmp_path)
    assert (found.faults, found.class_ids) == ([], {"0": "vessel", "1": "catheter"})
    assert [item.name for item in found.items] == [f"{part}{number}.png" for number in range(4)]
    first, second, third, fourth = (item.load_masks and item.load_masks(SIZE) for item in found.items)
    assert (first["vessel"] == truth(0)).all()
    assert (second["vessel"] == truth(1)).all()
    assert (second["catheter"] == truth(8)).all()
    assert third == {}, "an empty text file: no object"
    assert fourth is None, "no text file: not annotated"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 0.5 0.5 0.2 0.2", "line 1: 4 numbers, which is a box"),
        (f"{line(0)}\n0 0.1 0.2 0.3 0.4 0.5 0.6 0.7", "line 2: 7 numbers, expected"),
        ("5 0.1 0.2 0.3 0.4 0.5 0.6", "line 1: class 5 is not in"),
        ("0 0.1 0.2 0.3 x 0.5 0.6", "line 1: not a line of numbers"),
    ],
)
def test_lines_that_are_no_polygons_are_faults(tmp_path: Path, text: str, message: str) -> None:
    write_yolo(tmp_path)
    (tmp_path / "labels/train/1.txt").write_text(text)
    found = per_image.read_yolo(tmp_path)
    (fault,) = found.broken.values()
    assert f"1.txt: {message}" in fault
    assert "train/1.png" in found.broken
    assert "train/1.png" not in [item.name for item in found.items], "it is annotated"


def test_names_and_texts_that_cannot_be_read_are_told_with_their_file(tmp_path: Path) -> None:
    write_yolo(tmp_path)
    (tmp_path / "labels/train/1.txt").write_bytes(b"0 \xff")
    (tmp_path / "gt/train").mkdir(parents=True)
    (tmp_path / "gt/train/0.txt").write_text(line(2))
    found = per_image.read_yolo(tmp_path)
    assert ["1.txt: not a text in UTF-8" in fault for fault in found.broken.values()] == [True]
    (fault,) = found.faults
    assert "gt/train/0.txt, labels/train/0.txt: masks of one image; delete all but one" in fault
    (tmp_path / "data.yaml").write_text("names:\n")
    assert per_image.read_yolo(tmp_path).class_ids == {}
    (tmp_path / "data.yaml").write_text("names: vessel\n")
    with pytest.raises(ValueError, match=r"data\.yaml: `names` is 'vessel', expected a list"):
        per_image.read_yolo(tmp_path)
    (tmp_path / "data.yaml").unlink()
    (tmp_path / "labels/train/classes.txt").write_text(NAMES["classes.txt"])  # where labelImg writes it
    found = per_image.read_yolo(tmp_path)
    assert found.class_ids == {"0": "vessel", "1": "catheter"}
    assert not any("without an image" in note for note in found.notes)


def write_nnunet(source: Path, labels: Any, suffix: str = ".png") -> Path:
    for number in range(4):
        save(source / f"imagesTr/case_{number}_0000{suffix}", picture(number))
        save(source / f"labelsTr/case_{number}{suffix}", truth(number).astype(np.uint8) * np.uint8(1 + number % 2))
    save(source / f"imagesTs/case_9_0000{suffix}", picture(9))
    write_json(source / "dataset.json", {"labels": labels, "file_ending": suffix, "channel_names": {"0": "X-ray"}})
    return source


@pytest.mark.parametrize("suffix", [".png", ".tif", ".bmp"])
@pytest.mark.parametrize(
    "labels", [{"background": 0, "vessel": 1, "catheter": 2}, {"0": "background", "1": "vessel", "2": "catheter"}]
)
def test_cases_are_read_with_the_names_of_their_classes(tmp_path: Path, labels: Any, suffix: str) -> None:
    write_nnunet(tmp_path, labels, suffix)
    assert per_image.recognise_nnunet(tmp_path) == "nnU-Net raw data (imagesTr, labelsTr)"
    found = per_image.read_nnunet(tmp_path)
    assert (found.faults, found.class_ids) == ([], {"1": "vessel", "2": "catheter"})
    assert [item.name for item in found.items] == [
        *(f"case_{number}.png" for number in range(4)),
        "imagesTs/case_9.png",
    ]
    assert found.items[4].load_masks is None
    for number, item in enumerate(found.items[:4]):
        ((name, mask),) = item.load_masks(SIZE).items()
        assert name == ("vessel", "catheter")[number % 2]
        assert (mask == truth(number)).all()


def test_regions_are_unions_and_unknown_values_are_refused(tmp_path: Path) -> None:
    write_nnunet(tmp_path, {"background": 0, "all of it": [1, 2], "core": 2})
    first, second, *_ = (item.load_masks for item in per_image.read_nnunet(tmp_path).items)
    assert sorted(first(SIZE)) == ["all of it"]
    assert sorted(second(SIZE)) == ["all of it", "core"]
    write_nnunet(tmp_path, {"background": 0, "vessel": 1})
    load = per_image.read_nnunet(tmp_path).items[1].load_masks
    with pytest.raises(ValueError, match=r"case_1\.png: holds 2, which dataset\.json does not name"):
        load(SIZE)


def test_the_class_ignore_is_left_out(tmp_path: Path) -> None:
    write_nnunet(tmp_path, {"background": 0, "vessel": 1, "ignore": 2})
    survey = survey_source(tmp_path, ImportOptions("none"))
    assert (survey.classes, survey.open_points, survey.found.class_ids) == (["vessel"], (), {"1": "vessel"})
    (remark,) = survey.found.remarks
    assert "pixels to be ignored (ignore) count as background: in 2 mask(s)" in remark


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("imagesTr/case_0_0001.png", "case_0_0001.png: a second channel"),
        ("labelsTr/case_7.png", "case_7.png: a label map without an image"),
        ("labelsTr/case_1.tif", "labelsTr/case_1.png, labelsTr/case_1.tif: masks of one image; delete all but one"),
        ("imagesTr/case_1_0000.tif", "case_1_0000.tif: an image of the case of case_1_0000.png"),
    ],
)
def test_files_that_do_not_fit_are_faults_and_volumes_are_refused(tmp_path: Path, name: str, fault: str) -> None:
    write_nnunet(tmp_path, {"background": 0, "vessel": 1, "catheter": 2})
    save(tmp_path / name, truth(2).astype(np.uint8))
    (found,) = per_image.read_nnunet(tmp_path).faults
    assert fault in found
    (tmp_path / "imagesTr/case_8_0000.nii.gz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"case_8_0000\.nii\.gz: a volume.*write each slice or frame as PNG"):
        per_image.read_nnunet(tmp_path)


def test_label_maps_with_a_palette_are_read_by_their_values(tmp_path: Path) -> None:
    write_nnunet(tmp_path, {"background": 0, "vessel": 1, "catheter": 2})
    image = Image.open(tmp_path / "labelsTr/case_1.png").convert("P")
    image.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0])
    image.save(tmp_path / "labelsTr/case_1.png")
    assert (per_image.read_nnunet(tmp_path).items[1].load_masks(SIZE)["catheter"] == truth(1)).all()


@pytest.mark.parametrize(
    "labels",
    [
        *(["background", "vessel"], "vessel", 5, {"vessel": 1.5}, {"vessel": None}, {"vessel": []}, {"vessel": [[1]]}),
        *({"vessel": True}, {"vessel": -1}, {"vessel": [0, 1]}, {"0": ["background"]}),
    ],
)
def test_labels_of_another_form_are_refused(tmp_path: Path, labels: Any) -> None:
    write_nnunet(tmp_path, labels)
    with pytest.raises(ValueError, match=r"dataset\.json: `labels` must be \{name: value\}.*correct it"):
        per_image.read_nnunet(tmp_path)
