"""The side network: zero at first, one pass for all prompts, equal to its formula, saved and loaded with the model."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rl_reward_network.models.lora import load_trainable, save_trainable, setup_lora
from rl_reward_network.models.sa2va.checkpoint_sa2va import open_checkpoint, to_original
from rl_reward_network.models.sa2va.generation_sa2va import image_features
from rl_reward_network.models.sa2va.grounding_sa2va import decode_masks
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration, check_checkpoint
from rl_reward_network.models.sa2va.side_network import SideNetwork, SideNetworkConfig, side_network_config
from rl_reward_network.models.sa2va.video_sa2va import check_memory, masks_without_memory
from tests.conftest import smooth_image

SMALL = SideNetworkConfig(pixels=128, channels=(8, 16), packing=4)
PROMPTS = ["segment it", "segment the other"]


def image(seed: int = 0) -> np.ndarray:
    return np.asarray(smooth_image(70, 90, seed))


@pytest.fixture(scope="module")
def refined(tiny_model: Any) -> Any:
    """The tiny model with a side network that has been moved away from 0."""
    model = deepcopy(tiny_model)
    model.add_side_network(SMALL)
    torch.manual_seed(0)
    torch.nn.init.normal_(model.side_network.head.weight, std=0.1)
    torch.nn.init.normal_(model.side_network.head.bias, std=0.1)
    return model


def test_the_first_masks_are_those_of_sam2_upsampled(tiny_model: Any, tiny_processor: Any) -> None:
    model = deepcopy(tiny_model)
    model.add_side_network(SMALL)
    before, after = (one.segment([image()], PROMPTS, tiny_processor)[0] for one in (tiny_model, model))
    for old, new in zip(before, after, strict=True):
        assert len(old.mask_logits)
        upsampled = F.interpolate(old.mask_logits[:, None], size=(128, 128), mode="bilinear")[:, 0]
        assert torch.equal(new.mask_logits, upsampled)
        assert new.answer == old.answer
        assert torch.equal(new.iou_scores, old.iou_scores)


@pytest.mark.parametrize(("features", "from_seg"), [(True, False), (False, True)])
def test_refined_logits_equal_their_formula(features: bool, from_seg: bool) -> None:
    """(1 + gate) * upsampled + weights @ vectors, with the maps of the last layer at full resolution."""
    torch.manual_seed(0)
    side = SideNetwork(SideNetworkConfig(64, (8, 16), 2, features, from_seg=from_seg), sam_width=16)
    torch.nn.init.normal_(side.head.weight)
    torch.nn.init.normal_(side.head.bias)
    pixels, coarse = torch.randint(0, 256, (1, 3, 64, 64), dtype=torch.uint8), torch.randn(1, 16, 4, 4)
    old, seg, weights = torch.randn(5, 16, 16), torch.randn(5, 16), torch.randn(5, 2)
    side.eval()
    x = side(pixels, coarse)
    maps = F.pixel_shuffle(side.head(x), 2)[0]
    upsampled = F.interpolate(old[None], size=(64, 64), mode="bilinear")[0]
    used = side.of_seg(seg) if side.of_seg else weights
    expected = upsampled * (1 + maps[-1]) + torch.einsum("nc,chw->nhw", used, maps[:-1])
    torch.testing.assert_close(side.refine(x[0], old, weights, seg), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(side.refine(x[0], old, -weights, seg), side.refine(x[0], old, weights, seg)) == from_seg
    other = side(pixels, torch.randn(1, 16, 4, 4))
    assert torch.equal(x, other) != features, "SAM 2's map joins if and only if it is wanted"


def test_coarse_training_sees_half_the_resolution_and_an_answer_never_does() -> None:
    torch.manual_seed(0)
    side = SideNetwork(SideNetworkConfig(64, (8, 16), 2), sam_width=16)
    torch.nn.init.normal_(side.head.weight)
    pixels, coarse = torch.randint(0, 256, (1, 3, 64, 64), dtype=torch.uint8), torch.randn(1, 16, 4, 4)
    masks = torch.randn(5, 16, 16), torch.randn(5, 2), torch.randn(5, 16)
    side.eval()
    (whole,), (half,) = side(pixels, coarse), side(F.avg_pool2d(pixels.float(), 2), coarse)
    side.coarse = True
    assert torch.equal(side(pixels, coarse)[0], whole)
    (seen,) = side.train()(pixels, coarse)
    torch.testing.assert_close(seen.float(), half, atol=0.05, rtol=0.05)  # in bfloat16 where the hardware has it
    assert side.refine(seen, *masks).shape == (5, 32, 32)
    assert side.refine(whole, *masks).shape == (5, 64, 64)


def test_a_mask_does_not_depend_on_other_images_and_prompts(refined: Any, tiny_processor: Any) -> None:
    together = refined.segment([image(0), image(1)], PROMPTS, tiny_processor)
    for number in (0, 1):
        for prompt, found in zip(PROMPTS, together[number], strict=True):
            ((alone,),) = refined.segment([image(number)], [prompt], tiny_processor)
            torch.testing.assert_close(found.mask_logits, alone.mask_logits, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(together[0][0].mask_logits, together[1][0].mask_logits)
    assert together[0][0].masks().shape[1:] == (70, 90)


def test_the_selected_candidate_is_refined_and_gradients_reach_the_network(refined: Any, tiny_processor: Any) -> None:
    model = deepcopy(refined).eval()
    features = image_features(model, tiny_processor, [image()])
    seg = torch.randn(3, features.maps[2].shape[1])
    decoded = model.decode_masks(features, seg)
    assert decoded.mask_logits.shape == (3, 128, 128)
    without = decode_masks(model.grounding_encoder, features, seg)
    assert torch.equal(decoded.candidates, without.candidates)
    assert torch.equal(decoded.selected, without.selected)
    decoded.mask_logits.square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.side_network.parameters())


def test_a_named_candidate_is_refined_whatever_its_predicted_iou(tiny_model: Any, tiny_processor: Any) -> None:
    model = deepcopy(tiny_model)
    model.add_side_network(replace(SMALL, candidate=2))
    features = image_features(model, tiny_processor, [image()])
    decoded = model.decode_masks(features, torch.randn(3, features.maps[2].shape[1]))
    assert decoded.selected.tolist() == [2, 2, 2]
    assert torch.equal(decoded.iou_scores, decoded.candidate_scores[:, 2])
    upsampled = F.interpolate(decoded.candidates[:, 2, None], size=(128, 128), mode="bilinear")[:, 0]
    assert torch.equal(decoded.mask_logits, upsampled), "the last layer starts at 0"
    model.add_side_network(replace(SMALL, candidate=1, from_seg=True))
    assert (model.config.side.candidate, model.config.side.from_seg) == (2, False), "one that is there keeps them"


def test_it_is_saved_and_loaded_with_the_model(refined: Any, tiny_processor: Any, tmp_path: Path) -> None:
    refined.save_pretrained(tmp_path)
    tiny_processor.save_pretrained(tmp_path)
    check_checkpoint(open_checkpoint(tmp_path))
    loaded = Sa2VAForConditionalGeneration.from_pretrained(tmp_path)
    first, second = (one.segment([image()], PROMPTS, tiny_processor)[0][0] for one in (refined, loaded))
    torch.testing.assert_close(first.mask_logits, second.mask_logits, atol=1e-4, rtol=1e-4)
    assert loaded.config.side == SMALL
    with pytest.raises(ValueError, match=r"official layout cannot hold a side network; .*--side_network"):
        to_original(refined.state_dict(), refined.config)


def test_a_folder_of_trained_tensors_brings_it_along(refined, tiny_model, tiny_processor, tmp_path):
    trained, fresh = deepcopy(refined), deepcopy(tiny_model)
    setup_lora(trained, 2, 4)
    for parameter in trained.side_network.parameters():
        parameter.requires_grad_(True)
    save_trainable(trained, tmp_path / "trainable")
    load_trainable(fresh, tmp_path / "trainable")
    assert fresh.config.side == SMALL
    for name, tensor in trained.side_network.state_dict().items():
        assert torch.equal(tensor, fresh.side_network.state_dict()[name])
    half = deepcopy(tiny_model).to(torch.bfloat16)
    load_trainable(half, tmp_path / "trainable")  # trained tensors stay float32
    with torch.no_grad():
        features = image_features(half, tiny_processor, [image()])
        seg = torch.randn(1, refined.config.sam2_config.vision_config.fpn_hidden_size, dtype=torch.bfloat16)
        assert half.decode_masks(features, seg).mask_logits.isfinite().all()
    other = deepcopy(tiny_model)
    other.add_side_network(SideNetworkConfig(pixels=64, channels=(8, 16), packing=4))
    with pytest.raises(ValueError, match=r"side_network: the model has one of .*pixels=64.*--side_pixels 64"):
        load_trainable(other, tmp_path / "trainable")


def test_frames_without_memory_are_refined_and_memory_is_refused(refined: Any, tiny_processor: Any) -> None:
    frames = [image(0), image(1)]
    seg = torch.randn(2, refined.config.sam2_config.vision_config.fpn_hidden_size)
    for frame, logits in zip(frames, masks_without_memory(refined, frames, seg, tiny_processor, 2), strict=True):
        features = image_features(refined, tiny_processor, [frame])
        with torch.no_grad():
            torch.testing.assert_close(logits, refined.decode_masks(features, seg).mask_logits, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match=r"side network.*leave out --sam2_memory.*masks_without_memory"):
        check_memory(refined)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pixels": 500}, "pixels is 500, expected a multiple of 64"),
        ({"channels": [12]}, r"channels are \(12,\) .*multiples of 8"),
        ({"candidate": 0}, "candidate is 0, expected 1, 2, 3 or null"),
        ({"depth": 3}, r"config\.json: side_network has unknown fields \['depth'\]"),
    ],
)
def test_sizes_that_cannot_be_built_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        side_network_config(values)
