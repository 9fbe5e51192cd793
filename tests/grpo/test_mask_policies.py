"""Mask policies: log-probabilities and divergences against torch's own, and that the gradient goes the right way."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Normal, kl_divergence

from rl_reward_network.grpo.rollouts import MASK_POLICIES, SigmaController
from rl_reward_network.models.sa2va.grounding_sa2va import Sam2Features
from rl_reward_network.models.sa2va.pixels_sa2va import upsample_mask_logits

FEATURES = Sam2Features((torch.zeros(1, 4, 32, 32), torch.zeros(1, 4, 16, 16), torch.zeros(1, 4, 8, 8)))
SIZES = {"gaussian": 8, "bernoulli": 256}
WIDTHS = {"gaussian": 0.5, "bernoulli": 1.5}


def parameters_of(name: str, seed: int = 0) -> Tensor:
    return torch.randn(SIZES[name], generator=torch.Generator().manual_seed(seed))


def distribution(name: str, parameters: Tensor, width: float) -> Any:
    return Normal(parameters, width) if name == "gaussian" else Bernoulli(logits=parameters / width)


@pytest.mark.parametrize("name", SIZES)
def test_log_probability_and_divergence_are_torchs(name: str) -> None:
    policy, width = MASK_POLICIES[name], torch.tensor(WIDTHS[name])
    parameters, ref_parameters = parameters_of(name), parameters_of(name, 1)
    actions = policy.sample(parameters, width, 5, torch.Generator().manual_seed(2))
    exact, reference = (distribution(name, values, WIDTHS[name]) for values in (parameters, ref_parameters))
    expected = exact.log_prob(actions).mean(dim=1)
    log_probs = policy.log_prob(parameters, width, actions)
    torch.testing.assert_close(log_probs - log_probs[0], expected - expected[0])  # a Gaussian's constant is left out
    torch.testing.assert_close(policy.kl(parameters, ref_parameters, width), kl_divergence(exact, reference).mean())
    assert policy.kl(parameters, parameters, width).item() == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("name", SIZES)
def test_samples_have_the_distribution_and_follow_the_seed(name: str) -> None:
    policy, width = MASK_POLICIES[name], torch.tensor(WIDTHS[name])
    parameters = parameters_of(name)
    draws = [policy.sample(parameters, width, 4000, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    exact = distribution(name, parameters, WIDTHS[name])
    torch.testing.assert_close(draws[0].mean(dim=0), exact.mean, atol=0.05, rtol=0)


def test_the_width_of_the_gaussian_follows_the_embedding() -> None:
    policy = MASK_POLICIES["gaussian"]
    assert policy.width(torch.tensor([3.0, -3.0]), 0.5).item() == pytest.approx(1.5)
    assert not policy.width(torch.ones(2, requires_grad=True), 0.5).requires_grad


def test_the_controller_widens_alike_masks_and_narrows_foreign_ones() -> None:
    controller = SigmaController(0.3)
    controller.update(0.95, 0.0)
    assert controller.sigma == pytest.approx(0.315)
    controller.update(0.85, 0.5)
    assert controller.sigma == pytest.approx(0.33075)
    controller.update(0.85, 0.1)
    assert controller.sigma == pytest.approx(0.33075)
    controller.update(0.5, 1.0)
    assert controller.sigma == pytest.approx(0.315), "foreign masks are narrowed even when rewards are equal"
    for _ in range(200):
        controller.update(1.0, 1.0)
    assert controller.sigma == controller.LIMITS[1]


def test_sampled_cells_lie_on_the_cells_of_the_image() -> None:
    """A mask made of cells, sampled and drawn at image size, is that mask: the blocks are not shifted."""
    cells = torch.rand(16, 16, generator=torch.Generator().manual_seed(0)) > 0.5
    truth = cells.repeat_interleave(8, dim=0).repeat_interleave(8, dim=1)
    policy = MASK_POLICIES["bernoulli"]
    logits = policy.mask_logits(None, FEATURES, torch.zeros(4), cells.flatten()[None].float())
    drawn = upsample_mask_logits(logits, (128, 128), 64)[0] > 0
    centres = (slice(4, None, 8), slice(4, None, 8))  # corners of blocks are rounded by the bilinear upsampling
    assert torch.equal(drawn[centres], cells)
    assert torch.equal(drawn.flip(0, 1), upsample_mask_logits(logits.flip(1, 2), (128, 128), 64)[0] > 0)
    assert (drawn & truth).sum() / (drawn | truth).sum() > 0.85
