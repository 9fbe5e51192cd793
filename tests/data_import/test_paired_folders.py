"""Paired folders: which image has which mask, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

from rl_reward_network.data_import import files
from rl_reward_network.data_import.items import Item
from rl_reward_network.data_import.layouts import read_paired_folders, recognise_paired_folders
from rl_reward_network.data_import.survey import ImportOptions, survey_source
from tests.data_import.sources import SIZE, as_255, picture, save, truth, write_pairs


def items_of(source: Path) -> dict[str, Item]:
    assert recognise_paired_folders(source)
    found = read_paired_folders(source)
    assert found.faults == []
    return {item.name: item for item in found.items}


def check_masks(items: dict[str, Item], names: list[str]) -> None:
    assert sorted(items) == sorted(names)
    for number, name in enumerate(names):
        (mask,) = items[name].load_masks(SIZE).values()
        assert (mask == truth(number)).all(), name
        assert (items[name].load_image() == picture(number)).all()


@pytest.mark.parametrize(
    ("images", "masks", "names"),
    [
        ("images/{}.png", "masks/{}.png", "{}.png"),
        ("images/{}.png", "labels/{}.tif", "{}.png"),
        ("Images/{}.png", "gt/{}_gt.png", "{}.png"),
        ("images/{}.png", "annotations/{}-mask.png", "{}.png"),
        ("images/p7/{}.png", "masks/p7/{}.png", "p7/{}.png"),
        ("train/images/{}.png", "train/masks/{}.png", "train/{}.png"),
        ("images/train/{}.png", "masks/train/{}.png", "train/{}.png"),
        ("{}.png", "{}_mask.png", "{}.png"),
        ("p7/{}.png", "p7/{}_seg.png", "p7/{}.png"),
        ("{}.png", "masks/{}.png", "{}.png"),
        ("images/{}.v2.png", "masks/{}.v2.png", "{}.v2.png"),
        ("images/{}.tif", "masks/{}.png", "{}.png"),
        ("JPEGImages/480p/{}.png", "Annotations/480p/{}.png", "480p/{}.png"),
        ("Original/{}.png", "Ground Truth/{}.png", "Original/{}.png"),
        ("train_images/{}.png", "train_masks/{}.png", "train/{}.png"),
        ("images/{}_training.png", "1st_manual/{}_manual1.png", "{}_training.png"),
        ("images/{}.png", "masks/{}_vessels.png", "{}.png"),
        ("{}.png", "{}_1stHO.png", "{}.png"),
        ("valImages/{}.png", "valMasks/{}.png", "val/{}.png"),
        ("images/{}.png", "annotations/trimaps/{}.png", "{}.png"),
        ("CXR_png/{}.png", "ManualMask/{}.png", "CXR_png/{}.png"),
        ("Task1_Training_Input/{}.png", "Task1_Training_GroundTruth/{}_segmentation.png", "train/{}.png"),
    ],
)
def test_images_find_their_masks(tmp_path: Path, images: str, masks: str, names: str) -> None:
    write_pairs(tmp_path, images, masks)
    check_masks(items_of(tmp_path), [names.format(number) for number in range(5)])


def test_equal_stems_in_two_folders_stay_apart(tmp_path: Path) -> None:
    for part, first in (("train", 0), ("test", 2)):
        for number in (1, 2):
            save(tmp_path / part / "images" / f"{number}.png", picture(first + number))
            save(tmp_path / part / "masks" / f"{number}.png", truth(first + number).astype(np.uint8))
    items = items_of(tmp_path)
    assert sorted(items) == ["test/1.png", "test/2.png", "train/1.png", "train/2.png"]
    assert (items["test/2.png"].load_image() == picture(4)).all()
    assert (items["test/2.png"].load_masks(SIZE)["1"] == truth(4)).all()


def test_names_that_would_become_one_keep_their_folder_and_suffix(tmp_path: Path) -> None:
    paths = [save(tmp_path / name, picture(0)) for name in ("images/a.png", "img/a.png", "images/b.tif", "b.png")]
    assert list(files.names_of(paths, tmp_path).values()) == [
        "images/a_png.png",
        "img/a_png.png",
        "images/b_tif.tif",
        "b_png.png",
    ]


@pytest.mark.parametrize("names", [("a.png", "a.jpg", "a_png.png"), ("a.tif", "a.png", "a_tif.bmp")])
def test_two_files_that_would_be_written_as_one_are_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    paths = [save(tmp_path / name, picture(0)) for name in names]
    with pytest.raises(ValueError, match=rf"{names[2]} would be written as one file, a_...\.png; rename one"):
        files.names_of(paths, tmp_path)


def test_unmatched_and_unread_files_are_told(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    save(tmp_path / "images/bare.png", picture(9))
    save(tmp_path / "masks/lost.png", truth(9))
    save(tmp_path / "extra/7.png", picture(7))
    save(tmp_path / "images/1.GIF", picture(1)[..., 0], format="GIF")
    (tmp_path / "images/.hidden.gif").write_bytes(b"")
    save(tmp_path / "images/\u00e4.png", picture(0))
    save(tmp_path / "masks/a\u0308.png", truth(0))
    found = survey_source(tmp_path, ImportOptions("none", label="all")).found
    assert {item.name for item in found.items if item.load_masks is None} == {"bare.png"}
    assert len(found.items) == 7
    assert found.notes == [
        "1 mask(s) without an image, left out: masks/lost.png",
        "1 picture(s) outside of these folders, left out: extra/7.png",
        "1 image(s) without a mask, imported as unlabelled (images/bare.png)",
        "files of kinds that are not read, left out: 1 .gif (images/1.GIF); save them as PNG",
    ]


def test_two_images_or_two_masks_of_one_name_are_faults(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    save(tmp_path / "images/1.jpg", picture(9))
    save(tmp_path / "masks/3_mask.tif", truth(3))
    save(tmp_path / "masks/3.bmp", truth(3))
    first, second = read_paired_folders(tmp_path).faults
    assert "images/1.jpg, images/1.png: images of one name" in first
    assert "masks/3.bmp, masks/3.png, masks/3_mask.tif: masks of one image" in second


@pytest.mark.parametrize(
    ("names", "images", "masks"),
    [
        (["images/0.png", "masks/x0.png"], r"images/0\.png", r"masks/x0\.png"),
        (["images/1_a.png", "images/1_b.png", "masks/1.png"], r"images/1_a\.png", r"masks/1\.png"),
        (["images/p1/0.png", "masks/p2/0.png"], r"images/p1/0\.png", r"masks/p2/0\.png"),
    ],
)
def test_folders_without_a_pair_are_refused_with_names_of_both(tmp_path, names, images, masks):
    for name in names:
        save(tmp_path / name, picture(1))
    with pytest.raises(ValueError, match=rf"no image has a mask of equal name.*{images}.*{masks}"):
        read_paired_folders(tmp_path)


@pytest.mark.parametrize("name", ["images/{}.png", "photos/{}.png"])
def test_images_alone_are_no_pairs(tmp_path: Path, name: str) -> None:
    write_pairs(tmp_path, name, name)
    assert recognise_paired_folders(tmp_path) == ""


def test_linked_folders_are_followed_and_circles_are_not(tmp_path: Path) -> None:
    write_pairs(tmp_path / "real")
    write_pairs(tmp_path / "source", "train/images/{}.png", "train/masks/{}.png")
    (tmp_path / "source/val").symlink_to(tmp_path / "real")
    (tmp_path / "source/train/images/up").symlink_to(tmp_path / "source")
    assert len(read_paired_folders(tmp_path / "source").items) == 10


def joined(source: Path, name: str) -> np.ndarray:
    (mask,) = items_of(source)[name].load_masks(SIZE).values()
    return mask


@pytest.mark.parametrize("folder", ["masks/", ""])
def test_further_masks_of_an_image_are_joined_and_never_images(tmp_path: Path, folder: str) -> None:
    """BUSI: "benign (4)_mask.png" with "benign (4)_mask_1.png"."""
    write_pairs(tmp_path, "images/a ({}).png" if folder else "a ({}).png", folder + "a ({})_mask.png")
    further = np.roll(truth(2), 14, axis=1)
    save(tmp_path / folder / "a (2)_mask_1.png", as_255(further))
    assert len(items_of(tmp_path)) == 5
    assert (joined(tmp_path, "a (2).png") == (truth(2) | further)).all()
    assert any("joined of several files: " in note for note in read_paired_folders(tmp_path).notes)


def test_masks_of_two_observers_are_not_joined(tmp_path: Path) -> None:
    for observer in ("1st", "2nd"):
        write_pairs(tmp_path, "{}.png", f"{{}}_{observer}HO.png")
    save(tmp_path / "3_2ndHO.png", as_255(truth(9)))
    assert (joined(tmp_path, "3.png") == truth(3)).all()


@pytest.mark.parametrize("manual", ["1st_manual/{}_manual1.png", "manual1/{}_training.png"])
def test_a_drawing_comes_before_the_field_of_view(tmp_path: Path, manual: str) -> None:
    """DRIVE and HRF."""
    write_pairs(tmp_path, "training/images/{}_training.png", f"training/{manual}")
    for number in range(5):
        save(tmp_path / f"training/mask/{number}_training_mask.png", as_255(np.ones(SIZE, bool)))
    assert (joined(tmp_path, "training/3_training.png") == truth(3)).all()
    notes = read_paired_folders(tmp_path).notes
    assert any(
        "masks of 5 image(s) left out, such as training/mask/0_training_mask.png, since" in note for note in notes
    )


def test_links_that_lead_nowhere_are_a_fault_and_volumes_are_named(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    (tmp_path / "masks/3.png").unlink()
    (tmp_path / "masks/3.png").symlink_to("../.git/annex/objects/x/3.png")
    (tmp_path / "masks/4.nii.gz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"1 link\(s\) whose target is missing: masks/3\.png; fetch the files"):
        survey_source(tmp_path, ImportOptions("none"))
    (tmp_path / "masks/3.png").unlink()
    survey = survey_source(tmp_path, ImportOptions("none"))
    assert any("1 .nii.gz (masks/4.nii.gz); volumes: write each slice" in note for note in survey.found.notes)
    (tmp_path / "masks/3.png").symlink_to(save(tmp_path / ".annex/3.png", as_255(truth(3))))
    assert survey_source(tmp_path, ImportOptions("none")).open_points == (), "a link that leads somewhere is followed"
