"""Where the masks of sequences go, what is never replaced, and which masks a second run keeps."""

from pathlib import Path
from unittest.mock import MagicMock

import cv2
import numpy as np
import pytest
from PIL import Image

from rl_reward_network.data_import.sequences import FrameSequence, open_sequence
from rl_reward_network.segment.files import prompt_of
from rl_reward_network.segment.sequence_files import (
    SequenceTarget,
    animation,
    check_sequence_free,
    missing_masks,
    sequence_targets,
    truth_files,
    write_sequence_mask,
)
from tests.data_import.test_sequences import levels, write_folder, write_video

MASK = np.eye(4, dtype=bool)


@pytest.fixture
def target(tmp_path: Path) -> SequenceTarget:
    return SequenceTarget(tmp_path / "run", tmp_path / "run_segmented")


def test_each_sequence_has_a_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    folder, file = sequence_targets([tmp_path / "run", tmp_path / "scan.dcm"], None, None)
    assert (folder.folder, file.folder) == (tmp_path / "run_segmented", tmp_path / "scan_segmented")
    assert folder.mask(0) == tmp_path / "run_segmented" / "masks" / "0001.png"
    (named,) = sequence_targets([tmp_path / "run"], tmp_path / "out", "The catheter!")
    assert named.folder == tmp_path / "out" / "run_the-catheter_segmented"
    series = sequence_targets([tmp_path / "1.2.840.1", tmp_path / "1.2.840.2", tmp_path / "run" / ".."], None, None)
    assert [place.folder.name for place in series[:2]] == ["1.2.840.1_segmented", "1.2.840.2_segmented"]
    assert series[2].folder == tmp_path.with_name(f"{tmp_path.name}_segmented")
    with pytest.raises(ValueError, match=r"run, .*run\.avi: .*one folder, .*; give each an --output"):
        sequence_targets([tmp_path / "run", tmp_path / "run.avi"], None, None)
    with pytest.raises(ValueError, match=r"mask\.png: with --video, give a folder"):
        sequence_targets([tmp_path / "run"], tmp_path / "mask.png", None)
    with pytest.raises(ValueError, match="no sequence"):
        sequence_targets([], None, None)


def test_masks_of_the_same_run_are_kept(target: SequenceTarget) -> None:
    assert missing_masks(target, 3, "key") == [0, 1, 2]
    for index, key in enumerate(("key", "other", "key", "key")):
        write_sequence_mask(target, index, MASK, "the vessel", key)
    for path in target.results:
        path.touch()
    (target.masks / ".0002_x8d.png").write_bytes(b"a killed run")
    assert prompt_of(target.mask(0)) == "the vessel"
    np.testing.assert_array_equal(np.asarray(Image.open(target.mask(0))), 255 * MASK)
    assert missing_masks(target, 4, "key") == [1]
    assert not any(path.exists() for path in (*target.results, target.mask(1))), "results of another run"
    write_sequence_mask(target, 1, MASK, "the vessel", "key")
    assert missing_masks(target, 4, "key") == []


def test_only_masks_of_this_prompt_are_replaced(target: SequenceTarget) -> None:
    check_sequence_free(target, "this")
    write_sequence_mask(target, 0, MASK, "this", "key")
    target.results[0].touch()
    check_sequence_free(target, "this")
    with pytest.raises(ValueError, match=r"0001\.png: .*another prompt, 'this'; .*--output"):
        check_sequence_free(target, "that")
    with pytest.raises(ValueError, match=r"0001\.png: .*another sequence of this name; .*--output"):
        check_sequence_free(SequenceTarget(target.source.with_suffix(".avi"), target.folder), "this")
    Image.fromarray(MASK).save(target.mask(1))
    with pytest.raises(ValueError, match=r"0002\.png: .*not written by segment"):
        check_sequence_free(target, "this")
    for path in target.masks.iterdir():
        path.unlink()
    with pytest.raises(ValueError, match=r"overlay\.avi: .*not written by segment"):
        check_sequence_free(target, "this")


