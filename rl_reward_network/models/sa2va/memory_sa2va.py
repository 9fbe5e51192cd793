"""SAM 2's memory over the frames of a sequence, of bounded size.

The modules are those of transformers' Sam2VideoModel. Its loop over frames is not used: it accepts no embedding as
prompt, replaces masks of low object score, binarises masks of prompted frames for the memory, and keeps every frame.

Axes: K `[SEG]` of one answer, C SAM 2 width, M width of the memory (64), S side of the input, h w the decoder's grid,
P = (S/16)^2 cells of the coarsest map.

Source: bytedance/Sa2VA@9832e1a.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_reward_network.models.sa2va.grounding_sa2va import Sam2Features, sparse_prompts


@dataclass(frozen=True)
class RememberedFrame:
    """What SAM 2 keeps of one frame.

    Args:
        features: bfloat16 (P, K, M), as in the reference also where the weights are float32.
        pointer: (K, C), summary of each object.
    """

    features: Tensor
    pointer: Tensor


class SequenceMemory:
    """The frames that SAM 2 remembers: all prompted ones, the last 6 others, and object pointers of the last 15 others.

    Its size does not depend on the length of the sequence.

    Args:
        sam: Sam2VideoModel in evaluation mode.
        seg_embeddings: (K, C), K at least 1.
        prompted: number of first frames that `seg_embeddings` prompt. They neither use nor change each other's masks.
    """

    def __init__(self, sam: Any, seg_embeddings: Tensor, prompted: int) -> None:
        """An empty memory."""
        self.sam, self.seg_embeddings, self.prompted_count = sam, seg_embeddings, prompted
        self.prompted: list[RememberedFrame] = []
        self.recent: deque[Tensor] = deque(maxlen=sam.config.num_maskmem - 1)  # features, oldest first
        self.pointers: deque[Tensor] = deque(maxlen=sam.config.max_object_pointers_in_encoder - 1)

    def next_masks(self, features: Sam2Features) -> Tensor:
        """Logits of the next frame's masks, float32 (K, h, w); the frame is remembered.

        Args:
            features: of this one frame.
        """
        coarse, prompts = features.maps[2], sparse_prompts(self.sam, self.seg_embeddings.to(features.maps[2].dtype))
        starts = len(self.prompted) < self.prompted_count
        if starts:
            image = (coarse + self.sam.no_memory_embedding.reshape(1, -1, 1, 1)).expand(len(prompts), -1, -1, -1)
        else:
            image, prompts = self._recall(coarse), prompts[:, :2]
        logits, pointer = _decode(self.sam, features, image, prompts)
        frame = RememberedFrame(_encode(self.sam, coarse, logits), pointer)
        if starts:
            self.prompted.append(frame)
        else:
            self.recent.append(frame.features)
            self.pointers.append(frame.pointer)
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
        frames = [frame.features for frame in self.prompted] + list(self.recent)
        times = self.sam.memory_temporal_positional_encoding[:, 0]  # row i - 1: i frames ago; the last row: prompted
        rows = [len(times) - 1] * len(self.prompted) + list(range(len(self.recent)))[::-1]
        cells = self.sam.memory_encoder.position_encoding(
            (1, times.shape[-1], *self.sam.backbone_feature_sizes[-1]), times.device, torch.float32
        )
        positions = torch.cat([_cells(cells) + times[row] for row in rows]).expand(-1, frames[0].shape[1], -1)
        pointers = torch.stack([frame.pointer for frame in self.prompted] + list(self.pointers)[::-1])
        split = pointers.unflatten(2, (-1, times.shape[-1])).transpose(1, 2).flatten(0, 1)
        tokens = torch.cat([*(feature.to(split.dtype) for feature in frames), split])
        return tokens, torch.cat([positions, torch.zeros_like(split)]), len(split)


def check_memory(sam: Any) -> None:
    """Raise a ValueError unless SAM 2 has a memory, and its object pointers can be cut into tokens of its width."""
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
    """The best mask of each prompt, float32 (K, h, w), and its object pointer (K, C).

    Args:
        sam: Sam2VideoModel.
        features: of the frame; their coarsest map is not used.
        image: (K, C, S/16, S/16), the coarsest map after the memory.
        prompts: (K, tokens, C).
    """
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
