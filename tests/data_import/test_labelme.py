"""LabelMe: one JSON file per image."""

from pathlib import Path
from typing import Any

import pytest

from rl_reward_network.data_import.labelme import read_labelme, recognise_labelme
from rl_reward_network.data_import.survey import ImportOptions, survey_source
from tests.data_import.sources import SIZE, box_polygon, picture, save, truth, write_json


def drawing(number: int, kind: str = "polygon", **changes: Any) -> dict[str, Any]:
    x = box_polygon(number)
    points = [[x[0], x[1]], [x[4], x[5]]] if kind == "rectangle" else [[x[n], x[n + 1]] for n in range(0, 8, 2)]
    shape = {"label": "vessel", "shape_type": kind, "points": points, "flags": {}}
    size = {"imageHeight": SIZE[0], "imageWidth": SIZE[1]}
    return {"version": "5.5.0", "shapes": [shape], "imagePath": f"{number}.png", "imageData": None, **size, **changes}


def write_labelme(source: Path, **changes: Any) -> Path:
    for number in range(3):
        save(source / f"{number}.png", picture(number))
    write_json(source / "0.json", drawing(0))
    write_json(source / "1.json", drawing(1, "rectangle", **changes))
    return source


def test_polygons_and_rectangles_are_read(tmp_path: Path) -> None:
    write_labelme(tmp_path)
    assert recognise_labelme(tmp_path) == "LabelMe (2 JSON files)"
    found = read_labelme(tmp_path)
    assert found.faults == []
    masks = [item.load_masks and item.load_masks(SIZE) for item in found.items]
    assert masks[2] is None
    for number in (0, 1):
        mask = masks[number]
        assert mask is not None
        assert (mask["vessel"] == truth(number)).all()


@pytest.mark.parametrize("place", ["../images/1.png", "..\\images\\1.png", "elsewhere/1.png"])
def test_images_may_lie_beside_the_folder_of_the_drawings(tmp_path: Path, place: str) -> None:
    for number in range(2):
        save(tmp_path / f"images/{number}.png", picture(number))
        write_json(tmp_path / f"json/{number}.json", drawing(number, imagePath=f"../images/{number}.png"))
    write_json(tmp_path / "json/1.json", drawing(1, imagePath=place))
    found = read_labelme(tmp_path)
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
    drawn = [item for item in read_labelme(tmp_path / "source").items if item.load_masks]
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
    copy, fault = read_labelme(tmp_path).faults
    assert "0.png has a JSON file already" in copy
    assert "1.json" in fault
    assert message in fault


def test_a_drawing_on_another_size_is_refused(tmp_path: Path) -> None:
    write_labelme(tmp_path, imageHeight=SIZE[0] * 2, imageWidth=SIZE[1] * 2)
    load = read_labelme(tmp_path).items[1].load_masks
    assert load is not None
    with pytest.raises(ValueError, match=r"1\.json: drawn on 64 x 48, but the image is 32 x 24"):
        load(SIZE)


@pytest.mark.parametrize("folder", ["", "images/"])
def test_renumbered_files_are_a_fault_and_own_names_are_not(tmp_path: Path, folder: str) -> None:
    """Images and drawings were renamed together, imagePath still names the old image, which is now another one."""
    for number in range(4):
        save(tmp_path / f"{folder}{number}.png", picture(number))
    for number in range(1, 4):
        write_json(tmp_path / f"{number}.json", drawing(number, imagePath=f"{folder}{number - 1}.png"))
    faults = read_labelme(tmp_path).faults
    assert [f"but there is {number}.png" in fault for number, fault in enumerate(faults, 1)] == [True] * 3
    for number in range(1, 4):
        (tmp_path / f"{number}.json").rename(tmp_path / f"drawing {number}.json")
    assert read_labelme(tmp_path).faults == []


def test_pictures_of_masks_are_no_images_and_rubbish_is_a_fault(tmp_path: Path) -> None:
    save(write_labelme(tmp_path) / "0_mask.png", truth(0))
    (tmp_path / "a.json").write_text("// no JSON")
    assert recognise_labelme(tmp_path) == "LabelMe (3 JSON files)"
    found = read_labelme(tmp_path)
    assert [item.name for item in found.items] == ["0.png", "1.png", "2.png"]
    assert any("1 picture(s) of masks, left out: 0_mask.png" in note for note in found.notes)
    (fault,) = found.broken.values()
    assert "a.json: not valid JSON" in fault
    assert "move it out" in fault


def test_an_image_whose_drawing_is_cut_off_is_left_out_with_it(tmp_path: Path) -> None:
    write_labelme(tmp_path)
    (tmp_path / "0.json").write_text('{"shapes": [')
    found = read_labelme(tmp_path)
    assert [item.name for item in found.items] == ["1.png", "2.png"], "it is not imported as unlabelled"
    assert list(found.broken) == ["0.json"]
    survey = survey_source(tmp_path, ImportOptions("none", skip=1))
    survey.check()
    assert "0.json: not valid JSON" in survey.skipped[0]