def animate(path: Path, frames: list[np.ndarray]) -> None:
    with animation(path, (41, 51), 15) as append:
        for frame in frames:
            append(frame)


def test_an_animation_has_the_frames_and_their_rate(tmp_path: Path) -> None:
    red = np.zeros((41, 51, 3), dtype=np.uint8)
    red[..., 0] = 200
    animate(tmp_path / "overlay.avi", [red] * 3)
    video = cv2.VideoCapture(str(tmp_path / "overlay.avi"))
    assert (video.get(cv2.CAP_PROP_FRAME_COUNT), video.get(cv2.CAP_PROP_FPS)) == (3, 15)
    blue, _, read = video.read()[1].reshape(-1, 3).mean(axis=0)
    assert (blue < 10, abs(read - 200) < 10) == (True, True), "channels are RGB"


def test_an_animation_of_a_slow_recording_is_written(tmp_path: Path) -> None:
    with animation(tmp_path / "overlay.avi", (41, 51), 0.5) as append:
        append(np.zeros((41, 51, 3), dtype=np.uint8))
    assert cv2.VideoCapture(str(tmp_path / "overlay.avi")).get(cv2.CAP_PROP_FPS) == 1


def test_an_animation_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    black = np.zeros((41, 51, 3), dtype=np.uint8)
    with pytest.raises(cv2.error):
        animate(tmp_path / "overlay.avi", [black, black[:20]])
    dropping = MagicMock(fourcc=cv2.VideoWriter.fourcc)  # as OpenCV does on a full disk: without an error
    monkeypatch.setattr(cv2, "VideoWriter", dropping)
    with pytest.raises(ValueError, match=r"overlay\.avi: 0 of 2 frames were written; free some disk space"):
        animate(tmp_path / "overlay.avi", [black, black])
    assert list(tmp_path.iterdir()) == []


def write_truth(folder: Path, *names: str, size: tuple[int, int] = (20, 30)) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        Image.fromarray(np.full(size, 255, dtype=np.uint8)).save(folder / name)
    return folder


def test_true_masks_are_named_like_the_frames(tmp_path: Path) -> None:
    frames = open_sequence(write_folder(tmp_path / "run", levels(12)))
    truth = write_truth(tmp_path / "truth", "f2.png", "f11.png")
    (truth / "._f2.png").write_bytes(b"what macOS leaves beside f2.png on a USB stick")
    assert truth_files(frames, truth) == {1: truth / "f2.png", 10: truth / "f11.png"}
    video = open_sequence(write_video(tmp_path / "run.avi", levels(12)))
    numbered = write_truth(tmp_path / "numbered", "run2_0001.png", "12.png")
    assert truth_files(video, numbered) == {11: numbered / "12.png", 0: numbered / "run2_0001.png"}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), r"--truth .*truth: no mask there"),
        (("f13.png",), r"f13\.png: no frame of run is named so"),
        (("f1.bmp", "f1.png"), r"f1\.png: f1\.bmp is a mask of the same frame"),
    ],
)
def test_true_masks_of_no_frame_are_refused(tmp_path: Path, names: tuple[str, ...], message: str) -> None:
    frames = open_sequence(write_folder(tmp_path / "run", levels(12)))
    with pytest.raises(ValueError, match=message):
        truth_files(frames, write_truth(tmp_path / "truth", *names))


def test_frames_of_one_stem_have_no_true_masks(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "run", levels(3))
    Image.fromarray(levels(1)[0]).save(folder / "f1.bmp")
    with pytest.raises(ValueError, match=r"run: 2 frames are named f1, a true mask may be of any; rename them"):
        truth_files(open_sequence(folder), write_truth(tmp_path / "truth", "f1.png"))


def test_true_masks_of_another_size_are_refused(tmp_path: Path) -> None:
    frames: FrameSequence = open_sequence(write_folder(tmp_path / "run", levels(2)))
    with pytest.raises(ValueError, match=r"f1\.png: mask is 30 x 21"):
        truth_files(frames, write_truth(tmp_path / "truth", "f1.png", size=(21, 30)))
