"""Operations on masks: each in closed form, and on masks where nothing can be done."""

import cv2
import numpy as np
import pytest
from scipy.special import expit, logit

from rl_reward_network.env.operations import OPERATIONS, STOP, GuideImage, apply_operation

SIZE = 64


def guide(image: np.ndarray | None = None) -> GuideImage:
    return GuideImage(np.full((SIZE, SIZE, 3), 128, np.uint8) if image is None else image)


def soft_of(mask: np.ndarray) -> np.ndarray:
    return np.where(mask, np.float32(0.9), np.float32(0.1))


def square(top: int, left: int, side: int) -> np.ndarray:
    mask = np.zeros((SIZE, SIZE), bool)
    mask[top : top + side, left : left + side] = True
    return mask


def after(name: str, soft: np.ndarray, image: np.ndarray | None = None) -> np.ndarray:
    return apply_operation(name, guide(image), soft) > 0.5


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("mask", [np.zeros((SIZE, SIZE), bool), np.ones((SIZE, SIZE), bool)], ids=["empty", "full"])
def test_empty_and_full_masks_stay_soft_masks(name: str, mask: np.ndarray) -> None:
    soft = mask.astype(np.float32)
    result = apply_operation(name, guide(), soft)
    assert result.shape == soft.shape
    assert result.dtype == np.float32
    assert np.isfinite(result).all()
    assert result.min() >= 0
    assert result.max() <= 1
    assert ((result > 0.5) == mask).all()


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_given_mask_does_not_change(name: str) -> None:
    soft = np.random.default_rng(0).random((SIZE, SIZE)).astype(np.float32)
    copy = soft.copy()
    apply_operation(name, guide(), soft)
    assert (soft == copy).all()


def test_thresholds_shift_the_logit_and_undo_each_other() -> None:
    soft = np.linspace(0.01, 0.99, SIZE * SIZE, dtype=np.float32).reshape(SIZE, SIZE)
    up = apply_operation("threshold up", guide(), soft)
    assert up == pytest.approx(expit(logit(soft) - 1), abs=1e-3)
    assert apply_operation("threshold down", guide(), up) == pytest.approx(soft, abs=2e-3)


def test_morphology_is_that_of_opencv_on_the_mask() -> None:
    mask = np.random.default_rng(1).random((SIZE, SIZE)) > 0.6
    element = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (3, 3))
    kinds = {"open": cv2.MORPH_OPEN, "close": cv2.MORPH_CLOSE, "dilate": cv2.MORPH_DILATE, "erode": cv2.MORPH_ERODE}
    for name, kind in kinds.items():
        expected = cv2.morphologyEx(mask.astype(np.uint8), kind, element) > 0
        assert (after(name, soft_of(mask)) == expected).all(), name


def test_components() -> None:
    large, small, dot = square(5, 5, 20), square(40, 40, 6), square(55, 5, 1)
    soft = soft_of(large | small | dot)
    assert (after("keep the largest", soft) == large).all()
    assert (after("drop small components", soft) == (large | small)).all()  # the dot is below 0.1 % of the image


def test_a_dropped_component_takes_its_rim_with_it() -> None:
    large, small = square(5, 5, 20), square(45, 45, 6)
    soft = np.where(square(44, 44, 8), np.float32(0.4), np.float32(0.01))
    soft[large | small] = 0.9
    kept = apply_operation("keep the largest", guide(), soft)
    assert ((apply_operation("threshold down", guide(), kept) > 0.5) == large).all()


def test_holes_are_filled_but_not_bays() -> None:
    ring = square(5, 5, 20) & ~square(15, 15, 4)
    bay = square(40, 40, 20) & ~square(40, 45, 4)  # open at the top
    loop = square(5, 35, 20) & ~square(10, 40, 10)  # above 0.5 % of the image
    assert (after("fill holes", soft_of(ring | bay | loop)) == (square(5, 5, 20) | bay | loop)).all()


def test_a_gap_is_bridged_along_a_ridge_of_the_masks_own_polarity() -> None:
    rows = np.arange(256)[:, None]
    grey = 160 - 90 * np.exp(-((rows - 128.0) ** 2) / 8) * np.ones((1, 256))  # a dark line
    image = np.repeat(grey[..., None], 3, axis=2).astype(np.uint8)
    mask = np.zeros((256, 256), bool)
    mask[126:131, 20:120] = mask[126:131, 140:230] = True
    result = apply_operation("bridge gaps along ridges", GuideImage(image), soft_of(mask)) > 0.5
    assert result[128, 120:140].all()
    assert (result & ~mask)[:120].sum() == (result & ~mask)[137:].sum() == 0  # nothing is added elsewhere
    plain = np.full_like(image, 128)
    assert ((apply_operation("bridge gaps along ridges", GuideImage(plain), soft_of(mask)) > 0.5) == mask).all()


def test_smoothing_follows_edges_of_the_image() -> None:
    """A ragged border moves to the edge of the image; without an edge it is only blurred."""
    image = np.zeros((SIZE, SIZE, 3), np.uint8)
    image[:, 32:] = 255
    mask = np.zeros((SIZE, SIZE), bool)
    mask[:, 32:] = True
    ragged = mask.copy()
    ragged[::4, 30:32] = True
    assert (after("smooth along edges", soft_of(ragged), image) == mask).mean() > 0.999


def test_a_larger_image_is_treated_alike() -> None:
    mask = np.zeros((512, 512), bool)
    mask[100:120, 50:400] = True
    small = mask[::2, ::2]
    for name in ("erode", "dilate"):
        large = apply_operation(name, GuideImage(np.zeros((512, 512, 3), np.uint8)), soft_of(mask)) > 0.5
        half = apply_operation(name, GuideImage(np.zeros((256, 256, 3), np.uint8)), soft_of(small)) > 0.5
        assert large.mean() == pytest.approx(half.mean(), rel=0.02)


def test_stop_changes_nothing_and_unknown_names_fail() -> None:
    soft = soft_of(square(5, 5, 5))
    assert apply_operation(STOP, guide(), soft) is soft
    with pytest.raises(KeyError, match="sharpen"):
        apply_operation("sharpen", guide(), soft)
