from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig
from rl_reward_network.rewards import learned
from rl_reward_network.rewards.learned import score_masks

IMAGE = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
MASKS = np.random.default_rng(1).random((5, 20, 30), dtype=np.float32)


def brightness_under_mask(image, mask):
    return SimpleNamespace(score=(image * mask).mean(dim=(1, 2, 3)))


def test_any_callable_sees_the_image_in_unit_range_and_each_mask_in_order():
    scores = score_masks(brightness_under_mask, IMAGE, MASKS)
    expected = (IMAGE.transpose(2, 0, 1)[None] / 255 * MASKS[:, None]).mean(axis=(1, 2, 3))
    assert (scores.dtype, scores.shape) == (np.float32, (5,))
    np.testing.assert_allclose(scores, expected, rtol=1e-5)


def test_masks_in_parts_equal_masks_at_once(monkeypatch):
    network = RewardNetwork(RewardNetworkConfig(channels=(8, 16)))
    at_once = score_masks(network, IMAGE, MASKS)
    monkeypatch.setattr(learned, "PIXELS_AT_ONCE", 2 * 20 * 30)
    np.testing.assert_allclose(score_masks(network, IMAGE, MASKS), at_once, atol=1e-6)


def test_no_masks_no_scores_and_half_precision_is_accepted():
    assert score_masks(brightness_under_mask, IMAGE, MASKS[:0]).shape == (0,)
    half = score_masks(brightness_under_mask, IMAGE, MASKS.astype(np.float16))
    np.testing.assert_allclose(half, score_masks(brightness_under_mask, IMAGE, MASKS), rtol=1e-3)


def test_a_score_that_is_not_finite_stops_the_run():
    with pytest.raises(ValueError, match="not finite"):
        score_masks(lambda image, mask: SimpleNamespace(score=torch.full((len(mask),), torch.nan)), IMAGE, MASKS)


@pytest.mark.parametrize(
    ("image", "masks", "message"),
    [
        (IMAGE / 255, MASKS, r"uint8 \(H, W, 3\), got float64"),
        (IMAGE[..., 0], MASKS, r"uint8 \(H, W, 3\), got uint8 \(20, 30\)"),
        (IMAGE, MASKS[:, :, :-1], r"of \(20, 30\), got float32 \(5, 20, 29\)"),
        (IMAGE, MASKS > 0.5, "got bool"),
        (IMAGE, MASKS * 3, r"in \[0, 1\], got .*sigmoid"),
        (IMAGE, MASKS * np.nan, r"in \[0, 1\]"),
    ],
)
def test_bad_input(image, masks, message):
    with pytest.raises(ValueError, match=message):
        score_masks(brightness_under_mask, image, masks)
