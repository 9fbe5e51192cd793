"""Policies over masks, the actions of loop 2: its text ("Sure, [SEG].") is certain and has no gradient.

Each policy is a distribution with the same six functions, which are described at the first; a `sigma` (one number,
adapted to the similarity of a group's masks) widens it.
Axes: C SAM 2 width, G actions, A numbers of an action, D parameters, h w the decoder's grid. Why the tokens are not
the action: docs/explanation/mask-policies.md.

Source: Gaussian on a continuous prompt with a mean-reduced log-probability as in Flow-GRPO (arXiv 2505.05470).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_reward_network.models.sa2va.grounding_sa2va import Sam2Features

CELLS = 16  # side of the grid on which Sa2VA reads a region: finer Bernoulli noise would be lost
CERTAIN_LOGIT = 10.0  # magnitude of the logit of a sampled cell


@dataclass(frozen=True)
class GaussianMaskPolicy:
    """Normal noise on the `[SEG]` embedding: masks stay on SAM 2's manifold and change as a whole.

    The width is relative to the embedding's root mean square. Log-probability and KL are means over the C numbers.
    The gradient ends at the embedding, i.e. at `text_hidden_fcs`: the mask decoder gets none.
    """

    first_sigma: float = 0.3

    def parameters(self, model: Any, features: Sam2Features, embedding: Tensor) -> Tensor:
        """The distribution's parameters (D,) of one `[SEG]` embedding (C,), with gradient: the embedding itself."""
        return embedding.float()

    def width(self, parameters: Tensor, sigma: float) -> Tensor:
        """The width of this `sigma`, a scalar without gradient: the standard deviation in the embedding's unit.

        It is stored with the actions sampled with it.
        """
        return sigma * parameters.detach().pow(2).mean().sqrt()

    def sample(self, parameters: Tensor, width: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Actions (count, A); here A = C."""
        noise = torch.randn(count, len(parameters), generator=generator, device=generator.device)
        return parameters + width * noise.to(parameters)

    def mask_logits(self, model: Any, features: Sam2Features, embedding: Tensor, actions: Tensor) -> Tensor:
        """float32 (G, h, w) of each action: masks of the noisy embeddings."""
        logits: Tensor = model.decode_masks(features, actions).mask_logits
        return logits

    def log_prob(self, parameters: Tensor, width: Tensor, actions: Tensor) -> Tensor:
        """float32 (G,), with gradient in the parameters, up to a constant: -(a - e)^2 / (2 width^2), mean over C."""
        return -(actions - parameters).pow(2).mean(dim=1) / (2 * width**2)

    def kl(self, parameters: Tensor, ref_parameters: Tensor, width: Tensor) -> Tensor:
        """KL(policy || reference) >= 0, a scalar reduced as `log_prob` is: (e - e_ref)^2 / (2 width^2), mean over C."""
        return (parameters - ref_parameters).pow(2).mean() / (2 * width**2)


@dataclass(frozen=True)
class BernoulliMaskPolicy:
    """One Bernoulli variable per cell of a 16 x 16 grid: the mask's mean logit there; the width is a temperature."""

    first_sigma: float = 1.0

    def parameters(self, model: Any, features: Sam2Features, embedding: Tensor) -> Tensor:
        """Mean logit of each cell (256,); the gradient also reaches the mask decoder."""
        logits = model.decode_masks(features, embedding[None]).mask_logits
        return F.adaptive_avg_pool2d(logits[None], CELLS).flatten()

    def width(self, parameters: Tensor, sigma: float) -> Tensor:
        """The temperature."""
        return parameters.new_tensor(sigma)

    def sample(self, parameters: Tensor, width: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """0 or 1 (count, 256)."""
        probs = (parameters / width).sigmoid().to(generator.device).expand(count, -1)
        return torch.bernoulli(probs, generator=generator).to(parameters)

    def mask_logits(self, model: Any, features: Sam2Features, embedding: Tensor, actions: Tensor) -> Tensor:
        """The sampled cells, as blocks."""
        cells = (actions * 2 - 1).reshape(-1, 1, CELLS, CELLS) * CERTAIN_LOGIT
        return F.interpolate(cells, size=features.decoder_grid, mode="nearest")[:, 0].float()

    def log_prob(self, parameters: Tensor, width: Tensor, actions: Tensor) -> Tensor:
        """Mean over cells of log p(cell)."""
        logits = (parameters / width).expand_as(actions)
        return -F.binary_cross_entropy_with_logits(logits, actions, reduction="none").mean(dim=1)

    def kl(self, parameters: Tensor, ref_parameters: Tensor, width: Tensor) -> Tensor:
        """Mean over cells of p log(p / q) + (1 - p) log((1 - p) / (1 - q))."""
        logits, ref_logits = parameters / width, ref_parameters / width
        p = logits.sigmoid()
        on, off = F.logsigmoid(logits) - F.logsigmoid(ref_logits), F.logsigmoid(-logits) - F.logsigmoid(-ref_logits)
        return (p * on + (1 - p) * off).mean()


MaskPolicy = GaussianMaskPolicy | BernoulliMaskPolicy
MASK_POLICIES: dict[str, MaskPolicy] = {"gaussian": GaussianMaskPolicy(), "bernoulli": BernoulliMaskPolicy()}


@dataclass
class SigmaController:
    """Adapt the sigma of a mask policy to the similarity of the masks of a group.

    Args:
        sigma: current argument of `MaskPolicy.width`.
        target: median IoU of masks of one group.
        step: factor of one correction.
        limits: smallest and largest sigma.
    """

    sigma: float
    target: float = 0.85
    step: float = 1.05
    limits: tuple[float, float] = (0.02, 5.0)
    SLACK = 0.05  # distance from the target, on both sides, within which nothing changes
    MAX_EQUAL_GROUPS = 0.2  # share of groups with equal rewards above which the sigma grows

    def update(self, median_iou: float, share_equal: float) -> None:
        """Widen if masks are too similar or rewards are equal, narrow if masks have too little in common."""
        if median_iou < self.target - self.SLACK:
            self.sigma /= self.step
        elif median_iou > self.target + self.SLACK or share_equal > self.MAX_EQUAL_GROUPS:
            self.sigma *= self.step
        self.sigma = min(max(self.sigma, self.limits[0]), self.limits[1])
