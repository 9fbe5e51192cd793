"""`segment --video`: check every frame, ask the language model once, segment, and measure a sequence.

Each mask is written whole and holds a key of everything it depends on: a second run keeps masks of its own key, and
never replaces those of another prompt or sequence. Memory does not grow with the length of a sequence.
"""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image
from tqdm import tqdm

from rl_reward_network.atomic_io import pixels_digest, whole_file, write_json
from rl_reward_network.bit_depth import GreyWindow
from rl_reward_network.data.images import IMAGE_SUFFIXES, load_grid
from rl_reward_network.data.masks import load_mask
from rl_reward_network.data_import.files import DICOM_SUFFIXES
from rl_reward_network.data_import.sequences import (
    VIDEO_SUFFIXES,
    FrameSequence,
    KeyFrames,
    frame_contrast,
    key_frames,
    open_sequence,
    visible_images,
)
from rl_reward_network.inputs.segmenter import answers_fingerprint
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.models.sa2va.pixels_sa2va import upsample_mask_logits
from rl_reward_network.models.sa2va.video_sa2va import (
    FRAMES_SEEN,
    SequenceAnswer,
    answer_sequence,
    check_memory,
    masks_with_memory,
    masks_without_memory,
)
from rl_reward_network.report.overlays import GREEN, ORANGE, paint_mask
from rl_reward_network.report.page import csv_text
from rl_reward_network.report.sequences import FrameMeasures, measure_frames, summarise_frames
from rl_reward_network.rewards.learned import ImageScorer
from rl_reward_network.segment.files import NO_MASK, prompt_of, save_mask, text_of, words_of
from rl_reward_network.segment.maker import MaskMaker

RUN_KEY = "sa2va_sequence"  # of the text in a PNG that holds the key of its run
RECORDING_KEY = "sa2va_recording"  # of the text that tells the sequence from others of the same name
PREDICTED = ("dice", "score")  # by the reward network
STRIP = 6  # most frames in the strip


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
        known = self.source.suffix.lower() in (*VIDEO_SUFFIXES, *DICOM_SUFFIXES) and not self.source.is_dir()
        return self.source.stem if known else self.source.name

    @property
    def recording(self) -> str:
        """16 hex digits that identify the place of the sequence, without naming it."""
        return hashlib.sha256(str(self.source.resolve()).encode()).hexdigest()[:16]

    @property
    def results(self) -> tuple[Path, Path, Path, Path]:
        """The animation, the table of frames, the strip of frames, and the summary, which is written last."""
        names = ("overlay.avi", "frames.csv", "strip.png", "sequence.json")
        animation, table, strip, summary = (self.folder / name for name in names)
        return animation, table, strip, summary

    @property
    def masks(self) -> list[Path]:
        """The masks that exist."""
        return [path for path in sorted(self.folder.glob("masks/*.png")) if re.fullmatch(r"\d{4,}", path.stem)]

    def mask(self, index: int) -> Path:
        """The mask of a frame (from 0); its name counts from 1."""
        return self.folder / "masks" / f"{index + 1:04d}.png"


@dataclass(frozen=True)
class CheckedSequence:
    """A sequence of which every frame was decoded once.

    Args:
        target: where its masks go.
        frames: the sequence.
        contrast: of each frame, see `frame_contrast`.
        digest: of the pixels of all frames.
        truths: index of a frame -> file of its true mask.
    """

    target: SequenceTarget
    frames: FrameSequence
    contrast: list[float]
    digest: str
    truths: dict[int, Path]

    def mask(self, index: int) -> np.ndarray:
        """bool (H, W): the mask that was written for a frame."""
        return load_grid(self.target.mask(index)) > 0

    def truth(self, index: int) -> np.ndarray | None:
        """bool (H, W): the true mask of a frame; None without one."""
        return load_mask(self.truths[index], self.frames.size) if index in self.truths else None


@dataclass(frozen=True)
class SegmentedSequence:
    """The result for one sequence: where it was written, what is in sequence.json, Dice of each annotated frame."""

    target: SequenceTarget
    summary: dict[str, Any]
    dice: list[float]


def sequence_targets(paths: Sequence[Path], output: Path | None, prompt: str | None) -> list[SequenceTarget]:
    """The folder of each sequence, `<name>_<words of the prompt>_segmented`: beside it, or in the folder `output`.

    Raises:
        ValueError: no path, `output` is named as a file, or two sequences would share a folder.
    """
    if not paths:
        raise ValueError("no sequence: name folders of frames, DICOM files or video files")
    if output is not None and output.suffix.lower() in IMAGE_SUFFIXES and not output.is_dir():
        raise ValueError(f"--output {output}: with --video, give a folder")
    targets = []
    for path in paths:
        source = Path(os.path.abspath(path))  # the name of ".." is a folder's
        name = SequenceTarget(source, source).name
        targets.append(SequenceTarget(source, (output or source.parent) / f"{name}_{words_of(prompt)}segmented"))
    folder, count = Counter(target.folder for target in targets).most_common(1)[0]
    if count > 1:
        both = ", ".join(str(target.source) for target in targets if target.folder == folder)
        raise ValueError(f"{both}: their masks would be in one folder, {folder}; give each an --output of its own")
    return targets


