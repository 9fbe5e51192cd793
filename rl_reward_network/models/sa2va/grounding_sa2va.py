"""SAM 2 driven by `[SEG]` embeddings: the differentiable path from an image and a vector to a mask.

`sam` is transformers' Sam2VideoModel or Sam2Model. Its own `forward` takes no extra prompt, and its helpers
`get_image_embeddings` and `get_prompt_embeddings` cut gradients, so its parts are called one by one.
Axes: B images, K `[SEG]` of one image, C SAM 2 width, h w the decoder's grid.

Source: bytedance/Sa2VA@9832e1a.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sam2Features:
    """SAM 2's maps of B images before `conv_s0` / `conv_s1`, which belong to the trainable decoder.

    Args:
        maps: (B, C, S/4, S/4), (B, C, S/8, S/8), (B, C, S/16, S/16) for an S x S input.
    """

    maps: tuple[Tensor, Tensor, Tensor]

    def __getitem__(self, index: int) -> "Sam2Features":
        """The features of one image, batch axis kept."""
        fine, middle, coarse = (level[index : index + 1] for level in self.maps)
        return Sam2Features((fine, middle, coarse))


@dataclass(frozen=True)
class DecodedMasks:
    """SAM 2's answer to K prompts on one image.

    Args:
        mask_logits: float32 (K, h, w), of the candidate with the highest predicted IoU.
        iou_scores: (K, 3), predicted IoU of the three candidates.
        selected: int64 (K,), index of the candidate among the three.
        object_score_logits: (K,); the reference ignores it and so do we: a negative one does not empty the mask.
        candidates: (K, 3, h, w), logits of all three.
    """

    mask_logits: Tensor
    iou_scores: Tensor
    selected: Tensor
    object_score_logits: Tensor
    candidates: Tensor


def sam_features(sam: Any, sam_pixel_values: Tensor) -> Sam2Features:
    """SAM 2's three maps of (B, 3, S, S) images, without the parts that may train. Gradients are not cut."""
    fine, middle, coarse = sam.vision_encoder(sam_pixel_values.to(sam.dtype), return_dict=True).fpn_hidden_states
    return Sam2Features((fine, middle, coarse))


def sparse_prompts(sam: Any, seg_embeddings: Tensor) -> Tensor:
    """(1, K, 3, C): two not-a-point vectors (no click was made), then the `[SEG]` embedding."""
    nothing = sam.prompt_encoder.not_a_point_embed.weight.expand(len(seg_embeddings), 2, -1)
    return torch.cat([nothing, seg_embeddings[:, None]], dim=1)[None]


def decode_masks(sam: Any, features: Sam2Features, seg_embeddings: Tensor, multimask_output: bool) -> DecodedMasks:
    """The masks of K `[SEG]` embeddings on one image. Differentiable in both, and in the decoder's weights.

    Args:
        sam: SAM 2.
        features: of one image (B = 1).
        seg_embeddings: (K, C).
        multimask_output: True as in the reference; False gives the single-mask token, which Sa2VA never uses.
    """
    fine, middle, coarse = features.maps
    embedding = coarse + sam.no_memory_embedding.reshape(1, -1, 1, 1)  # first frame: no memory attention
    masks, scores, _, object_scores = sam.mask_decoder(
        image_embeddings=embedding,
        image_positional_embeddings=sam.get_image_wide_positional_embeddings().to(embedding.dtype),
        sparse_prompt_embeddings=sparse_prompts(sam, seg_embeddings.to(embedding.dtype)),
        dense_prompt_embeddings=sam.prompt_encoder.no_mask_embed.weight.reshape(1, -1, 1, 1).expand_as(embedding),
        multimask_output=multimask_output,
        high_resolution_features=[sam.mask_decoder.conv_s0(fine), sam.mask_decoder.conv_s1(middle)],
    )
    masks, scores = masks[0].float(), scores[0].float()
    selected = scores.argmax(dim=1)
    chosen = masks[torch.arange(len(masks), device=masks.device), selected]
    return DecodedMasks(chosen, scores, selected, object_scores[0, :, 0].float(), masks)
