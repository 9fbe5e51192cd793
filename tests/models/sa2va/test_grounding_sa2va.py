"""SAM 2 driven by `[SEG]` embeddings, and the losses of its masks: closed forms, monai, transformers' decoder."""

import math
from copy import deepcopy

import pytest
import torch
from monai.losses import DiceLoss

from rl_reward_network.models.sa2va.grounding_sa2va import (
    DecodedMasks,
    candidate_loss,
    iou_head_loss,
    mask_losses,
    soft_cldice,
    soft_skeleton,
    soft_targets,
)
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.models.sa2va.modeling_sa2va import NO_OBJECT
from rl_reward_network.models.sa2va.pixels_sa2va import upsample_mask_logits
from tests.golden_qwen import official_targets
from tests.qwen_vl import QWEN3_SAM3, write_tiny_qwen


@pytest.fixture(scope="module")
def sam3_model(tmp_path_factory):
    return load_sa2va_model(write_tiny_qwen(tmp_path_factory.mktemp("sam3") / "model", QWEN3_SAM3))[0]


@pytest.fixture(params=["SAM 2", "SAM 3"])
def model(request):
    return request.getfixturevalue("tiny_model" if request.param == "SAM 2" else "sam3_model")


def sam_pixels(model, images=1):
    return torch.randn(images, 3, *[model.config.sam2_image_size] * 2)


def test_the_answers_of_sam3_are_those_of_transformers_whole_model(sam3_model):
    """Image encoder, neck, prompts and decoder, and the score that empties a mask; `[SEG]` joins its empty click."""
    model, pixels, seg = deepcopy(sam3_model), sam_pixels(sam3_model), 3 * torch.randn(8, 32)
    sam, features = model.grounding_encoder, model.get_sam_features(pixels)
    with torch.no_grad():  # so that half of them are seen
        sam.mask_decoder.pred_obj_score_head.proj_out.bias -= model.decode_masks(
            features, seg
        ).object_score_logits.median()
    expected, seen = [], []
    for one in seg:
        join = lambda module, inputs, made, one=one: (torch.cat([made[0], one[None, None, None]], dim=2), made[1])  # noqa: E731
        hook = sam.prompt_encoder.register_forward_hook(join)
        with torch.no_grad():
            whole = sam._single_frame_forward(pixel_values=pixels)
        hook.remove()
        expected.append(whole.pred_masks[0, 0])
        seen.append(bool(whole.object_score_logits > 0))
    assert 0 < sum(seen) < len(seen)
    with torch.no_grad():
        found = model.answer_masks(model.decode_masks(features, seg))
    assert found.shape == (8, 32, 32)
    assert model.config.mask_size == 32
    assert [bool((mask > NO_OBJECT).any()) for mask in found] == seen
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-5, rtol=1e-5)


def test_broadcast_decoding_equals_transformers_own_decoder(model):
    """A prompt is two not-a-point vectors, as there is no click, and the `[SEG]`."""
    sam = model.grounding_encoder
    features = model.get_sam_features(sam_pixels(model))
    embeddings = torch.randn(3, 32)
    nothing = sam.prompt_encoder.not_a_point_embed.weight[0]
    fine, middle, coarse = features.maps
    with torch.no_grad():
        masks, scores, _, objects = sam.mask_decoder(
            image_embeddings=coarse + sam.no_memory_embedding.reshape(1, -1, 1, 1),
            image_positional_embeddings=sam.get_image_wide_positional_embeddings(),
            sparse_prompt_embeddings=torch.stack([torch.stack([nothing, nothing, seg]) for seg in embeddings])[None],
            dense_prompt_embeddings=sam.prompt_encoder.no_mask_embed.weight.reshape(1, -1, 1, 1).expand_as(coarse),
            multimask_output=True,
            high_resolution_features=[sam.mask_decoder.conv_s0(fine), sam.mask_decoder.conv_s1(middle)],
        )
        decoded = model.decode_masks(features, embeddings)
    assert torch.allclose(decoded.candidates[:, 1:], masks[0], atol=1e-4)
    assert torch.allclose(decoded.candidate_scores[:, 1:], scores[0], atol=1e-5)
    assert torch.allclose(decoded.object_score_logits, objects[0, :, 0], atol=1e-5)


def test_features_of_one_image_are_those_of_the_batch(tiny_model):
    pixels = torch.randn(2, 3, 256, 256)
    with torch.no_grad():
        both, second = tiny_model.get_sam_features(pixels), tiny_model.get_sam_features(pixels[1:])
    assert [tuple(level.shape) for level in both.maps] == [(2, 32, 64, 64), (2, 32, 32, 32), (2, 32, 16, 16)]
    for found, expected in zip(both[1].maps, second.maps, strict=True):
        assert torch.allclose(found, expected, atol=1e-5)


def test_no_embedding_gives_no_mask(tiny_model):
    features = tiny_model.get_sam_features(torch.randn(1, 3, 256, 256))
    one, none = (tiny_model.decode_masks(features, torch.randn(count, 32)) for count in (1, 0))
    for name, tensor in vars(one).items():
        assert getattr(none, name).shape == (0, *tensor.shape[1:]), name
        assert getattr(none, name).dtype == tensor.dtype