def check_sequence(
    target: SequenceTarget,
    prompt: str,
    grey: GreyWindow | None = None,
    truth: Path | None = None,
) -> CheckedSequence:
    """Open a sequence, and decode each frame and true mask once, before a model is loaded or anything is written.

    Args:
        target: the sequence, and where its masks go.
        prompt: of the masks.
        grey: window of grey above 8 bit; None measures it.
        truth: folder of true masks.

    Raises:
        ValueError: as `open_sequence`, `FrameSequence.frames`, `truth_files` and `check_sequence_free`.
    """
    frames = open_sequence(target.source, grey, is_frame=lambda file: prompt_of(file) is None)
    check_sequence_free(target, prompt)
    truths = {} if truth is None else truth_files(frames, truth)
    measured: list[float] = []
    digest = hashlib.sha256()
    for frame in tqdm(frames.frames(), f"reading {target.name}", len(frames), unit="frame", delay=2):
        measured.append(frame_contrast(frame))
        digest.update(pixels_digest(frame).encode())
    return CheckedSequence(target, frames, measured, digest.hexdigest(), truths)


def check_sequence_free(target: SequenceTarget, prompt: str) -> None:
    """Raise a ValueError if a file exists that was not written here, or is a mask of another prompt or sequence."""
    masks, remedy = target.masks, "choose another place by --output, or move it"
    for path in masks:
        existing = prompt_of(path)
        if existing == prompt and text_of(path, RECORDING_KEY) == target.recording:
            continue
        what = "was not written by segment" if existing is None else f"is of another prompt, {existing!r}"
        what = "is of another sequence of this name" if existing == prompt else what
        raise ValueError(f"{path}: exists already and {what}; {remedy}")
    others = [path for path in (target.folder, *target.results) if path.is_file()]
    if others and not masks:
        raise ValueError(f"{others[0]}: exists already and was not written by segment; {remedy}")


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
        raise ValueError(f"--truth {folder}: no mask there; name the folder of the masks of {sequence.path.name}")
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


