"""Masks of labelled images: families of damage, ridges, and the masks of each source."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import ndimage
from skimage.draw import line

from rl_reward_network.reward_training import masks as reward_masks
from rl_reward_network.reward_training.masks import (
    DAMAGED,
    DAMAGES,
    OTHER_FAMILIES,
    OWN,
    RIDGE,
    SEGMENTER,
    SHIFT,
    SHIFTED,
    SOURCES,
    RewardExample,
    damage,
    reward_examples,
    ridge_masks,
    source_masks,
    true_dice,
)
from rl_reward_network.rewards.metrics import dice, recall

FAMILIES = pytest.mark.parametrize("name", DAMAGES)


def tree(size=96):
    """A trunk with four branches, five pixels wide."""
    mask = np.zeros((size, size), dtype=bool)
    mask[line(5, 48, 90, 48)] = True
    for row, column in ((10, 10), (20, 85), (40, 8), (60, 90)):
        mask[line(row, column, row + 20, 48)] = True
    return ndimage.binary_dilation(mask, np.ones((5, 5)))


def overlap(mask, truth):
    return dice(mask[None], truth[None])[0]


@FAMILIES
def test_each_family_lowers_dice_repeats_with_its_seed_and_leaves_the_input(name):
    truth = tree()
    results, again = ([DAMAGES[name](truth, np.random.default_rng(seed)) for seed in range(12)] for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(results, again, strict=True))
    assert np.array_equal(truth, tree())
    scores = [overlap(result, truth) for result in results]
    assert all(result.dtype == bool and result.shape == truth.shape for result in results)
    assert np.mean([score < 0.995 for score in scores]) >= 0.75
    assert np.ptp(scores) > 0.05
    if name in ("dilate", "false_blobs", "false_tubes"):
        assert all((result >= truth).all() for result in results)
    elif name != SHIFT:
        assert all((result <= truth).all() and (result < truth).any() for result in results)


@FAMILIES
@pytest.mark.parametrize("mask", [np.zeros((9, 9), bool), np.ones((9, 9), bool), np.ones((1, 1), bool), np.eye(40) > 0])
def test_no_family_fails_on_odd_masks(name, mask):
    assert {DAMAGES[name](mask, np.random.default_rng(seed)).shape for seed in range(5)} == {mask.shape}


def test_dropped_branches_go_as_a_whole():
    mask = np.zeros((40, 40), dtype=bool)
    bars = slice(5, 9), slice(20, 24), slice(32, 36)  # no fork
    for rows in bars:
        mask[rows] = True
    for seed in range(10):
        kept = reward_masks.drop_branches(mask, np.random.default_rng(seed))
        assert 0 in {kept[rows].mean() for rows in bars} <= {0, 1}


def test_shift_moves_the_mask_by_at_least_a_pixel_on_each_axis():
    mask = np.zeros((40, 40), dtype=bool)
    mask[20, 20] = True
    for seed in range(20):
        (moved,) = np.abs(np.argwhere(reward_masks.shift(mask, np.random.default_rng(seed))) - 20)
        assert 1 <= moved.min() <= moved.max() <= 8


def test_eroding_may_leave_nothing_but_does_not_eat_in_from_the_border():
    assert not reward_masks.erode(np.eye(40) > 0, np.random.default_rng(0)).any()
    assert reward_masks.erode(np.ones((8, 8), bool), np.random.default_rng(0)).all()


def test_damage_is_of_the_given_families_and_spreads_dice():
    truth, rng = tree(), np.random.default_rng(4)
    only_less = {name: DAMAGES[name] for name in ("erode", "cut_out")}
    assert all((damage(truth, rng, only_less) <= truth).all() for _ in range(20))
    scores = [overlap(damage(truth, rng), truth) for _ in range(60)]
    assert min(scores) < 0.4
    assert max(scores) > 0.85
    assert np.array_equal(damage(truth, np.random.default_rng(7)), damage(truth, np.random.default_rng(7)))


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


def test_each_source_has_its_masks_and_only_the_named_ones_are_made(monkeypatch):
    truth = tree()
    image = np.repeat((60 + 130 * truth[..., None]).astype(np.uint8), 3, axis=2)
    example = RewardExample(image, truth, np.stack([np.roll(truth, 2 * n + 1, axis=1) for n in range(3)]))
    result = source_masks(example, np.random.default_rng(0), 4, own=~truth)
    counts = {SEGMENTER: 3, DAMAGED: 4, SHIFTED: 4, RIDGE: 6, OWN: 1}
    assert {name: len(stack) for name, stack in result.items()} == counts
    assert tuple(result) == SOURCES
    assert all(stack.dtype == bool and stack.shape[1:] == (96, 96) for stack in result.values())
    assert (true_dice(result[SHIFTED], truth) < 1).all()
    assert set(DAMAGES) - set(OTHER_FAMILIES) == {SHIFT}
    monkeypatch.setitem(DAMAGES, SHIFT, lambda *_: pytest.fail("not named"))
    monkeypatch.setattr(reward_masks, "ridge_masks", lambda *_: pytest.fail("not named"))
    assert tuple(source_masks(example, np.random.default_rng(0), 4, (SEGMENTER, DAMAGED))) == (SEGMENTER, DAMAGED)


def test_examples_are_labelled_samples_with_every_prompts_mask():
    truth, probabilities = np.ones((4, 5), bool), np.stack([np.full((4, 5), 0.4), np.full((4, 5), 0.6)])
    load = {"load_image": lambda: np.zeros((4, 5, 3), np.uint8), "load_mask": lambda: truth}
    inputs = SimpleNamespace(probabilities=lambda image: probabilities)
    (example,) = reward_examples(inputs, [SimpleNamespace(**load)], "examples")
    assert example.masks.tolist() == (probabilities > 0.5).tolist()
    assert example.truth.all()
