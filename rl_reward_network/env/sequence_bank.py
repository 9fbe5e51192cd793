"""Answers of a frozen model about sequences, each computed once and stored on disk."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rl_reward_network.artefacts import load_arrays, pixels_digest, save_arrays

TEXT, SEGS = "answer", "seg_embeddings"  # names in a file


class StoredAnswer(NamedTuple):
    """The language model's answer about a sequence.

    Args:
        answer: text, special tokens kept.
        seg_embeddings: float32 (K, C), the prompt for SAM 2 of each `[SEG]`; K may be 0.
    """

    answer: str
    seg_embeddings: np.ndarray


Ask = Callable[[Sequence[np.ndarray], str], StoredAnswer]


class SequenceBank:
    """Answers of a frozen model, read from disk where they exist, else computed: one per sequence and phrase.

    One safetensors file per answer, named by the SHA-256 of the model's fingerprint, the phrase, and the pixels of the
    frames that the language model sees. Masks are not stored: with memory or without it, they follow from the answer.

    Args:
        folder: folder of the files; made when the first one is written.
        ask: (frames uint8 (H, W, 3), phrase) -> `StoredAnswer`; called for missing answers alone.
        fingerprint: identifies everything else the answers depend on (weights, preprocessing, generation limits).

    Attributes:
        computed: number of answers that `ask` was called for.
        reused: number of answers found on disk.
    """

    def __init__(self, folder: Path, ask: Ask, fingerprint: str) -> None:
        if not fingerprint:
            raise ValueError("sequence bank: fingerprint is '', expected what identifies the model")
        self.folder, self.ask, self.fingerprint = folder, ask, fingerprint
        self.computed = self.reused = 0

    def path(self, frames: Sequence[np.ndarray], phrase: str) -> Path:
        """The file of the answer about these frames, each uint8 (H, W, 3)."""
        digests = "".join(pixels_digest(frame) for frame in frames)
        key = hashlib.sha256(f"{self.fingerprint}\n{digests}\n{phrase}".encode()).hexdigest()
        return self.folder / f"{key}.safetensors"

    def answer(self, frames: Sequence[np.ndarray], phrase: str) -> StoredAnswer:
        """The answer about a sequence, of which the frames uint8 (H, W, 3) are shown to the language model.

        Raises:
            ValueError: `ask` returned embeddings that are not finite float (K, C).
        """
        path = self.path(frames, phrase)
        stored = load_arrays(path, "the model is asked again")
        if stored:
            self.reused += 1
            return StoredAnswer(stored[TEXT].tobytes().decode(), stored[SEGS])
        found = self.ask(frames, phrase)
        segs = np.asarray(found.seg_embeddings, dtype=np.float32)
        if segs.ndim != 2 or not np.isfinite(segs).all():
            raise ValueError(
                f"ask returned embeddings {segs.shape}, finite={bool(np.isfinite(segs).all())}; expected finite (K, C)"
            )
        self.computed += 1
        text = np.frombuffer(found.answer.encode(), dtype=np.uint8)
        save_arrays(path, {TEXT: text, SEGS: np.ascontiguousarray(segs)})
        return StoredAnswer(found.answer, segs)
