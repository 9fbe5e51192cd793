import pytest
import torch
from monai.losses import DiceLoss

from rl_reward_network.models.sa2va.losses_sa2va import iou_head_loss, mask_losses


def test_losses_have_their_closed_forms() -> None:
    logits = torch.tensor([[[20.0, -20.0], [-20.0, -20.0]]])
    truth = torch.tensor([[[1, 0], [0, 0]]], dtype=torch.uint8)
    losses = mask_losses(logits, truth)
    assert losses["mask"].item() == pytest.approx(0, abs=1e-6)
    assert losses["dice"].item() == pytest.approx(0, abs=1e-6)
    undecided = mask_losses(torch.zeros(1, 2, 2), truth)
    assert undecided["mask"].item() == pytest.approx(2 * 0.693147, abs=1e-5)
    assert undecided["dice"].item() == pytest.approx(0.5 * (1 - (2 * 0.5 + 1) / (2 + 1 + 1)))


def test_dice_equals_monai() -> None:
    logits, truth = torch.randn(3, 8, 8), torch.rand(3, 8, 8) > 0.5
    monai = DiceLoss(sigmoid=True, smooth_nr=1.0, smooth_dr=1.0)(logits[:, None], truth[:, None].float())
    assert mask_losses(logits, truth)["dice"].item() == pytest.approx(0.5 * monai.item(), abs=1e-6)


def test_truth_is_sampled_nearest_to_the_decoders_grid() -> None:
    truth = torch.zeros(1, 8, 8, dtype=torch.bool)
    truth[:, ::2, ::2] = True  # nearest sampling to 4x4 sees only these pixels
    assert mask_losses(torch.full((1, 4, 4), 30.0), truth)["mask"].item() == pytest.approx(0, abs=1e-6)


def test_counts_must_agree() -> None:
    with pytest.raises(ValueError, match=r"2 .*1 "):
        mask_losses(torch.zeros(2, 4, 4), torch.zeros(1, 4, 4))
    with pytest.raises(ValueError, match=r"3 .*1 "):
        iou_head_loss(torch.zeros(3), torch.zeros(3, 4, 4), torch.zeros(1, 4, 4))


def test_the_iou_head_is_compared_with_the_true_iou() -> None:
    logits = torch.full((3, 2, 2), -5.0)
    logits[0, 0] = 5.0  # two predicted pixels, one of them true: IoU 1 / 2
    truth = torch.zeros(3, 2, 2, dtype=torch.bool)
    truth[0, 0, 0] = True
    truth[1] = True  # an empty prediction: 0; the third is empty in both: 1
    assert iou_head_loss(torch.tensor([0.5, 0.0, 1.0]), logits, truth).item() == 0
    assert iou_head_loss(torch.tensor([0.5, 0.3, 1.0]), logits, truth).item() == pytest.approx(0.3**2 / 3)


def test_the_iou_loss_moves_the_head_and_not_the_masks() -> None:
    scores, logits = torch.rand(2, requires_grad=True), torch.randn(2, 4, 4, requires_grad=True)
    iou_head_loss(scores, logits, torch.ones(2, 8, 8, dtype=torch.bool)).backward()
    assert scores.grad is not None
    assert logits.grad is None
