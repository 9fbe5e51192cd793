"""Prediction: answer and masks from an image and text, by the official single call or by the batched one.

`model` is a Sa2VAForConditionalGeneration; its class imports this file, so the type annotation is `Any`.

Axes: K `[SEG]` tokens of an answer, H W image pixels, h w the decoder's grid, C SAM 2 width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache

from rl_reward_network.models.sa2va.generation_sa2va import (
    Answer,
    Decoding,
    check_computed,
    decode,
    evaluating,
    selected_rows,
)
from rl_reward_network.models.sa2va.grounding_sa2va import Sam2Features
from rl_reward_network.models.sa2va.pixels_sa2va import ImageLike, square_pixels, to_rgb, upsample_mask_logits
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.models.sa2va.templates import IMAGE_PLACEHOLDER, SEG_ANSWERS

MASKS_AT_ONCE = 16  # limits the memory for an answer that repeats [SEG]


@dataclass(frozen=True)
class Segmentation:
    """The answer to one prompt on one image.

    Args:
        answer: text, special tokens kept.
        mask_logits: float32 (K, h, w) on the masks' grid, one per `[SEG]`; K may be 0.
        iou_scores: float32 (K,), IoU of each mask as predicted by SAM 2.
        vision_features: float32 (C,), SAM 2's coarsest map averaged over the image; the same for all prompts.
        image_size: (H, W) of the image.
        sam_image_size: side in pixels of SAM 2's square input, the intermediate size of `upsample_mask_logits`.
    """

    answer: str
    mask_logits: Tensor
    iou_scores: Tensor
    vision_features: Tensor
    image_size: tuple[int, int]
    sam_image_size: int

    def probabilities(self) -> np.ndarray:
        """Foreground probabilities, float32 (K, H, W) in [0, 1]."""
        if not len(self.mask_logits):
            return np.zeros((0, *self.image_size), dtype=np.float32)
        logits = upsample_mask_logits(self.mask_logits, self.image_size, self.sam_image_size)
        return logits.sigmoid().cpu().numpy()

    def masks(self) -> np.ndarray:
        """Masks, bool (K, H, W): probability above 0.5."""
        return self.probabilities() > 0.5


@torch.no_grad()
def predict_forward(
    model: Any,
    image: ImageLike | None = None,
    video: Sequence[ImageLike] | None = None,
    text: str | None = None,
    past_text: str = "",
    mask_prompts: Sequence[np.ndarray] | np.ndarray | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    processor: Sa2VAProcessor | None = None,
    max_new_tokens: int = 2048,
) -> dict[str, Any]:
    """Answer and masks of one image or one sequence, with the official method's arguments and result.

    One difference: a `[SEG]` in the user's text gives no mask, only those of the answer do.

    Args:
        image: PIL image or uint8 (H, W, 3); None for a question about text only.
        video: frames of a sequence, in place of an image; see `video_sa2va.predict_video`.
        text: the user's turn, with `<image>` at the image's (or all frames') place.
        past_text: earlier turns in the chat format; only without an image.
        mask_prompts: one bool (N, H, W) array of regions (in a list, or alone).
        tokenizer: used when no processor is given.
        processor: the checkpoint's Sa2VAProcessor.

    Returns:
        `prediction`: str, special tokens kept. `prediction_masks`: one bool (1, H, W) per `[SEG]`, or
        (frames, H, W). `mask_probabilities`: one float32 array of that shape, in [0, 1], per `[SEG]`.

    Raises:
        ValueError: no text or several, a path in place of an image, neither tokenizer nor processor, or a video
            together with an image, regions or earlier turns.
    """
    if video is not None and not (image is None and mask_prompts is None and not past_text):
        raise ValueError("video is given together with image, mask_prompts or past_text; leave those out, or the video")
    if not isinstance(text, str):
        raise ValueError(f"text is {text!r:.60}, expected a string: the user's turn with <image> at the image's place")
    if processor is None and tokenizer is None:
        raise ValueError("processor and tokenizer are None; give processor=Sa2VAProcessor.from_pretrained(...)")
    processor = processor or Sa2VAProcessor.from_config(model.config, tokenizer)  # type: ignore[arg-type]
    if video is not None:
        return model.predict_video(video, text, processor, max_new_tokens)
    inputs = send_to_device(processor(text, image, mask_prompts, past_text), model.device)
    result: dict[str, list[np.ndarray]] = {"prediction_masks": [], "mask_probabilities": []}
    with evaluating(model):
        (answer,) = answer_batch(model, processor, inputs, Decoding(max_new_tokens=max_new_tokens))
        if image is not None:
            features = image_features(model, processor, [image])
            size = to_rgb(image).size[::-1]
            (segmentation,) = segmentations(model, processor, features, [answer], size)
            result = mask_result(segmentation)
    return {"prediction": answer_text(processor, answer)} | result


def mask_result(segmentation: Segmentation) -> dict[str, list[np.ndarray]]:
    """`prediction_masks` and `mask_probabilities` of `predict_forward`."""
    probabilities = segmentation.probabilities()[:, None]
    return {"prediction_masks": list(probabilities > 0.5), "mask_probabilities": list(probabilities)}


def answer_batch(model: Any, processor: Sa2VAProcessor, inputs: dict[str, Any], how: Decoding) -> list[Answer]:
    """One answer per sample of a processor's output."""
    body, rows = model.model, None
    if "pixel_values" in inputs:
        pixels = {name: inputs[name] for name in ("pixel_values", "image_grid_thw") if name in inputs}
        regions = {name: inputs[name] for name in ("prompt_masks", "vp_overall_mask") if name in inputs}
        rows = body.image_rows(body.get_vision_features(**pixels), **regions)
    spliced = body.splice(inputs["input_ids"], rows, inputs["attention_mask"])
    return decode(model, processor, spliced, inputs["attention_mask"], how)


def answer_text(processor: Sa2VAProcessor, answer: Answer) -> str:
    """The answer as text: special tokens kept, outer white space removed."""
    return processor.text(answer.token_ids).strip()


@torch.no_grad()
def segment(
    model: Any,
    images: Sequence[ImageLike],
    prompts: Sequence[str],
    processor: Sa2VAProcessor,
    batch_size: int = 16,
    max_new_tokens: int = 64,
    sam_features: Sequence[Sam2Features] | None = None,
) -> list[list[Segmentation]]:
    """Every prompt on every image: `result[image][prompt]`.

    Both image encoders run once per image, prompts share the image's keys and values, and a guessed answer ("Sure,
    [SEG]." at first, then the model's previous answer) is verified in the prompt's forward pass. The result equals one
    `predict_forward` per pair.

    Args:
        images: PIL images or uint8 (H, W, 3).
        prompts: the user's turns; `<image>` is put in front where it is missing.
        batch_size: prompts decoded at once (SEGMENT_BATCH of the shell files).
        sam_features: SAM 2's maps of each image from `get_sam_features`; None computes them.

    Raises:
        ValueError: no prompt, batch_size below 1, or a single image or prompt in place of a list.
    """
    one_image = isinstance(images, Image.Image) or (isinstance(images, np.ndarray) and images.ndim < 4)
    if one_image or isinstance(prompts, str):
        raise ValueError("images and prompts must be lists; put a single one into a list: segment([image], [prompt])")
    if not prompts or batch_size < 1:
        raise ValueError(f"{len(prompts)} prompts, batch_size {batch_size}: expected at least 1 of both")
    texts = [prompt if IMAGE_PLACEHOLDER in prompt else IMAGE_PLACEHOLDER + prompt for prompt in prompts]
    guess = processor.answer_ids(SEG_ANSWERS[1])
    results = []
    with evaluating(model):
        for index, image in enumerate(images):
            features = sam_features[index] if sam_features else image_features(model, processor, [image])
            answers = _answer_prompts(model, image, texts, processor, batch_size, max_new_tokens, guess)
            guess = answers[0].token_ids  # the answer for the next image is most likely the same
            size = to_rgb(image).size[::-1]
            results.append(segmentations(model, processor, features, answers, size, batch_size))
    return results


@torch.no_grad()
def image_features(
    model: Any, processor: Sa2VAProcessor, images: Sequence[ImageLike], encoder_trains: bool = False
) -> Sam2Features:
    """SAM 2's maps of B images, and the pixels for the side network if the model has one.

    With `encoder_trains` the pixels for SAM 2 in place of its maps, which change with every step.
    """
    pixels = torch.cat([processor.sam_pixel_values(image) for image in images]).to(model.device)
    side_pixels, side = None, model.config.side_pixels
    if side is not None:
        side_pixels = torch.stack([square_pixels(image, side) for image in images]).to(model.device)
    if encoder_trains:
        return Sam2Features((), side_pixels, pixels)
    return Sam2Features(model.get_sam_features(pixels).maps, side_pixels)


def segmentations(
    model: Any,
    processor: Sa2VAProcessor,
    features: Any,
    answers: list[Answer],
    size: tuple[int, int],
    at_once: int = MASKS_AT_ONCE,
) -> list[Segmentation]:
    """Answers on one image of size (H, W) with the masks of their `[SEG]`, `at_once` decoded at a time.

    Raises:
        ValueError: as `check_computed`.
    """
    states = [answer.states_at(processor.seg_token_id) for answer in answers]
    flat = [state for group in states for state in group]
    logits, scores = [torch.zeros(0, *features.grid, device=model.device)], [torch.zeros(0, device=model.device)]
    for start in range(0, len(flat), at_once):
        embeddings = model.text_hidden_fcs(torch.stack(flat[start : start + at_once]))
        decoded = model.decode_masks(features, embeddings)
        logits.append(decoded.mask_logits)
        scores.append(decoded.iou_scores)
    counts, masks, pooled = [len(group) for group in states], torch.cat(logits), features.pooled()[0]
    check_computed(answers, masks, pooled)
    groups = zip(answers, masks.split(counts), torch.cat(scores).split(counts), strict=True)
    return [
        Segmentation(answer_text(processor, answer), mask, score, pooled, size, processor.sam_image_size)
        for answer, mask, score in groups
    ]


def _answer_prompts(
    model: Any,
    image: ImageLike,
    texts: list[str],
    processor: Sa2VAProcessor,
    batch_size: int,
    max_new_tokens: int,
    guess: list[int],
) -> list[Answer]:
    """Answers to all texts, `batch_size` at a time; the image's part of the prompt is computed once."""
    pixels, (count,) = processor.vision_inputs([image])
    prompts = [processor.token_ids(processor.prompt_text(text, count)) for text in texts]
    split = _shared_prefix(prompts, processor)
    prefix = torch.tensor([prompts[0][:split]], device=model.device)
    body, cache = model.model, DynamicCache(config=model.config.text_config)
    features = body.get_vision_features(**send_to_device(pixels, model.device))
    inputs = body.splice(prefix, body.image_rows(features))
    body(**inputs, past_key_values=cache, use_cache=True)
    answers: list[Answer] = []
    for start in range(0, len(prompts), batch_size):
        suffixes = [prompt[split:] for prompt in prompts[start : start + batch_size]]
        how = Decoding(max_new_tokens, guess_ids=answers[0].token_ids if answers else guess)
        answers += _answer_suffixes(model, processor, cache, suffixes, how, inputs.get("position_table"))
    return answers


def _shared_prefix(prompts: list[list[int]], processor: Sa2VAProcessor) -> int:
    """Number of leading ids that all prompts share, the image included; a ValueError if they differ before its end."""
    end = prompts[0].index(processor.token_ids(processor.image_tokens.end)[0]) + 1
    if any(prompt[:end] != prompts[0][:end] for prompt in prompts):
        raise ValueError("prompts of one image must not differ before <image>; put <image> first in each")
    return end


def _answer_suffixes(
    model: Any,
    processor: Sa2VAProcessor,
    cache: DynamicCache,
    suffixes: list[list[int]],
    how: Decoding,
    position_table: Tensor | None,
) -> list[Answer]:
    """Answers to prompts that continue one shared cache; the cache is not changed."""
    padded = processor.pad(suffixes)
    cached = torch.ones(len(suffixes), cache.get_seq_length(), dtype=torch.long)
    mask = torch.cat([cached, padded["attention_mask"]], dim=1).to(model.device)
    inputs = {"inputs_embeds": model.get_input_embeddings()(padded["input_ids"].to(model.device))}
    if position_table is not None:
        inputs["position_table"] = position_table.expand(-1, len(suffixes), -1)
    first = torch.zeros(len(suffixes), dtype=torch.long, device=model.device)
    return decode(model, processor, inputs, mask, how, selected_rows(cache, first, model.config.text_config))
