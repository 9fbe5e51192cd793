"""Weights of the two loops, by the size of their gradients: the loop that pulls harder is turned down.

Each loop's weight is divided by the norm of its gradient in the LoRA layers, which both share, and both are scaled so
that their sum stays what was asked for. In the manner of GradNorm (arXiv 1711.02257), without its training rates.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

EVERY = 10  # optimisation steps between two measurements: each takes a backward pass for each loop
MEMORY = 0.5  # how much of the earlier norms stays
MOST = 10.0  # largest ratio of a weight to what was asked for


class LoopWeights:
    """The weights now in force.

    Args:
        asked: loop -> weight that was asked for.
        adaptive: whether they follow the gradients; else they stay.
    """

    def __init__(self, asked: Mapping[str, float], adaptive: bool) -> None:
        self.asked, self.adaptive = dict(asked), adaptive
        self.norms: dict[str, float] = {}

    def __getitem__(self, loop: str) -> float:
        """The weight of a loop in this step."""
        if not self.norms:
            return self.asked[loop]
        pulls = {name: weight / max(self.norms[name], 1e-12) for name, weight in self.asked.items()}
        scale = sum(self.asked.values()) / sum(pulls.values())
        return min(pulls[loop] * scale, MOST * self.asked[loop])

    def wants(self, step: int) -> bool:
        """Whether gradients are to be measured in this step."""
        return self.adaptive and step % EVERY == 0

    def note(self, norms: Mapping[str, float]) -> None:
        """Norms of this step, the same on every process; a loop without any gradient says nothing about its size."""
        if set(norms) == set(self.asked) and all(norms.values()):
            before = self.norms or norms
            self.norms = {name: MEMORY * before[name] + (1 - MEMORY) * norm for name, norm in norms.items()}

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"norms": self.norms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        self.norms = state["norms"]


def gradient_norm(loss: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
    """Norm of the gradient of `loss`, a scalar whose graph stays; nothing is added to any `grad`."""
    found = torch.autograd.grad(loss, list(parameters), retain_graph=True, allow_unused=True)
    norms = [gradient.norm() for gradient in found if gradient is not None]
    return torch.stack(norms).norm() if norms else torch.zeros((), device=loss.device)
