"""Soft clDice: parity with monai, closed forms on small lines, and a gradient that closes a gap."""

import pytest
import torch

from rl_reward_network.models.soft_cldice import soft_cldice, soft_skeleton


def line(*gap: int) -> torch.Tensor:
    """A horizontal line of one pixel, 20 long, with some pixels missing."""
    mask = torch.zeros(1, 1, 9, 26)
    mask[..., 4, 3:23] = 1
    for column in gap:
        mask[..., 4, column] = 0
    return mask


def test_a_line_of_one_pixel_is_its_own_skeleton_and_a_gap_costs_its_share() -> None:
    assert torch.equal(soft_skeleton(line(), 3), line())
    assert soft_cldice(line(), line()).tolist() == [1]
    # all of the prediction is on the target; 17 of 20 pixels of the target are found, smoothed by one pixel
    sensitivity = (17 + 1) / (20 + 1)
    expected = 2 * sensitivity / (1 + sensitivity)
    assert soft_cldice(line(10, 11, 12), line()).tolist() == pytest.approx([expected])


def test_width_does_not_count() -> None:
    wide = torch.zeros(1, 1, 9, 26)
    wide[..., 3:6, 2:24] = 1
    assert soft_cldice(line(), wide).item() > 0.95
    assert soft_cldice(wide, line()).item() > 0.9


def test_the_gradient_closes_a_gap() -> None:
    mask = (0.98 * line(10, 11) + 0.01).requires_grad_()
    soft_cldice(mask, line()).sum().backward()
    assert mask.grad is not None
    assert mask.grad.isfinite().all()
    assert (mask.grad[0, 0, 4, 10:12] > 0).all()
    assert mask.grad[0, 0, 4, 10] > mask.grad[0, 0, 1, 10]


def test_parity_with_monai() -> None:
    monai = pytest.importorskip("monai.losses.cldice", reason="monai is in the `test` extra")
    generator = torch.Generator().manual_seed(0)
    masks = torch.rand(1, 1, 24, 30, generator=generator)
    targets = (torch.rand(1, 1, 24, 30, generator=generator) > 0.6).float()
    torch.testing.assert_close(soft_skeleton(masks, 4), monai.soft_skel(masks, 4))
    ours = soft_cldice(masks, targets, 4)
    loss = monai.SoftclDiceLoss(iter_=4, smooth=1e-9, include_background=True)
    loss.smooth_nr = loss.smooth_dr = 1.0  # as ours: of the shares, not of their mean
    theirs = 1 - loss(masks, targets)
    torch.testing.assert_close(ours[0], theirs)
