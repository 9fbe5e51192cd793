"""SAM 2 driven by `[SEG]` embeddings: the differentiable path from an image and a vector to a mask, and its losses.

`sam` is transformers' Sam2VideoModel, Sam2Model or, with SAM 3, Sam3TrackerVideoModel: SAM 2's prompt encoder and
decoder behind another image encoder, of 1008 pixels a side with a coarsest grid of 72. Its parts are called one by one:
`forward` accepts no embedding as prompt, `get_image_embeddings` and `get_prompt_embeddings` run without gradients, and
the mask decoder copies the image for every prompt (broadcasting is a third faster for eleven prompts).

The losses use all pixels of the decoder's grid: no point sampling, so they are deterministic. The truth is averaged
over the area of each cell. Sa2VA's own recipe samples it by `nearest`, which takes the corner of a cell: targets are
shifted by half a cell, and thin objects lose their width (docs/reference/specification.md).

Source: bytedance/Sa2VA@9832e1a, projects/sa2va: 2.0 x binary cross-entropy + 0.5 x Dice, the defaults here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_reward_network.models.sa2va.side_network import SideNetwork

BCE_WEIGHT, DICE_WEIGHT = 2.0, 0.5
ITERATIONS = 10  # erosions: at least half of the largest width in pixels, here of vessels of 20 pixels
SMOOTH = 1.0  # keeps ratios and gradients of soft clDice finite without a skeleton


@dataclass(frozen=True)
class Sam2Features:
    """SAM 2's feature maps of B images, before `conv_s0` and `conv_s1`, which are parts of the trainable decoder."""

    maps: Any  # (B, C, S/4, S/4), (B, C, S/8, S/8), (B, C, S/16, S/16) for an S x S input
    side_pixels: Tensor | None = None  # uint8 (B, 3, P, P), the input of the side network
    # float (B, 3, S, S), where the image encoder trains: there are no maps, `decode_masks` computes them anew
    sam_pixels: Tensor | None = None

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Sam2Features":
        pixels = (None if one is None else change(one) for one in (self.side_pixels, self.sam_pixels))
        return Sam2Features(tuple(map(change, self.maps)), *pixels)

    def __getitem__(self, index: int) -> "Sam2Features":
        """The features of one image, batch axis kept."""
        return self._each(lambda tensor: tensor[index : index + 1])

    def to(self, device: torch.device | str) -> "Sam2Features":
        """The same features on another device."""
        return self._each(lambda tensor: tensor.to(device))

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(tensor.nbytes for tensor in (*self.maps, self.side_pixels, self.sam_pixels) if tensor is not None)

    @property
    def decoder_grid(self) -> tuple[int, int]:
        """(h, w) of SAM 2's own masks."""
        source, stride = (self.maps[0], 1) if self.sam_pixels is None else (self.sam_pixels, 4)
        height, width = source.shape[-2:]
        return height // stride, width // stride

    @property
    def grid(self) -> tuple[int, int]:
        """(h, w) of the masks that are decoded from these features."""
        size = self.decoder_grid if self.side_pixels is None else self.side_pixels.shape[-2:]
        return size[0], size[1]

    def pooled(self) -> Tensor:
        """(B, C): the coarsest map averaged over the image, as a summary of its appearance."""
        assert self.maps
        return self.maps[2].mean(dim=(2, 3))


@dataclass(frozen=True)
class DecodedMasks:
    """SAM 2's masks for K prompts on one image: of the candidate among 1 to 3 with the highest predicted IoU.

    Of another one where the side network's configuration names it.
    """

    mask_logits: Tensor  # float32 (K, h, w), refined by the side network if there is one
    iou_scores: Tensor  # float32 (K,), its predicted IoU
    selected: Tensor  # int64 (K,), index of that candidate
    candidates: Tensor  # float32 (K, 4, h, w), SAM 2's logits; 0 is the single-mask token, unused by Sa2VA
    candidate_scores: Tensor  # float32 (K, 4), predicted IoU; its gradient ends in the head that predicts it
    object_score_logits: Tensor  # float32 (K,); of SAM 2 unused, as in the reference; see `answer_masks`

    def __getitem__(self, rows: int | slice) -> "DecodedMasks":
        """The masks of some prompts, their axis kept."""
        rows = slice(rows, rows + 1) if isinstance(rows, int) else rows
        return DecodedMasks(*(tensor[rows] for tensor in vars(self).values()))


