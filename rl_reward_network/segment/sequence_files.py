"""Where the masks of a sequence go, what is never written over, and what a killed run leaves for the next one.

Each mask is written whole and holds a key of everything it depends on. A second run keeps masks of its own key.
"""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from rl_reward_network.artefacts import whole_file
from rl_reward_network.data.images import IMAGE_SUFFIXES
from rl_reward_network.data.masks import load_mask
from rl_reward_network.data_import.dicom_pixels import SUFFIXES
from rl_reward_network.data_import.sequences import VIDEO_SUFFIXES, FrameSequence, visible_images
from rl_reward_network.segment.files import PROMPT_KEY, prompt_of, words_of

RUN_KEY = "sa2va_sequence"  # of the text in a PNG that holds the key of its run
RECORDING_KEY = "sa2va_recording"  # of the text that tells the sequence from others of the same name


@dataclass(frozen=True)
class SequenceTarget:
    """A sequence, and the folder of its masks.

    Args:
        source: folder or file of the frames.
        folder: what is written is below it.
    """

    source: Path
    folder: Path

    @property
    def name(self) -> str:
        """The name of the sequence: of its folder, or of its file without a known suffix (1.2.840 has none)."""
        known = self.source.suffix.lower() in (*VIDEO_SUFFIXES, *SUFFIXES) and not self.source.is_dir()
        return self.source.stem if known else self.source.name

    @property
    def recording(self) -> str:
        """16 hex digits that identify the place of the sequence, without naming it."""
        return hashlib.sha256(str(self.source.resolve()).encode()).hexdigest()[:16]

    @property
    def masks(self) -> Path:
        """Folder of the masks."""
        return self.folder / "masks"

    @property
    def answers(self) -> Path:
        """Folder of the language model's answers."""
        return self.folder / "answers"

    @property
    def results(self) -> tuple[Path, Path, Path]:
        """The animation, the table of frames, and the summary, which is written last."""
        return self.folder / "overlay.avi", self.folder / "frames.csv", self.folder / "sequence.json"

    def mask(self, index: int) -> Path:
        """The mask of a frame (from 0); its name counts from 1."""
        return self.masks / f"{index + 1:04d}.png"


def sequence_targets(paths: Sequence[Path], output: Path | None, prompt: str | None) -> list[SequenceTarget]:
    """The folder of each sequence: beside it, or in the folder `output`.

    Args:
        paths: folders or files, a sequence each.
        output: folder.
        prompt: its words become part of the names; None adds nothing.

    Raises:
        ValueError: no path, `output` is named as a file, or two sequences would share a folder.
    """
    if not paths:
        raise ValueError("no sequence: name folders of frames, DICOM files or video files")
    if output is not None and output.suffix.lower() in IMAGE_SUFFIXES and not output.is_dir():
        raise ValueError(f"--output {output}: with --video, give a folder")
    targets = [_target(Path(os.path.abspath(path)), output, prompt) for path in paths]  # the name of ".." is a folder's
    shared = [folder for folder, count in Counter(target.folder for target in targets).items() if count > 1]
    if shared:
        both = ", ".join(str(target.source) for target in targets if target.folder == shared[0])
        raise ValueError(f"{both}: their masks would be in one folder, {shared[0]}; give each an --output of its own")
    return targets


def _target(source: Path, output: Path | None, prompt: str | None) -> SequenceTarget:
    name = SequenceTarget(source, source).name
    return SequenceTarget(source, (output or source.parent) / f"{name}_{words_of(prompt)}segmented")


def check_sequence_free(target: SequenceTarget, prompt: str) -> None:
    """Check that only masks of the same sequence and prompt would be replaced.

    Raises:
        ValueError: a file exists that was not written here, or holds the mask of another prompt or sequence.
    """
    masks = _masks_in(target)
    for path in masks:
        existing = prompt_of(path)
        if existing != prompt or _text_of(path, RECORDING_KEY) != target.recording:
            what = "was not written by segment" if existing is None else f"is of another prompt, {existing!r}"
            what = "is of another sequence of this name" if existing == prompt else what
            raise ValueError(f"{path}: exists already and {what}; choose another place by --output, or move the folder")
    others = [path for path in (target.folder, *target.results) if path.is_file()]
    if others and not masks:
        raise ValueError(
            f"{others[0]}: exists already and was not written by segment; choose another place by --output, or move it"
        )


