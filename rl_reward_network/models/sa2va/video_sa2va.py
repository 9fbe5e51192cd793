"""Frames of a sequence: one answer about a few of them, then a mask on each, with SAM 2's memory or without it.

Source: bytedance/Sa2VA@9832e1a; key frames without memory as in kumuji/Sa2VA-i@c5a809b.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from accelerate.utils import send_to_device
from PIL import Image
from torch import Tensor

from rl_reward_network.models.sa2va.generation_sa2va import (
    MASKS_AT_ONCE,
    Decoding,
    answer_batch,
    answer_text,
    check_computed,
    evaluating,
    image_features,
)
from rl_reward_network.models.sa2va.grounding_sa2va import Sam2Features, sparse_prompts
from rl_reward_network.models.sa2va.pixels_sa2va import ImageLike, to_rgb, upsample_mask_logits
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.models.sa2va.templates import IMAGE_PLACEHOLDER, SEG_ANSWERS

FRAMES_SEEN = 5  # by the language model, in training and in the official prediction; these frames are prompted, too
Decoder = Callable[[Sam2Features], Tensor]
SEGS_AT_ONCE = 4  # attention to eleven remembered frames takes about 0.2 GB for each [SEG] in float32


class SequenceAnswer(NamedTuple):
    """The language model's answer about a sequence: its text, and the prompt for SAM 2 of each `[SEG]`."""

    answer: str  # special tokens kept
    seg_embeddings: Tensor  # float32 (K, C); K may be 0


@torch.no_grad()
def predict_video(
    model: Any, video: Iterable[ImageLike], text: str, processor: Sa2VAProcessor, max_new_tokens: int = 2048
) -> dict[str, Any]:
    """Answer and masks of a sequence, as the official method: `predict_forward(video=...)`, with its result.

    The language model sees the first five frames. They are prompts for SAM 2, whose memory carries each `[SEG]` on.
    For a long sequence, `answer_sequence` and `masks_with_memory` do the same without keeping frames and masks.
    """
    check_memory(model)
    frames = list(same_size(video))
    found, size = _answer(model, frames[:FRAMES_SEEN], text, processor, Decoding(max_new_tokens)), frames[0].size[::-1]
    probabilities = np.empty((len(found.seg_embeddings), len(frames), *size), dtype=np.float32)
    for number, logits in enumerate(masks_with_memory(model, frames, found.seg_embeddings, processor)):
        if len(logits):
            upsampled = upsample_mask_logits(logits, size, processor.sam_image_size)
            probabilities[:, number] = upsampled.sigmoid().cpu().numpy()
    return {
        "prediction": found.answer,
        "prediction_masks": [sequence > 0.5 for sequence in probabilities],
        "mask_probabilities": list(probabilities),
    }


def answer_sequence(
    model: Any, frames: Sequence[ImageLike], text: str, processor: Sa2VAProcessor, max_new_tokens: int = 64
) -> SequenceAnswer:
    """The answer to one question about 1 to 5 frames of one size; `<image>` is put in front where it is missing.

    Raises:
        ValueError: more than 5 frames, or an error of `same_size`.
    """
    shown = list(same_size(frames))
    if len(shown) > FRAMES_SEEN:
        raise ValueError(
            f"{len(shown)} frames are given to the language model, which was trained on at most {FRAMES_SEEN}; "
            "choose some of them (key_frames)"
        )
    text = text if IMAGE_PLACEHOLDER in text else IMAGE_PLACEHOLDER + text
    guess = processor.answer_ids(SEG_ANSWERS[1])
    return _answer(model, shown, text, processor, Decoding(max_new_tokens, guess_ids=guess))


def masks_with_memory(
    model: Any,
    frames: Iterable[ImageLike],
    seg_embeddings: Tensor,
    processor: Sa2VAProcessor,
    prompted: int = FRAMES_SEEN,
) -> Iterator[Tensor]:
    """Mask logits of each frame, float32 (K, h, w), one frame at a time, by SAM 2's memory of the frames before it.

    Memory stays constant, whatever the number of frames. `upsample_mask_logits` brings a result to the frame's size.

    Args:
        frames: in order of time; PIL images or uint8 (H, W, 3), all of one size.
        seg_embeddings: (K, C), from `answer_sequence`.
        prompted: number of first frames on which the embeddings are the prompt; they are remembered to the end.

    Raises:
        ValueError: a SAM 2 without memory, or prompted below 1; while iterating, an error of `same_size`.
    """
    check_memory(model)
    if prompted < 1:
        raise ValueError(f"prompted is {prompted}, expected 1 or more: without a prompt there is nothing to remember")
    sam, groups = model.grounding_encoder, seg_embeddings.to(model.device).split(SEGS_AT_ONCE)
    memories = [SequenceMemory(sam, group, prompted) for group in groups if len(group)]
    return _masks(model, frames, processor, 1, [memory.next_masks for memory in memories])


