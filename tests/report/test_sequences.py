"""Per-frame Dice and stability over time, by hand."""

import numpy as np
import pytest

from rl_reward_network.report.sequences import FrameMeasures, measure_frames, summarise_frames


def columns(first: int, last: int) -> np.ndarray:
    """A mask, bool (2, 10), of the columns first to last - 1."""
    mask = np.zeros((2, 10), dtype=bool)
    mask[:, first:last] = True
    return mask


def test_numbers_of_a_sequence_by_hand() -> None:
    masks = [columns(0, 4), columns(2, 6), columns(2, 6), columns(0, 0)]
    truths = [columns(0, 4), columns(0, 6), None, columns(0, 1)]
    contrast = [1.0, 1.04, 1.2, 1.19]  # the second and third frame are not alike
    first, second, third, last = measure_frames(zip(masks, truths, strict=True), contrast)
    assert first == FrameMeasures(0.4, 1.0, None, None)
    of_truth = pytest.approx(2 * 4 / (4 + 6)), pytest.approx(2 / 6), pytest.approx(4 / 6)
    assert second == FrameMeasures(0.4, *of_truth, 0.5, pytest.approx(0.75))
    assert third == FrameMeasures(0.4, None, 1.0, None)
    assert last == FrameMeasures(0.0, 0.0, 0.0, None, 0.0, pytest.approx(104**0.5)), "the frame before has no truth"
    summary = summarise_frames([first, second, third, last])
    assert summary == {
        "frames": 4,
        "share": pytest.approx(0.3),
        "stability": pytest.approx((1 / 3 + 1 + 0) / 3),
        "annotated": 3,
        "dice": pytest.approx((1 + 0.8 + 0) / 3),
        "true_stability": pytest.approx(2 / 3),
        "stability_there": pytest.approx(1 / 3),
        "alike_pairs": 2,
        "flicker_dice": pytest.approx(0.25),
        "flicker_pixels": pytest.approx((0.75 + 104**0.5) / 2),
    }


def test_one_frame_without_truth_has_neither_dice_nor_stability() -> None:
    summary = summarise_frames(list(measure_frames([(columns(0, 5), None)], [1.0])))
    missing = ("stability", "dice", "true_stability", "stability_there", "flicker_dice", "flicker_pixels")
    assert summary == {
        **dict.fromkeys(missing),
        **{"frames": 1, "share": 0.5, "annotated": 0, "alike_pairs": 0},
    }


def test_empty_masks_that_stay_empty_are_stable() -> None:
    _, second = measure_frames([(columns(0, 0), columns(0, 0))] * 2, [1.0, 1.0])
    assert second == FrameMeasures(0.0, 1.0, 1.0, 1.0, 1.0, 0.0)


def test_a_truth_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one \(N, H, W\) shape"):
        list(measure_frames([(columns(0, 1), np.zeros((3, 10), dtype=bool))], [1.0]))
