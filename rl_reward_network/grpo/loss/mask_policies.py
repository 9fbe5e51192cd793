"""Policies over masks: what loop 2 samples, since its words ("Sure, [SEG].") are certain and give no gradient.

Each has the same six functions; a `spread` (one number, controlled by how different a group's masks are) widens it.
Axes: C SAM 2 width, G actions, h w the decoder's grid. Why tokens do not do: docs/mask_policies.md.

Source: Gaussian on a continuous prompt with a mean-reduced log-probability as in Flow-GRPO (arXiv 2505.05470).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_reward_network.models.sa2va.grounding_sa2va import Sam2Features

CELLS = 16  # side of the grid on which Sa2VA reads a region: finer Bernoulli noise would not be seen
CERTAIN_LOGIT = 10.0  # of a cell that was drawn


class MaskPolicy(Protocol):
    """A distribution over masks of one image that can be sampled, scored and compared with a reference."""

    @property
    def first_spread(self) -> float:
        """The spread to begin with."""

    def parameters(self, model: Any, features: Sam2Features, embedding: Tensor) -> Tensor:
        """The distribution's parameters (D,) of one `[SEG]` embedding (C,), with gradient."""

    def width(self, parameters: Tensor, spread: float) -> Tensor:
        """What `spread` means here, a scalar without gradient: kept with the actions, so that it stays as it was."""

    def sample(self, parameters: Tensor, width: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """(count, A) actions."""

    def mask_logits(self, model: Any, features: Sam2Features, embedding: Tensor, actions: Tensor) -> Tensor:
        """float32 (G, h, w) of each action."""

    def log_prob(self, parameters: Tensor, width: Tensor, actions: Tensor) -> Tensor:
        """float32 (G,), with gradient in the parameters; up to a constant."""

    def kl(self, parameters: Tensor, reference: Tensor, width: Tensor) -> Tensor:
        """KL(policy || reference) >= 0, a scalar in closed form, reduced as `log_prob` is."""


@dataclass(frozen=True)
class GaussianMaskPolicy:
    """Normal noise on the `[SEG]` embedding: masks stay on SAM 2's own manifold, and change as a whole.

    The width is relative to the embedding's root mean square. Log-probability and KL are means over the C numbers.
    The gradient ends at the embedding, so at `text_hidden_fcs`: the mask decoder learns nothing from it.
    """

    first_spread: float = 0.3

    def parameters(self, model: Any, features: Sam2Features, embedding: Tensor) -> Tensor:
        """The embedding itself (C,)."""
        return embedding.float()

    def width(self, parameters: Tensor, spread: float) -> Tensor:
        """Standard deviation in the embedding's unit."""
        return spread * parameters.detach().pow(2).mean().sqrt()

    def sample(self, parameters: Tensor, width: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """(count, C)."""
        noise = torch.randn(count, len(parameters), generator=generator, device=generator.device)
        return parameters + width * noise.to(parameters)

    def mask_logits(self, model: Any, features: Sam2Features, embedding: Tensor, actions: Tensor) -> Tensor:
        """Masks of the noisy embeddings."""
        logits: Tensor = model.decode_masks(features, actions).mask_logits
        return logits

    def log_prob(self, parameters: Tensor, width: Tensor, actions: Tensor) -> Tensor:
        """-(a - e)^2 / (2 width^2), mean over C."""
        return -(actions - parameters).pow(2).mean(dim=1) / (2 * width**2)

    def kl(self, parameters: Tensor, reference: Tensor, width: Tensor) -> Tensor:
        """(e - e_ref)^2 / (2 width^2), mean over C: both have the same width."""
        return (parameters - reference).pow(2).mean() / (2 * width**2)


@dataclass(frozen=True)
class BernoulliMaskPolicy:
    """A coin for each cell of the 16 x 16 grid, from the mask's own mean logit there; the width is a temperature."""

    first_spread: float = 1.0

    def parameters(self, model: Any, features: Sam2Features, embedding: Tensor) -> Tensor:
        """Mean logit of each cell (256,); the gradient reaches the mask decoder, too."""
        logits = model.decode_masks(features, embedding[None]).mask_logits
        return F.adaptive_avg_pool2d(logits[None], CELLS).flatten()

    def width(self, parameters: Tensor, spread: float) -> Tensor:
        """The temperature."""
        return parameters.new_tensor(spread)

    def sample(self, parameters: Tensor, width: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """0 or 1 (count, 256)."""
        chance = (parameters / width).sigmoid().to(generator.device).expand(count, -1)
        return torch.bernoulli(chance, generator=generator).to(parameters)

    def mask_logits(self, model: Any, features: Sam2Features, embedding: Tensor, actions: Tensor) -> Tensor:
        """The drawn cells, as blocks."""
        cells = (actions * 2 - 1).reshape(-1, 1, CELLS, CELLS) * CERTAIN_LOGIT
        return F.interpolate(cells, size=features.maps[0].shape[-2:], mode="nearest")[:, 0].float()

    def log_prob(self, parameters: Tensor, width: Tensor, actions: Tensor) -> Tensor:
        """Mean over cells of log p(cell)."""
        logits = (parameters / width).expand_as(actions)
        return -F.binary_cross_entropy_with_logits(logits, actions, reduction="none").mean(dim=1)

    def kl(self, parameters: Tensor, reference: Tensor, width: Tensor) -> Tensor:
        """Mean over cells of p log(p / q) + (1 - p) log((1 - p) / (1 - q))."""
        own, other = parameters / width, reference / width
        p = own.sigmoid()
        on, off = F.logsigmoid(own) - F.logsigmoid(other), F.logsigmoid(-own) - F.logsigmoid(-other)
        return (p * on + (1 - p) * off).mean()


@dataclass(frozen=True)
class CandidateMaskPolicy:
    """A choice among SAM 2's three candidates by its own predicted IoU; the width is a temperature of that IoU.

    Of the decoder only the head that predicts the IoU learns: the rest draws the masks as well, and a lesson in
    choosing is no lesson in drawing (docs/mask_policies.md).
    """

    first_spread: float = 0.1

    def parameters(self, model: Any, features: Sam2Features, embedding: Tensor) -> Tensor:
        """Predicted IoU of the three candidates (3,)."""
        decoder = model.grounding_encoder.mask_decoder
        with _held(decoder, but=decoder.iou_prediction_head):
            scores: Tensor = model.decode_masks(features, embedding[None]).candidate_scores
        return scores[0, 1:]

    def width(self, parameters: Tensor, spread: float) -> Tensor:
        """The temperature."""
        return parameters.new_tensor(spread)

    def sample(self, parameters: Tensor, width: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Index of a candidate, 0 to 2, as float (count, 1)."""
        chance = (parameters / width).softmax(dim=0).to(generator.device)
        chosen = torch.multinomial(chance, count, replacement=True, generator=generator)
        return chosen[:, None].to(parameters)

    def mask_logits(self, model: Any, features: Sam2Features, embedding: Tensor, actions: Tensor) -> Tensor:
        """The chosen candidates."""
        candidates: Tensor = model.decode_masks(features, embedding[None]).candidates
        return candidates[0, actions[:, 0].long() + 1]

    def log_prob(self, parameters: Tensor, width: Tensor, actions: Tensor) -> Tensor:
        """Exact."""
        return (parameters / width).log_softmax(dim=0)[actions[:, 0].long()]

    def kl(self, parameters: Tensor, reference: Tensor, width: Tensor) -> Tensor:
        """Exact."""
        own, other = ((values / width).log_softmax(dim=0) for values in (parameters, reference))
        return (own.exp() * (own - other)).sum()


@contextmanager
def _held(module: nn.Module, but: nn.Module) -> Iterator[None]:
    """What is computed inside gives the weights of `module` no gradient, except those of its part `but`."""
    free = {id(parameter) for parameter in but.parameters()}
    held = [p for p in module.parameters() if p.requires_grad and id(p) not in free]
    for parameter in held:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in held:
            parameter.requires_grad_(True)


MASK_POLICIES: dict[str, MaskPolicy] = {
    "gaussian": GaussianMaskPolicy(),
    "bernoulli": BernoulliMaskPolicy(),
    "candidates": CandidateMaskPolicy(),
}


@dataclass
class SpreadController:
    """Keeps a group's masks different enough to learn from, and no more.

    Args:
        spread: what `MaskPolicy.width` is given.
        target: median IoU between masks of one group.
        step: factor of one correction.
        limits: `spread` stays inside.
    """

    spread: float
    target: float = 0.85
    step: float = 1.05
    limits: tuple[float, float] = (0.02, 5.0)
    SLACK = 0.05  # of the target on both sides, in which nothing changes
    EQUAL_GROUPS = 0.2  # share of groups without any spread of rewards above which masks must differ more

    def update(self, median_iou: float, share_equal: float) -> None:
        """Widen where masks are too alike or rewards equal, narrow where masks have nothing in common any more."""
        if median_iou < self.target - self.SLACK:
            self.spread /= self.step
        elif median_iou > self.target + self.SLACK or share_equal > self.EQUAL_GROUPS:
            self.spread *= self.step
        self.spread = min(max(self.spread, self.limits[0]), self.limits[1])
