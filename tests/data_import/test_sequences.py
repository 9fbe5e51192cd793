"""Sequences on disk: the order of frames, one size, one depth, one white level, and memory for one frame."""

import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from rl_reward_network.bit_depth import GreyWindow
from rl_reward_network.data_import.sequences import key_frames, open_sequence
from tests.conftest import smooth_image
from tests.data_import.sources import SECRET, save, write_dicom


def write_folder(folder: Path, frames: list[np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, frame in enumerate(frames, 1):
        Image.fromarray(frame).save(folder / f"f{number}.png")
    return folder


def write_video(path: Path, frames: Iterable[np.ndarray], rate: float = 15.0) -> Path:
    writer = None
    for frame in frames:
        writer = writer or cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), rate, frame.shape[1::-1])
        writer.write(frame[..., ::-1].copy())
    writer.release()
    return path


def levels(count: int, size: tuple[int, int] = (20, 30)) -> list[np.ndarray]:
    """Frames of one colour each: red is 10 times the number of the frame, modulo 256."""
    frames = [np.zeros((*size, 3), dtype=np.uint8) for _ in range(count)]
    for number, frame in enumerate(frames):
        frame[..., 0] = 10 * number % 256
    return frames


def test_a_folder_is_in_the_order_of_its_numbers(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "run", levels(12))
    (folder / "notes.txt").write_text("no frame")
    (folder / ".hidden.png").write_text("no frame")
    sequence = open_sequence(folder)
    assert sequence.names == tuple(f"f{number}.png" for number in range(1, 13))
    assert (sequence.size, sequence.grey) == ((20, 30), None)
    assert [int(frame[0, 0, 0]) for frame in sequence.frames()] == list(range(0, 120, 10))
    assert [int(frame[0, 0, 0]) for frame in sequence.frames([1, 10])] == [10, 100]
    assert len(open_sequence(folder, is_frame=lambda file: file.name != "f3.png")) == 11


def test_a_video_gives_its_frames_by_number(tmp_path: Path) -> None:
    sequence = open_sequence(write_video(tmp_path / "run.avi", levels(12)))
    assert (len(sequence), sequence.size) == (12, (20, 30))
    red = [int(frame[..., 0].mean()) for frame in sequence.frames([0, 4, 11])]
    assert np.abs(np.subtract(red, [0, 40, 110])).max() <= 3, "MJPG loses a little; channels are RGB"
    assert max(int(frame[..., 2].max()) for frame in sequence.frames()) <= 6
    assert len(list(sequence.frames())) == 12


def test_a_dicom_gives_windowed_frames_in_one_window(tmp_path: Path) -> None:
    stored = np.stack([np.full((16, 24), 100 * number) for number in range(1, 6)])
    path = write_dicom(tmp_path / "run.dcm", stored, PhotometricInterpretation="MONOCHROME1")
    sequence = open_sequence(path)
    assert (len(sequence), sequence.size, sequence.names[4]) == (5, (16, 24), "frame 5")
    assert sequence.grey == GreyWindow(4095 - 500, 4095 - 100)
    grey = [frame[0, 0].tolist() for frame in sequence.frames()]
    assert grey == [[value] * 3 for value in (255, 191, 127, 64, 0)]
    assert [int(f[0, 0, 0]) for f in open_sequence(path, grey=GreyWindow(0, 4095)).frames([4])] == [
        round(3595 * 255 / 4095)
    ]
    assert SECRET not in repr(sequence)


def test_deep_grey_is_not_brightened_frame_by_frame(tmp_path: Path) -> None:
    frames = [np.full((8, 8), value, dtype=np.uint16) for value in (1000, 500, 250)]
    sequence = open_sequence(write_folder(tmp_path / "run", frames))
    assert sequence.grey == GreyWindow(250, 1000)
    assert [int(frame[0, 0, 0]) for frame in sequence.frames()] == [255, 85, 0]


def test_what_is_no_sequence_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    one = write_folder(tmp_path / "one", levels(1)) / "f1.png"
    (tmp_path / "bad.avi").write_text("not a video")
    (tmp_path / "bad.dcm").write_text("not a DICOM file")
    write_video(tmp_path / "whole.avi", levels(40))
    minus = write_dicom(tmp_path / "minus.dcm", np.zeros((8, 8)), NumberOfFrames=-3)
    data = (tmp_path / "whole.avi").read_bytes()
    (tmp_path / "cut.avi").write_bytes(data[: len(data) // 2])
    for path, message in (
        (tmp_path / "none", r"none: no such file or folder"),
        (tmp_path / "empty", r"empty: holds no frame"),
        (one, r"f1\.png: not a sequence; name a folder"),
        (tmp_path / "bad.avi", r"bad\.avi: not a readable video .*ffmpeg"),
        (tmp_path / "cut.avi", r"cut\.avi: frame \d+ of 40 cannot be decoded; .*ffmpeg"),
        (tmp_path / "bad.dcm", r"bad\.dcm: not a DICOM file"),
        (minus, r"minus\.dcm: not a readable DICOM picture .*NumberOfFrames is -3"),
    ):
        with pytest.raises(ValueError, match=message):
            open_sequence(path)


def test_frames_that_differ_are_refused_by_their_headers_and_broken_ones_are_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "run", levels(3))
    save(folder / "f2.png", levels(1, (20, 31))[0])
    with pytest.raises(ValueError, match=r"run: f2\.png is 31 x 20 \(width x height\), but f1\.png is 30 x 20"):
        open_sequence(folder)
    save(folder / "f2.png", np.zeros((20, 30), dtype=np.uint16))
    with pytest.raises(ValueError, match=r"f2\.png: has more than 8 bit, but f1\.png has 8 bit"):
        open_sequence(folder)
    whole = save(folder / "f2.png", smooth_image(20, 30, 1)).read_bytes()
    (folder / "f2.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"f2\.png: not a readable image"):
        list(open_sequence(folder).frames())
    path = write_dicom(tmp_path / "run.dcm", np.zeros((3, 16, 24)), bits=8)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match=r"run\.dcm: pixels cannot be decoded \(frame 3"):
        list(open_sequence(path).frames())


@pytest.mark.parametrize("kind", ["folder", "avi", "dcm"])
def test_memory_does_not_grow_with_the_length(tmp_path: Path, kind: str) -> None:
    def peak(count: int) -> int:
        frames = [np.full((64, 64, 3), number % 256, dtype=np.uint8) for number in range(count)]
        if kind == "folder":
            path = write_folder(tmp_path / str(count), frames)
        elif kind == "avi":
            path = write_video(tmp_path / f"{count}.avi", frames)
        else:
            path = write_dicom(tmp_path / f"{count}.dcm", np.stack([frame[..., 0] for frame in frames]), bits=8)
        sequence = open_sequence(path)
        tracemalloc.start()
        for _ in sequence.frames():
            pass
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    peak(2)  # imports
    assert peak(200) < peak(10) + 3 * 64 * 64 * 10


@pytest.mark.parametrize(
    ("count", "how", "most", "expected"),
    [
        (60, "first", 5, [0, 1, 2, 3, 4]),
        (60, "uniform", 5, [0, 15, 30, 44, 59]),
        *((3, how, 5, [0, 1, 2]) for how in ("first", "uniform")),
        *((count, "uniform", 1, [0]) for count in (1, 9)),
    ],
)
def test_key_frames(count: int, how: Any, most: int, expected: list[int]) -> None:
    assert key_frames(count, how, most) == expected
    for arguments in ((0, how), (count, how, 0)):
        with pytest.raises(ValueError, match="expected 1 or more of both"):
            key_frames(*arguments)