def _masks_in(target: SequenceTarget) -> list[Path]:
    return [path for path in sorted(target.masks.glob("*.png")) if re.fullmatch(r"\d{4,}", path.stem)]


def missing_masks(target: SequenceTarget, count: int, key: str) -> list[int]:
    """Indices of the frames whose mask of this run is not there.

    If some are missing, what other runs left is deleted first, so that old results never stand beside new masks.
    """
    ours = {path for path in _masks_in(target) if _text_of(path, RUN_KEY) == key}
    missing = [index for index in range(count) if target.mask(index) not in ours]
    if missing or len(ours) < len(_masks_in(target)):
        for path in (*reversed(target.results), *(path for path in _masks_in(target) if path not in ours)):
            path.unlink(missing_ok=True)
    return missing


def _text_of(path: Path, name: str) -> str | None:
    with Image.open(path) as image:
        return image.info.get(name)


def write_sequence_mask(target: SequenceTarget, index: int, mask: np.ndarray, prompt: str, key: str) -> None:
    """Write the mask of a frame, bool (H, W), as 0 and 255, with its prompt and the key of its run."""
    text = PngInfo()
    for name, value in ((PROMPT_KEY, prompt), (RUN_KEY, key), (RECORDING_KEY, target.recording)):
        text.add_itxt(name, value)
    with whole_file(target.mask(index)) as temporary:
        Image.fromarray(np.where(mask, np.uint8(255), np.uint8(0))).save(temporary, "PNG", pnginfo=text)


@contextmanager
def animation(path: Path, size: tuple[int, int], rate: float) -> Iterator[Callable[[np.ndarray], None]]:
    """A function that appends a frame, uint8 (H, W, 3) RGB, to a Motion JPEG video in an AVI file.

    OpenCV writes this format without a codec, frame by frame; a GIF would be kept in memory until its end.

    Args:
        path: the file, which appears at the end.
        size: (H, W) of the frames.
        rate: frames per second; 1 is the least that the format has.

    Raises:
        ValueError: as `whole_file`, or not all frames were written.
    """
    count = 0
    with whole_file(path) as temporary:
        fourcc = cv2.VideoWriter.fourcc(*"MJPG")
        writer = cv2.VideoWriter(str(temporary), cv2.CAP_OPENCV_MJPEG, fourcc, max(1.0, rate), size[::-1])

        def append(frame: np.ndarray) -> None:
            nonlocal count
            writer.write(cv2.cvtColor(frame, cv2.COLOR_RGB2BGR))
            count += 1

        try:
            yield append
        finally:
            writer.release()
        written = max(0, int(cv2.VideoCapture(str(temporary)).get(cv2.CAP_PROP_FRAME_COUNT)))
        if written != count:  # OpenCV raises no error
            raise ValueError(
                f"{path}: {written} of {count} frames were written; free some disk space, and run it again"
            )


def truth_files(sequence: FrameSequence, folder: Path) -> dict[int, Path]:
    """Index of a frame -> the file of its true mask; frames may lack one.

    A mask has the stem of its frame's file. Of a DICOM or video file, the last number in its name counts the frames,
    from 1: `run_12.png` is the mask of frame 12.

    Raises:
        ValueError: no folder or no mask, a mask of no frame, two of one frame, two frames of one stem, or a mask that
            is not binary or not of the frames' size.
    """
    files = visible_images(folder) if folder.is_dir() else []
    if not files:
        raise ValueError(
            f"--truth {folder}: no mask there; name the folder that holds the masks of {sequence.path.name}"
        )
    by_stem = {Path(name).stem: index for index, name in enumerate(sequence.names)}
    if len(by_stem) < len(sequence):
        stem, count = Counter(Path(name).stem for name in sequence.names).most_common(1)[0]
        raise ValueError(f"{sequence.path}: {count} frames are named {stem}, a true mask may be of any; rename them")
    found: dict[int, Path] = {}
    for path in files:
        numbers = re.findall(r"\d+", path.stem)
        number = int(numbers[-1]) - 1 if numbers and not sequence.path.is_dir() else -1
        index = by_stem.get(path.stem, number)
        if not 0 <= index < len(sequence):
            raise ValueError(f"{path}: no frame of {sequence.path.name} is named so; rename or remove the mask")
        if index in found:
            raise ValueError(f"{path}: {found[index].name} is a mask of the same frame; keep one of them")
        load_mask(path, sequence.size)
        found[index] = path
    return found
