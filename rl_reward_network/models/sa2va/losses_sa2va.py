"""Mask losses of Sa2VA's training recipe, on all pixels of the decoder's grid (no point sampling: deterministic).

Source: bytedance/Sa2VA@9832e1a, projects/sa2va: 2.0 x binary cross-entropy + 0.5 x Dice next to the text's own loss.
"""

import torch.nn.functional as F
from torch import Tensor

BCE_WEIGHT, DICE_WEIGHT = 2.0, 0.5


def mask_losses(mask_logits: Tensor, masks: Tensor) -> dict[str, Tensor]:
    """`mask` (weighted cross-entropy) and `dice` (weighted), scalars; differentiable in the logits.

    Args:
        mask_logits: float (K, h, w), on the decoder's grid.
        masks: bool or uint8 (K, H, W), ground truth at any size; taken to (h, w) by nearest sampling as in training.

    Raises:
        ValueError: the numbers of masks differ, or there is none.
    """
    if len(mask_logits) != len(masks) or not len(masks):
        raise ValueError(
            f"{len(mask_logits)} predicted and {len(masks)} true masks: expected the same number, at least 1"
        )
    truth = F.interpolate(masks[:, None].to(mask_logits.device).float(), size=mask_logits.shape[-2:], mode="nearest")[
        :, 0
    ]
    logits = mask_logits.float()
    cross_entropy = F.binary_cross_entropy_with_logits(logits, truth)
    probability = logits.sigmoid().flatten(1)
    truth = truth.flatten(1)
    overlap = (2 * (probability * truth).sum(1) + 1) / (probability.sum(1) + truth.sum(1) + 1)
    return {"mask": BCE_WEIGHT * cross_entropy, "dice": DICE_WEIGHT * (1 - overlap).mean()}
