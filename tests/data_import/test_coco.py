"""COCO instances as CVAT, Label Studio, Roboflow and ARCADE's publishers write them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rl_reward_network.data.annotations import read_annotations
from rl_reward_network.data.masks import to_rle
from rl_reward_network.data_import.coco import read_coco, recognise_coco
from rl_reward_network.data_import.items import Outline, OutlineMasks
from rl_reward_network.data_import.survey import ImportOptions, survey_source
from rl_reward_network.data_import.write import write_import
from tests.conftest import SHARED
from tests.data_import.sources import SIZE, annotation, box_polygon, coco_content, picture, save, truth, write_json

ARCADE = SHARED / "realdata" / "arcade"
CATEGORIES = ["vessel", "catheter"]


def write_coco(source: Path, json_file: str, image: str, name: str = "{}.png") -> Path:
    """Four images: one object, two objects of one class, another class alone, none."""
    for number in range(4):
        save(source / image.format(number), picture(number))
    rle = {"image_id": 1, "category_id": 1, "iscrowd": 1, "segmentation": to_rle(truth(16))}
    annotations = [annotation(0, 0), annotation(1, 1), rle, annotation(2, 2, 2)]
    names = [name.format(number) for number in range(4)]
    write_json(source / json_file, coco_content(names, annotations, CATEGORIES))
    return source


@pytest.mark.parametrize(
    ("json_file", "image", "name"),
    [
        ("annotations/instances_default.json", "images/{}.png", "{}.png"),  # CVAT
        ("annotations/instances_train2017.json", "train2017/{}.png", "{}.png"),  # COCO itself
        ("result.json", "images/{}.png", "images\\{}.png"),  # Label Studio
        ("train/_annotations.coco.json", "train/{}.png", "{}.png"),  # Roboflow
        ("train/annotations/train.json", "train/images/{}.png", "{}.png"),  # ARCADE
        ("annotations.json", "data/deep/{}.png", "../../upload/{}.png"),
    ],
)
def test_the_mask_of_a_category_is_the_union_of_its_instances(tmp_path, json_file, image, name):
    write_coco(tmp_path, json_file, image, name)
    assert recognise_coco(tmp_path) == f"COCO instances ({Path(json_file).name})"
    found = read_coco(tmp_path)
    assert (found.faults, found.class_ids) == ([], {"1": "vessel", "2": "catheter"})
    masks = [load(SIZE) if load else None for load in [item.load_masks for item in found.items]]
    assert masks[3] is None, "without any annotation"
    assert [sorted(classes) for classes in masks if classes is not None] == [["vessel"], ["vessel"], ["catheter"]]
    assert (masks[0]["vessel"] == truth(0)).all()  # type: ignore[index]
    assert (masks[1]["vessel"] == truth(1) | truth(16)).all()  # type: ignore[index]
    assert (masks[2]["catheter"] == truth(2)).all()  # type: ignore[index]


def test_an_image_without_the_chosen_class_is_empty_and_one_without_any_unlabelled(tmp_path: Path) -> None:
    write_coco(tmp_path / "coco", "result.json", "images/{}.png")
    survey = survey_source(tmp_path / "coco", ImportOptions(patients_csv="none", label="1"))
    assert survey.phrase == "vessel"
    write_import(survey, tmp_path / "out")
    samples = read_annotations(tmp_path / "out")
    masks = [sample.load_mask() for sample in samples]
    assert [None if mask is None else int(mask.sum()) for mask in masks] == [
        truth(0).sum(),
        (truth(1) | truth(16)).sum(),
        0,
        None,
    ]
    assert {sample.text for sample in samples} == {"vessel"}


def test_every_fault_of_a_file_is_listed(tmp_path: Path) -> None:
    names = [f"{number}.png" for number in range(3)]
    for name in names[:2]:
        save(tmp_path / "images" / name, picture(0))
    annotations = [{"image_id": 0, "category_id": 1, "segmentation": []}, annotation(0, 7), annotation(0, 1, 9)]
    content = coco_content(names, annotations, CATEGORIES)
    content["images"][1]["id"] = 0
    write_json(tmp_path / "a.json", content)
    words = (
        "id 0 is that of 2 images",
        "only a box",
        "image_id 7",
        "image_id 1",
        "image '2.png': there is no such file",
    )
    assert [word in fault for word, fault in zip(words, read_coco(tmp_path).faults, strict=True)] == [True] * 5
    for key in ("images", "annotations"):
        write_json(tmp_path / "a.json", {**content, key: [None]})
        (fault,) = read_coco(tmp_path).faults
        assert f"`{key}` must be a list of objects" in fault
    write_coco(tmp_path, "a.json", "images/{}.png")
    save(tmp_path / "images/0.png", picture(0, (48, 64)))
    (point,) = survey_source(tmp_path, ImportOptions("none", label="all")).open_points
    assert "image '0.png': drawn on 32 x 24, but the image is 64 x 48" in point


def test_an_image_in_two_files_is_a_fault_and_numbers_that_differ_are_told(tmp_path: Path) -> None:
    write_coco(tmp_path, "a.json", "images/{}.png")
    write_json(tmp_path / "b.json", coco_content(["0.png"], [annotation(0, 0)], ["tree"]))
    found = read_coco(tmp_path)
    (image,) = found.faults
    assert "category 1 is 'tree' in b.json, but 'vessel' in another file" in found.notes[0]
    assert found.class_ids == {"2": "catheter"}
    assert "an image of a.json and of b.json" in image


def test_shares_are_scaled_and_checked() -> None:
    masks = OutlineMasks((Outline("a", [[0.25, 0, 0.5, 0, 0.5, 0.5, 0.25, 0.5]], "1.txt: line 1"),), shares=True)
    expected = np.zeros((8, 16), bool)
    expected[:4, 4:8] = True
    assert (masks((8, 16))["a"] == expected).all()
    bad = OutlineMasks((Outline("a", [[0.25, 0, 7, 0, 0.5, 0.5]], "1.txt: line 1"),), shares=True)
    with pytest.raises(ValueError, match=r"1\.txt: line 1: a polygon reaches 7"):
        bad((8, 16))


@pytest.mark.parametrize(
    "parts",
    [[[]], [[5, 5, 20, 20]], [[5, 5] * 4], [[5, 5, 9, 5, 7, 5]], [{"size": list(SIZE), "counts": [SIZE[0] * SIZE[1]]}]],
)
def test_an_outline_without_area_is_no_object_and_refused(parts: list[Any]) -> None:
    good = Outline("a", [box_polygon(1), []], "a.json: annotation 1")
    assert (OutlineMasks((good,))(SIZE)["a"] == truth(1)).all(), "a part without area is left out"
    with pytest.raises(ValueError, match=r"a\.json: annotation 2: the outline covers no pixel[;:] .* delete it"):
        OutlineMasks((good, Outline("a", parts, "a.json: annotation 2")))(SIZE)


@pytest.mark.skipif(not ARCADE.exists(), reason="the ARCADE angiograms are not here")
def test_arcade_as_published_gives_the_masks_that_are_read_from_the_folder_directly(tmp_path: Path) -> None:
    """Three parts whose images are all called 1.png, 2.png ..., an outline per SYNTAX segment."""
    records = json.loads((ARCADE / "annotations.json").read_text())
    published = tmp_path / "syntax"
    expected: dict[str, dict[str, Any]] = {}
    for part in ("train", "val", "test"):
        picked = [record for record in records if record["image"].startswith(part)][:3]
        names = [f"{number}.png" for number in range(1, len(picked) + 1)]
        annotations = []
        for number, (record, name) in enumerate(zip(picked, names, strict=True)):
            expected[f"{part}/{name}"] = record
            save(published / part / "images" / name, np.asarray(Image.open(ARCADE / "images" / record["image"])))
            annotations += [
                {"image_id": number, "category_id": 1 + place % 26, "segmentation": [polygon]}
                for place, polygon in enumerate(record["mask"])
            ]
        content = coco_content(names, annotations, [str(number) for number in range(1, 27)])
        for image in content["images"]:
            image |= {"height": 512, "width": 512}
        write_json(published / part / "annotations" / f"{part}.json", content)
    assert survey_source(published, ImportOptions("none")).classes is None, "26 classes: the user has to choose"
    survey = survey_source(published, ImportOptions("none", label="all"))
    assert (survey.description, survey.phrase) == ("COCO instances (test.json, train.json, val.json)", "blood vessel")
    write_import(survey, tmp_path / "out")
    imported = {str(s.image_path.relative_to(tmp_path / "out/images")): s for s in read_annotations(tmp_path / "out")}
    direct = {s.image_path.name: s for s in read_annotations(ARCADE, "(?P<group>.+)")}
    assert imported.keys() == expected.keys()
    for name, record in expected.items():
        mask = imported[name].load_mask()
        assert mask.any()
        assert (mask == direct[record["image"]].load_mask()).all()
        assert (imported[name].load_image() == direct[record["image"]].load_image()).all()


def test_parts_with_equal_names_lie_in_folders_of_the_name_of_their_file(tmp_path: Path) -> None:
    for part in ("train", "val"):
        for number in range(2):
            save(tmp_path / part / f"images/{number}.png", picture(number))
        names = [f"{number}.png" for number in range(2)]
        write_json(tmp_path / f"annotations/{part}.json", coco_content(names, [annotation(0, 0)], ["vessel"]))
    found = read_coco(tmp_path)
    assert found.faults == []
    assert [item.name for item in found.items] == ["train/0.png", "train/1.png", "val/0.png", "val/1.png"]


def write_parts(source: Path, named: list[str], there: list[str], file: str = "a.json") -> Path:
    for number, name in enumerate(there):
        save(source / name, picture(number))
    annotations = [annotation(number, number) for number in range(len(named))]
    return write_json(source / file, coco_content(named, annotations, ["vessel"])).parent


@pytest.mark.parametrize(
    ("named", "there", "file"),
    [
        (["train/0.png", "train/1.png"], ["train/0.png", "test/1.png"], "a.json"),
        (["train/0.png", "train/1.png"], ["test/0.png", "test/1.png"], "a.json"),
        (["0.png", "1.png"], ["train/0.png", "test/1.png"], "train.json"),
        (["0.png", "1.png"], ["images/0.png", "other/1.png"], "a.json"),
        (["0.png", "1.png"], ["images/0.png", "test/1.png"], "train/a.json"),
        (["p1/0.png", "p2/0.png"], ["p1/0.png"], "a.json"),
        (["p1/0.png", "p1/1.png"], ["p1/0.png", "p2/1.png"], "a.json"),
    ],
)
def test_a_lost_image_is_not_replaced_by_another_one_of_its_name(tmp_path, named, there, file):
    write_parts(tmp_path, named, there, file)
    faults = read_coco(tmp_path).faults
    assert faults
    assert all("image '" in fault and "there is no such file" in fault for fault in faults)


@pytest.mark.parametrize(
    ("named", "there"),
    [
        (["/data/me/pictures/0.png", "/data/me/pictures/1.png"], ["images/0.png", "images/1.png"]),
        (["C:\\up\\0.png", "C:\\up\\1.png"], ["deep/er/0.png", "deep/er/1.png"]),
        (["\u00e4.png"], ["images/a\u0308.png"]),
    ],
)
def test_images_that_lie_elsewhere_are_found_by_their_name(tmp_path: Path, named: list[str], there: list[str]) -> None:
    found = read_coco(write_parts(tmp_path, named, there))
    assert (found.faults, [item.found_as for item in found.items]) == ([], there)


def test_a_segmentation_of_another_type_is_named_and_a_flat_outline_is_read(tmp_path: Path) -> None:
    save(tmp_path / "0.png", picture(0))
    content = coco_content(["0.png"], [annotation(0, 0)], ["vessel"])
    content["annotations"][0]["segmentation"] = 5
    write_json(tmp_path / "a.json", content)
    (fault,) = read_coco(tmp_path).faults
    assert "a.json: annotation 0: segmentation is 5, expected outlines" in fault
    content["annotations"][0]["segmentation"] = box_polygon(0)
    write_json(tmp_path / "a.json", content)
    (item,) = read_coco(tmp_path).items
    assert (item.load_masks(SIZE)["vessel"] == truth(0)).all()
