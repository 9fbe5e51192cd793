"""Mean teacher: the loss against the masks of a moving average, and how it fades in.

The teacher, a moving average of the model, segments an image as it is; the model learns that mask on a strong view of
the image. A pixel counts as much as the teacher is sure of it.

Source: Tarvainen & Valpola, "Mean teachers are better role models" (arXiv 1703.01780); the fading of Laine & Aila,
"Temporal Ensembling" (arXiv 1610.02242); strong views for the model and a hard target, as in FixMatch (arXiv
2001.07685). Other than there, no pixel is left out below a limit: its weight is the distance of its probability from
one half. Vessels are thin, and almost all of their pixels are near a border, where no limit would be passed.
"""

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_reward_network.models.ema import warm_decay

FADE_IN = 0.3  # share of the steps
STEEPNESS = 5.0  # of the fading, as in Temporal Ensembling


def fade_in(step: int, steps: int) -> float:
    """Weight in (0, 1] of the loss on images without masks: exp(-5 (1 - t)^2) over the first part of the steps."""
    rise = min(1.0, step / max(1.0, FADE_IN * steps))
    return math.exp(-STEEPNESS * (1 - rise) ** 2)


def consistency_losses(logits: Tensor, taught: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy and Dice loss against the teacher's masks at 0.5, each pixel weighted by its confidence |2 p - 1|.

    Args:
        logits: float (N, h, w), of the model.
        taught: float (N, h, w) in [0, 1], the teacher's soft masks.

    Returns:
        Two scalars, means over the N masks, differentiable in the logits.
    """
    logits, taught = logits.float().flatten(1), taught.float().flatten(1)
    target, weight = (taught > 0.5).float(), (2 * taught - 1).abs()
    each = F.binary_cross_entropy_with_logits(logits, target, weight, reduction="none")
    cross_entropy = each.sum(1) / weight.sum(1).clamp(min=1)
    probability = logits.sigmoid()
    overlap = 2 * (weight * probability * target).sum(1) + 1
    dice = overlap / ((weight * probability).sum(1) + (weight * target).sum(1) + 1)
    return cross_entropy.mean(), (1 - dice).mean()


class TeacherCopy:
    """A moving average of a small network as a network of its own, the running statistics of BatchNorm included.

    `ema.EMA` keeps the trainable tensors of a model alone, without a second model.

    Args:
        student: gives the initial average.
        decay: in [0, 1), reached after a warm-up, see `ema.warm_decay`.
    """

    def __init__(self, student: nn.Module, decay: float) -> None:
        self.network, self.decay, self.steps = copy.deepcopy(student).eval().requires_grad_(False), decay, 0

    @torch.no_grad()
    def update(self, student: nn.Module) -> None:
        """Update the average with the student's current state."""
        decay = warm_decay(self.decay, self.steps)
        for average, new in zip(self.network.state_dict().values(), student.state_dict().values(), strict=True):
            if average.is_floating_point():
                average.lerp_(new.to(average), 1 - decay)
            else:
                average.copy_(new)
        self.steps += 1

    @torch.no_grad()
    def probs(self, images: Tensor) -> Tensor:
        """Foreground probabilities of images."""
        found: Tensor = self.network(images).float().sigmoid()
        return found
