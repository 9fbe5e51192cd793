"""Weights of the two loops, balanced by the norms of their gradients.

Each loop's weight is divided by the norm of its gradient in the LoRA layers, which both loops share, and both weights
are scaled so that their sum stays as configured. Similar to GradNorm (arXiv 1711.02257), without its training rates.
A gradient may be noise alone, however small or large: no weight leaves `BOUNDS`, even if the sum then differs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

EVERY = 10  # optimisation steps between two measurements: each takes a backward pass for each loop
MEMORY = 0.5  # weight of the earlier norms in the running mean
BOUNDS = (0.25, 4.0)  # of the ratio of a weight to the configured one


class LoopWeights:
    """The current weights.

    Args:
        configured: loop -> weight from the settings.
        adaptive: whether the weights depend on the gradients; otherwise they are constant.
    """

    def __init__(self, configured: Mapping[str, float], adaptive: bool) -> None:
        self.configured, self.adaptive = dict(configured), adaptive
        self.norms: dict[str, float] = {}

    def __getitem__(self, loop: str) -> float:
        """The weight of a loop in this step."""
        if not self.norms:
            return self.configured[loop]
        balanced = {name: weight / self.norms[name] for name, weight in self.configured.items()}
        scale = sum(self.configured.values()) / sum(balanced.values())
        low, high = BOUNDS
        return self.configured[loop] * min(max(scale / self.norms[loop], low), high)

    def measures_at(self, step: int) -> bool:
        """Whether gradient norms are measured in this step."""
        return self.adaptive and step % EVERY == 0

    def update(self, norms: Mapping[str, float]) -> None:
        """Update with the norms of this step, equal on every process; ignored if a loop had no gradient."""
        if set(norms) == set(self.configured) and all(norms.values()):
            earlier = self.norms or norms
            self.norms = {name: MEMORY * earlier[name] + (1 - MEMORY) * norm for name, norm in norms.items()}

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"norms": self.norms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        self.norms = state["norms"]


def gradient_norm(loss: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
    """Norm of the gradient of the scalar `loss`; its graph is kept, and no `grad` is changed."""
    gradients = torch.autograd.grad(loss, list(parameters), retain_graph=True, allow_unused=True)
    norms = [gradient.norm() for gradient in gradients if gradient is not None]
    return torch.stack(norms).norm() if norms else torch.zeros((), device=loss.device)
