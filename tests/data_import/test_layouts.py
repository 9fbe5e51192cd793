"""What all layouts do alike: recognised alone, read rightly, imported, and no damage ends in a traceback."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_reward_network.data.annotations import read_annotations
from rl_reward_network.data_import.layouts import LAYOUTS, recognise_layout
from rl_reward_network.data_import.survey import ImportOptions, survey_source
from rl_reward_network.data_import.write import write_import
from tests.data_import.sources import (
    SIZE,
    annotation,
    as_255,
    coco_content,
    drawing,
    line,
    picture,
    save,
    truth,
    write_dicom,
    write_json,
    write_pairs,
)

# Each writes four images: with the object truth(0), with truth(1), with none of it, and without annotation.
EMPTY = np.zeros(SIZE, np.uint8)


def pictures(source: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        save(source / name, picture(number))
    return source


def numbered(pattern: str) -> list[str]:
    return [pattern.format(number) for number in range(4)]


def paired(source: Path) -> None:
    pictures(source, *numbered("images/{}.png"))
    for number, mask in enumerate((as_255(truth(0)), as_255(truth(1)), EMPTY)):
        save(source / f"masks/{number}.png", mask)


def coco(source: Path) -> None:
    pictures(source, *numbered("images/{}.png"))
    annotations = [annotation(0, 0), annotation(1, 1), annotation(2, 2, 2)]
    content = coco_content(numbered("{}.png"), annotations, ["vessel", "catheter"])
    write_json(source / "annotations/instances_default.json", content)


def nnunet(source: Path) -> None:
    pictures(source, *numbered("imagesTr/{}_0000.png")[:3])
    save(source / "imagesTs/3_0000.png", picture(3))
    for number, mask in enumerate((truth(0).astype(np.uint8), truth(1).astype(np.uint8), EMPTY)):
        save(source / f"labelsTr/{number}.png", mask)
    write_json(source / "dataset.json", {"labels": {"background": 0, "vessel": 1}, "file_ending": ".png"})


def yolo(source: Path) -> None:
    pictures(source, *numbered("images/{}.png"))
    (source / "labels").mkdir()
    for number, text in enumerate((line(0), line(1), "")):
        (source / f"labels/{number}.txt").write_text(text)
    (source / "data.yaml").write_text("names: [vessel]\n")


def labelme(source: Path) -> None:
    pictures(source, *numbered("{}.png"))
    for number, content in enumerate((drawing(0), drawing(1, "rectangle"), drawing(2, shapes=[]))):
        write_json(source / f"{number}.json", content)


def dicom(source: Path) -> None:
    for number in range(4):
        write_dicom(source / f"images/{number}.dcm", picture(number)[..., 0], bits=8)
    for number, mask in enumerate((as_255(truth(0)), as_255(truth(1)), EMPTY)):
        save(source / f"masks/{number}.png", mask)


SOURCES: dict[str, Callable[[Path], Any]] = {
    **{"paired": paired, "coco": coco, "nnunet": nnunet, "yolo": yolo, "labelme": labelme, "dicom": dicom}
}
each_layout = pytest.mark.parametrize("name", LAYOUTS)


def options(name: str, skip: int = 0) -> ImportOptions:
    return ImportOptions("none", label=None if name in ("paired", "dicom") else "vessel", skip=skip)


@each_layout
def test_it_is_recognised_as_itself_alone(tmp_path: Path, name: str) -> None:
    SOURCES[name](tmp_path)
    assert [other for other, layout in LAYOUTS.items() if layout.recognise(tmp_path)] == [name]
    assert recognise_layout(tmp_path) == (name, LAYOUTS[name].recognise(tmp_path))


@each_layout
def test_images_masks_and_what_has_none_arrive(tmp_path: Path, name: str) -> None:
    SOURCES[name](tmp_path / "source")
    found = LAYOUTS[name].read(tmp_path / "source", "middle")
    assert (found.faults, found.broken, found.private) == ([], {}, LAYOUTS[name].private)
    assert len({item.name for item in found.items}) == 4
    write_import(survey_source(tmp_path / "source", options(name)), tmp_path / "out")
    samples = read_annotations(tmp_path / "out")
    for number, sample in enumerate(samples):
        grey = picture(number)[..., :1].repeat(3, axis=2)
        assert (sample.load_image() == (grey if name == "dicom" else picture(number))).all()
        mask = sample.load_mask()
        assert (mask is None) == (number == 3), "not annotated"
        assert mask is None or (mask == (truth(number) if number < 2 else False)).all()
    assert len({sample.group_id for sample in samples}) == 4


def files(source: Path) -> list[Path]:
    return sorted(path for path in source.rglob("*") if path.is_file())


@each_layout
def test_a_damaged_image_or_mask_is_named_and_can_be_skipped_with_its_image(tmp_path: Path, name: str) -> None:
    SOURCES[name](tmp_path / "source")
    ours = [path for path in files(tmp_path / "source") if path.stem.startswith("1")]
    assert ours
    for path in ours:
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        survey = survey_source(tmp_path / "source", options(name))
        with pytest.raises(ValueError, match=path.name.replace(".", r"\.")):
            survey.check()
        survey = survey_source(tmp_path / "source", options(name, skip=1))
        survey.check()
        assert len(survey.found.items) == 3, "an image whose mask is damaged is not imported as unlabelled"
        path.write_bytes(whole)


@each_layout
@pytest.mark.filterwarnings("ignore")
def test_no_damage_ends_in_a_traceback(tmp_path: Path, name: str) -> None:
    """Cut, with other bytes, or replaced: a fault in words, or still a picture."""
    SOURCES[name](tmp_path)
    rng = np.random.default_rng(0)
    for _ in range(25):
        path = files(tmp_path)[rng.integers(len(files(tmp_path)))]
        whole = path.read_bytes()
        damaged = bytearray(whole[: rng.integers(len(whole) + 1)] if rng.random() < 0.4 else whole)
        for place in rng.integers(len(damaged), size=4) if damaged else ():
            damaged[place] = rng.integers(256)
        path.write_bytes(bytes(damaged))
        try:
            survey = survey_source(tmp_path, options(name))
        except ValueError:
            continue
        finally:
            path.write_bytes(whole)
        told = any("left out" in note for note in survey.found.notes)  # a DICOM file without a picture
        assert survey.open_points or told or len(survey.seen) == 4


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
    yield from [path] if path else []
    for key, part in items:
        yield from leaves(part, (*path, key))


@pytest.mark.parametrize("name", ["coco", "nnunet", "labelme"])
@pytest.mark.parametrize("wrong", [5, None, "x", [], {}, [5], [None], True, -1.5])
def test_no_value_of_another_type_ends_in_a_traceback(tmp_path: Path, name: str, wrong: Any) -> None:
    SOURCES[name](tmp_path)
    file = next(path for path in files(tmp_path) if path.suffix == ".json")
    good = json.loads(file.read_text())
    if name == "coco":
        good = coco_content(["0.png"], [annotation(0, 0)], ["vessel"])
    for place in leaves(good):
        content = json.loads(json.dumps(good))
        part = content
        for key in place[:-1]:
            part = part[key]
        part[place[-1]] = wrong
        write_json(file, content)
        try:
            survey = survey_source(tmp_path, ImportOptions("none"))
        except ValueError:
            continue
        assert survey.open_points or all(one.item.load_image().size for one in survey.seen)


def test_two_layouts_in_one_folder_are_asked_about(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    coco(tmp_path)
    with pytest.raises(ValueError, match=r"paired folders .* and COCO .*--layout paired or coco"):
        recognise_layout(tmp_path)
    assert recognise_layout(tmp_path, "coco")[0] == "coco"


def test_other_folders_are_refused_with_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no known layout; expected images/ and masks/"):
        recognise_layout(tmp_path)
    with pytest.raises(ValueError, match="nowhere: no such folder"):
        recognise_layout(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="layout is 'voc', expected auto, paired, coco"):
        recognise_layout(tmp_path, "voc")


def test_rubbish_in_a_json_file_is_of_no_concern_to_other_layouts(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    for number, text in enumerate(("// x", "", "[1, 2", "\x00")):
        (tmp_path / f"{number}.json").write_text(text)
    assert recognise_layout(tmp_path)[0] == "paired"


@pytest.mark.parametrize("text", ["ImageSets/Segmentation/default.txt", "masks/readme.txt"])
def test_lists_in_a_folder_of_masks_are_no_yolo(tmp_path: Path, text: str) -> None:
    write_pairs(tmp_path, "JPEGImages/{}.png", "SegmentationClass/{}.png")
    (tmp_path / text).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / text).write_text("0\n1\n")
    assert recognise_layout(tmp_path)[0] == "paired"


SLASH = r"0\.png: a name with a backslash.*; unpack the archive again"


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        *((name, SLASH) for name in ("images\\", "images/a\\", "images/a\\b/", "images/a:")),
        (os.fsdecode(b"images/gef\xe4ss"), "gef\ufffdss0\\.png: its name is not UTF-8; rename it"),
    ],
)
def test_names_that_cannot_be_written_are_refused(tmp_path: Path, folder: str, message: str) -> None:
    """The backslashes of an archive made by Windows; import.json's images could not be found again."""
    write_pairs(tmp_path, folder + "{}.png", "masks/{}.png")
    with pytest.raises(ValueError, match=message):
        recognise_layout(tmp_path)
