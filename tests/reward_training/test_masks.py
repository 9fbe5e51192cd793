import numpy as np
import pytest
from scipy import ndimage
from skimage.draw import line

from rl_reward_network.reward_training import masks as reward_masks
from rl_reward_network.reward_training.damage import DAMAGES
from rl_reward_network.reward_training.masks import (
    RIDGE,
    SEEN,
    SEEN_FAMILIES,
    SEGMENTER,
    SOURCES,
    UNSEEN,
    RewardExample,
    balance,
    make_windows,
    source_masks,
    true_dice,
    unpack,
)
from rl_reward_network.rewards.masks import dice


def tree_of(size=(90, 120), seed=0, prompts=3):
    rng = np.random.default_rng(seed)
    truth = np.zeros(size, dtype=bool)
    for _ in range(4):
        rows, columns = rng.integers(0, size[0], 2), rng.integers(0, size[1], 2)
        truth[line(rows[0], columns[0], rows[1], columns[1])] = True
    truth = ndimage.binary_dilation(truth, np.ones((3, 3)))
    image = np.repeat((60 + 130 * truth[..., None]).astype(np.uint8), 3, axis=2)
    masks = (
        np.stack([np.roll(truth, 2 * n + 1, axis=1) for n in range(prompts)]) if prompts else np.zeros((0, *size), bool)
    )
    return RewardExample(image, truth, masks, f"patient{seed}")


def test_windows_hold_the_truth_the_segmenters_masks_and_damage_cut_at_one_place():
    windows = make_windows([tree_of(), tree_of(seed=1)], 3, 64, 8, [0])
    masks = unpack(windows.masks, 64)
    assert windows.image.shape == (6, 64, 64, 3)
    assert (masks.shape, windows.dice.shape) == ((6, 8, 64, 64), (6, 8))
    for image, truth, stack, scores in zip(windows.image, windows.truth, masks, windows.dice, strict=True):
        assert np.array_equal(image[..., 0] > 100, truth)
        assert np.array_equal(stack[0], truth)
        np.testing.assert_allclose(scores, dice(stack, np.broadcast_to(truth, stack.shape)))
        shifts = [n for n in (1, 3, 5) if any((mask[:, n:] == truth[:, :-n]).all() for mask in stack[1:4])]
        assert len(shifts) == 3, "the three masks of the segmenter, each shifted"


def test_equal_seeds_give_equal_windows_and_one_example_does_not_move_the_next():
    first, second = tree_of(), tree_of(seed=1)
    a, b = (make_windows([first, second], 2, 32, 5, [3]) for _ in range(2))
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    other = make_windows([tree_of(seed=2), second], 2, 32, 5, [3])
    assert all(np.array_equal(x[2:], y[2:]) for x, y in zip(a, other, strict=True))
    assert not np.array_equal(a.masks, make_windows([first, second], 2, 32, 5, [4]).masks)


def test_at_most_half_of_the_masks_are_the_segmenters_and_none_is_needed():
    example = tree_of(prompts=20)
    masks = unpack(make_windows([example], 1, 64, 10, [0]).masks, 64)[0]
    truth = masks[0]
    shifted = [any((mask[:, 2 * n + 1 :] == truth[:, : -2 * n - 1]).all() for n in range(20)) for mask in masks[1:]]
    assert sum(shifted) == 5
    assert make_windows([tree_of(prompts=0)], 2, 64, 6, [0]).masks.shape[:2] == (2, 6)


def test_the_unseen_family_and_source_are_kept_out_of_training(monkeypatch):
    def forbidden(*_):
        raise AssertionError("kept out of training")

    monkeypatch.setitem(DAMAGES, reward_masks.UNSEEN_FAMILY, forbidden)
    monkeypatch.setattr(reward_masks, "ridge_masks", forbidden)
    make_windows([tree_of()], 5, 64, 16, [0])
    assert set(DAMAGES) - set(SEEN_FAMILIES) == {reward_masks.UNSEEN_FAMILY}
    with pytest.raises(AssertionError):
        source_masks(tree_of(), np.random.default_rng(0), 1)


def test_small_images_are_mirrored_up_to_the_window():
    windows = make_windows([tree_of(size=(20, 100))], 1, 32, 4, [0])
    assert np.array_equal(windows.truth[0][20:], windows.truth[0][19:7:-1])
    array = np.arange(12).reshape(3, 4)
    assert reward_masks._cut(array, 1, 1, 2).tolist() == [[5, 6], [9, 10]]
    assert reward_masks._cut(array, 0, 0, 4)[3].tolist() == array[2].tolist()


def test_an_image_without_object_still_gives_windows():
    empty = tree_of(prompts=0)._replace(truth=np.zeros((90, 120), dtype=bool))
    windows = make_windows([empty], 2, 48, 20, [0])
    assert not windows.truth.any()
    assert set(windows.dice.ravel()) == {0, 1}  # false blobs score 0, empty masks 1


def test_balance_makes_rare_dice_as_likely_as_common_ones():
    dice_of = np.array([[0.05, 0.95, 0.95, 0.95], [0.95, 0.95, 0.95, 0.95]])
    chance = balance(dice_of)
    np.testing.assert_allclose(chance.sum(axis=1), 1)
    np.testing.assert_allclose(chance[0], [0.7, 0.1, 0.1, 0.1])  # one of the lowest tenth, seven of the highest
    assert balance(np.array([[1.0]])) == 1


def test_sources_of_a_test_image():
    example = tree_of(size=(96, 96))
    result = source_masks(example, np.random.default_rng(0), 4)
    assert tuple(result) == SOURCES == (SEGMENTER, SEEN, UNSEEN, RIDGE)
    assert {name: len(stack) for name, stack in result.items()} == {SEGMENTER: 3, SEEN: 4, UNSEEN: 4, RIDGE: 6}
    assert all(stack.dtype == bool and stack.shape[1:] == (96, 96) for stack in result.values())
    assert (true_dice(result[UNSEEN], example.truth) < 1).all()
    assert tuple(source_masks(example, np.random.default_rng(0), 4, (SEEN,))) == (SEEN,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"truth": tree_of().truth * 1}, r"example 0.truth must be bool \(H, W\), got int64"),
        ({"image": tree_of().image / 255}, r"example 0.image must be uint8 \(90, 120, 3\), got float64"),
        ({"masks": tree_of().masks[:, 1:]}, r"example 0.masks must be bool .* got bool \(3, 89, 120\)"),
        ({"masks": tree_of().masks * 0.5}, "example 0.masks must be bool .* got float64"),
    ],
)
def test_bad_examples_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        make_windows([tree_of()._replace(**change)], 1, 32, 4, [0])
