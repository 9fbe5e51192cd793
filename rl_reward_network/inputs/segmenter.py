"""A frozen Sa2VA with two methods: masks and features of one image, and masks at image size."""

import hashlib
import json
import warnings
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from rl_reward_network.atomic_io import weights_fingerprint
from rl_reward_network.data.images import file_stamp
from rl_reward_network.env.mask_bank import NO_MASK_LOGIT, FrozenAnswer
from rl_reward_network.models.sa2va.generation_sa2va import Segmentation
from rl_reward_network.models.sa2va.loading_sa2va import Dtype, load_sa2va_model
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from rl_reward_network.models.sa2va.pixels_sa2va import upsample_mask_logits
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor

MASK_RULES = 1  # increase when the computation of masks changes; stored masks are then computed again


@dataclass(eq=False)
class Sa2VASegmenter:
    """A frozen Sa2VA, of one checkpoint, that answers prompts with masks."""

    model: Sa2VAForConditionalGeneration
    processor: Sa2VAProcessor
    batch_size: int  # prompts decoded at once; halved once when the GPU's memory runs out
    max_new_tokens: int
    fingerprint: str  # changes when weights, preprocessing or limits do
    halved: bool = False

    def segment(self, image: np.ndarray, prompts: list[str]) -> FrozenAnswer:
        """Mask logits on the decoder's grid for each prompt on a uint8 (H, W, 3) image, and the image's features.

        Several `[SEG]` in one answer are joined by their maximum; none is an empty mask. ValueError where the GPU's
        memory runs out with half of the batch, too.
        """
        (answers,) = self._within_memory(image, prompts)
        empty = torch.full((1, *answers[0].mask_logits.shape[-2:]), NO_MASK_LOGIT)
        logits = [torch.cat([answer.mask_logits.cpu().float(), empty]).amax(dim=0) for answer in answers]
        return FrozenAnswer(torch.stack(logits).numpy(), answers[0].vision_features.cpu().float().numpy())

    def _within_memory(self, image: np.ndarray, prompts: list[str]) -> list[list[Segmentation]]:
        """`model.segment`; the first time that memory runs out, the batch is halved for the rest of the run."""
        try:
            return self.model.segment(
                [image], prompts, self.processor, batch_size=self.batch_size, max_new_tokens=self.max_new_tokens
            )
        except torch.OutOfMemoryError:
            what = f"out of memory with SEGMENT_BATCH={self.batch_size} (--segment_batch)"
            if self.halved or self.batch_size == 1:
                raise ValueError(f"{what}; set a lower one, or use a GPU with more memory") from None
        self.halved, self.batch_size = True, self.batch_size // 2
        warnings.warn(f"{what}; going on with {self.batch_size}, set SEGMENT_BATCH to that", stacklevel=4)
        torch.cuda.empty_cache()
        return self._within_memory(image, prompts)

    def upsample(self, mask_logits: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """float32 (P, H, W) probabilities at image size from (P, h, w) logits."""
        logits = upsample_mask_logits(torch.from_numpy(mask_logits).float(), size, self.processor.sam_image_size)
        return logits.sigmoid().numpy()


def load_segmenter(
    model_path: str | Path,
    device: str = "cpu",
    batch_size: int = 16,
    max_new_tokens: int = 64,
    max_tiles: int = 1,
    dtype: Dtype = "auto",
    image_resize: str | None = None,
) -> Sa2VASegmenter:
    """The checkpoint as a segmenter; one of the same files and settings that is still in use is shared.

    One tile by default: a choice among prompts does not need the 12 of prediction, which cost 7 to 10 times as much.
    """
    folder = Path(model_path)
    files = map(file_stamp, sorted(folder.iterdir())) if folder.is_dir() else ()
    stamps = (str(folder.resolve() if folder.is_dir() else model_path), *files)
    key = (stamps, device, batch_size, max_new_tokens, max_tiles, dtype, image_resize)
    if (loaded := _LOADED.get(key)) is not None:
        return loaded
    model, processor = load_sa2va_model(model_path, device, dtype=dtype)
    processor.max_tiles = max_tiles
    processor.set_image_resize(image_resize)
    fingerprint = answers_fingerprint(model, processor, max_new_tokens)
    return _LOADED.setdefault(key, Sa2VASegmenter(model, processor, batch_size, max_new_tokens, fingerprint))


_LOADED: WeakValueDictionary[Hashable, Sa2VASegmenter] = WeakValueDictionary()  # those in use


def answers_fingerprint(model: Sa2VAForConditionalGeneration, processor: Sa2VAProcessor, max_new_tokens: int) -> str:
    """Identifies what answers depend on, apart from image and prompt: weights, configuration, words, limits, device."""
    limits = f"tiles={processor.max_tiles} tokens={max_new_tokens} dtype={model.dtype} rules={MASK_RULES}"
    limits += "" if processor.image_resize == "prediction" else f" resize={processor.image_resize}"
    limits += "" if model.device.type == "cpu" else f" {model.device.type}"  # whose sums round otherwise
    # The second is in `limits`, as the processor's counts; the third in `words`.
    apart = ["transformers_version", "image_resize", "added_token_ids"]
    if model.config.side_network is None:
        apart.append("side_network")  # a field since 0.14
    config = {name: value for name, value in model.config.to_dict().items() if name not in apart}
    words = sorted(processor.tokenizer.get_vocab().items())
    own: list[Any] = []  # what a Qwen-VL has in files of its own
    if (patches := processor.patches) is not None:
        own = [processor.chat, list(patches.image_mean), list(patches.image_std)]
    settings = hashlib.sha256(f"{json.dumps(config, sort_keys=True, default=str)}{words}{own or ''}".encode())
    return f"{weights_fingerprint(model)} {settings.hexdigest()[:8]} {limits}"
