"""The frozen model's masks, each (image, prompt) computed once and kept on disk."""

import hashlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from tqdm import tqdm

from rl_reward_network.artefacts import whole_file

Segment = Callable[[np.ndarray, list[str]], np.ndarray]


class MaskBank:
    """Mask logits of a frozen model for one list of prompts, read from disk where they exist, else computed.

    One safetensors file per image, named by the SHA-256 of the model's fingerprint and the image's pixels, holds one
    fp16 array per prompt. So a new prompt costs one mask per image, another model or another preprocessing shares
    nothing, and a run that was stopped goes on where it was. Files appear whole or not at all; one that cannot be
    read is computed again, with a warning.

    Args:
        folder: where the files are kept; made when the first one is written.
        segment: (image uint8 (H, W, 3), prompts) -> float32 (P, h, w) mask logits, one per prompt. Called at most
            once per image, with the missing prompts only.
        fingerprint: names everything else the masks depend on (weights, preprocessing, generation limits).
        prompts: at least one; the order of the masks.

    Attributes:
        computed: (image, prompt) pairs that `segment` was called for.
        reused: (image, prompt) pairs that were found on disk. A pair is counted once, however often it is read.
    """

    def __init__(self, folder: Path, segment: Segment, fingerprint: str, prompts: Sequence[str]) -> None:
        if not prompts or not fingerprint:
            raise ValueError(f"mask bank: got prompts={list(prompts)} and fingerprint={fingerprint!r}; give both")
        self.folder, self.segment, self.fingerprint = folder, segment, fingerprint
        self.prompts = tuple(prompts)
        self.computed = self.reused = 0
        self._keys = {prompt: hashlib.sha256(prompt.encode()).hexdigest() for prompt in self.prompts}
        self._counted: set[str] = set()

    def path(self, image: np.ndarray) -> Path:
        """The file of this image (uint8 (H, W, 3)) under this model."""
        digest = hashlib.sha256(f"{self.fingerprint}\n{image.shape}\n{image.dtype}\n".encode())
        digest.update(np.ascontiguousarray(image).data)
        return self.folder / f"{digest.hexdigest()}.safetensors"

    def logits(self, image: np.ndarray) -> np.ndarray:
        """float32 (P, h, w) mask logits of an image (uint8 (H, W, 3)) on the decoder's grid, rounded to fp16.

        Raises:
            ValueError: `segment` answered with another number of masks or with values that are not finite.
        """
        path = self.path(image)
        stored = _read(path)
        missing = [prompt for prompt in self.prompts if self._keys[prompt] not in stored]
        if missing:
            stored |= self._compute(image, missing)
            with whole_file(path) as temporary:
                save_file(stored, temporary)
        if path.name not in self._counted:
            self._counted.add(path.name)
            self.reused += len(self.prompts) - len(missing)
        return np.stack([stored[self._keys[prompt]] for prompt in self.prompts]).astype(np.float32)

    def build(self, images: Iterable[np.ndarray], total: int | None = None) -> None:
        """Compute what is missing for `images` (uint8 (H, W, 3) each; a generator keeps one in memory at a time)."""
        for image in tqdm(images, desc="masks", unit="image", total=total):
            self.logits(image)

    def _compute(self, image: np.ndarray, prompts: list[str]) -> dict[str, np.ndarray]:
        """fp16 (h, w) logits by prompt key, from one call of the model."""
        masks = np.asarray(self.segment(image, prompts))
        if masks.ndim != 3 or len(masks) != len(prompts) or not np.isfinite(masks).all():
            finite = bool(np.isfinite(masks).all())
            raise ValueError(
                f"segment: got shape {masks.shape}, finite={finite}; expected ({len(prompts)}, h, w) finite"
            )
        self.computed += len(prompts)
        limit = float(np.finfo(np.float16).max)
        half = np.clip(masks, -limit, limit).astype(np.float16)
        return {self._keys[prompt]: mask for prompt, mask in zip(prompts, half, strict=True)}


def _read(path: Path) -> dict[str, np.ndarray]:
    """The arrays in `path`; none when there is no such file or it is damaged (said in a warning)."""
    if not path.exists():
        return {}
    try:
        return load_file(path)
    except SafetensorError as error:
        warnings.warn(f"{path}: damaged ({error}); its masks are computed again", stacklevel=3)
        return {}
