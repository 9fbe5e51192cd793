"""Other weights of the same model: a moving average (the partner) and the start (the reference), for a while.

Averages are float32: at a decay of 0.999 a bfloat16 one keeps less than a fifth of the movement it should make.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def trainable_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that train, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def copied(model: nn.Module) -> dict[str, Tensor]:
    """Copies of what trains."""
    return {name: parameter.detach().clone() for name, parameter in trainable_tensors(model).items()}


@contextmanager
def swapped(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """`model` with other weights inside the block; no backward pass may run in it.

    Nothing is copied, unless an engine holds the model's weights in another dtype than these. Autocast must forget its
    casts on both ways: it knows a parameter by the tensor, not by its numbers, and would go on with the old ones.

    Raises:
        ValueError: a tensor is of another shape than the model's.
    """
    own = dict(model.named_parameters())
    for name, tensor in weights.items():
        if own[name].shape != tensor.shape:
            raise ValueError(f"{name}: got {tuple(tensor.shape)}, the model has {tuple(own[name].shape)}")
    before = {name: own[name].data for name in weights}
    try:
        for name, tensor in weights.items():
            own[name].data = tensor.to(own[name].dtype)
        torch.clear_autocast_cache()
        yield
    finally:
        for name, tensor in before.items():
            own[name].data = tensor
        torch.clear_autocast_cache()


class EMA:
    """A moving average of what trains: float32 copies, w <- d w + (1 - d) new after each optimiser step.

    The decay warms up as min(decay, (1 + t) / (10 + t)), or a short run's average would stay at the start.

    Args:
        model: where the average starts.
        decay: in [0, 1); 0 is the model itself, one step late.
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
        """Decay that is in force after so many updates."""
        return min(self.decay, (1 + steps) / (10 + steps))

    def half_life_after(self, steps: int) -> float:
        """Updates in which a change of the model arrives by half, at the decay in force after so many updates."""
        decay = self.decay_after(steps)
        return math.log(0.5) / math.log(decay) if decay else 0.0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move towards the model."""
        new = trainable_tensors(model)
        averages = list(self.weights.values())
        torch._foreach_lerp_(averages, [new[name].data.float() for name in self.weights], 1 - self.current_decay)
        self.steps += 1

    @torch.no_grad()
    def distance(self, model: nn.Module) -> float:
        """Euclidean distance to the model over all tensors."""
        new = trainable_tensors(model)
        gaps = [(tensor - new[name]).norm() for name, tensor in self.weights.items()]
        return float(torch.stack(gaps).norm()) if gaps else 0.0
