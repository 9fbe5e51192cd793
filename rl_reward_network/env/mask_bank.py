"""Answers of a frozen model about images, each computed once and stored on disk."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from rl_reward_network.atomic_io import load_arrays, pixels_digest, save_arrays

VISION = "vision_features"  # name of the pooled features in a file, beside the masks
NO_MASK_LOGIT = -32.0  # everywhere in the mask of an answer without [SEG]: probability 1e-14, exact in float16


class FrozenAnswer(NamedTuple):
    """Output of a frozen model for one image and P prompts: its features are pooled over the image."""

    mask_logits: np.ndarray
    """float32 (P, h, w), on the decoder's grid."""
    vision_features: np.ndarray
    """float32 (C,)."""


Segment = Callable[[np.ndarray, list[str]], FrozenAnswer]


class MaskBank:
    """Answers of a frozen model to a list of prompts, read from disk where they exist, else computed.

    One safetensors file per image, named by the SHA-256 of the model's fingerprint and the image's pixels, holds one
    fp16 mask per prompt and the image's features. A new prompt costs one mask per image; another model or
    preprocessing shares no file; an interrupted run continues with the missing masks. Several processes may fill one
    bank. Files are written atomically; the masks of a damaged file are computed again, with a warning.

    Args:
        folder: made when the first file is written.
        segment: (image uint8 (H, W, 3), prompts) -> `FrozenAnswer`. Called at most once per image, with the missing
            prompts only.
        fingerprint: identifies everything else the answers depend on (weights, preprocessing, generation limits).
        prompts: at least one; the order of the masks.

    Attributes:
        computed, reused: numbers of (image, prompt) pairs that were computed, or found on disk; each counts once.
        encoded: number of images that `segment` was called for; each runs the image encoders once.
        without_mask: number of (image, prompt) pairs whose answer has no mask, only `NO_MASK_LOGIT`.
    """

    def __init__(self, folder: Path, segment: Segment, fingerprint: str, prompts: Sequence[str]) -> None:
        if not prompts or not fingerprint:
            raise ValueError(f"mask bank: prompts are {list(prompts)} and fingerprint is {fingerprint!r}; give both")
        self.folder, self.segment, self.fingerprint = folder, segment, fingerprint
        self.prompts = tuple(prompts)
        self.computed = self.reused = self.encoded = self.without_mask = 0
        self._keys = {prompt: hashlib.sha256(prompt.encode()).hexdigest() for prompt in self.prompts}
        self._counted: set[str] = set()

    def path(self, image: np.ndarray) -> Path:
        """The file of this image (uint8 (H, W, 3)) under this model."""
        return self.folder / f"{pixels_digest(image, self.fingerprint)}.safetensors"

    def answer(self, image: np.ndarray) -> FrozenAnswer:
        """The answer for an image, uint8 (H, W, 3); masks are rounded to fp16.

        A ValueError if `segment` returned another number of masks, or values that are not finite.
        """
        path = self.path(image)
        stored = load_arrays(path, "its masks are computed again")
        if VISION not in stored:  # a new file, or one of version 0.3 or earlier
            stored = {}
        missing = [prompt for prompt in self.prompts if self._keys[prompt] not in stored]
        if missing:
            stored |= self._compute(image, missing)
            save_arrays(path, stored)
        masks = np.stack([stored[self._keys[prompt]] for prompt in self.prompts]).astype(np.float32)
        if path.name not in self._counted:
            self._counted.add(path.name)
            self.reused += len(self.prompts) - len(missing)
            self.without_mask += int((masks == NO_MASK_LOGIT).all(axis=(1, 2)).sum())
        return FrozenAnswer(masks, stored[VISION])

    def build(self, images: Iterable[np.ndarray], total: int | None = None) -> None:
        """Compute the missing answers for `images`, uint8 (H, W, 3) each; a generator holds one in memory at a time."""
        for image in tqdm(images, desc="masks", unit="image", total=total):
            self.answer(image)
        self.check_masks()

    def check_masks(self) -> None:
        """Raise a ValueError if none of the answers so far has a mask: an empty mask would be a statement."""
        answers = len(self._counted) * len(self.prompts)
        if answers and self.without_mask == answers:
            raise ValueError(
                f"the model gave no mask: none of its {answers} answers has a [SEG]; look at one by sa2va-rl segment, "
                "and check the model by sa2va-rl doctor"
            )

    def counts(self) -> str:
        """One line on the calls of the frozen model."""
        silent = f"; answers without [SEG]: {self.without_mask}" if self.without_mask else ""
        return (
            f"masks computed by Sa2VA: {self.computed}, read from the bank: {self.reused}; "
            f"images encoded: {self.encoded}{silent}"
        )

    def _compute(self, image: np.ndarray, prompts: list[str]) -> dict[str, np.ndarray]:
        """fp16 (h, w) logits by prompt key and the image's features, from one call of the model."""
        masks, features = self.segment(image, prompts)
        finite = bool(np.isfinite(masks).all() and np.isfinite(features).all())
        if masks.ndim != 3 or len(masks) != len(prompts) or features.ndim != 1 or not finite:
            raise ValueError(
                f"segment returned shapes {masks.shape} and {features.shape}, finite={finite}; "
                f"expected ({len(prompts)}, h, w) and (C,) finite"
            )
        self.computed += len(prompts)
        self.encoded += 1
        limit = float(np.finfo(np.float16).max)
        half = np.clip(masks, -limit, limit).astype(np.float16)
        by_prompt = {self._keys[prompt]: mask for prompt, mask in zip(prompts, half, strict=True)}
        return {**by_prompt, VISION: features.astype(np.float32)}
