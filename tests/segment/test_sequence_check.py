"""Every frame is decoded before anything is written."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rl_reward_network.segment.files import Target, write_mask
from rl_reward_network.segment.sequence_check import check_sequence
from rl_reward_network.segment.sequence_files import SequenceTarget
from tests.conftest import smooth_image
from tests.data_import.test_sequences import levels, write_folder


def target_of(folder: Path) -> SequenceTarget:
    return SequenceTarget(folder, folder.with_name(f"{folder.name}_segmented"))


def test_every_frame_is_measured(tmp_path: Path) -> None:
    flat, busy = np.full((40, 40, 3), 90, dtype=np.uint8), smooth_image(40, 40)
    checked = check_sequence(target_of(write_folder(tmp_path / "run", [flat, busy, flat])), "the vessel", contrast=True)
    assert len(checked.contrast) == 3
    assert checked.contrast[1] > checked.contrast[0] == checked.contrast[2]
    same = check_sequence(target_of(write_folder(tmp_path / "copy", [flat, busy, flat])), "the vessel")
    other = check_sequence(target_of(write_folder(tmp_path / "other", [flat, busy, busy])), "the vessel")
    assert checked.digest == same.digest != other.digest
    assert checked.truth(0) is None
    assert same.contrast == []


def test_masks_of_single_images_are_no_frames(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "run", levels(2))
    target = Target(folder / "f1.png", folder / "f1_mask.png", folder / "f1_overlay.png")
    write_mask(target, levels(1)[0], np.zeros((20, 30), dtype=bool), "the vessel")
    assert len(check_sequence(target_of(folder), "the vessel").frames) == 2


@pytest.mark.parametrize("size", [0, 20, 60])  # bytes left: none, half of the header, a part of the pixels
def test_an_unreadable_frame_is_named(tmp_path: Path, size: int) -> None:
    folder = write_folder(tmp_path / "run", levels(3))
    (folder / "f2.png").write_bytes((folder / "f2.png").read_bytes()[:size])
    with pytest.raises(ValueError, match=r"f2\.png: not a readable image"):
        check_sequence(target_of(folder), "the vessel")


def test_a_link_to_nowhere_and_a_bomb_are_named_and_a_folder_is_no_frame(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "run", levels(3))
    (folder / "f0.png").mkdir()
    assert len(check_sequence(target_of(folder), "the vessel").frames) == 3
    Image.new("1", (20_000, 20_000)).save(folder / "f9.png")
    with pytest.raises(ValueError, match=r"f9\.png: .*400000000 pixels.*make it smaller, at most 178 million"):
        check_sequence(target_of(folder), "the vessel")
    (folder / "f9.png").unlink()
    (folder / "f9.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(ValueError, match=r"f9\.png: a link whose target is missing"):
        check_sequence(target_of(folder), "the vessel")


def test_a_broken_frame_is_found(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "run", [smooth_image(40, 40, seed) for seed in range(3)])
    whole = (folder / "f3.png").read_bytes()
    (folder / "f3.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"f3\.png: not a readable image"):
        check_sequence(target_of(folder), "the vessel")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
