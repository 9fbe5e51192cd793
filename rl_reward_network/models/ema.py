"""Moving averages of weights, other weights in one model, and what the model learns from such an average.

Averages are float32: in bfloat16 and at a decay of 0.999, rounding would remove over four fifths of their movement. The
average, a mean teacher, segments an image as it is; the model learns that mask on a strong view of the image. A pixel
counts as much as the teacher is sure of it.

Source: Tarvainen & Valpola, "Mean teachers are better role models" (arXiv 1703.01780); the fading of Laine & Aila,
"Temporal Ensembling" (arXiv 1610.02242); strong views for the model and a hard target, as in FixMatch (arXiv
2001.07685). Other than there, no pixel is left out below a limit: its weight is the distance of its probability from
one half. Vessels are thin, and almost all of their pixels are near a border, where no limit would be passed.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FADE_IN = 0.3  # share of the steps in which a mean teacher's loss rises
STEEPNESS = 5.0  # of the fading, as in Temporal Ensembling


def trainable_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def copied(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the trainable parameters, by name."""
    return {name: parameter.detach().clone() for name, parameter in trainable_tensors(model).items()}


@contextmanager
def swapped(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace parameters and buffers of `model` inside the block, in which no backward pass may run.

    Nothing is copied, unless the model's dtype differs from that of `weights`. A ValueError for another shape.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in weights.items():
        if tensors[name].shape != tensor.shape:
            raise ValueError(f"{name}: got {tuple(tensor.shape)}, the model has {tuple(tensors[name].shape)}")
    before = {name: tensors[name].data for name in weights}
    try:
        for name, tensor in weights.items():
            tensors[name].data = tensor.to(tensors[name].dtype)
        torch.clear_autocast_cache()  # it finds casts by the parameter object, so it would return the replaced values
        yield
    finally:
        for name, tensor in before.items():
            tensors[name].data = tensor
        torch.clear_autocast_cache()


class EMA:
    """Exponential moving average of a model, float32: w <- d w + (1 - d) new after an optimiser step; d warms up.

    Args:
        model: gives the initial average.
        decay: in [0, 1); 0 is the current model, one step late.
        buffers: average the running statistics of BatchNorm, too, and copy other buffers; otherwise the average is of
            the trainable parameters alone.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, buffers: bool = False) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"ema_decay is {decay}, expected 0 <= ema_decay < 1")
        if wrong := [name for name, p in trainable_tensors(model).items() if p.dtype != torch.float32]:
            raise ValueError(f"{wrong[0]} trains in {model.get_parameter(wrong[0]).dtype}; make it float32 first")
        self.decay, self.buffers, self.steps = decay, buffers, 0
        self.weights = {name: tensor.clone() for name, tensor in self._current(model).items()}

    def _current(self, model: nn.Module) -> dict[str, Tensor]:
        buffers = dict(model.named_buffers()) if self.buffers else {}
        return {name: tensor.detach() for name, tensor in {**trainable_tensors(model), **buffers}.items()}

    @property
    def current_decay(self) -> float:
        """Decay of the next update."""
        return self.decay_after(self.steps)

    def decay_after(self, steps: int) -> float:
        """Decay after a number of updates: without a warm-up, the average of a short run is its initial model."""
        return min(self.decay, (1 + steps) / (10 + steps))

    def half_life_after(self, steps: int) -> float:
        """Updates after which half of a change of the model is in the average, at the decay after `steps` updates."""
        decay = self.decay_after(steps)
        return math.log(0.5) / math.log(decay) if decay else 0.0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Update the average with the model's current state."""
        new = self._current(model)
        averaged = [name for name, tensor in self.weights.items() if tensor.is_floating_point()]
        averages = [self.weights[name] for name in averaged]
        torch._foreach_lerp_(averages, [new[name].float() for name in averaged], 1 - self.current_decay)
        for name in self.weights.keys() - averaged:  # numbers, such as BatchNorm's of batches
            self.weights[name].copy_(new[name])
        self.steps += 1

    def load(self, weights: Mapping[str, Tensor], steps: int) -> None:
        """Go on from the weights and the number of updates of a checkpoint."""
        self.steps = steps
        for name, tensor in self.weights.items():
            tensor.copy_(weights[name])

    @torch.no_grad()
    def distance(self, model: nn.Module) -> float:
        """Euclidean distance between the average and the model, over all tensors."""
        new = self._current(model)
        gaps = [(tensor - new[name]).norm() for name, tensor in self.weights.items()]
        return float(torch.stack(gaps).norm()) if gaps else 0.0


class EMAModel:
    """The specification's average: a second model, without warm-up; all other attributes are those of that model.

    Buffers are copied: the running statistics of BatchNorm are averages already. Training uses `EMA`.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        self.model, self.decay = copy.deepcopy(model).eval().requires_grad_(False), decay

    @torch.no_grad()
    def update(self, student: nn.Module) -> None:
        """Average the student's parameters, and copy its buffers."""
        for average, new in zip(self.model.parameters(), student.parameters(), strict=True):
            average.lerp_(new.to(average), 1 - self.decay)
        for buffer, current in zip(self.model.buffers(), student.buffers(), strict=True):
            buffer.copy_(current)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass."""
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "model":  # a copy asks before it has one
            raise AttributeError(name)
        return getattr(self.model, name)


def fade_in(step: int, steps: int) -> float:
    """Weight in (0, 1] of the loss on images without masks: exp(-5 (1 - t)^2) over the first part of the steps."""
    rise = min(1.0, step / max(1.0, FADE_IN * steps))
    return math.exp(-STEEPNESS * (1 - rise) ** 2)


def consistency_losses(logits: Tensor, taught: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy and Dice loss against the teacher's masks at 0.5, each pixel weighted by its confidence |2 p - 1|.

    Two means over N masks, from logits (N, h, w), which learn, and the teacher's soft masks, float (N, h, w) in [0, 1].
    """
    logits, taught = logits.float().flatten(1), taught.float().flatten(1)
    target, weight = (taught > 0.5).float(), (2 * taught - 1).abs()
    each = F.binary_cross_entropy_with_logits(logits, target, weight, reduction="none")
    cross_entropy = each.sum(1) / weight.sum(1).clamp(min=1)
    probability = logits.sigmoid()
    overlap = 2 * (weight * probability * target).sum(1) + 1
    dice = overlap / ((weight * probability).sum(1) + (weight * target).sum(1) + 1)
    return cross_entropy.mean(), (1 - dice).mean()
