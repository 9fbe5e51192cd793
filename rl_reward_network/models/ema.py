"""Other weights in one model: an exponential moving average (the EMA teacher) and the initial ones (the reference).

The average is float32: in bfloat16 and at a decay of 0.999, rounding would remove over four fifths of its movement.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def trainable_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def copied(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the trainable parameters, by name."""
    return {name: parameter.detach().clone() for name, parameter in trainable_tensors(model).items()}


@contextmanager
def swapped(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace weights of `model` inside the block; no backward pass may run in it.

    Nothing is copied, unless the model's dtype differs from that of `weights`. The cache of autocast is cleared at both
    ends: it finds casts by the parameter object, so it would return those of the replaced values.

    Raises:
        ValueError: a tensor has another shape than the model's.
    """
    parameters = dict(model.named_parameters())
    for name, tensor in weights.items():
        if parameters[name].shape != tensor.shape:
            raise ValueError(f"{name}: got {tuple(tensor.shape)}, the model has {tuple(parameters[name].shape)}")
    before = {name: parameters[name].data for name in weights}
    try:
        for name, tensor in weights.items():
            parameters[name].data = tensor.to(parameters[name].dtype)
        torch.clear_autocast_cache()
        yield
    finally:
        for name, tensor in before.items():
            parameters[name].data = tensor
        torch.clear_autocast_cache()


def warm_decay(decay: float, steps: int) -> float:
    """The decay after a number of updates: without a warm-up, the average of a short run is its initial model."""
    return min(decay, (1 + steps) / (10 + steps))


class EMA:
    """Exponential moving average of the trainable parameters, float32: w <- d w + (1 - d) new after an optimiser step.

    The decay warms up, see `warm_decay`.

    Args:
        model: gives the initial average.
        decay: in [0, 1); 0 is the current model, one step late.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"ema_decay is {decay}, expected 0 <= ema_decay < 1")
        if wrong := [name for name, p in trainable_tensors(model).items() if p.dtype != torch.float32]:
            raise ValueError(f"{wrong[0]} trains in {model.get_parameter(wrong[0]).dtype}; make it float32 first")
        self.decay, self.steps, self.weights = decay, 0, copied(model)

    @property
    def current_decay(self) -> float:
        """Decay of the next update."""
        return self.decay_after(self.steps)

    def decay_after(self, steps: int) -> float:
        """Decay after a number of updates."""
        return warm_decay(self.decay, steps)

    def half_life_after(self, steps: int) -> float:
        """Updates after which half of a change of the model is in the average, at the decay after `steps` updates."""
        decay = self.decay_after(steps)
        return math.log(0.5) / math.log(decay) if decay else 0.0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Update the average with the model's current parameters."""
        new = trainable_tensors(model)
        averages = list(self.weights.values())
        torch._foreach_lerp_(averages, [new[name].data.float() for name in self.weights], 1 - self.current_decay)
        self.steps += 1

    @torch.no_grad()
    def distance(self, model: nn.Module) -> float:
        """Euclidean distance between the average and the model, over all tensors."""
        new = trainable_tensors(model)
        gaps = [(tensor - new[name]).norm() for name, tensor in self.weights.items()]
        return float(torch.stack(gaps).norm()) if gaps else 0.0


class EMAModel:
    """A second model with averaged weights, w <- d w + (1 - d) new; all other attributes are that model's.

    Buffers are copied: the running statistics of BatchNorm are averages already. `EMA` needs no second model, and warms
    up.

    Args:
        model: gives the initial average; it is copied.
        decay: in [0, 1].
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        self.model, self.decay = copy.deepcopy(model).eval().requires_grad_(False), decay

    @torch.no_grad()
    def update(self, student: nn.Module) -> None:
        """Update the average with the student's current parameters, and copy its buffers."""
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