def masks_without_memory(
    model: Any, frames: Iterable[ImageLike], seg_embeddings: Tensor, processor: Sa2VAProcessor, batch_size: int = 1
) -> Iterator[Tensor]:
    """Mask logits of each frame, float32 (K, h, w), from the same embeddings, each frame by itself.

    Equal to `decode_masks` on every frame, which is how Sa2VA is trained. For a short sequence with one pass of
    contrast agent this is enough, and no error is carried on. Arguments as `masks_with_memory`; `batch_size` is the
    number of frames that SAM 2 encodes at once.

    Raises:
        ValueError: batch_size below 1; while iterating, an error of `same_size`.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, expected 1 or more")
    groups = [group for group in seg_embeddings.to(model.device).split(MASKS_AT_ONCE) if len(group)]
    decoders = [
        lambda features, group=group: model.answer_masks(model.decode_masks(features, group)) for group in groups
    ]
    return _masks(model, frames, processor, batch_size, decoders)


def same_size(frames: Iterable[ImageLike]) -> Iterator[Image.Image]:
    """The frames as PIL RGB, one at a time; a ValueError for no frame, or one that is no image, or of another size."""
    if isinstance(frames, str | os.PathLike | Image.Image):
        raise ValueError(f"video is {frames!r:.100}, expected a list of frames: PIL images or uint8 arrays (H, W, 3)")
    size = None
    for number, frame in enumerate(frames):
        try:
            rgb = to_rgb(frame)
        except ValueError as error:
            raise ValueError(f"frame {number} of the sequence: {error}") from error
        size = size or rgb.size
        if rgb.size != size:
            found, first = ("{}x{}".format(*pair) for pair in (rgb.size, size))
            raise ValueError(
                f"frame {number} is {found} pixels, frame 0 is {first}; a sequence has frames of one size: "
                "crop the frames, or segment them as single images"
            )
        yield rgb
    if size is None:
        raise ValueError("the sequence has no frame, expected at least one image")


@torch.no_grad()
def _answer(
    model: Any, frames: Sequence[Image.Image], text: str, processor: Sa2VAProcessor, how: Decoding
) -> SequenceAnswer:
    inputs = send_to_device(processor.sequence_inputs(text, frames), model.device)
    with evaluating(model):
        (answer,) = answer_batch(model, processor, inputs, how)
        states = answer.states_at(processor.seg_token_id)
        width = model.config.sam2_config.vision_config.fpn_hidden_size
        none = torch.zeros(0, width, device=model.device)
        embeddings = model.text_hidden_fcs(torch.stack(states)).float() if states else none
        check_computed([answer], embeddings)
    return SequenceAnswer(answer_text(processor, answer), embeddings)


@torch.no_grad()
def _masks(
    model: Any, frames: Iterable[ImageLike], processor: Sa2VAProcessor, batch_size: int, decoders: Sequence[Decoder]
) -> Iterator[Tensor]:
    """The masks of all decoders on each frame; without a `[SEG]` they are (0, h, w), and SAM 2 does not run."""
    checked, side = same_size(frames), model.config.mask_size
    while batch := list(islice(checked, batch_size)):
        logits = [torch.zeros(0, side, side, device=model.device)] * len(batch)
        if decoders:
            with evaluating(model):
                features = image_features(model, processor, batch)
                logits = [torch.cat([decode(features[i]) for decode in decoders]) for i in range(len(batch))]
                check_computed([], *logits)
        yield from logits


class SequenceMemory:
    """The frames that SAM 2 remembers: all prompted ones, the last 6 others, and object pointers of the last 15 others.

    Of a frame it keeps features, bfloat16 (P, K, M), as in the reference also where the weights are float32, and a
    pointer (K, C), the summary of each object. The embeddings (K, C), K at least 1, prompt a number of first frames,
    which neither use nor change each other's masks.
    """

    def __init__(self, sam: Any, seg_embeddings: Tensor, prompted: int) -> None:
        self.sam, self.seg_embeddings, self.prompted_count = sam, seg_embeddings, prompted
        self.prompted: list[tuple[Tensor, Tensor]] = []  # features and pointers
        self.recent: deque[Tensor] = deque(maxlen=sam.config.num_maskmem - 1)  # features, oldest first
        self.pointers: deque[Tensor] = deque(maxlen=sam.config.max_object_pointers_in_encoder - 1)

    def next_masks(self, features: Sam2Features) -> Tensor:
        """Logits of the next frame's masks, float32 (K, h, w), from its features; the frame is remembered."""
        coarse, prompts = features.maps[2], sparse_prompts(self.sam, self.seg_embeddings.to(features.maps[2].dtype))
        starts = len(self.prompted) < self.prompted_count
        if starts:
            image = (coarse + self.sam.no_memory_embedding.reshape(1, -1, 1, 1)).expand(len(prompts), -1, -1, -1)
        else:
            image, prompts = self._recall(coarse), prompts[:, :2]
        logits, pointer = _decode(self.sam, features, image, prompts)
        kept = _encode(self.sam, coarse, logits)
        if starts:
            self.prompted.append((kept, pointer))
        else:
            self.recent.append(kept)
            self.pointers.append(pointer)
        return logits

    def _recall(self, coarse: Tensor) -> Tensor:
        """(K, C, S/16, S/16): a coarsest map (1, C, S/16, S/16) after attention to the memory."""
        memory, positions, pointer_tokens = self._tokens()
        neck = self.sam.vision_encoder.neck
        own_positions = neck.position_encoding(coarse.shape, coarse.device, torch.float32).to(coarse.dtype)
        attended = self.sam.memory_attention(
            current_vision_features=_cells(coarse).expand(-1, memory.shape[1], -1),
            current_vision_position_embeddings=_cells(own_positions),
            memory=memory.to(coarse.dtype),
            memory_posision_embeddings=positions.to(coarse.dtype),  # transformers' spelling
            num_object_pointer_tokens=pointer_tokens,
        )
        return attended[0].transpose(1, 2).unflatten(2, coarse.shape[-2:])

    def _tokens(self) -> tuple[Tensor, Tensor, int]:
        """Tokens (T, K, M) to attend to, their positions (T, K, M), and how many of them, at the end, are pointers."""
        frames = [features for features, _ in self.prompted] + list(self.recent)
        times = self.sam.memory_temporal_positional_encoding[:, 0]  # row i - 1: i frames ago; the last row: prompted
        rows = [len(times) - 1] * len(self.prompted) + list(range(len(self.recent)))[::-1]
        cells = self.sam.memory_encoder.position_encoding(
            (1, times.shape[-1], *self.sam.backbone_feature_sizes[-1]), times.device, torch.float32
        )
        positions = torch.cat([_cells(cells) + times[row] for row in rows]).expand(-1, frames[0].shape[1], -1)
        pointers = torch.stack([pointer for _, pointer in self.prompted] + list(self.pointers)[::-1])
        split = pointers.unflatten(2, (-1, times.shape[-1])).transpose(1, 2).flatten(0, 1)
        tokens = torch.cat([*(feature.to(split.dtype) for feature in frames), split])
        return tokens, torch.cat([positions, torch.zeros_like(split)]), len(split)


