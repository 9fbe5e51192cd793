"""Sequences of frames (a folder of images, a DICOM file with several frames, a video file).

Frames are decoded one at a time, so memory does not grow with the length. All frames have one size, and grey of more
than 8 bit has one window for the whole sequence (see `bit_depth.py`). No DICOM tag is kept.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import cv2
import numpy as np

from rl_reward_network.bit_depth import MAX_FRAMES, GreyWindow, common_window, grey_to_rgb
from rl_reward_network.data.images import IMAGE_SUFFIXES, image_header, load_deep, load_image
from rl_reward_network.data_import.dicom import begins_as_dicom, iter_frames, read_header
from rl_reward_network.data_import.files import DICOM_SUFFIXES

VIDEO_SUFFIXES = (".avi", ".mp4", ".m4v", ".mov")
Decode = Callable[[Iterable[int]], Iterator[np.ndarray]]
"""Ascending indices -> stored values of those frames: uint8 (H, W, 3), or unsigned grey (H, W)."""


@dataclass(frozen=True)
class FrameSequence:
    """The frames of one recording, on disk."""

    path: Path
    names: tuple[str, ...]  # in order: file names of a folder, else "frame 1", "frame 2", ...
    size: tuple[int, int]  # (H, W) of each
    grey: GreyWindow | None  # of more than 8 bit; None: 8 bit
    decode: Decode

    def __len__(self) -> int:
        return len(self.names)

    def frames(self, indices: Iterable[int] | None = None) -> Iterator[np.ndarray]:
        """Frames at ascending `indices` (from 0; None: all) as uint8 (H, W, 3) RGB, each decoded on demand.

        ValueError where one cannot be decoded, or has another size; it is named.
        """
        wanted = range(len(self)) if indices is None else list(indices)
        for index, pixels in zip(wanted, self.decode(wanted), strict=True):
            if pixels.shape[:2] != self.size:
                raise ValueError(_other_size(self.path, self.names, index, pixels.shape[:2], self.size))
            yield pixels if pixels.ndim == 3 else grey_to_rgb(pixels, self.grey or GreyWindow(0, 255))


def open_sequence(
    path: Path, grey: GreyWindow | None = None, is_frame: Callable[[Path], bool] = lambda file: True
) -> FrameSequence:
    """Read the headers of a folder of images, sorted by name with numbers as numbers, of a DICOM or of a video file.

    `grey` is the window of grey of more than 8 bit; None measures it on a few frames. `is_frame` tells whether an image
    of a folder belongs to the sequence. ValueError where nothing is there, no frame is found, or frames differ in size
    or depth; it names the file.
    """
    if path.is_dir():
        return _folder(path, grey, is_frame)
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder; name a folder of frames, a DICOM file or a video file")
    if (suffix := path.suffix.lower()) in VIDEO_SUFFIXES:
        return _video(path)
    if suffix in DICOM_SUFFIXES or (suffix not in IMAGE_SUFFIXES and begins_as_dicom(path)):
        return _dicom(path, grey)
    kinds = ", ".join(VIDEO_SUFFIXES)
    raise ValueError(f"{path}: not a sequence; name a folder of frames, a DICOM file or a video file ({kinds})")


def visible_images(folder: Path) -> list[Path]:
    """The paths in a folder that are named as images are, by name; neither folders nor hidden files."""
    named = (path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES and path.name[0] != ".")
    return sorted(path for path in named if not path.is_dir())


def natural_order(path: Path) -> list[tuple[int, str]]:
    """Sort key of a file name that compares numbers as numbers.

    >>> sorted([Path("f10.png"), Path("f9.png")], key=natural_order)[0].name
    'f9.png'
    """
    parts = re.split(r"(\d+)", path.name.lower())
    return [(int(part), "") if number % 2 else (0, part) for number, part in enumerate(parts)]


def _folder(folder: Path, grey: GreyWindow | None, is_frame: Callable[[Path], bool]) -> FrameSequence:
    files = [path for path in sorted(visible_images(folder), key=natural_order) if is_frame(path)]
    if not files:
        raise ValueError(
            f"{folder}: holds no frame ({', '.join(IMAGE_SUFFIXES)}); name the folder that holds them, or a DICOM or"
            " video file itself"
        )
    names = tuple(path.name for path in files)
    size, deep = image_header(files[0])
    for index, file in enumerate(files):
        found, is_deep = image_header(file)
        if found != size:
            raise ValueError(_other_size(folder, names, index, found, size))
        if is_deep != deep:
            depths = [f"{'more than 8' if depth else '8'} bit" for depth in (is_deep, deep)]
            raise ValueError(f"{file}: has {depths[0]}, but {names[0]} has {depths[1]}; export all frames alike")
    load = load_deep if deep else load_image
    decode: Decode = lambda indices: (load(files[index]) for index in indices)  # noqa: E731
    used = grey or _measured(decode, len(files)) if deep else None
    return FrameSequence(folder, names, size, used, decode)


def _dicom(path: Path, grey: GreyWindow | None) -> FrameSequence:
    header = read_header(path)
    try:
        count, size = int(header.get("NumberOfFrames") or 1), (int(header.Rows), int(header.Columns))
        if count < 1:
            raise ValueError(f"NumberOfFrames is {count}")
        deep = header.BitsStored > 8 and header.SamplesPerPixel == 1
    except Exception as error:  # of damaged tags: AttributeError, ValueError, TypeError, ...
        raise ValueError(
            f"{path}: not a readable DICOM picture ({type(error).__name__}: {error}); export it again"
        ) from error
    decode = partial(iter_frames, path)
    used = grey or _measured(decode, count) if deep else None
    return FrameSequence(path, tuple(f"frame {n + 1}" for n in range(count)), size, used, decode)


def _video(path: Path) -> FrameSequence:
    """The frames of a video file, which is decoded once to count them: headers may promise more."""
    capture = _opened(path)
    try:
        promised = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
        readable, first = capture.read()
        count = int(readable)
        while readable and capture.grab():
            count += 1
    finally:
        capture.release()
    if not count or count < promised:
        raise ValueError(_broken_video(path, count, promised))
    return FrameSequence(
        path, tuple(f"frame {n + 1}" for n in range(count)), first.shape[:2], None, partial(_read, path)
    )


def _read(path: Path, indices: Iterable[int]) -> Iterator[np.ndarray]:
    """Frames of a video file in RGB; those between the indices are decoded and dropped, since seeking is not exact."""
    capture, position = _opened(path), 0
    try:
        for index in indices:
            while position < index and capture.grab():
                position += 1
            readable, frame = capture.read()
            if not readable:
                raise ValueError(_broken_video(path, position, index + 1))
            position += 1
            yield cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)
    finally:
        capture.release()


def _opened(path: Path) -> cv2.VideoCapture:
    capture = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG)
    if not capture.isOpened():
        raise ValueError(f"{path}: not a readable video (damaged, or a codec that OpenCV lacks); {_REMEDY}")
    return capture


_REMEDY = "convert it, e.g. by ffmpeg -i FILE -c:v mjpeg -q:v 2 NEW.avi, or export its frames as PNG"


def _broken_video(path: Path, count: int, promised: int) -> str:
    return f"{path}: frame {count + 1} of {max(promised, 1)} cannot be decoded; {_REMEDY}"


def _other_size(path: Path, names: tuple[str, ...], index: int, found: tuple[int, ...], size: tuple[int, int]) -> str:
    sizes = [f"{width} x {height}" for height, width in (found, size)]
    return (
        f"{path}: {names[index]} is {sizes[0]} (width x height), but {names[0]} is {sizes[1]}; a sequence has one size:"
        " leave out what does not belong to it, or segment without --video"
    )


def _measured(decode: Decode, count: int) -> GreyWindow:
    """One window for all frames, measured on as many of them as that of a series in training."""
    return common_window(decode(range(0, count, -(-count // MAX_FRAMES))))


def key_frames(count: int, how: Literal["first", "uniform"], most: int = 5) -> list[int]:
    """Numbers of the frames that a language model sees, from 0, in order of time; all if there are at most `most`.

    "first" is what the official prediction does; in an angiogram those frames may lie before the contrast agent.
    "uniform" is evenly spaced, with the first and the last frame. ValueError for a count or `most` below 1.
    """
    if count < 1 or most < 1:
        raise ValueError(f"{count} frames, at most {most} key frames: expected 1 or more of both")
    last = count - 1 if how == "uniform" else min(count, most) - 1
    return np.linspace(0, last, min(count, most)).round().astype(int).tolist()