def sam_features(sam: Any, sam_pixel_values: Tensor) -> Sam2Features:
    """SAM 2's three maps of (B, 3, S, S) images, from its frozen parts; differentiable."""
    maps = sam.vision_encoder(sam_pixel_values.to(sam.dtype), return_dict=True).fpn_hidden_states
    return Sam2Features(tuple(maps[:3]))  # SAM 3 has a coarser one, which nothing reads


def sparse_prompts(sam: Any, seg_embeddings: Tensor) -> Tensor:
    """(K, 3, C): two not-a-point vectors, as there is no click, then the `[SEG]` embedding (K, C)."""
    nothing = sam.prompt_encoder.not_a_point_embed.weight.expand(len(seg_embeddings), 2, -1)
    return torch.cat([nothing, seg_embeddings[:, None]], dim=1)


def decode_masks(
    sam: Any, features: Sam2Features, seg_embeddings: Tensor, side: SideNetwork | None = None
) -> DecodedMasks:
    """The masks of K `[SEG]` embeddings on one image; differentiable in both and in the weights of decoder and `side`.

    The features are those of one image (B = 1), with the pixels for `side` if it is given; embeddings are (K, C), K may
    be 0.
    """
    if not len(seg_embeddings):  # transformers' attention takes no empty batch
        return decode_masks(sam, features, seg_embeddings.new_zeros(1, seg_embeddings.shape[1]), side)[:0]
    pixels, decoder = features.sam_pixels, sam.mask_decoder
    fine, middle, coarse = features.maps if pixels is None else sam_features(sam, pixels).maps
    tokens, pixels = _transform(sam, coarse, sparse_prompts(sam, seg_embeddings.to(coarse.dtype)))
    pixels = decoder.upscale_conv1(pixels) + decoder.conv_s1(middle)
    pixels = decoder.activation(decoder.upscale_layer_norm(pixels))
    pixels = decoder.activation(decoder.upscale_conv2(pixels) + decoder.conv_s0(fine))  # (K, C/8, h, w)
    weights = [network(tokens[:, 2 + i]) for i, network in enumerate(decoder.output_hypernetworks_mlps)]
    of_masks = torch.stack(weights, dim=1)  # (K, 4, C/8)
    candidates = (of_masks @ pixels.flatten(2)).unflatten(2, pixels.shape[-2:]).float()
    scores = decoder.iou_prediction_head(tokens[:, 1].detach()).float()  # a guess about masks must not change them
    selected = scores[:, 1:].argmax(dim=1) + 1
    if side is not None and side.config.candidate is not None:
        selected = torch.full_like(selected, side.config.candidate)
    rows = torch.arange(len(selected), device=selected.device)
    mask_logits = candidates[rows, selected]
    if side is not None:
        assert features.side_pixels is not None, "`generation_sa2va.image_features` makes features with the pixels"
        (x,) = side(features.side_pixels, coarse)
        mask_logits = side.refine(x, mask_logits, of_masks[rows, selected], seg_embeddings)
    object_scores = decoder.pred_obj_score_head(tokens[:, 0])[:, 0].float()
    return DecodedMasks(mask_logits, scores[rows, selected], selected, candidates, scores, object_scores)


