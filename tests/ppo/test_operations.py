"""Operations on masks, each in closed form and where nothing can be done; searches on images of a known optimum."""

import cv2
import numpy as np
import pytest
from scipy.special import expit, logit

from rl_reward_network.env.observation import EdgeFeatures
from rl_reward_network.ppo.operations import (
    KEPT,
    MOST_SEQUENCES,
    OPERATIONS,
    EditedImage,
    apply_operation,
    best_sequences,
    best_threshold,
    find_sequences,
    greedy,
    words,
)
from rl_reward_network.rewards.metrics import dice

SIDE, SIZE = 48, 64
DILATE, ERODE = ("dilate",), ("erode",)


def known_image(number):
    """An image rewarded by Dice. Even numbers: dilate is right, and it is bright. Odd: erode is right, it is dark."""
    rng = np.random.default_rng(number)
    truth = np.zeros((SIDE, SIDE), bool)
    top, left = rng.integers(8, 16, 2)
    truth[top : top + 18, left : left + 14] = True
    bright = number % 2 == 0
    guide = EdgeFeatures(np.full((SIDE, SIDE, 3), 200 if bright else 60, np.uint8))
    wrong = apply_operation("erode" if bright else "dilate", guide, truth.astype(np.float32))
    soft = np.where(wrong > 0.5, np.float32(0.95), np.float32(0.05))
    return EditedImage(guide, soft, lambda mask: float(dice(mask[None], truth[None])[0]), f"patient {number}")


GUIDE = EdgeFeatures(np.full((SIZE, SIZE, 3), 128, np.uint8))


def soft_of(mask):
    return np.where(mask, np.float32(0.9), np.float32(0.1))


def square(top, left, side):
    mask = np.zeros((SIZE, SIZE), bool)
    mask[top : top + side, left : left + side] = True
    return mask


def after(name, soft, guide=GUIDE):
    return apply_operation(name, guide, soft) > 0.5


@pytest.mark.parametrize("name", OPERATIONS)
def test_empty_and_full_masks_stay_soft_masks_and_no_input_changes(name):
    assert name.islower()
    for value in (0, 1):
        soft = np.full((SIZE, SIZE), value, np.float32)
        result = apply_operation(name, GUIDE, soft)
        assert (result.shape, result.dtype) == (soft.shape, np.float32)
        assert 0 <= result.min() <= result.max() <= 1
        assert ((result > 0.5) == value).all()
    soft = np.random.default_rng(0).random((SIZE, SIZE)).astype(np.float32)
    copy = soft.copy()
    apply_operation(name, GUIDE, soft)
    assert (soft == copy).all()


def test_thresholds_shift_the_logit_and_undo_each_other():
    soft = np.linspace(0.01, 0.99, SIZE * SIZE, dtype=np.float32).reshape(SIZE, SIZE)
    up = apply_operation("threshold up", GUIDE, soft)
    assert up == pytest.approx(expit(logit(soft) - 1), abs=1e-3)
    assert apply_operation("threshold down", GUIDE, up) == pytest.approx(soft, abs=2e-3)


def test_morphology_is_that_of_opencv_on_the_mask():
    mask = np.random.default_rng(1).random((SIZE, SIZE)) > 0.6
    element = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (3, 3))
    kinds = {"open": cv2.MORPH_OPEN, "close": cv2.MORPH_CLOSE, "dilate": cv2.MORPH_DILATE, "erode": cv2.MORPH_ERODE}
    for name, kind in kinds.items():
        expected = cv2.morphologyEx(mask.astype(np.uint8), kind, element) > 0
        assert (after(name, soft_of(mask)) == expected).all(), name


def test_components_are_dropped_with_their_rim():
    large, small, dot = square(5, 5, 20), square(40, 40, 6), square(55, 5, 1)
    soft = soft_of(large | small | dot)
    assert (after("keep the largest", soft) == large).all()
    assert (after("drop small components", soft) == (large | small)).all()  # the dot is below 0.1 % of the image
    soft = np.where(square(39, 39, 8), np.float32(0.4), np.float32(0.01))
    soft[large | small] = 0.9
    kept = apply_operation("keep the largest", GUIDE, soft)
    assert (after("threshold down", kept) == large).all()


def test_holes_are_filled_but_not_bays():
    ring = square(5, 5, 20) & ~square(15, 15, 4)
    bay = square(40, 40, 20) & ~square(40, 45, 4)  # open at the top
    loop = square(5, 35, 20) & ~square(10, 40, 10)  # above 0.5 % of the image
    assert (after("fill holes", soft_of(ring | bay | loop)) == (square(5, 5, 20) | bay | loop)).all()


