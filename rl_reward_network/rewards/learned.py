"""The learned reward: what a reward network thinks of masks, without any label."""

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

PIXELS_AT_ONCE = 2**20  # bounds the memory: one mask of 999x960, sixteen of 256x256


class Judge(Protocol):
    """A reward network: looks at an image once, then judges any number of its masks."""

    def truth_maps(self, image: Tensor) -> Tensor:
        """What it makes of float images (1, 3, H, W) in [0, 1]."""

    def judge(self, mask: Tensor, truth_maps: Tensor) -> Any:
        """The quality of float masks (B, 1, H, W) in [0, 1]: a RewardOutput."""


def judge_masks(network: Judge, image: np.ndarray, masks: np.ndarray) -> dict[str, np.ndarray]:
    """Everything the network says about each mask of one image in numbers.

    Args:
        network: a RewardNetwork, or anything of that form.
        image: uint8 (H, W, 3), RGB.
        masks: float32 (P, H, W) in [0, 1]. A binary mask is judged as the mask it is, a soft one by its soft overlap.

    Returns:
        float32 arrays: `score`, `dice` and `spread` (P,); `members` (P, K, 4), Dice, IoU, precision and recall as each
        member has them; `truth_map` (H, W), as `truth_map` gives it. The score is clipped to [0, 1].

    Raises:
        ValueError: a wrong dtype, shape or range, or a number that is not finite.
    """
    _check(image, masks)
    at_once = max(1, PIXELS_AT_ONCE // (image.shape[0] * image.shape[1]))
    with torch.no_grad():
        maps = network.truth_maps(_picture(network, image))
        parts = [
            _numbers(network.judge(_to(maps, masks[start : start + at_once]), maps))
            for start in range(0, max(1, len(masks)), at_once)
        ]
    result = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    result["truth_map"] = _mean_map(maps)
    if not all(np.isfinite(column).all() for column in result.values()):
        raise ValueError("the reward network returned a score that is not finite; its weights are damaged")
    return result


def score_masks(network: Judge, image: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """The reward of each mask, float32 (P,) in [0, 1]; arguments and errors as `judge_masks`."""
    return judge_masks(network, image, masks)["score"]


def truth_map(network: Judge, image: np.ndarray) -> np.ndarray:
    """Probability that each pixel is object, float32 (H, W), the mean over members; `image` uint8 (H, W, 3)."""
    _check(image, np.zeros((0, *image.shape[:2]), dtype=np.float32))
    with torch.no_grad():
        return _mean_map(network.truth_maps(_picture(network, image)))


def ascend(network: Judge, image: np.ndarray, masks: np.ndarray, step_size: float, steps: int) -> Iterator[np.ndarray]:
    """Climb the score by its gradient in the mask: m <- clip(m + step_size * g / max |g|, 0, 1), each mask by itself.

    Args:
        network: as `judge_masks`; its truth maps are computed once.
        image: uint8 (H, W, 3), RGB.
        masks: float32 (P, H, W) in [0, 1], where to start.
        step_size: most that one step changes a pixel, in (0, 1].
        steps: number of steps.

    Yields:
        The soft masks after each step, float32 (P, H, W) in [0, 1]; threshold them at 0.5.

    Raises:
        ValueError: as `judge_masks`.
    """
    _check(image, masks)
    with torch.no_grad():
        maps = network.truth_maps(_picture(network, image))
    mask = _to(maps, masks)
    for _ in range(steps):
        mask.requires_grad_()
        (gradient,) = torch.autograd.grad(network.judge(mask, maps).score.sum(), mask)
        largest = gradient.abs().amax(dim=(1, 2, 3), keepdim=True).clamp_min(torch.finfo(mask.dtype).tiny)
        mask = (mask.detach() + step_size * gradient / largest).clamp(0, 1)
        yield mask[:, 0].cpu().numpy()


def _mean_map(maps: Tensor) -> np.ndarray:
    """The mean over the members of truth maps (K, 1, 1, H, W), float32 (H, W)."""
    return maps.mean(dim=0)[0, 0].float().cpu().numpy()


def _numbers(output: Any) -> dict[str, np.ndarray]:
    """What is kept of a RewardOutput: numbers, not maps, so that many masks of a large image need little memory."""
    kept = {"score": output.score.clamp(0, 1), "dice": output.dice, "spread": output.spread}
    kept["members"] = output.members.permute(2, 1, 0)
    return {name: values.float().cpu().numpy() for name, values in kept.items()}


def _to(maps: Tensor, masks: np.ndarray) -> Tensor:
    """Masks (P, H, W) as (P, 1, H, W) of the dtype and device of the truth maps."""
    return torch.tensor(masks, dtype=maps.dtype, device=maps.device)[:, None]


def _picture(network: Judge, image: np.ndarray) -> Tensor:
    """float32 (1, 3, H, W) in [0, 1] on the network's device."""
    parameter = next(network.parameters(), None) if isinstance(network, torch.nn.Module) else None
    device = torch.device("cpu") if parameter is None else parameter.device
    return torch.tensor(image, device=device).permute(2, 0, 1)[None].float() / 255


def _check(image: np.ndarray, masks: np.ndarray) -> None:
    """Refuse what the network would misread silently."""
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or image.size == 0:
        raise ValueError(f"image must be uint8 (H, W, 3), got {image.dtype} {image.shape}")
    if masks.ndim != 3 or masks.shape[1:] != image.shape[:2] or not np.issubdtype(masks.dtype, np.floating):
        raise ValueError(f"masks must be float (P, H, W) of {image.shape[:2]}, got {masks.dtype} {masks.shape}")
    if masks.size and not (masks.min() >= 0 and masks.max() <= 1):  # also refuses NaN
        raise ValueError(f"masks must be probabilities in [0, 1], got [{masks.min()}, {masks.max()}]; apply a sigmoid")
