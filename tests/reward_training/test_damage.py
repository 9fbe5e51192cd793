from itertools import pairwise

import numpy as np
import pytest
from scipy import ndimage
from skimage.draw import line

from rl_reward_network.reward_training import damage as families
from rl_reward_network.reward_training.damage import DAMAGES, damage, ridge_masks
from rl_reward_network.rewards.metrics import dice, recall


def tree(size=96):
    """A trunk with four branches, five pixels wide."""
    mask = np.zeros((size, size), dtype=bool)
    mask[line(5, 48, 90, 48)] = True
    for row, column in ((10, 10), (20, 85), (40, 8), (60, 90)):
        mask[line(row, column, row + 20, 48)] = True
    return ndimage.binary_dilation(mask, np.ones((5, 5)))


def overlap(mask, truth):
    return dice(mask[None], truth[None])[0]


@pytest.mark.parametrize("name", DAMAGES)
def test_each_family_lowers_dice_repeats_with_its_seed_and_leaves_the_input(name):
    truth = tree()
    results = [DAMAGES[name](truth, np.random.default_rng(seed)) for seed in range(12)]
    again = [DAMAGES[name](truth, np.random.default_rng(seed)) for seed in range(12)]
    assert all(np.array_equal(a, b) for a, b in zip(results, again, strict=True))
    assert np.array_equal(truth, tree())
    scores = [overlap(result, truth) for result in results]
    assert all(result.dtype == bool and result.shape == truth.shape for result in results)
    assert np.mean([score < 0.995 for score in scores]) >= 0.75
    assert np.ptp(scores) > 0.05


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("mask", [np.zeros((9, 9), bool), np.ones((9, 9), bool), np.ones((1, 1), bool), np.eye(40) > 0])
def test_no_family_fails_on_odd_masks(name, mask):
    for seed in range(5):
        assert DAMAGES[name](mask, np.random.default_rng(seed)).shape == mask.shape


def test_direction_of_each_family():
    truth = tree()
    for seed in range(8):
        grown = [DAMAGES[name](truth, np.random.default_rng(seed)) for name in ("dilate", "false_blobs", "false_tubes")]
        shrunk = [DAMAGES[name](truth, np.random.default_rng(seed)) for name in ("erode", "drop_branches", "cut_out")]
        assert all((result >= truth).all() for result in grown)
        assert all((result <= truth).all() and (result < truth).any() for result in shrunk)


def test_dropped_branches_go_as_a_whole():
    mask = np.zeros((40, 40), dtype=bool)
    mask[5:9], mask[20:24], mask[32:36] = True, True, True  # three bars, no fork
    for seed in range(10):
        kept = families.drop_branches(mask, np.random.default_rng(seed))
        shares = [kept[rows].mean() for rows in (slice(5, 9), slice(20, 24), slice(32, 36))]
        assert set(shares) <= {0, 1}
        assert 0 in shares


def test_shift_moves_the_mask_by_at_least_a_pixel_on_each_axis():
    mask = np.zeros((40, 40), dtype=bool)
    mask[20, 20] = True
    for seed in range(20):
        moved = np.argwhere(families.shift(mask, np.random.default_rng(seed)))
        assert len(moved) == 1
        assert (np.abs(moved[0] - 20) >= 1).all()
        assert (np.abs(moved[0] - 20) <= 8).all()


def test_eroding_a_thin_vessel_may_leave_nothing_which_scores_zero():
    thin = np.eye(40) > 0
    eroded = families.erode(thin, np.random.default_rng(0))
    assert not eroded.any()
    assert overlap(eroded, thin) == 0
    assert np.array_equal(
        damage(np.zeros((8, 8), bool), np.random.default_rng(0), {"erode": families.erode}), eroded[:8, :8]
    )


def test_eroding_does_not_eat_in_from_the_image_border():
    assert families.erode(np.ones((8, 8), bool), np.random.default_rng(0)).all()


def test_damage_draws_only_from_the_given_families_and_spreads_dice():
    truth, rng = tree(), np.random.default_rng(4)
    only_less = {name: DAMAGES[name] for name in ("erode", "cut_out")}
    assert all((damage(truth, rng, only_less) <= truth).all() for _ in range(20))
    scores = [overlap(damage(truth, rng), truth) for _ in range(60)]
    assert min(scores) < 0.4
    assert max(scores) > 0.85
    assert np.array_equal(damage(truth, np.random.default_rng(7)), damage(truth, np.random.default_rng(7)))


@pytest.mark.parametrize(
    ("mask", "kinds", "message"),
    [
        (np.zeros((4, 4)), DAMAGES, r"bool \(H, W\), got float64"),
        (np.zeros((1, 4, 4), bool), DAMAGES, r"got bool \(1, 4, 4\)"),
        (np.zeros((4, 4), bool), {}, "families is empty"),
    ],
)
def test_bad_input(mask, kinds, message):
    with pytest.raises(ValueError, match=message):
        damage(mask, np.random.default_rng(0), kinds)


@pytest.mark.parametrize("dark", [True, False])
def test_ridge_masks_find_tubes_of_each_polarity_and_stricter_ones_are_smaller(dark):
    truth = tree()
    grey = np.where(truth, 60, 180) if dark else np.where(truth, 180, 60)
    masks = ridge_masks(np.repeat(grey[..., None], 3, axis=2).astype(np.uint8))
    assert (masks.dtype, masks.shape) == (bool, (6, *truth.shape))
    right, wrong = (masks[:3], masks[3:]) if dark else (masks[3:], masks[:3])
    assert overlap(right[1], truth) > 0.6
    assert recall(wrong[1][None], truth[None])[0] < 0.2
    for loose, strict in pairwise(right):
        assert (strict <= loose).all()
        assert strict.sum() < loose.sum()
    assert not ridge_masks(np.full((32, 32, 3), 90, np.uint8)).any()
