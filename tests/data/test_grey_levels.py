import json

import numpy as np
import pytest
from PIL import Image

from rl_reward_network.data import images
from rl_reward_network.data.images import DATA_SET, given_levels, measured_levels, saved_levels
from rl_reward_network.depth import Levels


@pytest.fixture
def write(tmp_path):
    def write(name, value, hot=65535):
        grey = np.full((40, 50), value, dtype=np.uint16)
        grey[7, 7] = hot  # one pixel in 2000
        Image.fromarray(grey).save(tmp_path / name)
        return tmp_path / name

    return write


def test_a_data_set_has_one_level_that_hot_pixels_do_not_move(write):
    images = {write(f"{n}.png", value): DATA_SET for n, value in enumerate([300, 1000, 600])}
    assert measured_levels(images) == {DATA_SET: (300, 1000)}
    assert measured_levels(dict(reversed(images.items()))) == {DATA_SET: (300, 1000)}


def test_series_have_their_own_and_their_median_is_the_data_sets(write):
    images = {write(f"{n}.png", 1000 * (n + 1)): f"s{n % 3}" for n in range(6)}
    assert measured_levels(images) == {
        DATA_SET: (2000, 5000),
        "s0": (1000, 4000),
        "s1": (2000, 5000),
        "s2": (3000, 6000),
    }
    mixed = images | {write("alone.png", 900): DATA_SET}
    assert measured_levels(mixed) == {**measured_levels(images), DATA_SET: (900, 1155)}


def test_without_deep_images_there_is_nothing(write):
    assert measured_levels({}) == {}


def test_few_images_are_read(write, monkeypatch):
    measured = []

    def histogram(path):
        measured.append(path.name)
        return np.bincount([1000])

    monkeypatch.setattr(images, "grey_histogram", histogram)
    monkeypatch.setattr(images, "MAX_IMAGES", 8)
    names = [write(f"{n:03d}.png", 1000) for n in range(33)]
    measured_levels(dict.fromkeys(names, DATA_SET))
    assert sorted(measured) == [f"{n:03d}.png" for n in range(0, 33, 5)]
    measured.clear()
    measured_levels(dict.fromkeys(names, "series"))
    assert len(measured) == 4


def test_a_damaged_image_is_named(write):
    path = write("x.png", 1000)
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(ValueError, match=r"x\.png: not a readable image"):
        measured_levels({path: DATA_SET})


def test_levels_of_a_run_go_before_bits(write):
    assert given_levels(None, None) is None
    assert given_levels(10, None) == {DATA_SET: (0, 1023)}
    saved = {DATA_SET: Levels(3, 700)}
    assert given_levels(10, saved) == given_levels(None, saved) == saved
    with pytest.raises(ValueError, match="bit_depth: got 3; give 8 to 16"):
        given_levels(3, None)


def test_levels_of_a_run_are_read_back_those_of_version_0_11_with_black_at_0():
    levels = {DATA_SET: Levels(30, 4000)}
    assert saved_levels(json.loads(json.dumps({"grey_levels": levels}))) == levels
    assert saved_levels({"white_levels": {DATA_SET: 4000}}) == {DATA_SET: Levels(0, 4000)}
    assert saved_levels({"white_levels": None}) is saved_levels({"grey_levels": None}) is saved_levels({}) is None
