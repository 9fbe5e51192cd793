"""Inputs of the field as users of other projects reported them, and their neighbours: read rightly, or told."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rl_reward_network.data.annotations import read_annotations
from rl_reward_network.data.masks import check_outline, ignored_classes, parse_polygon
from rl_reward_network.data_import.survey import ImportOptions, Survey, report_lines, survey_source
from rl_reward_network.data_import.write import write_import
from tests.conftest import SHARED
from tests.data_import.sources import (
    SIZE,
    box_polygon,
    coco_content,
    drawing,
    line,
    picture,
    save,
    truth,
    write_json,
    write_pairs,
)

CASES = SHARED / "cases"


@pytest.mark.skipif(not CASES.exists(), reason="the inputs of the field are not here")
@pytest.mark.parametrize(
    ("case", "label", "pixels", "phrase", "told"),
    [
        ("voc-void", "all", 264, "blood vessel", "pixels to be ignored (#e0e0c0) count as background: in 6 mask(s)"),
        ("roboflow-dummy-class", None, 264, "vessel", "1 class(es) that no mask holds: angio-vessels"),
        ("labelme-rect4", None, 264, "vessel", ""),
        ("coco-float-ids", None, 264, "vessel", ""),
        ("refcoco", None, 264, "vessel", "files that are not read, left out: 1 .p (refs(unc).p)"),
        ("dicom-aspect", None, 132, "blood vessel", "6 image(s) whose pixels are no squares (height / width 2)"),
        ("dicom-padding", None, 264, "blood vessel", ""),
        ("dicom-signed-no-window", None, 586, "blood vessel", ""),
    ],
)
def test_cases_are_imported(tmp_path: Path, case: str, label: str | None, pixels: int, phrase: str, told: str) -> None:
    survey = survey_source(CASES / case / "input", ImportOptions("none", label=label))
    assert any(told in text for text in report_lines(survey))
    write_import(survey, tmp_path / "out")
    samples = read_annotations(tmp_path / "out")
    masks = [sample.load_mask() for sample in samples]
    assert [sample.text for sample in samples] == [phrase] * 6
    assert int(np.median([mask.sum() for mask in masks if mask is not None])) == pixels
    if case == "dicom-padding":
        vessels = samples[0].load_image()[16:48, 16:48, 0]
        assert (len(np.unique(vessels)), vessels.min(), vessels.max()) == (51, 4, 230)
    if case == "dicom-signed-no-window":
        assert np.mean([sample.load_image().std() for sample in samples]) == pytest.approx(66, abs=3)


@pytest.mark.skipif(not CASES.exists(), reason="the inputs of the field are not here")
def test_outlines_without_a_pixel_are_faults_of_annotations(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"record 0 \(image 'v0\.png'\): `mask`: the outline covers no pixel"):
        read_annotations(CASES / "tiny-polygons/input", "(?P<group>.+)")


# ---- pixels to be ignored -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "ignored"),
    [
        ([["255"]], []),
        ([["1"], ["255"]], []),  # two ways to write one class
        ([["1", "255"], ["2"]], ["255"]),
        ([["255"], ["255"], ["1", "255"]], []),  # a binary mask with a stray pixel
        ([["85", "170", "255"]], []),  # a scale of greys
        ([["128", "255"]], []),  # disc and cup
        ([["#800000", "255"]], []),  # white is a colour
        ([["#800000", "#e0e0c0"]], ["#e0e0c0"]),
        ([["#e0e0c0"]], []),
        ([["vessel", "__ignore__"], ["Void"]], ["Void", "__ignore__"]),
        ([["vessel", "don't care", "Un-Labelled"]], ["Un-Labelled", "don't care"]),
        ([["vessel", "ignored areas", "IGNORE 1"]], ["IGNORE 1", "ignored areas"]),
        ([["1", "-1"]], ["-1"]),
        ([["voided", "ignorance"]], []),
    ],
)
def test_spellings_of_ignored_pixels(files: list[list[str]], ignored: list[str]) -> None:
    assert ignored_classes(files) == (set(ignored), set())


def paired(source: Path, void: str) -> Path:
    """Label maps of one class, with three pixels to be ignored."""
    for number in range(4):
        mask = truth(number).astype(np.uint8)
        mask[20, 1:4] = 255
        save(source / f"images/{number}.png", picture(number))
        image = Image.fromarray(mask)
        if void != "255":
            palette = [0] * 768
            palette[3:6], palette[765:] = [128, 0, 0], [224, 224, 192]
            image.putpalette(palette)
        (source / "masks").mkdir(exist_ok=True)
        (image.convert("RGB") if void == "RGB" else image).save(source / f"masks/{number}.png")
    return source


SPECK = [1, 20, 4, 20, 4, 21, 1, 21]  # three pixels


def coco(source: Path, void: str) -> Path:
    records = [(n, n, 1, box_polygon(n)) for n in range(4)] + [(n + 4, n, 2, SPECK) for n in range(4)]
    flag = {"ignore": 1} if void == "flag" else {}
    annotations = [
        {
            "id": number,
            "image_id": image,
            "category_id": category,
            "segmentation": [part],
            **(flag if number > 3 else {}),
        }
        for number, image, category, part in records
    ]
    for number in range(4):
        save(source / f"{number}.png", picture(number))
    names = [f"{number}.png" for number in range(4)]
    write_json(source / "a.json", coco_content(names, annotations, ["vessel", "other" if flag else void]))
    return source


def labelme(source: Path, void: str) -> Path:
    for number in range(4):
        save(source / f"{number}.png", picture(number))
        content = drawing(number)
        points = [SPECK[place : place + 2] for place in range(0, 8, 2)]
        content["shapes"].append({"label": void, "points": points, "shape_type": "polygon"})
        write_json(source / f"{number}.json", content)
    return source


def yolo(source: Path, void: str) -> Path:
    speck = " ".join(str(value / SIZE[1 - place % 2]) for place, value in enumerate(SPECK))
    for number in range(4):
        save(source / f"images/{number}.png", picture(number))
        (source / "labels").mkdir(exist_ok=True)
        (source / f"labels/{number}.txt").write_text(f"{line(number)}\n1.000000000000000000e+00 {speck}\n")
    (source / "classes.txt").write_text(f"vessel\n{void}\n")
    return source


def nnunet(source: Path, void: str) -> Path:
    paired(source, "255")
    for number in range(4):
        for old, new in (("images", f"imagesTr/{number}_0000.png"), ("masks", f"labelsTr/{number}.png")):
            (source / new).parent.mkdir(exist_ok=True)
            (source / f"{old}/{number}.png").rename(source / new)
    write_json(source / "dataset.json", {"labels": {"background": 0, "vessel": 1, void: 255}})
    return source


@pytest.mark.parametrize(
    ("write", "void"),
    [
        *((paired, void) for void in ("255", "palette", "RGB")),
        *((coco, void) for void in ("ignore", "unlabeled", "flag")),
        *((labelme, void) for void in ("__ignore__", "DontCare")),
        *((yolo, void) for void in ("void", "ignore region")),
        (nnunet, "ignore"),
    ],
)
@pytest.mark.parametrize("label", [None, "all"])
def test_ignored_pixels_are_in_no_mask_whatever_the_layout(tmp_path, write, void, label):
    survey = survey_source(write(tmp_path / "s", void), ImportOptions("none", label=label))
    (remark,) = survey.found.remarks
    assert "count as background: in 4 mask(s), 0.4% of the picture at most" in remark
    write_import(survey, tmp_path / "out")
    for number, sample in enumerate(read_annotations(tmp_path / "out")):
        assert (sample.load_mask() == truth(number)).all()


def test_masks_that_are_mostly_to_be_ignored_are_refused_and_a_class_may_be_named(tmp_path: Path) -> None:
    def stored(mask: np.ndarray) -> np.ndarray:
        return np.where(np.arange(SIZE[1]) > 20, 255, mask.astype(np.uint8)).astype(np.uint8)

    write_pairs(tmp_path, stored=stored)
    assert "5 mask(s) (0.png, 1.png, 2.png, ...) have more than 20% of pixels to be ignored (255)" in "".join(
        survey_source(tmp_path, ImportOptions("none")).open_points
    )
    named = survey_source(tmp_path, ImportOptions("none", label="255"))
    assert (named.open_points, named.classes) == ((), ["255"])
    assert survey_source(tmp_path, ImportOptions("none", label="1")).open_points == (), "255 may be another class"
    both = (("vein", "1"), ("artery", "255"))
    entries = [{"name": n, "phrases": [n], "held_out": f"the {n}", "ids": [number]} for n, number in both]
    write_json(tmp_path / "c.json", entries)
    asked = survey_source(tmp_path, ImportOptions("none", classes=tmp_path / "c.json"))
    assert (asked.open_points, asked.classes) == ((), ["1", "255"])


# ---- outlines -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("polygon", "shares", "fault"),
    [
        ([0.2, 0.3, 0.8, 0.3, 0.8, 0.9], False, r"coordinates are 0\.2\.\.0\.9, all in 0\.\.1, .* multiply x by 32"),
        ([0.2, 0.3, 0.8, 0.3, 0.8, 0.9], True, ""),  # a small object in the corner, drawn in shares
        ([0, 0, 1, 0, 1, 1, 0, 1], False, ""),  # the first pixel
        ([5, 5, 9, 5, 7, 5], False, "covers no pixel; it reaches x 5..9, y 5..5"),
        ([5.2, 5.2, 5.4, 5.2, 5.4, 5.4], False, "covers no pixel"),
    ],
)
def test_outlines_of_shares_or_without_a_pixel_are_refused(polygon: list[float], shares: bool, fault: str) -> None:
    parts = parse_polygon(polygon, SIZE)
    if not fault:
        check_outline(parts, SIZE, shares)
        return
    with pytest.raises(ValueError, match=fault):
        check_outline(parts, SIZE, shares)


# ---- variants of known exporters ----------------------------------------------------------------------------------


def one_coco(source: Path, **changes: Any) -> Survey:
    """One image and annotation whose records have other keys; None: the key is missing."""
    save(source / "images/0.png", picture(0))
    content = coco_content(["0.png"], [{"image_id": 0, "category_id": 1, "segmentation": [box_polygon(0)]}], ["vessel"])
    for place, values in changes.items():
        record = content[place][0]
        record |= values
        content[place][0] = {key: value for key, value in record.items() if value is not None}
    write_json(source / "a.json", content)
    return survey_source(source, ImportOptions("none"))


POINTS = [[5, 3], [12, 3], [12, 8], [5, 8]]


@pytest.mark.parametrize(
    "changes",
    [
        {"annotations": {"image_id": 0.0, "category_id": 1.0}},
        {"annotations": {"image_id": "0", "category_id": "1"}},
        {"annotations": {"image_id": "0.0", "category_id": "1.000000e+00"}, "categories": {"id": 1.0}},
        {"images": {"file_name": None, "coco_url": "http://images.cocodataset.org/train/0.png"}},
        {"images": {"file_name": None, "path": "C:\\data\\0.png"}},
        {"images": {"height": None, "width": None}},
        {"annotations": {"segmentation": POINTS}},
        {"annotations": {"segmentation": [POINTS]}},
        {"annotations": {"id": None, "bbox": None, "iscrowd": None}},
    ],
)
def test_variants_of_coco_are_read(tmp_path: Path, changes: dict[str, Any]) -> None:
    survey = one_coco(tmp_path, **changes)
    assert (survey.open_points, survey.classes) == ((), ["vessel"])
    assert (survey.found.items[0].load_masks(SIZE)["vessel"] == truth(0)).all()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"annotations": {"image_id": 3.0}}, "annotation 0: no image has its image_id 3; export it again"),
        ({"annotations": {"category_id": "x"}}, "no category has its category_id x"),
        ({"images": {"file_name": None}}, "image 0: it has no `file_name`, but id, height, width; export it again"),
    ],
)
def test_faults_of_coco_say_what_is_there(tmp_path: Path, changes: dict[str, Any], fault: str) -> None:
    assert fault in "\n".join(one_coco(tmp_path, **changes).open_points)


@pytest.mark.parametrize("kind", ["rectangle", "rotation", "quadrilateral", "polygon", None])
def test_four_corners_of_labelme_are_a_quadrangle(tmp_path: Path, kind: str | None) -> None:
    save(tmp_path / "0.png", picture(0))
    turned = [[10, 2], [18, 10], [10, 18], [2, 10]]
    shape = {"label": "vessel", "shape_type": kind, "points": turned, "description": "left", "flags": {}}
    write_json(tmp_path / "0.json", drawing(0, shapes=[shape], text="a vessel", imageHeight=None, imageWidth=None))
    survey = survey_source(tmp_path, ImportOptions("none"))
    assert survey.open_points == ()
    assert "keys that are not read: text (1), shapes.description (1)" in survey.found.notes
    (seen,) = survey.seen
    assert seen.pixels["vessel"] == pytest.approx(16 * 16 / 2, abs=12)


@pytest.mark.parametrize("names", [None, "vessel\ncatheter\n"])
def test_classes_that_a_table_has_written_as_floats_are_numbers(tmp_path: Path, names: str | None) -> None:
    for number in range(2):
        save(tmp_path / f"images/{number}.png", picture(number))
        values = [0.0, *map(float, line(number).split()[1:])]
        (tmp_path / "labels").mkdir(exist_ok=True)
        np.savetxt(tmp_path / f"labels/{number}.txt", [values])
    if names:
        (tmp_path / "classes.txt").write_text(names)
    survey = survey_source(tmp_path, ImportOptions("none"))
    assert survey.open_points == ()
    assert (survey.classes, survey.phrase) == ((["vessel"], "vessel") if names else (["0"], "blood vessel"))


@pytest.mark.parametrize("name", ["0.000000000000000000e+00", 0.0, 0, "0.5", "-1"])
def test_a_number_is_no_phrase(tmp_path: Path, name: str | float) -> None:
    assert one_coco(tmp_path, categories={"name": name}).phrase == "blood vessel"


def test_keys_of_coco_that_say_something_are_named_with_their_number(tmp_path: Path) -> None:
    changes = {"annotations": {"attributes": {"occluded": True}, "tag": ""}, "images": {"split": "train"}}
    assert (
        "keys that are not read: images.split (1), annotations.attributes (1)"
        in one_coco(tmp_path, **changes).found.notes
    )


@pytest.mark.parametrize(
    ("name", "options", "aspect"),
    [
        ("{}.png", {"dpi": (300, 150)}, "2"),
        ("{}.tif", {"dpi": (100, 200)}, "0.5"),
        ("{}.jpg", {"dpi": (200, 100)}, "2"),
        ("{}.jpg", {"dpi": (96, 96)}, ""),
        ("{}.bmp", {}, ""),
    ],
)
def test_pictures_whose_pixels_are_no_squares_are_told(tmp_path, name, options, aspect):
    write_pairs(tmp_path, images=f"images/{name}", masks="masks/{}.png")
    for number in range(5):
        save(tmp_path / f"images/{name.format(number)}", picture(number), **options)
    remarks = survey_source(tmp_path, ImportOptions("none")).found.remarks
    assert [f"(height / width {aspect})" in remark for remark in remarks] == [True] * bool(aspect)


def test_declared_classes_of_images_without_annotations_force_no_choice(tmp_path: Path) -> None:
    save(tmp_path / "images/0.png", picture(0))
    write_json(tmp_path / "a.json", coco_content(["0.png"], [], ["vessel", "bone"]))
    survey = survey_source(tmp_path, ImportOptions("none"))
    assert (survey.open_points, survey.classes) == ((), [])
