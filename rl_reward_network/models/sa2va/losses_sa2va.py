"""Mask losses of Sa2VA's training recipe, on all pixels of the decoder's grid: no point sampling, so deterministic.

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
        mask_logits: float (K, h, w), on the decoder's grid.
        masks: bool or uint8 (K, H, W), ground truth at any size; resized to (h, w) by nearest sampling as in training.
        bce_weight, dice_weight: factors of the two losses.

    Raises:
        ValueError: the numbers of masks differ, or there is none.
    """
    truth = _on_grid(masks, mask_logits)
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
        masks: bool or uint8 (K, H, W), ground truth, sampled as in `mask_losses`.

    Raises:
        ValueError: the numbers of masks differ, or there is none.
    """
    predicted = mask_logits.detach() > 0
    truth = _on_grid(masks, mask_logits) > 0.5
    union = (predicted | truth).flatten(1).sum(1).float()
    iou = torch.where(union > 0, (predicted & truth).flatten(1).sum(1) / union.clamp(min=1), 1.0)
    return F.mse_loss(iou_scores.float(), iou)


def _on_grid(masks: Tensor, mask_logits: Tensor) -> Tensor:
    """float (K, h, w): masks sampled on the logits' grid; a ValueError unless there is one for each mask's logits."""
    if len(mask_logits) != len(masks) or not len(masks):
        raise ValueError(
            f"{len(mask_logits)} predicted and {len(masks)} true masks: expected the same number, at least 1"
        )
    on_device = masks[:, None].to(mask_logits.device).float()
    return F.interpolate(on_device, size=mask_logits.shape[-2:], mode="nearest")[:, 0]
