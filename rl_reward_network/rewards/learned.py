"""The learned reward: what a reward network thinks of masks, without any label."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

PIXELS_AT_ONCE = 2**20  # bounds the memory: one mask of 999x960, sixteen of 256x256


def score_masks(network: Callable[..., Any], image: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """The network's score of each mask of one image.

    Args:
        network: maps image float32 (B, 3, H, W) and mask float32 (B, 1, H, W), both in [0, 1], to an output with
            `score` (B,); a RewardNetwork, or any callable of that form.
        image: uint8 (H, W, 3), RGB.
        masks: float32 (P, H, W) in [0, 1]. A binary mask is scored as the mask it is, a soft one by its soft overlap.

    Returns:
        float32 (P,) in [0, 1].

    Raises:
        ValueError: a wrong dtype, shape or range, or a score that is not finite.
    """
    _check(image, masks)
    parameter = next(network.parameters(), None) if isinstance(network, nn.Module) else None
    device = torch.device("cpu") if parameter is None else parameter.device
    picture = torch.tensor(image, device=device).permute(2, 0, 1)[None].float() / 255
    at_once = max(1, PIXELS_AT_ONCE // (image.shape[0] * image.shape[1]))
    scores = [np.zeros(0, dtype=np.float32)]
    with torch.no_grad():
        for start in range(0, len(masks), at_once):
            batch = torch.tensor(masks[start : start + at_once], dtype=torch.float32, device=device)[:, None]
            output = network(picture.expand(len(batch), -1, -1, -1), batch)
            scores.append(output.score.float().cpu().numpy())
    result = np.concatenate(scores)
    if not np.isfinite(result).all():
        raise ValueError("the reward network returned a score that is not finite; its weights are damaged")
    return result


def _check(image: np.ndarray, masks: np.ndarray) -> None:
    """Refuse what the network would misread silently."""
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or image.size == 0:
        raise ValueError(f"image must be uint8 (H, W, 3), got {image.dtype} {image.shape}")
    if masks.ndim != 3 or masks.shape[1:] != image.shape[:2] or not np.issubdtype(masks.dtype, np.floating):
        raise ValueError(f"masks must be float (P, H, W) of {image.shape[:2]}, got {masks.dtype} {masks.shape}")
    if masks.size and not (masks.min() >= 0 and masks.max() <= 1):  # also refuses NaN
        raise ValueError(f"masks must be probabilities in [0, 1], got [{masks.min()}, {masks.max()}]; apply a sigmoid")
