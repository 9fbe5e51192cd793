from typing import Any

import numpy as np
import pytest

from rl_reward_network.data_import.sequences import frame_contrast, key_frames
from tests.conftest import tube_image


@pytest.mark.parametrize(
    ("count", "how", "most", "expected"),
    [
        (60, "first", 5, [0, 1, 2, 3, 4]),
        (60, "uniform", 5, [0, 15, 30, 44, 59]),
        (3, "first", 5, [0, 1, 2]),
        (3, "uniform", 5, [0, 1, 2]),
        (1, "uniform", 5, [0]),
        (9, "uniform", 1, [0]),
    ],
)
def test_first_and_uniform_frames(count: int, how: Any, most: int, expected: list[int]) -> None:
    assert key_frames(count, how, most=most) == expected


def test_contrast_frames_are_spread_over_the_filled_part() -> None:
    contrast = [0.1, 0.1, 0.5, 0.9, 1.0, 0.8, 0.7, 0.85, 0.6, 0.2]  # filled: 3 to 8, from 0.55 on
    assert key_frames(10, "contrast", contrast, most=3) == [4, 5, 7]
    assert key_frames(10, "contrast", contrast) == [4, 5, 6, 7, 8]
    assert key_frames(10, "contrast", contrast, most=1) == [4]


def test_a_single_good_frame_and_a_constant_sequence() -> None:
    assert key_frames(4, "contrast", [0, 0, 3, 0]) == [2]
    assert key_frames(6, "contrast", [1] * 6, most=3) == [0, 2, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5, "best"), r"key_frames is 'best', .*'uniform'"),
        ((0, "first"), r"0 frames"),
        ((5, "first", None, 0), r"at most 0"),
        ((5, "contrast"), r"0 values .* 5 frames"),
        ((2, "contrast", [1.0, float("nan")]), r"2 values \(1 finite\)"),
    ],
)
def test_bad_arguments_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        key_frames(*arguments)


def test_contrast_grows_with_the_agent_whatever_polarity_and_size() -> None:
    image, _ = tube_image(96, 3)
    grey = image.mean()
    fading = [(grey + share * (image - grey)).astype(np.uint8) for share in (0.1, 0.4, 0.7, 1.0)]
    values = [frame_contrast(frame) for frame in fading]
    assert values == sorted(values)
    assert values[-1] > 5 * values[0]
    assert frame_contrast(255 - fading[-1]) == pytest.approx(values[-1], rel=0.01)
    assert frame_contrast(fading[-1][..., 0]) == pytest.approx(values[-1], rel=0.01)
    large = np.kron(fading[-1], np.ones((8, 8, 1), np.uint8))
    small = np.kron(fading[-1], np.ones((4, 4, 1), np.uint8))
    assert frame_contrast(large) == pytest.approx(frame_contrast(small), rel=0.03)


def test_an_empty_frame_has_no_contrast_and_floats_are_refused() -> None:
    assert frame_contrast(np.full((40, 50), 90, np.uint8)) == pytest.approx(0, abs=1e-9)
    with pytest.raises(ValueError, match=r"uint8 .* got float64 \(4, 4\)"):
        frame_contrast(np.zeros((4, 4)))
