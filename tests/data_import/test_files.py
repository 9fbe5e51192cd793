"""Which pictures are masks, by their folders and names."""

from pathlib import Path, PurePosixPath

import numpy as np
import pytest
from PIL import Image

from rl_reward_network.data_import.files import (
    files_below,
    image_keys,
    images_and_masks,
    pictures_below,
    role_of,
    unread_note,
    without_role,
)
from rl_reward_network.segment.files import save_mask, targets, write_mask

FOLDERS = {
    "image": ("images", "JPEGImages", "train_images", "img_dir", "Images (2)", "trainImages", "inputs"),
    "mask": (
        "masks",
        "Ground Truth",
        "ground_truth",
        "1st_manual",
        "manual2",
        "SegmentationClass",
        "labels-ah",
        "ann_dir",
        "TrainMasks",
        "ManualMask",
        "Task1_Training_GroundTruth",
        "target",
    ),
    "": ("photos", "P07", "imagesTr", "labelsTr", "maskara", "Unmasked", "480p"),
}


@pytest.mark.parametrize(("role", "names"), FOLDERS.items())
def test_folders_say_what_they_hold(role: str, names: tuple[str, ...]) -> None:
    assert [role_of(PurePosixPath(name, "1.png")) for name in names] == [role] * len(names)
    assert role_of(PurePosixPath("images", names[0], "1.png")) == (role or "image"), "the deepest one that says it"


def test_parts_of_the_data_stay_in_the_name() -> None:
    places = ("train_images/1.png", "training masks/1.png", "test/gt/1.png", "gt/test/1.png")
    assert [str(without_role(PurePosixPath(place))) for place in places] == [
        *("train/1.png", "train/1.png", "test/1.png", "test/1.png")
    ]
    assert str(without_role(PurePosixPath("valMasks/1.png"))) == "val/1.png"


@pytest.mark.parametrize(
    ("name", "bases"),
    [
        ("benign (4)_mask", ["benign (4)"]),
        ("benign (4)_mask_2", ["benign (4)", "benign (4)_2"]),
        ("21_manual1", ["21", "211"]),
        ("Image_01L_1stHO", ["Image_01L"]),
        ("a-seg", ["a"]),
        ("mask_1", []),
        ("unmasked", []),
    ],
)
def test_affixes_are_taken_off(name: str, bases: list[str]) -> None:
    assert [key.name for key in image_keys(PurePosixPath(f"{name}.png"))] == bases


def test_what_segment_has_written_is_no_data_but_can_be_scored(tmp_path: Path) -> None:
    picture = np.zeros((16, 16, 3), np.uint8)
    for name in ("a.png", "a_mask.png", "b.png"):
        Image.fromarray(picture).save(tmp_path / name)
    write_mask(targets([tmp_path / "b.png"], None, None)[0], picture, picture[..., 0] > 0, "the vessel", None)
    (tmp_path / "labelsTs").mkdir()
    save_mask(tmp_path / "labelsTs" / "b.png", picture[..., 0], "the vessel")
    ours = [tmp_path / name for name in ("b_mask.png", "b_overlay.png", "labelsTs/b.png")]
    assert all(path.exists() for path in ours)
    assert pictures_below(tmp_path) == ([tmp_path / "a.png", tmp_path / "b.png"], [tmp_path / "a_mask.png"])
    assert {*ours} <= {*files_below(tmp_path, ".png", predictions=True)}
    (note,) = unread_note(tmp_path)
    assert note.startswith(
        "3 pictures that `segment` has written, left out (b_mask.png, b_overlay.png, labelsTs/b.png)"
    )


def sorted_out(*names: str) -> tuple[list[str], list[str]]:
    images, masks = images_and_masks([Path("/data", name) for name in names], Path("/data"))
    return [path.name for path in images], [path.name for path in masks]


def test_a_mask_is_never_an_image_and_what_is_only_named_like_one_stays_an_image():
    assert sorted_out("a.png", "a_mask.png", "a_mask_1.png") == (["a.png"], ["a_mask.png", "a_mask_1.png"])
    assert sorted_out("a.png", "a_mask.png", "b_mask.png") == (["a.png"], ["a_mask.png", "b_mask.png"]), "b is missing"
    assert sorted_out("images/a.png", "images/a_mask.png") == (["a.png"], ["a_mask.png"])
    assert sorted_out("x/a.png", "GT/a.png") == (["a.png"], ["a.png"])
    assert sorted_out("a_mask.png", "b_mask.png") == (["a_mask.png", "b_mask.png"], [])
    names = "a_seg_1.png", "a_seg_1_mask.png", "a_seg_2.png"
    assert sorted_out(*names) == (["a_seg_1.png", "a_seg_2.png"], ["a_seg_1_mask.png"])
