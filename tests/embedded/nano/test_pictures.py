from pathlib import Path

import numpy as np
import pytest

import rl_reward_network.embedded.datasets as embedded
from rl_reward_network.embedded.angiograms import LOOKS, render_series
from rl_reward_network.embedded.nano.pictures import SEED, Pictures, open_pictures
from rl_reward_network.embedded.nano.score import TEST_SCENES
from rl_reward_network.embedded.regions import make_scenes


def test_pictures_are_rendered_once_and_whole(tmp_path: Path, pictures: Pictures) -> None:
    again = open_pictures(tmp_path, angiograms=12, scenes=4, seed=0)
    for name in ("images", "parts", "scenes", "objects", "words"):
        np.testing.assert_array_equal(getattr(pictures, name), getattr(again, name))
    made = [path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*.npy"))]
    open_pictures(tmp_path, angiograms=12, scenes=4, seed=0)
    assert [path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*.npy"))] == made


def test_no_training_picture_is_in_the_embedded_data(tmp_path: Path) -> None:
    """NumPy pads short seeds with zeros, so different first numbers are what keeps the streams apart."""
    for seed in (0, embedded.SEED, TEST_SCENES[1]):  # the seeds that would coincide without the offset
        ours = open_pictures(tmp_path, angiograms=6, scenes=3, seed=seed)
        for number, look in enumerate(LOOKS):
            frame = next(render_series(np.random.default_rng([SEED + seed, number]), look, 1))
            np.testing.assert_array_equal(ours.images[number], frame.image)
            patient = next(render_series(np.random.default_rng([embedded.SEED, number, 0]), look, 1))
            assert not np.array_equal(ours.images[number], patient.image)
        for kept in (embedded.SEED, TEST_SCENES[1]):
            for scene, theirs in zip(ours.scenes, make_scenes(3, kept), strict=True):
                assert not np.array_equal(scene, theirs.image)


def test_numbers_that_are_too_small_are_refused(tmp_path: Path) -> None:
    for numbers in ((0, 1, 0), (1, 0, 0), (1, 1, -1)):
        with pytest.raises(ValueError, match="expected >= 1, >= 1, >= 0"):
            open_pictures(tmp_path, *numbers)
