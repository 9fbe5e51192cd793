"""Pictures of more than 8 bit: which they are, and their grey window."""

import io
import json
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from rl_reward_network.bit_depth import (
    MAX_IMAGES,
    GreyWindow,
    grey_to_rgb,
    is_cut,
    is_deep,
    recorded_window,
    robust_window,
    window_for,
    window_of_bits,
    windows_of,
)


@pytest.mark.parametrize("black", [0, 500, 30_000, 61_000])
def test_contrast_is_full_wherever_the_values_begin(black: int) -> None:
    grey = np.linspace(black, black + 3500, 64 * 64).round().astype(np.uint16).reshape(64, 64)
    shown = grey_to_rgb(grey, robust_window(np.bincount(grey.ravel())))[..., 0]
    assert (shown.min(), shown.max()) == (0, 255)
    assert 73 < shown.std() < 75, "as of an even ramp, 255 / sqrt(12)"


def test_hot_and_dead_pixels_move_no_end_and_few_values_are_not_stretched():
    grey = np.full(10_000, 2000)
    grey[::2], grey[:5], grey[-5:] = 3000, 65535, 0
    assert robust_window(np.bincount(grey)) == GreyWindow(2000, 3000)
    assert robust_window(np.bincount([90, 100, 140])) == GreyWindow(0, 255)
    assert robust_window(np.bincount([1000, 1003])) == GreyWindow(1000, 1255)
    assert (grey_to_rgb(np.array([[1000, 1003]]), GreyWindow(1000, 1255))[0, :, 0] == [0, 3]).all()


def test_a_bit_depth_is_its_full_range() -> None:
    assert [window_of_bits(bits) for bits in (None, 8, 10, 12, 16)] == [
        None,
        *[GreyWindow(0, white) for white in (255, 1023, 4095, 65535)],
    ]
    for bits in (0, 7, 17):
        with pytest.raises(ValueError, match=f"bit_depth: got {bits}; give 8 to 16"):
            window_of_bits(bits)


def ramp(path: Path) -> np.ndarray:
    """Stored values that the name of the file tells: all `value`, with one hot pixel in 2000."""
    grey = np.full(2000, int(path.stem.split("_")[1]))
    grey[7] = 65535
    return grey.reshape(40, 50)


def named(*values: int) -> list[Path]:
    return [Path(f"{number}_{value}.png") for number, value in enumerate(values)]


def test_a_data_set_has_one_window_and_each_series_that_is_named_its_own() -> None:
    assert windows_of({}, None, ramp) == {}
    alone = dict.fromkeys(named(300, 1000, 600))
    assert windows_of(alone, None, ramp) == windows_of(dict(reversed(alone.items())), None, ramp)
    assert set(windows_of(alone, None, ramp).values()) == {GreyWindow(300, 1000)}
    assert set(windows_of(alone, 12, ramp).values()) == {GreyWindow(0, 4095)}
    series: dict[Path, str | None] = {
        path: f"s{number % 3}" for number, path in enumerate(named(1000, 2000, 3000, 4000, 5000, 6000))
    }
    own = [GreyWindow(low, low + 3000, True) for low in (1000, 2000, 3000)] * 2
    assert list(windows_of(series, None, ramp).values()) == own
    mixed = {**series, Path("a_900.png"): None}
    assert list(windows_of(mixed, None, ramp).values()) == [*own, GreyWindow(900, 1155)]


def test_few_images_are_read() -> None:
    read: list[Path] = []
    paths = named(*range(1000, 1000 + 2 * MAX_IMAGES + 1))
    for key, count in ((None, 43), ("series", 4)):
        windows_of(dict.fromkeys(paths, key), None, lambda path: read.append(path) or ramp(path))  # type: ignore[func-returns-value]
        assert len(read) == count
        read.clear()


def test_the_window_of_a_run_is_recorded_and_excludes_a_bit_depth() -> None:
    one, other, own = GreyWindow(1, 1000, True), GreyWindow(5, 3000, True), GreyWindow(2, 500)
    assert recorded_window({}) is recorded_window({"a": None}) is None
    assert recorded_window({"a": one, "b": other, "c": None}) == {"data set": [1, 1000]}, "the lower median"
    assert recorded_window({"a": one, "b": other, "c": own}) == {"data set": [2, 500]}
    saved = json.loads(json.dumps({"grey_levels": recorded_window({"c": GreyWindow(12, 987)})}))
    assert window_for(saved, None) == GreyWindow(12, 987)
    assert window_for({"grey_levels": {"data set": [3, 40], "0123456789ab": [0, 4000]}}, None) == GreyWindow(3, 40)
    assert window_for({"grey_levels": None}, None) is window_for({}, None) is None
    assert window_for({}, 12) == GreyWindow(0, 4095)
    with pytest.raises(ValueError, match=r"--bit_depth 12.*987"):
        window_for(saved, 12)


@pytest.mark.parametrize(
    ("pixels", "suffix", "deep", "cut"),
    [
        (np.zeros((9, 9), np.uint16), ".png", True, False),
        (np.zeros((9, 9), np.uint16), ".tif", True, False),
        (np.zeros((9, 9), np.float32), ".tif", True, False),
        (np.zeros((9, 9, 3), np.uint16), ".png", False, True),
        (np.zeros((9, 9, 4), np.uint16), ".png", False, True),
        (np.zeros((9, 9, 3), np.uint16), ".tif", False, True),
        (np.zeros((9, 9, 3), np.uint8), ".png", False, False),
        (np.zeros((9, 9), np.uint8), ".tif", False, False),
    ],
)
def test_the_depth_of_a_file(pixels: np.ndarray, suffix: str, deep: bool, cut: bool) -> None:
    image = Image.open(io.BytesIO(cv2.imencode(suffix, pixels)[1].tobytes()))
    assert (is_deep(image), is_cut(image)) == (deep, cut)


@pytest.mark.parametrize("mode", ["I;16", "I;16L", "I;16B", "I", "F"])
def test_the_depth_of_a_picture_in_memory(mode: str) -> None:
    assert is_deep(Image.new(mode, (9, 9)))
    assert not is_cut(Image.new(mode, (9, 9)))
