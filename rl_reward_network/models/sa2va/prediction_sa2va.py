"""From an image and words to an answer and masks: the official single call, and the batched one everything else uses.

`model` is a Sa2VAForConditionalGeneration everywhere; its class imports this file, so it is not named as a type.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen2Tokenizer
from transformers.cache_utils import DynamicCache

from rl_reward_network.models.sa2va.generation_sa2va import Answer, Decoding, decode
from rl_reward_network.models.sa2va.processing_sa2va import (
    ImageLike,
    Sa2VAProcessor,
    left_pad,
    to_rgb,
    upsample_mask_logits,
)
from rl_reward_network.models.sa2va.templates import IMAGE_END, IMAGE_PLACEHOLDER

FINGERPRINT_SAMPLES = 65536  # per tensor; smaller ones are read whole


@dataclass(frozen=True)
class Segmentation:
    """The answer to one prompt on one image.

    Args:
        answer: text, special tokens kept.
        mask_logits: float32 (K, h, w) on the decoder's grid, one per `[SEG]`; K may be 0.
        iou_scores: float32 (K,), SAM 2's own guess of each mask's IoU.
        image_size: (H, W) of the image.
        sam_image_size: side of the square between the decoder's grid and the image.
    """

    answer: str
    mask_logits: Tensor
    iou_scores: Tensor
    image_size: tuple[int, int]
    sam_image_size: int

    def probabilities(self) -> np.ndarray:
        """float32 (K, H, W) in [0, 1]."""
        if not len(self.mask_logits):
            return np.zeros((0, *self.image_size), dtype=np.float32)
        logits = upsample_mask_logits(self.mask_logits, self.image_size, self.sam_image_size)
        return logits.sigmoid().cpu().numpy()

    def masks(self) -> np.ndarray:
        """bool (K, H, W)."""
        return self.probabilities() > 0.5


@torch.no_grad()
def predict_forward(
    model: Any,
    image: ImageLike | None = None,
    text: str | None = None,
    past_text: str = "",
    mask_prompts: Sequence[np.ndarray] | np.ndarray | None = None,
    tokenizer: Qwen2Tokenizer | None = None,
    processor: Sa2VAProcessor | None = None,
    video: Any = None,
    max_new_tokens: int = 2048,
) -> dict[str, Any]:
    """Answer and masks of one image, with the official method's arguments and result.

    Args:
        image: PIL image or uint8 (H, W, 3); None for a question about text only.
        text: what the user says, with `<image>` where the image goes.
        past_text: earlier turns in the chat format; only without an image.
        mask_prompts: one bool (N, H, W) array of regions (in a list, or alone).
        tokenizer: used when no processor is given.
        processor: the checkpoint's Sa2VAProcessor.
        video: not supported yet.
        max_new_tokens: longest answer.

    Returns:
        `prediction`: str, special tokens kept. `prediction_masks`: one bool (1, H, W) per `[SEG]`.
        `mask_probabilities`: one float32 (1, H, W) in [0, 1] per `[SEG]`.

    Raises:
        ValueError: no text, a video, or neither tokenizer nor processor.
    """
    if video is not None:
        raise ValueError("video is not supported yet; give one frame as image")
    if text is None:
        raise ValueError("text is missing: say what to do, with <image> where the image goes")
    if processor is None and tokenizer is None:
        raise ValueError("give processor=Sa2VAProcessor.from_pretrained(...), or at least tokenizer=")
    processor = processor or Sa2VAProcessor.from_config(model.config, tokenizer)  # type: ignore[arg-type]
    inputs = to_device(processor(text, image, mask_prompts, past_text), model.device)
    (answer,) = answer_batch(model, processor, inputs, Decoding(max_new_tokens=max_new_tokens))
    result: dict[str, Any] = {
        "prediction": answer_text(processor, answer),
        "prediction_masks": [],
        "mask_probabilities": [],
    }
    if image is not None and (states := answer.states_at(processor.seg_token_id)):
        features = model.get_sam_features(inputs["sam_pixel_values"])
        decoded = model.decode_masks(features, model.text_hidden_fcs(torch.stack(states)))
        size = to_rgb(image).size[::-1]
        segmentation = Segmentation("", decoded.mask_logits, decoded.iou_scores, size, processor.sam_image_size)
        probabilities = segmentation.probabilities()[:, None]
        result |= {"prediction_masks": list(probabilities > 0.5), "mask_probabilities": list(probabilities)}
    return result


def answer_batch(model: Any, processor: Sa2VAProcessor, inputs: dict[str, Any], how: Decoding) -> list[Answer]:
    """Answers to a processor's batch: inputs embedded once, then decoded."""
    names = ("prompt_masks", "vp_overall_mask")
    if "pixel_values" in inputs:
        regions = {name: inputs[name] for name in names}
        features = model.model.get_vision_features(inputs["pixel_values"])
        embeds = model.model.embed(inputs["input_ids"], features, **regions)
    else:
        embeds = model.model.embed(inputs["input_ids"])
    return decode(model, processor, embeds, inputs["attention_mask"], how)


def answer_text(processor: Sa2VAProcessor, answer: Answer) -> str:
    """The answer as text, special tokens kept, outer white space off."""
    return processor.text(answer.token_ids).strip()


