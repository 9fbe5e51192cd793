"""Mask losses of Sa2VA, on all pixels of a grid: no point sampling, so deterministic.

The truth is averaged over the area of each cell. Sa2VA's own recipe samples it by `nearest`, which takes the corner of
a cell: targets are shifted by half a cell, and thin objects lose their width (docs/specification.md).

Source: bytedance/Sa2VA@9832e1a, projects/sa2va: 2.0 x binary cross-entropy + 0.5 x Dice, added to the text loss.
These weights are the defaults. Fine-tuning has its own (`grpo.settings`).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BCE_WEIGHT, DICE_WEIGHT = 2.0, 0.5


def mask_losses(
    mask_logits: Tensor, masks: Tensor, bce_weight: float = BCE_WEIGHT, dice_weight: float = DICE_WEIGHT
) -> dict[str, Tensor]:
    """`mask` (weighted cross-entropy) and `dice` (weighted), scalars; differentiable in the logits.

    Args:
        mask_logits: float (K, h, w).
        masks: bool, uint8 or float in [0, 1] (K, H, W), ground truth at any size; see `soft_targets`.
        bce_weight, dice_weight: factors of the two losses.

    Raises:
        ValueError: the numbers of masks differ, or there is none.
    """
    truth = soft_targets(masks, mask_logits)
    logits = mask_logits.float()
    cross_entropy = F.binary_cross_entropy_with_logits(logits, truth)
    probability = logits.sigmoid().flatten(1)
    truth = truth.flatten(1)
    overlap = (2 * (probability * truth).sum(1) + 1) / (probability.sum(1) + truth.sum(1) + 1)
    return {"mask": bce_weight * cross_entropy, "dice": dice_weight * (1 - overlap).mean()}


def iou_head_loss(iou_scores: Tensor, mask_logits: Tensor, masks: Tensor) -> Tensor:
    """Mean squared error between predicted and true IoU, scalar; differentiable in the predictions alone.

    The IoU of two empty masks is 1.

    Args:
        iou_scores: float (K,), predictions of SAM 2's head.
        mask_logits: float (K, h, w).
        masks: bool, uint8 or float in [0, 1] (K, H, W), ground truth. Where (h, w) divides its size, the IoU is that
            of the whole cells with the truth at its own size.

    Raises:
        ValueError: the numbers of masks differ, or there is none.
    """
    predicted = mask_logits.detach() > 0
    truth = soft_targets(masks, mask_logits)
    union = torch.where(predicted, 1.0, truth).flatten(1).sum(1)
    overlap = torch.where(predicted, truth, 0.0).flatten(1).sum(1)
    return F.mse_loss(iou_scores.float(), torch.where(union > 0, overlap / union, 1.0))


def soft_targets(masks: Tensor, mask_logits: Tensor) -> Tensor:
    """float32 (K, h, w) in [0, 1]: the share of each cell of the logits' grid that the masks cover.

    Args:
        masks: bool, uint8 or float (K, H, W).
        mask_logits: float (K, h, w).

    Raises:
        ValueError: the numbers of masks differ, or there is none.
    """
    if len(mask_logits) != len(masks) or not len(masks):
        raise ValueError(
            f"{len(mask_logits)} predicted and {len(masks)} true masks: expected the same number, at least 1"
        )
    on_device = masks[:, None].to(mask_logits.device).float()
    return F.interpolate(on_device, size=mask_logits.shape[-2:], mode="area")[:, 0]


def official_targets(masks: Tensor, size: tuple[int, int]) -> Tensor:
    """float32 (K, h, w): masks (K, H, W) sampled by `nearest`, as in Sa2VA's recipe; for comparison with it only."""
    return F.interpolate(masks[:, None].float(), size=size, mode="nearest")[:, 0]
