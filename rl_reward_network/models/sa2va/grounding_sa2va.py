"""SAM 2 driven by `[SEG]` embeddings: the differentiable path from an image and a vector to a mask.

`sam` is transformers' Sam2VideoModel or Sam2Model, whose parts are called one by one: its own `forward` takes no extra
prompt, its helpers `get_image_embeddings` and `get_prompt_embeddings` cut gradients, and its mask decoder copies the
image once for every prompt, where broadcasting takes a third less time for eleven.
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

    def pooled(self) -> Tensor:
        """(B, C): the coarsest map averaged over the image, a short description of what kind of image it is."""
        return self.maps[2].mean(dim=(2, 3))


@dataclass(frozen=True)
class DecodedMasks:
    """SAM 2's answer to K prompts on one image.

    Args:
        mask_logits: float32 (K, h, w), of the candidate with the highest predicted IoU among 1 to 3.
        iou_scores: float32 (K,), that predicted IoU.
        selected: int64 (K,), index of the candidate, 1 to 3.
        candidates: float32 (K, 4, h, w), logits of all; 0 is the single-mask token, which Sa2VA never uses.
        candidate_scores: float32 (K, 4), predicted IoU of all.
        object_score_logits: float32 (K,); the reference ignores it and so do we: a negative one empties no mask.
    """

    mask_logits: Tensor
    iou_scores: Tensor
    selected: Tensor
    candidates: Tensor
    candidate_scores: Tensor
    object_score_logits: Tensor


def sam_features(sam: Any, sam_pixel_values: Tensor) -> Sam2Features:
    """SAM 2's three maps of (B, 3, S, S) images, without the parts that may train. Gradients are not cut."""
    fine, middle, coarse = sam.vision_encoder(sam_pixel_values.to(sam.dtype), return_dict=True).fpn_hidden_states
    return Sam2Features((fine, middle, coarse))


def sparse_prompts(sam: Any, seg_embeddings: Tensor) -> Tensor:
    """(K, 3, C): two not-a-point vectors (no click was made), then the `[SEG]` embedding."""
    nothing = sam.prompt_encoder.not_a_point_embed.weight.expand(len(seg_embeddings), 2, -1)
    return torch.cat([nothing, seg_embeddings[:, None]], dim=1)


def decode_masks(sam: Any, features: Sam2Features, seg_embeddings: Tensor) -> DecodedMasks:
    """The masks of K `[SEG]` embeddings on one image. Differentiable in both, and in the decoder's weights.

    Args:
        sam: SAM 2.
        features: of one image (B = 1).
        seg_embeddings: (K, C).
    """
    fine, middle, coarse = features.maps
    decoder = sam.mask_decoder
    tokens, pixels = _transform(sam, coarse, sparse_prompts(sam, seg_embeddings.to(coarse.dtype)))
    pixels = decoder.upscale_conv1(pixels) + decoder.conv_s1(middle)
    pixels = decoder.activation(decoder.upscale_layer_norm(pixels))
    pixels = decoder.activation(decoder.upscale_conv2(pixels) + decoder.conv_s0(fine))  # (K, C/8, h, w)
    weights = [network(tokens[:, 2 + i]) for i, network in enumerate(decoder.output_hypernetworks_mlps)]
    candidates = (torch.stack(weights, dim=1) @ pixels.flatten(2)).unflatten(2, pixels.shape[-2:]).float()
    scores = decoder.iou_prediction_head(tokens[:, 1]).float()
    selected = scores[:, 1:].argmax(dim=1) + 1
    rows = torch.arange(len(selected), device=selected.device)
    object_scores = decoder.pred_obj_score_head(tokens[:, 0])[:, 0].float()
    return DecodedMasks(candidates[rows, selected], scores[rows, selected], selected, candidates, scores, object_scores)


def _transform(sam: Any, coarse: Tensor, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """The two-way transformer on prompts (K, 3, C): tokens (K, 9, C), object score, IoU and 4 masks first, and pixels.

    The image is broadcast over the prompts, not copied. First frame: no memory attention, only its stand-in vector.
    """
    decoder, count = sam.mask_decoder, len(prompts)
    image = coarse + sam.no_memory_embedding.reshape(1, -1, 1, 1)
    image = image + sam.prompt_encoder.no_mask_embed.weight.reshape(1, -1, 1, 1)
    places = sam.get_image_wide_positional_embeddings().to(image.dtype)
    own = torch.cat([decoder.obj_score_token.weight, decoder.iou_token.weight, decoder.mask_tokens.weight])
    tokens, pixels = decoder.transformer(
        point_embeddings=torch.cat([own.expand(count, -1, -1), prompts], dim=1)[:, None],
        image_embeddings=image.expand(count, -1, -1, -1),
        image_positional_embeddings=places.expand(count, -1, -1, -1),
        attention_similarity=None,
    )
    return tokens[:, 0], pixels.transpose(2, 3).reshape(count, *image.shape[1:])
