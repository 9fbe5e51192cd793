"""From a sequence to its masks, its animation and its numbers: check all frames, ask once, segment, measure."""

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from rl_reward_network.artefacts import write_json
from rl_reward_network.data_import.sequences import FrameSequence, KeyFrames, key_frames
from rl_reward_network.env.mask_bank import StoredAnswer, sequence_answer
from rl_reward_network.inputs.segmenter import answers_fingerprint
from rl_reward_network.models.sa2va.loading_sa2va import Dtype
from rl_reward_network.models.sa2va.memory_sa2va import check_memory
from rl_reward_network.models.sa2va.pixels_sa2va import upsample_mask_logits
from rl_reward_network.models.sa2va.video_sa2va import (
    FRAMES_SEEN,
    answer_sequence,
    masks_with_memory,
    masks_without_memory,
)
from rl_reward_network.segment.loading import load_mask_maker
from rl_reward_network.segment.maker import MaskMaker
from rl_reward_network.segment.sequence_check import CheckedSequence
from rl_reward_network.segment.sequence_files import SequenceTarget, missing_masks, write_sequence_mask
from rl_reward_network.segment.sequence_results import write_results


@dataclass(frozen=True)
class SegmentedSequence:
    """The result for one sequence.

    Args:
        target: where it was written.
        summary: as in sequence.json.
        dice: of each annotated frame.
    """

    target: SequenceTarget
    summary: dict[str, Any]
    dice: list[float]


@dataclass(frozen=True)
class SequenceMaker:
    """A loaded Sa2VA that segments sequences by one prompt.

    Args:
        maker: model, processor, prompt, and the reward network if there is one.
        fingerprint: of the model and its limits.
        memory: masks by SAM 2's memory of the frames before, as in the official prediction; else each frame by itself.
        key_frames: which frames the language model sees.
    """

    maker: MaskMaker
    fingerprint: str
    memory: bool
    key_frames: KeyFrames

    def __call__(self, checked: CheckedSequence) -> SegmentedSequence:
        """Answer, write what is missing of the masks, then the animation, frames.csv and sequence.json."""
        chosen = self._chosen(checked)
        frames = list(checked.frames.frames(chosen))
        answer = sequence_answer(checked.target.answers, self._ask, self.fingerprint, frames, self.maker.prompt)
        if not len(answer.seg_embeddings):
            warnings.warn(
                f"{checked.target.source}: no [SEG] in the answer {answer.answer!r:.100}; its masks are empty",
                stacklevel=2,
            )
        self._write_masks(checked, answer, chosen)
        measures = write_results(checked, self.maker.network)
        summary = {
            "prompt": self.maker.prompt,
            "answer": answer.answer,
            "segs": len(answer.seg_embeddings),
            "key_frames": [index + 1 for index in chosen],
            "memory": self.memory,
            **measures.summary,
        }
        write_json(checked.target.results[2], summary)
        return SegmentedSequence(checked.target, summary, measures.dice)

    def _chosen(self, checked: CheckedSequence) -> list[int]:
        count, most = len(checked.frames), frames_shown(self.maker.model)
        if most == 1 and self.key_frames == "uniform":
            return [count // 2]  # the first frames of an angiogram show no vessel yet
        return key_frames(count, self.key_frames, checked.contrast, most)

    def _ask(self, frames: Sequence[np.ndarray], prompt: str) -> StoredAnswer:
        model, processor = self.maker.model, self.maker.processor
        found = answer_sequence(model, frames, prompt, processor, self.maker.max_new_tokens)
        return StoredAnswer(found.answer, found.seg_embeddings.cpu().numpy())

    def _write_masks(self, checked: CheckedSequence, answer: StoredAnswer, chosen: list[int]) -> None:
        """Write the missing masks; with memory every mask is computed again, since each depends on those before."""
        settings = f"{self.fingerprint}\n{self.maker.prompt}\n{self.memory} {chosen}\n{checked.digest}"
        key = hashlib.sha256(settings.encode()).hexdigest()
        missing = missing_masks(checked.target, len(checked.frames), key)
        if not missing:
            return
        computed = range(len(checked.frames)) if self.memory else missing
        masks = self._masks(checked.frames, computed, answer.seg_embeddings)
        bar = tqdm(masks, checked.target.source.name, len(computed), unit="frame")
        for index, mask in zip(computed, bar, strict=True):
            if index in missing:
                write_sequence_mask(checked.target, index, mask, self.maker.prompt, key)

    def _masks(self, frames: FrameSequence, indices: Sequence[int], segs: np.ndarray) -> Iterator[np.ndarray]:
        """bool (H, W) of each frame; several `[SEG]` are joined, none is an empty mask."""
        if not len(segs):
            yield from (np.zeros(frames.size, dtype=bool) for _ in indices)
            return
        segment = masks_with_memory if self.memory else masks_without_memory
        processor = self.maker.processor
        for logits in segment(self.maker.model, frames.frames(indices), torch.from_numpy(segs), processor):
            probabilities = upsample_mask_logits(logits, frames.size, processor.sam_image_size).sigmoid()
            yield (probabilities > 0.5).any(dim=0).cpu().numpy()


def frames_shown(model: Any) -> int:
    """The most frames to show to the language model: 5, as Sa2VA was trained.

    One where SAM 2 has no memory: such a model, the embedded one, was trained on single images, and answers nonsense
    about three.
    """
    return FRAMES_SEEN if hasattr(model.grounding_encoder, "memory_attention") else 1


def load_sequence_maker(
    model_path: str | None,
    prompt: str,
    reward_net: Path | None = None,
    device: str | None = None,
    bit_depth: int | None = None,
    dtype: Dtype | None = None,
    image_resize: str | None = None,
    memory: bool = False,
    key_frames: KeyFrames = "uniform",
) -> SequenceMaker:
    """Load reward network and model; the arguments are those of `load_mask_maker` and `SequenceMaker`.

    Raises:
        ValueError: as `load_mask_maker`, or `memory` with a model whose SAM 2 has none.
    """
    maker = load_mask_maker(model_path, prompt, None, reward_net, device, None, bit_depth, dtype, image_resize)
    if memory:
        check_memory(maker.model.grounding_encoder)
    fingerprint = answers_fingerprint(maker.model, maker.processor, maker.max_new_tokens)
    return SequenceMaker(maker, fingerprint, memory, key_frames)