def test_a_gap_is_bridged_along_a_ridge_of_the_masks_own_polarity():
    rows = np.arange(256)[:, None]
    grey = 160 - 90 * np.exp(-((rows - 128.0) ** 2) / 8) * np.ones((1, 256))  # a dark line
    image = np.repeat(grey[..., None], 3, axis=2).astype(np.uint8)
    mask = np.zeros((256, 256), bool)
    mask[126:131, 20:120] = mask[126:131, 140:230] = True
    result = after("bridge gaps along ridges", soft_of(mask), EdgeFeatures(image))
    assert result[128, 120:140].all()
    assert (result & ~mask)[:120].sum() == (result & ~mask)[137:].sum() == 0  # nothing is added elsewhere
    plain = EdgeFeatures(np.full_like(image, 128))
    assert (after("bridge gaps along ridges", soft_of(mask), plain) == mask).all()


def test_smoothing_follows_edges_of_the_image():
    image = np.zeros((SIZE, SIZE, 3), np.uint8)
    image[:, 32:] = 255
    ragged = image[..., 0] > 0
    ragged[::4, 30:32] = True
    assert (after("smooth along edges", soft_of(ragged), EdgeFeatures(image)) == (image[..., 0] > 0)).mean() > 0.999


@pytest.mark.parametrize("name", ["erode", "dilate"])
def test_a_larger_image_is_treated_alike(name):
    mask = np.zeros((512, 512), bool)
    mask[100:120, 50:400] = True
    shares = [
        after(name, soft_of(one), EdgeFeatures(np.zeros((*one.shape, 3), np.uint8))).mean()
        for one in (mask, mask[::2, ::2])
    ]
    assert shares[0] == pytest.approx(shares[1], rel=0.02)


def test_a_threshold_is_stretched_to_a_half_and_unknown_names_fail():
    soft = np.append(np.linspace(0, 1, 1001, dtype=np.float32), np.float32(0.6))
    for best in (0.01, 0.5, 0.6, 0.99):
        after = apply_operation(f"threshold at {best}", GUIDE, soft)
        assert ((after > 0.5) == (soft > np.float32(best))).all()
        assert (after.dtype, after.min(), after.max()) == (np.float32, 0, 1)
        assert (np.diff(after[:-1]) >= 0).all()
    with pytest.raises(KeyError, match="sharpen"):
        apply_operation("sharpen", GUIDE, soft)


def test_a_sequence_is_applied_in_order_and_what_memory_dropped_is_computed_again():
    image = known_image(0)
    sequence = ("dilate", "erode", "dilate")
    expected = image.soft
    for name in sequence:
        expected = apply_operation(name, image.guide, expected)
    np.testing.assert_array_equal(image.edited(sequence), expected)
    assert image.edited(()) is image.soft
    for one in OPERATIONS:
        for other in OPERATIONS[:4]:
            image.mask((one, other))
    assert len(image._softs) <= KEPT
    np.testing.assert_array_equal(image.edited(sequence), expected)
    assert image.reward(DILATE) > 0.97 > image.reward(())
    assert (words(()), words(("dilate", "erode"))) == ("none", "dilate, erode")


def test_the_best_fixed_sequence_is_the_one_with_the_highest_mean():
    bright = [known_image(number) for number in range(0, 12, 2)]
    sequences = best_sequences(bright, 2)
    best = next(iter(sequences))
    assert best[0] == "dilate"
    means = {sequence: np.mean([image.reward(sequence) for image in bright]) for sequence in sequences}
    assert sequences == pytest.approx(means)
    assert () in sequences
    assert sequences[best] >= max(sequences.values()) - 2e-4  # a longer one must gain


def test_the_threshold_with_the_highest_reward_is_found():
    images = [known_image(number) for number in range(4)]
    assert best_threshold(images) == 0.5  # all are equal
    for image in images:
        image.soft = np.where(image.soft > 0.5, np.float32(0.3), np.float32(0.1))
    assert best_threshold(images) in (0.1, 0.15, 0.2, 0.25)


def test_greedy_stops_where_nothing_is_better():
    image = known_image(0)
    found = greedy(image.reward, 5)
    assert image.reward(found) >= image.reward(DILATE)
    assert greedy(lambda sequence: -len(sequence), 5) == ()
    assert greedy(lambda sequence: float(sequence.count("close")), 3) == ("close",) * 3


def test_a_policy_chooses_from_nothing_a_threshold_the_best_for_all_and_the_best_of_some():
    found = find_sequences([known_image(number) for number in range(9)], 1)
    assert found[:3] == ((), ("threshold at 0.5",), DILATE)
    assert ERODE in found
    assert len(set(found)) == len(found) <= MOST_SEQUENCES + 1
