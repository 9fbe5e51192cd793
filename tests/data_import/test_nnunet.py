"""nnU-Net's raw format with flat images."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rl_reward_network.data_import.nnunet import read_nnunet, recognise_nnunet
from rl_reward_network.data_import.survey import ImportOptions, survey_source
from tests.data_import.sources import SIZE, picture, save, truth, write_json


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
    assert recognise_nnunet(tmp_path) == "nnU-Net raw data (imagesTr, labelsTr)"
    found = read_nnunet(tmp_path)
    assert (found.faults, found.class_ids) == ([], {"1": "vessel", "2": "catheter"})
    assert [item.name for item in found.items] == [
        *(f"case_{number}.png" for number in range(4)),
        "imagesTs/case_9.png",
    ]
    assert found.items[4].load_masks is None
    for number, item in enumerate(found.items[:4]):
        assert item.load_masks is not None
        ((name, mask),) = item.load_masks(SIZE).items()
        assert name == ("vessel", "catheter")[number % 2]
        assert (mask == truth(number)).all()


def test_regions_are_unions_and_unknown_values_are_refused(tmp_path: Path) -> None:
    write_nnunet(tmp_path, {"background": 0, "all of it": [1, 2], "core": 2})
    first, second, *_ = (item.load_masks for item in read_nnunet(tmp_path).items)
    assert first is not None
    assert second is not None
    assert sorted(first(SIZE)) == ["all of it"]
    assert sorted(second(SIZE)) == ["all of it", "core"]
    write_nnunet(tmp_path, {"background": 0, "vessel": 1})
    load = read_nnunet(tmp_path).items[1].load_masks
    assert load is not None
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
    (found,) = read_nnunet(tmp_path).faults
    assert fault in found
    (tmp_path / "imagesTr/case_8_0000.nii.gz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"case_8_0000\.nii\.gz: a volume.*write each slice or frame as PNG"):
        read_nnunet(tmp_path)


def test_label_maps_with_a_palette_are_read_by_their_values(tmp_path: Path) -> None:
    write_nnunet(tmp_path, {"background": 0, "vessel": 1, "catheter": 2})
    image = Image.open(tmp_path / "labelsTr/case_1.png").convert("P")
    image.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0])
    image.save(tmp_path / "labelsTr/case_1.png")
    load = read_nnunet(tmp_path).items[1].load_masks
    assert load is not None
    assert (load(SIZE)["catheter"] == truth(1)).all()


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
        read_nnunet(tmp_path)