def check_memory(model: Any) -> None:
    """Raise a ValueError unless SAM 2 has a memory, whose object pointers can be cut into tokens of its width.

    A side network is refused, too: no memory was trained on its masks.
    """
    sam = model.grounding_encoder
    if model.side_network is not None:
        raise ValueError(
            "this model has a side network, whose masks SAM 2's memory does not know; leave out --sam2_memory (in "
            "Python: masks_without_memory)"
        )
    if model.config.has_sam3:
        raise ValueError(
            "the memory of SAM 3 is not supported; leave out --sam2_memory (in Python: masks_without_memory)"
        )
    if not hasattr(sam, "memory_attention"):
        raise ValueError(
            f"this model's SAM 2 has no memory: sam2_config.model_type in config.json is {sam.config.model_type!r}, "
            "expected 'sam2_video'; segment the frames without memory (masks_without_memory)"
        )
    if sam.hidden_dim % sam.mem_dim:
        raise ValueError(
            f"SAM 2's width (d_model) is {sam.hidden_dim}, expected a multiple of its memory's, {sam.mem_dim}; "
            "segment the frames without memory (masks_without_memory)"
        )


def _decode(sam: Any, features: Sam2Features, image: Tensor, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """The best mask (K, h, w) and object pointer (K, C) of each prompt; `image` (K, C, ...) is the map after memory."""
    fine, middle, _ = features.maps
    masks, scores, tokens, object_scores = sam.mask_decoder(
        image_embeddings=image,
        image_positional_embeddings=sam.get_image_wide_positional_embeddings().to(image.dtype),
        sparse_prompt_embeddings=prompts[:, None],
        dense_prompt_embeddings=sam.prompt_encoder.no_mask_embed.weight.reshape(1, -1, 1, 1),
        multimask_output=True,
        high_resolution_features=[sam.mask_decoder.conv_s0(fine), sam.mask_decoder.conv_s1(middle)],
    )
    rows, best = torch.arange(len(masks), device=masks.device), scores[:, 0].argmax(dim=1)
    pointer = sam.object_pointer_proj(tokens[rows, 0, best])
    # A low object score empties no mask, but the memory is told of it, as in the reference.
    pointer = torch.where(object_scores[:, 0] > 0, pointer, sam.no_object_pointer)
    return masks[rows, 0, best].float(), pointer


def _encode(sam: Any, coarse: Tensor, logits: Tensor) -> Tensor:
    """The memory of a frame, bfloat16 (P, K, M), from its coarsest map and its mask logits (K, h, w)."""
    square = F.interpolate(logits[:, None], size=(sam.image_size,) * 2, mode="bilinear").sigmoid()
    masks = square * sam.config.sigmoid_scale_for_mem_enc + sam.config.sigmoid_bias_for_mem_enc
    features, _ = sam.memory_encoder(coarse.expand(len(masks), -1, -1, -1), masks.to(coarse.dtype))
    return _cells(features).bfloat16()


def _cells(maps: Tensor) -> Tensor:
    """(P, B, channels) from maps (B, channels, S/16, S/16), the order of transformers' memory attention."""
    return maps.flatten(2).permute(2, 0, 1)
