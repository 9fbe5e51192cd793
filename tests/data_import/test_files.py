"""Which pictures are masks, by their folders and names."""

from pathlib import Path, PurePosixPath

import pytest

from rl_reward_network.data_import.files import image_keys, images_and_masks, role_of, without_role

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
