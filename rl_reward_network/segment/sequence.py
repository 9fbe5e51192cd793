"""`segment --video`: check every frame, ask the language model once, segment, and measure a sequence.

Each mask is written whole and holds a key of everything it depends on: a second run keeps masks of its own key, and
never replaces those of another prompt or sequence. Memory does not grow with the length of a sequence.
"""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from tqdm import tqdm

from rl_reward_network.atomic_io import pixels_digest, whole_file, write_json
from rl_reward_network.bit_depth import GreyWindow
from rl_reward_network.data.images import IMAGE_SUFFIXES, load_grid, text_of
from rl_reward_network.data.masks import load_mask
from rl_reward_network.data_import.files import DICOM_SUFFIXES
from rl_reward_network.data_import.sequences import (
    VIDEO_SUFFIXES,
    FrameSequence,
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
from rl_reward_network.report.overlays import AFTER, TRUTH, paint_mask
from rl_reward_network.report.page import csv_text
from rl_reward_network.rewards.learned import ImageScorer
from rl_reward_network.rewards.metrics import dice, iou
from rl_reward_network.segment.files import prompt_of, save_mask, words_of
from rl_reward_network.segment.maker import NO_MASK, MaskMaker

RUN_KEY = "sa2va_sequence"  # of the text in a PNG that holds the key of its run
RECORDING_KEY = "sa2va_recording"  # of the text that tells the sequence from others of the same name
PREDICTED = ("dice", "score")  # by the reward network
STRIP = 6  # most frames in the strip


@dataclass(frozen=True)
class SequenceTarget:
    """A sequence, its folder or file `source`, and the folder below which everything is written."""

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
    def results(self) -> tuple[Path, Path, Path]:
        """The table of frames, the strip of frames, and the summary, which is written last."""
        return self.folder / "frames.csv", self.folder / "strip.png", self.folder / "sequence.json"

    @property
    def masks(self) -> list[Path]:
        """The masks that exist."""
        return [path for path in sorted(self.folder.glob("masks/*.png")) if re.fullmatch(r"\d{4,}", path.stem)]

    def mask(self, index: int) -> Path:
        """The mask of a frame (from 0); its name counts from 1."""
        return self.folder / "masks" / f"{index + 1:04d}.png"


@dataclass(frozen=True)
class CheckedSequence:
    """A sequence of which every frame was decoded once; `truths`: index of a frame -> its true mask."""

    target: SequenceTarget
    frames: FrameSequence
    digest: str
    truths: dict[int, Path]

    def mask(self, index: int) -> np.ndarray:
        """bool (H, W): the mask that was written for a frame."""
        return load_grid(self.target.mask(index)) > 0

    def truth(self, index: int) -> np.ndarray | None:
        """bool (H, W): the true mask of a frame; None without one."""
        return load_mask(self.truths[index], self.frames.size) if index in self.truths else None


class SegmentedSequence(NamedTuple):
    """The result for one sequence: where it was written, what is in sequence.json, Dice of each annotated frame."""

    target: SequenceTarget
    summary: dict[str, Any]
    dice: list[float]


def sequence_targets(paths: Sequence[Path], output: Path | None, prompt: str | None) -> list[SequenceTarget]:
    """The folder of each sequence, `<name>_<words>_segmented` with words of the prompt: beside it, or in `output`."""
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
    target: SequenceTarget, prompt: str, grey: GreyWindow | None = None, truth: Path | None = None
) -> CheckedSequence:
    """Open a sequence, and decode each frame and true mask once, before a model is loaded or anything is written."""
    frames = open_sequence(target.source, grey, is_frame=lambda file: prompt_of(file) is None)
    check_sequence_free(target, prompt)
    truths = {} if truth is None else truth_files(frames, truth)
    digest = hashlib.sha256()
    for frame in tqdm(frames.frames(), f"reading {target.name}", len(frames), unit="frame", delay=2):
        digest.update(pixels_digest(frame).encode())
    return CheckedSequence(target, frames, digest.hexdigest(), truths)


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
    from 1: `run_12.png` is the mask of frame 12. A ValueError for no mask, one of no frame, two of one frame, two
    frames of one stem, or a mask that is not binary or not of the frames' size.
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

    With `sam2_memory` the language model sees the first frames, and SAM 2's memory carries the masks on, as in the
    official prediction; a ValueError where SAM 2 has none. Else the language model sees some of the whole sequence, and
    each frame is segmented by itself.
    """

    maker: MaskMaker
    sam2_memory: bool = False

    def __post_init__(self) -> None:
        if self.sam2_memory:
            check_memory(self.maker.model)

    def __call__(self, checked: CheckedSequence) -> SegmentedSequence:
        """Ask about the shown frames, write the missing masks, then the results; without `[SEG]` a ValueError."""
        maker, shown = self.maker, self._shown(len(checked.frames))
        frames = list(checked.frames.frames(shown))
        answer = answer_sequence(maker.model, frames, maker.prompt, maker.processor, maker.max_new_tokens)
        if not len(answer.seg_embeddings):
            raise ValueError(f"{checked.target.source}: no [SEG] in the answer {answer.answer!r:.100}; {NO_MASK}")
        self._write_masks(checked, answer, shown)
        measures, predicted = write_results(checked, maker.network)
        summary = {
            **{"prompt": maker.prompt, "answer": answer.answer, "segs": len(answer.seg_embeddings)},
            **{"key_frames": [index + 1 for index in shown], "sam2_memory": self.sam2_memory},
            **summarise_frames(measures),
            **{f"predicted_{name}": mean for name, mean in zip(PREDICTED, predicted, strict=False)},
        }
        write_json(checked.target.results[2], summary)
        return SegmentedSequence(checked.target, summary, [frame.dice for frame in measures if frame.dice is not None])

    def _shown(self, count: int) -> list[int]:
        """Indices of the frames that the language model sees: up to 5, as Sa2VA was trained."""
        if self.sam2_memory:
            return key_frames(count, "first", FRAMES_SEEN)
        if hasattr(self.maker.model.grounding_encoder, "memory_attention"):
            return key_frames(count, "uniform", FRAMES_SEEN)
        # Without memory it is the embedded model, trained on single images. First frames show no vessel yet.
        return [count // 2]

    def _write_masks(self, checked: CheckedSequence, answer: SequenceAnswer, shown: list[int]) -> None:
        """Write the missing masks; with memory every mask is computed again, since each depends on those before."""
        maker, target, count = self.maker, checked.target, len(checked.frames)
        weights = answers_fingerprint(maker.model, maker.processor, maker.max_new_tokens)
        settings = f"{weights}\n{maker.prompt}\n{self.sam2_memory} {shown}\n{checked.digest}"
        key = hashlib.sha256(settings.encode()).hexdigest()
        missing = missing_masks(target, count, key)
        computed = range(count) if self.sam2_memory and missing else missing
        if not computed:
            return
        segment = masks_with_memory if self.sam2_memory else masks_without_memory
        masks = segment(maker.model, checked.frames.frames(computed), answer.seg_embeddings, maker.processor)
        bar = tqdm(masks, target.source.name, len(computed), unit="frame")
        for index, logits in zip(computed, bar, strict=True):
            if index in missing:
                upsampled = upsample_mask_logits(logits, checked.frames.size, maker.processor.sam_image_size)
                mask = (upsampled.sigmoid() > 0.5).any(dim=0).cpu().numpy()  # several [SEG] are joined
                save_mask(target.mask(index), mask, maker.prompt, {RUN_KEY: key, RECORDING_KEY: target.recording})


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


# ---- results ----


class FrameMeasures(NamedTuple):
    """The mask of one frame in numbers, all in [0, 1]; None where there is nothing to compare with."""

    share: float  # of the frame that the mask covers
    dice: float | None  # with the truth
    iou_before: float | None  # with the mask of the frame before
    true_iou_before: float | None  # the same of the truth, where both frames are annotated


Mask = np.ndarray | None


def measure_frame(before: tuple[Mask, Mask], mask: np.ndarray, truth: Mask) -> FrameMeasures:
    """Compare a mask, bool (H, W), with its truth and both with those before; a ValueError for another size."""
    compared = [
        None if one is None or other is None else float(metric(one[None], other[None])[0])
        for metric, one, other in ((dice, mask, truth), (iou, before[0], mask), (iou, before[1], truth))
    ]
    return FrameMeasures(float(mask.mean()), *compared)


def summarise_frames(frames: Sequence[FrameMeasures]) -> dict[str, float | int | None]:
    """Means over a sequence; None where no frame, or no pair of consecutive frames, has the number.

    `stability` is the mean IoU of consecutive masks, and has no best value: vessels move with the heart and fill with
    contrast agent. Where two consecutive frames are annotated, that of the truth, `true_stability`, says how much
    change is right; `stability_there` is that of the masks on those pairs alone.
    """

    def mean(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return float(np.mean(known)) if known else None

    share, with_truth, before, true_before = zip(*frames, strict=True)
    return {
        "frames": len(frames),
        "share": mean(share),
        "stability": mean(before),
        "annotated": sum(value is not None for value in with_truth),
        "dice": mean(with_truth),
        "true_stability": mean(true_before),
        "stability_there": mean(frame.iou_before for frame in frames if frame.true_iou_before is not None),
    }


def write_results(checked: CheckedSequence, network: RewardNetwork | None) -> tuple[list[FrameMeasures], list[float]]:
    """Write frames.csv and the strip of a sequence with all of its masks; one frame is in memory at a time.

    Returns the measures of each mask, and means of `PREDICTED` over the frames in the domain of the reward network.
    """
    measures, predicted, outside, strip = list[FrameMeasures](), list[tuple[float, ...]](), list[str](), []
    in_strip = set(key_frames(len(checked.frames), "uniform", STRIP))
    before: tuple[Mask, Mask] = (None, None)
    for index, frame in enumerate(checked.frames.frames()):
        mask, truth = checked.mask(index), checked.truth(index)
        measures.append(measure_frame(before, mask, truth))
        before = (mask, truth)
        if network is not None:
            scorer = ImageScorer(network, frame)
            quality = scorer.quality(mask[None].astype(np.float32))
            predicted.append(tuple(float(quality[name][0]) for name in PREDICTED))
            outside += [scorer.outside] if scorer.outside else []
        if index in in_strip:
            painted = frame if truth is None else paint_mask(frame, truth, TRUTH, opacity=0)
            strip.append(paint_mask(painted, mask, AFTER, opacity=0))
    with whole_file(checked.target.results[1]) as temporary:
        Image.fromarray(np.hstack(strip)).save(temporary, format="PNG")
    if outside:
        tqdm.write(f"no Dice is predicted for {len(outside)} of {len(predicted)} frames; the first: {outside[0]}")
    rows: list[tuple[Any, ...]] = [("number", "frame", "share", "dice", "iou_before", "true_iou_before")]
    rows[0] += tuple(f"predicted_{name}" for name in PREDICTED) if predicted else ()
    numbers = zip(checked.frames.names, measures, predicted or [()] * len(measures), strict=True)
    for number, (name, measured, scores) in enumerate(numbers, 1):
        rows.append((number, name, *measured, *(None if np.isnan(value) else value for value in scores)))
    with whole_file(checked.target.results[0]) as temporary:  # names of frames may be Latin-1
        temporary.write_text(csv_text(rows), encoding="utf-8", errors="backslashreplace")
    return measures, np.nanmean(predicted, axis=0).tolist() if len(predicted) > len(outside) else []