def test_losses_have_their_closed_forms_and_dice_is_that_of_monai():
    logits = torch.tensor([[[20.0, -20.0], [-20.0, -20.0]]])
    truth = torch.tensor([[[1, 0], [0, 0]]], dtype=torch.uint8)
    losses = mask_losses(logits, truth)
    assert losses["mask"].item() == pytest.approx(0, abs=1e-6)
    assert losses["dice"].item() == pytest.approx(0, abs=1e-6)
    undecided = mask_losses(torch.zeros(1, 2, 2), truth)
    assert undecided["mask"].item() == pytest.approx(2 * 0.693147, abs=1e-5)
    assert undecided["dice"].item() == pytest.approx(0.5 * (1 - (2 * 0.5 + 1) / (2 + 1 + 1)))
    logits, truth = torch.randn(3, 8, 8), torch.rand(3, 8, 8) > 0.5
    monai = DiceLoss(sigmoid=True, smooth_nr=1.0, smooth_dr=1.0)(logits[:, None], truth[:, None].float())
    assert mask_losses(logits, truth)["dice"].item() == pytest.approx(0.5 * monai.item(), abs=1e-6)


def test_truth_is_the_share_of_each_cell():
    """A vessel 2 pixels wide on cells 4 pixels wide: half a cell, wherever it begins; `nearest` sees all or none."""
    for start, shares, sampled in ((2, [0.5, 0.0], [0, 0]), (3, [0.25, 0.25], [0, 1]), (4, [0.0, 0.5], [0, 1])):
        truth = torch.zeros(1, 8, 8, dtype=torch.bool)
        truth[:, :, start : start + 2] = True
        assert soft_targets(truth, torch.zeros(1, 2, 2))[0, 0].tolist() == shares
        assert official_targets(truth, (2, 2))[0, 0].tolist() == sampled
        loss = mask_losses(torch.tensor([[[-1.0, 2.0]]]), truth, bce_weight=1.0)["mask"].item()
        cells = [math.log1p(math.exp(x)) - share * x for x, share in zip((-1.0, 2.0), shares, strict=True)]
        assert loss == pytest.approx(sum(cells) / 2)


def test_the_best_mask_of_a_thin_tree_is_the_tree():
    """The mask that minimises the loss, drawn as in prediction, has a higher Dice than that of official targets."""
    rows, columns = torch.meshgrid(torch.arange(256), torch.arange(256), indexing="ij")
    tree = (((rows - columns).abs() < 4) | ((rows + 2 * columns - 300).abs() < 8))[None]
    soft, official = soft_targets(tree, torch.zeros(1, 64, 64)), official_targets(tree, (64, 64))
    drawn = [upsample_mask_logits(targets - 0.5, (256, 256), 256) > 0 for targets in (soft, official)]
    dice = [(2 * (mask & tree).sum() / (mask.sum() + tree.sum())).item() for mask in drawn]
    assert dice[0] > 0.97
    assert dice[1] < 0.9


def test_counts_must_agree():
    with pytest.raises(ValueError, match=r"2 .*1 "):
        mask_losses(torch.zeros(2, 4, 4), torch.zeros(1, 4, 4))
    with pytest.raises(ValueError, match=r"3 .*1 "):
        iou_head_loss(torch.zeros(3), torch.zeros(3, 4, 4), torch.zeros(1, 4, 4))


def test_the_iou_head_is_compared_with_the_true_iou():
    logits = torch.full((3, 2, 2), -5.0)
    logits[0, 0] = 5.0  # two predicted pixels, one of them true: IoU 1 / 2
    truth = torch.zeros(3, 2, 2, dtype=torch.bool)
    truth[0, 0, 0] = True
    truth[1] = True  # an empty prediction: 0; the third is empty in both: 1
    assert iou_head_loss(torch.tensor([0.5, 0.0, 1.0]), logits, truth).item() == 0
    assert iou_head_loss(torch.tensor([0.5, 0.3, 1.0]), logits, truth).item() == pytest.approx(0.3**2 / 3)


def test_every_candidate_that_may_be_selected_is_compared():
    """Candidate 0 is never used; 1 to 3 have IoU 1, 0.5 and 0."""
    truth = torch.tensor([[[True, False], [False, False]]])
    right, row = torch.tensor([[5.0, -5.0], [-5.0, -5.0]]), torch.tensor([[5.0, 5.0], [-5.0, -5.0]])
    candidates = torch.stack([row, right, row, -right])[None]
    scores = torch.tensor([[9.0, 0.9, 0.5, 0.2]], requires_grad=True)
    decoded = DecodedMasks(right[None], scores[:, 1], torch.tensor([1]), candidates, scores, torch.zeros(1))
    loss = candidate_loss(decoded, truth)
    assert loss.item() == pytest.approx((0.1**2 + 0.2**2) / 3)
    (gradient,) = torch.autograd.grad(loss, scores)
    assert gradient[0].tolist() == pytest.approx([0, 2 * -0.1 / 3, 0, 2 * 0.2 / 3], abs=1e-7)


def test_the_true_iou_is_that_of_the_cells_at_the_size_of_the_truth():
    truth = torch.rand(3, 12, 20, generator=torch.Generator().manual_seed(0)) > 0.6
    logits = torch.randn(3, 3, 5, generator=torch.Generator().manual_seed(1))
    cells = (logits > 0).repeat_interleave(4, dim=1).repeat_interleave(4, dim=2)
    iou = (cells & truth).flatten(1).sum(1) / (cells | truth).flatten(1).sum(1)
    scores, logits = iou.clone().requires_grad_(), logits.requires_grad_()
    loss = iou_head_loss(scores, logits, truth)
    assert loss.item() == pytest.approx(0, abs=1e-12)
    loss.backward()
    assert scores.grad is not None
    assert logits.grad is None, "the loss moves the head and not the masks"


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
