"""Every layout is recognised as itself alone."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_reward_network.data_import.layouts import LAYOUTS, recognise_layout
from tests.data_import.sources import SIZE, as_255, save, truth, write_pairs
from tests.data_import.test_coco import write_coco
from tests.data_import.test_dicom import write_dicom
from tests.data_import.test_labelme import write_labelme
from tests.data_import.test_nnunet import write_nnunet
from tests.data_import.test_yolo import write_yolo


def write_dicom_with_masks(source: Path) -> Path:
    write_dicom(source / "images/a.dcm", np.zeros(SIZE))
    save(source / "masks/a.png", as_255(truth(0)))
    return source


SOURCES: dict[str, Callable[[Path], Any]] = {
    "paired": write_pairs,
    "coco": lambda source: write_coco(source, "annotations/instances_default.json", "images/{}.png"),
    "nnunet": lambda source: write_nnunet(source, {"background": 0, "vessel": 1}),
    "yolo": write_yolo,
    "labelme": write_labelme,
    "dicom": write_dicom_with_masks,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_is_recognised_as_itself_alone(tmp_path: Path, name: str) -> None:
    SOURCES[name](tmp_path)
    assert [other for other, layout in LAYOUTS.items() if layout.recognise(tmp_path)] == [name]
    assert recognise_layout(tmp_path) == (name, LAYOUTS[name].recognise(tmp_path))


def test_two_layouts_in_one_folder_are_asked_about(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    write_coco(tmp_path, "result.json", "images/{}.png")
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