@torch.no_grad()
def segment(
    model: Any,
    images: Sequence[ImageLike],
    prompts: Sequence[str],
    processor: Sa2VAProcessor,
    batch_size: int = 16,
    max_new_tokens: int = 64,
) -> list[list[Segmentation]]:
    """Every prompt on every image: `result[image][prompt]`.

    Both image encoders run once per image, prompts share the image's keys and values, and the first answer to an image
    is the guess that the other prompts verify. The result equals one `predict_forward` per pair.

    Args:
        images: PIL images or uint8 (H, W, 3).
        prompts: user texts; `<image>` is put in front where it is missing.
        processor: the checkpoint's.
        batch_size: prompts decoded at once (SEGMENT_BATCH of the shell files).
        max_new_tokens: longest answer.

    Raises:
        ValueError: no prompt, or batch_size below 1.
    """
    if not prompts or batch_size < 1:
        raise ValueError(f"{len(prompts)} prompts, batch_size {batch_size}: expected at least 1 of both")
    texts = [prompt if IMAGE_PLACEHOLDER in prompt else IMAGE_PLACEHOLDER + prompt for prompt in prompts]
    return [_segment_image(model, image, texts, processor, batch_size, max_new_tokens) for image in images]


def _segment_image(
    model: Any, image: ImageLike, texts: list[str], processor: Sa2VAProcessor, batch_size: int, max_new_tokens: int
) -> list[Segmentation]:
    size = to_rgb(image).size[::-1]
    sam_features = model.get_sam_features(processor.sam_pixel_values(image).to(model.device))
    results: list[Segmentation] = []
    for answers in _answer_prompts(model, image, texts, processor, batch_size, max_new_tokens):
        states = [answer.states_at(processor.seg_token_id) for answer in answers]
        counts = [len(group) for group in states]
        logits, scores = _decode_groups(model, sam_features, [state for group in states for state in group])
        groups = zip(answers, logits.split(counts), scores.split(counts), strict=True)
        results += [
            Segmentation(answer_text(processor, answer), mask, score, size, processor.sam_image_size)
            for answer, mask, score in groups
        ]
    return results


def _decode_groups(model: Any, sam_features: Any, states: list[Tensor]) -> tuple[Tensor, Tensor]:
    if not states:
        grid = sam_features.maps[0].shape[-2:]
        return torch.zeros(0, *grid), torch.zeros(0)
    decoded = model.decode_masks(sam_features, model.text_hidden_fcs(torch.stack(states)))
    return decoded.mask_logits, decoded.iou_scores.max(dim=1).values


def _answer_prompts(
    model: Any, image: ImageLike, texts: list[str], processor: Sa2VAProcessor, batch_size: int, max_new_tokens: int
) -> Iterator[list[Answer]]:
    """Answers to all texts, `batch_size` at a time; the image's part of the prompt is read once."""
    tiles = processor.tiles(image)
    prompts = [processor.token_ids(processor.prompt_text(text, len(tiles))) for text in texts]
    split = _shared_prefix(prompts, processor)
    prefix = torch.tensor([prompts[0][:split]], device=model.device)
    features = model.model.get_vision_features(processor.pixel_values(tiles).to(model.device))
    cache = DynamicCache(config=model.config.text_config)
    model.model(inputs_embeds=model.model.embed(prefix, features), past_key_values=cache, use_cache=True)
    guess: list[int] = []
    for start in range(0, len(prompts), batch_size):
        suffixes = [prompt[split:] for prompt in prompts[start : start + batch_size]]
        answers = _answer_suffixes(model, processor, cache, suffixes, Decoding(max_new_tokens, guess_ids=guess))
        guess = guess or answers[0].token_ids
        yield answers


def _shared_prefix(prompts: list[list[int]], processor: Sa2VAProcessor) -> int:
    """How many leading ids all prompts share: up to and with `</img>`, or less where texts differ before the image."""
    end = prompts[0].index(processor.token_ids(IMAGE_END)[0]) + 1
    if any(prompt[:end] != prompts[0][:end] for prompt in prompts):
        raise ValueError("prompts of one image must not differ before <image>; put <image> first in each")
    return end


def _answer_suffixes(
    model: Any, processor: Sa2VAProcessor, cache: DynamicCache, suffixes: list[list[int]], how: Decoding
) -> list[Answer]:
    """Answers to prompts that go on from one shared cache, which is left untouched."""
    padded = left_pad(suffixes, processor.tokenizer.pad_token_id or 0)
    seen = torch.ones(len(suffixes), cache.get_seq_length(), dtype=torch.long)
    mask = torch.cat([seen, padded["attention_mask"]], dim=1).to(model.device)
    embeds = model.get_input_embeddings()(padded["input_ids"].to(model.device))
    return decode(model, processor, embeds, mask, how, _repeat(cache, len(suffixes), model.config.text_config))


def _repeat(cache: DynamicCache, times: int, config: Any) -> DynamicCache:
    copy = DynamicCache(config=config)
    for number, layer in enumerate(cache.layers):
        keys, values = layer.keys, layer.values  # type: ignore[union-attr]
        copy.update(keys.repeat(times, 1, 1, 1), values.repeat(times, 1, 1, 1), number)  # type: ignore[union-attr]
    return copy


def to_device(inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """A processor's batch with every tensor, those in lists too, on `device`."""
    return {
        name: [item.to(device) for item in value] if isinstance(value, list) else value.to(device)
        for name, value in inputs.items()
    }


def weights_fingerprint(model: torch.nn.Module) -> str:
    """16 hex digits that change when a weight does: names, shapes and up to 65,536 evenly spaced values per tensor."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // FINGERPRINT_SAMPLES)].float().cpu().numpy()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(sample.tobytes())
    return digest.hexdigest()[:16]
