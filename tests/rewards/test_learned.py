import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig, judge
from rl_reward_network.rewards import learned
from rl_reward_network.rewards.learned import ascend, judge_masks, score_masks, truth_map

SMALL = RewardNetworkConfig(channels=(8, 16), members=2, caution=0.5)

IMAGE = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
MASKS = np.random.default_rng(1).random((5, 20, 30), dtype=np.float32)


class BrightIsObject(RewardNetwork):
    """Two members that see the object where the image is bright, the second less surely; counts its looks."""

    looks = 0

    def truth_maps(self, image):
        self.looks += 1
        bright = image.mean(dim=1, keepdim=True)
        return torch.stack([bright, bright**2])


def test_numbers_and_order_are_those_of_the_network_and_the_image_is_in_unit_range():
    network = BrightIsObject(SMALL)
    found = judge_masks(network, IMAGE, MASKS)
    maps = network.truth_maps(torch.from_numpy(IMAGE.transpose(2, 0, 1)[None] / 255).float())
    expected = torch.stack([judge(torch.from_numpy(MASKS)[:, None], truth) for truth in maps], dim=1)  # (4, K, P)
    np.testing.assert_allclose(found["members"], expected.permute(2, 1, 0), rtol=1e-4)
    np.testing.assert_allclose(found["dice"], expected[0].mean(dim=0), rtol=1e-4)
    np.testing.assert_allclose(found["score"], found["dice"] - 0.5 * found["spread"], rtol=1e-4)
    assert {name: (column.dtype, column.shape) for name, column in found.items()} == {
        "score": (np.float32, (5,)),
        "dice": (np.float32, (5,)),
        "spread": (np.float32, (5,)),
        "members": (np.float32, (5, 2, 4)),
        "truth_map": (np.float32, (20, 30)),
    }
    assert np.array_equal(score_masks(network, IMAGE, MASKS), found["score"])


def test_masks_in_parts_equal_masks_at_once_and_the_image_is_looked_at_once(monkeypatch):
    network = BrightIsObject(SMALL)
    at_once = score_masks(network, IMAGE, MASKS)
    monkeypatch.setattr(learned, "PIXELS_AT_ONCE", 2 * 20 * 30)
    np.testing.assert_allclose(score_masks(network, IMAGE, MASKS), at_once, atol=1e-6)
    assert network.looks == 2


def test_many_masks_of_a_large_image_keep_no_maps(monkeypatch):
    monkeypatch.setattr(learned, "PIXELS_AT_ONCE", 20 * 30)
    maps = []

    class Watched(BrightIsObject):
        def judge(self, mask, truth_maps):
            assert sum(reference() is not None for reference in maps) <= 1, "the maps of earlier masks are still held"
            output = super().judge(mask, truth_maps)
            maps.append(weakref.ref(output.error_map))
            return output

    score_masks(Watched(SMALL), IMAGE, MASKS)
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
        def truth_maps(self, image):
            return super().truth_maps(image) * torch.nan

    with pytest.raises(ValueError, match="not finite"):
        score_masks(Damaged(SMALL), IMAGE, MASKS)


def test_the_truth_map_is_the_mean_of_the_members():
    bright = IMAGE.mean(axis=2) / 255
    np.testing.assert_allclose(truth_map(BrightIsObject(SMALL), IMAGE), (bright + bright**2) / 2, rtol=1e-5)


def test_the_ascent_climbs_step_by_step_to_what_the_network_believes():
    network = BrightIsObject(SMALL)
    image = np.zeros((20, 30, 3), dtype=np.uint8)
    image[5:12, 8:20] = 250
    object_, start = image[..., 0] > 0, (MASKS > 0.5).astype(np.float32)
    scores = [score_masks(network, image, start)]
    path = list(ascend(network, image, start, 0.2, 12))
    scores += [score_masks(network, image, masks) for masks in path]
    assert len(path) == 12
    assert all(np.abs(b - a).max() <= 0.2 + 1e-6 for a, b in zip([start, *path], path, strict=False))
    assert (np.diff(scores, axis=0) > -1e-6).all()
    assert np.array_equal(path[-1] > 0.5, np.broadcast_to(object_, start.shape))
    assert network.looks == 1 + 1 + 12, "one look for the whole ascent"


def test_each_mask_climbs_by_itself():
    network = BrightIsObject(SMALL)
    *_, together = ascend(network, IMAGE, MASKS, 0.3, 4)
    *_, alone = ascend(network, IMAGE, MASKS[2:3], 0.3, 4)
    np.testing.assert_allclose(together[2:3], alone, atol=1e-5)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_the_ascent_starts_from_nothing_and_from_everything(value):
    *_, last = ascend(BrightIsObject(SMALL), IMAGE, np.full((1, 20, 30), value, dtype=np.float32), 0.4, 5)
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
