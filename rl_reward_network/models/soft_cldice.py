"""Soft clDice: the centreline Dice of soft masks, differentiable, for losses that must not break a vessel.

Source: Shit et al., "clDice - a Novel Topology-Preserving Loss Function for Tubular Structure Segmentation", CVPR 2021,
algorithms 1 and 2; erosion by a cross of 3 x 3 pixels, dilation by a square, as in the authors' code.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

ITERATIONS = 10  # erosions: at least half of the largest width in pixels, here of vessels of 20 pixels
SMOOTH = 1.0  # keeps ratios and gradients finite without a skeleton


def soft_cldice(masks: Tensor, targets: Tensor, iterations: int = ITERATIONS) -> Tensor:
    """float32 (N,) in [0, 1]: soft clDice of N pairs, differentiable in both.

    Args:
        masks, targets: float (N, 1, H, W) in [0, 1].
        iterations: erosions of the skeleton.
    """
    masks, targets = masks.float(), targets.float()
    skeleton, true_skeleton = soft_skeleton(masks, iterations), soft_skeleton(targets, iterations)
    precision = _share(skeleton, targets)
    sensitivity = _share(true_skeleton, masks)
    return 2 * precision * sensitivity / (precision + sensitivity)


def soft_skeleton(masks: Tensor, iterations: int) -> Tensor:
    """Soft centrelines float (N, 1, H, W) in [0, 1] of masks of that kind."""
    skeleton = F.relu(masks - _opened(masks))
    for _ in range(iterations):
        masks = _eroded(masks)
        delta = F.relu(masks - _opened(masks))
        skeleton = skeleton + F.relu(delta - skeleton * delta)
    return skeleton


def _share(skeleton: Tensor, inside: Tensor) -> Tensor:
    """float (N,): the share of each skeleton that lies inside."""
    both, whole = ((x).flatten(1).sum(1) for x in (skeleton * inside, skeleton))
    share: Tensor = (both + SMOOTH) / (whole + SMOOTH)
    return share


def _eroded(masks: Tensor) -> Tensor:
    return torch.min(-F.max_pool2d(-masks, (3, 1), 1, (1, 0)), -F.max_pool2d(-masks, (1, 3), 1, (0, 1)))


def _opened(masks: Tensor) -> Tensor:
    return F.max_pool2d(_eroded(masks), 3, 1, 1)