@dataclass(frozen=True)
class SequenceMaker:
    """A loaded Sa2VA that segments sequences by one prompt.

    Args:
        maker: model, processor, prompt, and the reward network if there is one.
        sam2_memory: masks by SAM 2's memory of the frames before, as officially; else each frame by itself.
        key_frames: which frames the language model sees.

    Raises:
        ValueError: `sam2_memory` with a model whose SAM 2 has none.
    """

    maker: MaskMaker
    sam2_memory: bool = False
    key_frames: KeyFrames = "uniform"

    def __post_init__(self) -> None:
        """Check the memory."""
        if self.sam2_memory:
            check_memory(self.maker.model)

    def __call__(self, checked: CheckedSequence) -> SegmentedSequence:
        """Ask about the chosen frames, write the missing masks, then the results.

        Raises:
            ValueError: the answer has no `[SEG]`; nothing is written.
        """
        maker, chosen = self.maker, self._chosen(checked)
        shown = list(checked.frames.frames(chosen))
        answer = answer_sequence(maker.model, shown, maker.prompt, maker.processor, maker.max_new_tokens)
        segs = len(answer.seg_embeddings)
        if not segs:
            raise ValueError(f"{checked.target.source}: no [SEG] in the answer {answer.answer!r:.100}; {NO_MASK}")
        self._write_masks(checked, answer, chosen)
        frames, predicted = write_results(checked, maker.network)
        summary = {
            **{"prompt": maker.prompt, "answer": answer.answer, "segs": segs},
            **{"key_frames": [index + 1 for index in chosen], "sam2_memory": self.sam2_memory},
            **summarise_frames(frames),
            **{f"predicted_{name}": mean for name, mean in zip(PREDICTED, predicted, strict=False)},
        }
        write_json(checked.target.results[3], summary)
        return SegmentedSequence(checked.target, summary, [frame.dice for frame in frames if frame.dice is not None])

    def _chosen(self, checked: CheckedSequence) -> list[int]:
        """Indices of the frames that the language model sees: up to 5, as Sa2VA was trained.

        One where SAM 2 has no memory: such a model, the embedded one, was trained on single images.
        """
        most = FRAMES_SEEN if hasattr(self.maker.model.grounding_encoder, "memory_attention") else 1
        if most == 1 and self.key_frames == "uniform":
            return [len(checked.frames) // 2]  # the first frames of an angiogram show no vessel yet
        return key_frames(len(checked.frames), self.key_frames, checked.contrast, most)

    def _write_masks(self, checked: CheckedSequence, answer: SequenceAnswer, chosen: list[int]) -> None:
        """Write the missing masks; with memory every mask is computed again, since each depends on those before."""
        maker, target, count = self.maker, checked.target, len(checked.frames)
        weights = answers_fingerprint(maker.model, maker.processor, maker.max_new_tokens)
        settings = f"{weights}\n{maker.prompt}\n{self.sam2_memory} {chosen}\n{checked.digest}"
        key = hashlib.sha256(settings.encode()).hexdigest()
        missing = missing_masks(target, count, key)
        computed = range(count) if self.sam2_memory and missing else missing
        masks = self._masks(checked.frames, computed, answer)
        for index, mask in zip(computed, tqdm(masks, target.source.name, len(computed), unit="frame"), strict=True):
            if index in missing:
                save_mask(target.mask(index), mask, maker.prompt, {RUN_KEY: key, RECORDING_KEY: target.recording})

    def _masks(self, frames: FrameSequence, indices: Sequence[int], answer: SequenceAnswer) -> Iterator[np.ndarray]:
        """bool (H, W) of each frame; several `[SEG]` are joined."""
        segment = masks_with_memory if self.sam2_memory else masks_without_memory
        processor = self.maker.processor
        if indices:
            for logits in segment(self.maker.model, frames.frames(indices), answer.seg_embeddings, processor):
                probabilities = upsample_mask_logits(logits, frames.size, processor.sam_image_size).sigmoid()
                yield (probabilities > 0.5).any(dim=0).cpu().numpy()


def missing_masks(target: SequenceTarget, count: int, key: str) -> list[int]:
    """Indices of the frames whose mask of this run is not there.

    If some are missing, what other runs left is deleted first, so that old results never stand beside new masks.
    """
    ours = {path for path in target.masks if text_of(path, RUN_KEY) == key}
    missing = [index for index in range(count) if target.mask(index) not in ours]
    if missing or len(ours) < len(target.masks):
        for path in (*reversed(target.results), *(path for path in target.masks if path not in ours)):
            path.unlink(missing_ok=True)
    return missing


def write_results(checked: CheckedSequence, network: RewardNetwork | None) -> tuple[list[FrameMeasures], list[float]]:
    """Write the animation, frames.csv and strip of a sequence with all of its masks; one frame is in memory at a time.

    Returns:
        Measures of each mask, and means of `PREDICTED` over the frames in the domain of the reward network; empty
        without one.
    """
    predicted: list[tuple[float, ...]] = []
    outside: list[str] = []
    in_strip, strip = set(key_frames(len(checked.frames), "uniform", [], STRIP)), list[np.ndarray]()
    with animation(checked.target.results[0], checked.frames.size, checked.frames.rate) as append:
        for index, frame in enumerate(checked.frames.frames()):
            mask, truth = checked.mask(index), checked.truth(index)
            if network is not None:
                scorer = ImageScorer(network, frame)
                quality = scorer.quality(mask[None].astype(np.float32))
                predicted.append(tuple(float(quality[name][0]) for name in PREDICTED))
                outside += [scorer.outside] if scorer.outside else []
            if truth is not None:
                frame = paint_mask(frame, truth, GREEN, opacity=0)
            painted = paint_mask(frame, mask, ORANGE, opacity=0)
            append(painted)
            strip += [painted] if index in in_strip else []
    with whole_file(checked.target.results[2]) as temporary:
        Image.fromarray(np.hstack(strip)).save(temporary, format="PNG")
    masks = ((checked.mask(index), checked.truth(index)) for index in range(len(checked.frames)))
    measures = list(measure_frames(masks, checked.contrast))
    heads = ["number", "frame", "share", "dice", "iou_before", "true_iou_before", "dice_before", "border_before"]
    heads += [f"predicted_{name}" for name in PREDICTED] if predicted else []
    if outside:
        tqdm.write(f"no Dice is predicted for {len(outside)} of {len(predicted)} frames; the first: {outside[0]}")
    rows = [
        (number + 1, name, *astuple(frame), *(None if np.isnan(value) else value for value in quality))
        for number, (name, frame, quality) in enumerate(
            zip(checked.frames.names, measures, predicted or [()] * len(measures), strict=True)
        )
    ]
    with whole_file(checked.target.results[1]) as temporary:  # names of frames may be Latin-1
        temporary.write_text(csv_text([heads, *rows]), encoding="utf-8", errors="backslashreplace")
    return measures, np.nanmean(predicted, axis=0).tolist() if len(predicted) > len(outside) else []


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
            raise ValueError(f"{path}: {written} of {count} frames were written; free some disk space, run it again")
