"""Everything that can be wrong with a sequence, found before a model is loaded or anything is written."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from rl_reward_network.artefacts import pixels_digest
from rl_reward_network.data.images import load_grid
from rl_reward_network.data.masks import load_mask
from rl_reward_network.data_import.sequences import FrameSequence, frame_contrast, open_sequence
from rl_reward_network.depth import Levels
from rl_reward_network.segment.files import prompt_of
from rl_reward_network.segment.sequence_files import SequenceTarget, check_sequence_free, truth_files


@dataclass(frozen=True)
class CheckedSequence:
    """A sequence of which every frame was decoded once.

    Args:
        target: where its masks go.
        frames: the sequence.
        contrast: of each frame, see `frame_contrast`; empty if it was not asked for.
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


def check_sequence(
    target: SequenceTarget,
    prompt: str,
    levels: Levels | None = None,
    truth: Path | None = None,
    contrast: bool = False,
) -> CheckedSequence:
    """Open a sequence, and decode each frame and true mask once, before anything is written.

    Args:
        target: the sequence, and where its masks go.
        prompt: of the masks.
        levels: of grey of more than 8 bit; None measures it.
        truth: folder of true masks.
        contrast: whether to measure the contrast of each frame, which takes longer than decoding it.

    Raises:
        ValueError: as `open_sequence`, `FrameSequence.frames`, `truth_files` and `check_sequence_free`.
    """
    frames = open_sequence(target.source, levels, is_frame=lambda file: prompt_of(file) is None)
    check_sequence_free(target, prompt)
    truths = {} if truth is None else truth_files(frames, truth)
    measured: list[float] = []
    digest = hashlib.sha256()
    for frame in tqdm(frames.frames(), f"reading {target.name}", len(frames), unit="frame", delay=2):
        measured += [frame_contrast(frame)] if contrast else []
        digest.update(pixels_digest(frame).encode())
    return CheckedSequence(target, frames, measured, digest.hexdigest(), truths)