def _transform(sam: Any, coarse: Tensor, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """The two-way transformer on prompts (K, 3, C): tokens (K, 9, C), and pixels (K, C, S/16, S/16).

    The first six tokens are those of the object score, the IoU and the four masks. The image is broadcast over the
    prompts, not copied. As on the first frame of a video, the no-memory vector replaces memory attention.
    """
    decoder, count = sam.mask_decoder, len(prompts)
    image = coarse + sam.no_memory_embedding.reshape(1, -1, 1, 1)
    image = image + sam.prompt_encoder.no_mask_embed.weight.reshape(1, -1, 1, 1)
    positions = sam.get_image_wide_positional_embeddings().to(image.dtype)
    output_tokens = torch.cat([decoder.obj_score_token.weight, decoder.iou_token.weight, decoder.mask_tokens.weight])
    tokens, pixels = decoder.transformer(
        point_embeddings=torch.cat([output_tokens.expand(count, -1, -1), prompts], dim=1)[:, None],
        image_embeddings=image.expand(count, -1, -1, -1),
        image_positional_embeddings=positions.expand(count, -1, -1, -1),
        attention_similarity=None,
    )
    return tokens[:, 0], pixels.transpose(2, 3).reshape(count, *image.shape[1:])


def mask_losses(
    mask_logits: Tensor, masks: Tensor, bce_weight: float = BCE_WEIGHT, dice_weight: float = DICE_WEIGHT
) -> dict[str, Tensor]:
    """`mask` (cross-entropy) and `dice`, weighted scalars against `soft_targets`; differentiable in the logits."""
    truth, logits = soft_targets(masks, mask_logits), mask_logits.float()
    cross_entropy = F.binary_cross_entropy_with_logits(logits, truth)
    probability = logits.sigmoid().flatten(1)
    truth = truth.flatten(1)
    overlap = (2 * (probability * truth).sum(1) + 1) / (probability.sum(1) + truth.sum(1) + 1)
    return {"mask": bce_weight * cross_entropy, "dice": dice_weight * (1 - overlap).mean()}


def iou_head_loss(iou_scores: Tensor, mask_logits: Tensor, masks: Tensor) -> Tensor:
    """Mean squared error of SAM 2's predictions (K,) of the `true_iou`, scalar; differentiable in them alone."""
    return F.mse_loss(iou_scores.float(), true_iou(mask_logits, masks))


def candidate_loss(decoded: DecodedMasks, masks: Tensor) -> Tensor:
    """As `iou_head_loss`, of all candidates that may be selected: the right one still is when they have moved."""
    ious = torch.stack([true_iou(candidate, masks) for candidate in decoded.candidates.unbind(1)[1:]], dim=1)
    return F.mse_loss(decoded.candidate_scores[:, 1:], ious)


def true_iou(mask_logits: Tensor, masks: Tensor) -> Tensor:
    """float32 (K,), without gradient: the IoU of masks with the truth; of two empty ones 1.

    Where (h, w) divides the size of the truth, the IoU is that of the whole cells with the truth at its own size.
    """
    predicted, truth = mask_logits.detach() > 0, soft_targets(masks, mask_logits)
    union = torch.where(predicted, 1.0, truth).flatten(1).sum(1)
    overlap = torch.where(predicted, truth, 0.0).flatten(1).sum(1)
    return torch.where(union > 0, overlap / union, 1.0)


def soft_targets(masks: Tensor, mask_logits: Tensor) -> Tensor:
    """float32 (K, h, w) in [0, 1]: the share of each cell of the grid of the logits that masks (K, H, W) cover."""
    if len(mask_logits) != len(masks) or not len(masks):
        raise ValueError(
            f"{len(mask_logits)} predicted and {len(masks)} true masks: expected the same number, at least 1"
        )
    on_device = masks.to(mask_logits.device).float()
    if masks.shape == mask_logits.shape:  # as beside a side network, where the interpolation would take long
        return on_device
    return F.interpolate(on_device[:, None], size=mask_logits.shape[-2:], mode="area")[:, 0]


# ---- soft clDice ----


def soft_cldice(masks: Tensor, targets: Tensor, iterations: int = ITERATIONS) -> Tensor:
    """float32 (N,) in [0, 1]: the centreline Dice of soft masks, differentiable in both; it must not break a vessel.

    Masks and targets are float (N, 1, H, W) in [0, 1], `iterations` are erosions of the skeleton.

    Source: Shit et al., "clDice - a Novel Topology-Preserving Loss Function for Tubular Structure Segmentation", CVPR
    2021, algorithms 1 and 2; erosion by a cross of 3 x 3 pixels, dilation by a square, as in the authors' code.
    """
    masks, targets = masks.float(), targets.float()
    skeleton, true_skeleton = soft_skeleton(masks, iterations), soft_skeleton(targets, iterations)

    def share(skeleton: Tensor, inside: Tensor) -> Tensor:
        """float (N,): the share of each skeleton that lies inside."""
        both, whole = (x.flatten(1).sum(1) for x in (skeleton * inside, skeleton))
        return (both + SMOOTH) / (whole + SMOOTH)

    precision, sensitivity = share(skeleton, targets), share(true_skeleton, masks)
    return 2 * precision * sensitivity / (precision + sensitivity)


def soft_skeleton(masks: Tensor, iterations: int) -> Tensor:
    """Soft centrelines float (N, 1, H, W) in [0, 1] of masks of that kind."""
    skeleton = F.relu(masks - _opened(masks))
    for _ in range(iterations):
        masks = _eroded(masks)
        delta = F.relu(masks - _opened(masks))
        skeleton = skeleton + F.relu(delta - skeleton * delta)
    return skeleton


def _eroded(masks: Tensor) -> Tensor:
    return torch.min(-F.max_pool2d(-masks, (3, 1), 1, (1, 0)), -F.max_pool2d(-masks, (1, 3), 1, (0, 1)))


def _opened(masks: Tensor) -> Tensor:
    return F.max_pool2d(_eroded(masks), 3, 1, 1)
