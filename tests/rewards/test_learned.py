import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig, soft_overlap
from rl_reward_network.rewards import learned
from rl_reward_network.rewards.learned import ImageScorer, foreground_prob, predict_mask_quality, score_masks

SMALL = RewardNetworkConfig(channels=(8, 16), packing=2, members=2, caution=0.5)

IMAGE = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
MASKS = np.random.default_rng(1).random((5, 20, 30), dtype=np.float32)


class BrightIsObject(RewardNetwork):
    """Two members that find bright objects, the second with lower probability; counts its passes."""

    passes = 0

    def foreground_probs(self, image):
        self.passes += 1
        bright = image.mean(dim=1, keepdim=True)
        return torch.stack([bright, bright**2])


def test_numbers_and_order_are_those_of_the_network_and_the_image_is_in_unit_range():
    network = BrightIsObject(SMALL)
    result = predict_mask_quality(network, IMAGE, MASKS)
    maps = network.foreground_probs(torch.from_numpy(IMAGE.transpose(2, 0, 1)[None] / 255).float())
    expected = torch.stack(
        [soft_overlap(torch.from_numpy(MASKS)[:, None], truth) for truth in maps], dim=1
    )  # (4, K, P)
    np.testing.assert_allclose(result["members"], expected.permute(2, 1, 0), rtol=1e-4)
    np.testing.assert_allclose(result["dice"], expected[0].mean(dim=0), rtol=1e-4)
    np.testing.assert_allclose(result["score"], result["dice"] - 0.5 * result["spread"], rtol=1e-4)
    assert {name: (column.dtype, column.shape) for name, column in result.items()} == {
        "score": (np.float32, (5,)),
        "dice": (np.float32, (5,)),
        "spread": (np.float32, (5,)),
        "members": (np.float32, (5, 2, 4)),
        "member_scores": (np.float32, (5, 2)),
    }
    np.testing.assert_allclose(result["member_scores"], expected[0].T, rtol=1e-4)
    assert np.array_equal(score_masks(network, IMAGE, MASKS), result["score"])


def test_masks_in_parts_equal_masks_at_once_and_the_network_runs_once_per_image(monkeypatch):
    network = BrightIsObject(SMALL)
    at_once = score_masks(network, IMAGE, MASKS)
    monkeypatch.setattr(learned, "PIXELS_AT_ONCE", 2 * 20 * 30)
    np.testing.assert_allclose(score_masks(network, IMAGE, MASKS), at_once, atol=1e-6)
    assert network.passes == 2


def test_many_masks_of_a_large_image_keep_no_maps(monkeypatch):
    monkeypatch.setattr(learned, "PIXELS_AT_ONCE", 20 * 30)
    maps = []

    class Recording(BrightIsObject):
        def mask_quality(self, mask, foreground_probs):
            assert sum(reference() is not None for reference in maps) <= 1, (
                "the maps of earlier masks are still referenced"
            )
            output = super().mask_quality(mask, foreground_probs)
            maps.append(weakref.ref(output.error_map))
            return output

    score_masks(Recording(SMALL), IMAGE, MASKS)
    assert len(maps) == 5


def test_no_masks_no_scores_and_half_precision_is_accepted():
    network = BrightIsObject(SMALL)
    assert score_masks(network, IMAGE, MASKS[:0]).shape == (0,)
    half = score_masks(network, IMAGE, MASKS.astype(np.float16))
    np.testing.assert_allclose(half, score_masks(network, IMAGE, MASKS), rtol=1e-3)


def test_a_score_below_zero_counts_as_zero():
    doubtful = BrightIsObject(replace(SMALL, caution=100.0))
    assert np.array_equal(score_masks(doubtful, IMAGE, MASKS), np.zeros(5, dtype=np.float32))


def test_a_score_that_is_not_finite_stops_the_run():
    class Damaged(BrightIsObject):
        def foreground_probs(self, image):
            return super().foreground_probs(image) * torch.nan

    with pytest.raises(ValueError, match="not finite"):
        score_masks(Damaged(SMALL), IMAGE, MASKS)


def test_the_foreground_probability_is_the_mean_of_the_members():
    bright = IMAGE.mean(axis=2) / 255
    np.testing.assert_allclose(foreground_prob(BrightIsObject(SMALL), IMAGE), (bright + bright**2) / 2, rtol=1e-5)


def test_the_ascent_climbs_step_by_step_to_the_predicted_object():
    network = BrightIsObject(SMALL)
    image = np.zeros((20, 30, 3), dtype=np.uint8)
    image[5:12, 8:20] = 250
    object_, start = image[..., 0] > 0, (MASKS > 0.5).astype(np.float32)
    scores = [score_masks(network, image, start)]
    path = list(ImageScorer(network, image).ascend(start, 0.2, 12))
    scores += [score_masks(network, image, masks) for masks in path]
    assert len(path) == 12
    assert all(np.abs(b - a).max() <= 0.2 + 1e-6 for a, b in zip([start, *path], path, strict=False))
    assert (np.diff(scores, axis=0) > -1e-6).all()
    assert np.array_equal(path[-1] > 0.5, np.broadcast_to(object_, start.shape))
    assert network.passes == 1 + 1 + 12, "one pass for the whole ascent"


def test_each_mask_climbs_by_itself():
    network = BrightIsObject(SMALL)
    *_, together = ImageScorer(network, IMAGE).ascend(MASKS, 0.3, 4)
    *_, alone = ImageScorer(network, IMAGE).ascend(MASKS[2:3], 0.3, 4)
    np.testing.assert_allclose(together[2:3], alone, atol=1e-5)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_the_ascent_starts_from_nothing_and_from_everything(value):
    start = np.full((1, 20, 30), value, dtype=np.float32)
    *_, last = ImageScorer(BrightIsObject(SMALL), IMAGE).ascend(start, 0.4, 5)
    assert np.isfinite(last).all()
    assert (last != value).any()


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
        score_masks(BrightIsObject(SMALL), image, masks)
