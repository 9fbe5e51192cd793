"""Nearly identical images are found across groups, and quickly."""

import time

import numpy as np
import pytest

from rl_reward_network.data_import import survey
from rl_reward_network.data_import.survey import suspected_leaks, thumbnail


def scene(number: int) -> np.ndarray:
    grid = np.random.default_rng(number).integers(0, 255, (40, 48, 3), dtype=np.uint8)
    return np.kron(grid, np.ones((4, 4, 1), np.uint8))


def test_a_thumbnail_has_mean_0_and_norm_1_whatever_brightness_and_depth() -> None:
    image = scene(0)
    small = thumbnail(image)
    assert small.shape == (survey.SIDE**2,)
    assert abs(small.mean()) < 1e-6
    assert np.linalg.norm(small) == pytest.approx(1, abs=1e-5)
    grey = image.mean(axis=2)
    assert small @ thumbnail((grey * 200).astype(np.uint16)) > 0.999
    assert small @ thumbnail((grey / 2 + 60).astype(np.uint8)) > 0.999
    assert not thumbnail(np.full((9, 9), 77, np.uint8)).any(), "a blank image is like no other"


def test_pairs_across_groups_alone_are_counted_the_most_similar_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "BLOCK", 2)  # pairs lie in one block and in two
    noise = np.random.default_rng(9).normal(0, 20, scene(0).shape)
    near = np.clip(scene(0) + noise, 0, 255).astype(np.uint8)
    small = np.stack([thumbnail(image) for image in (scene(0), scene(1), near, scene(2), scene(1))])
    count, pairs = suspected_leaks(small, ["a", "b", "c", "d", "e"])
    assert count == 2
    assert [pair[:2] for pair in pairs] == [(1, 4), (0, 2)]
    assert pairs[0][2] == pytest.approx(1, abs=1e-5)
    assert 0.97 < pairs[1][2] < 1
    assert suspected_leaks(small, ["a", "b", "a", "d", "e"])[0] == 1, "in one group it is no leak"
    assert suspected_leaks(small, ["a", "b", "c", "d", "e"], limit=1) == (2, pairs[:1])


def test_five_thousand_images_take_seconds() -> None:
    rng = np.random.default_rng(0)
    small = rng.standard_normal((5000, survey.SIDE**2), dtype=np.float32)
    small /= np.linalg.norm(small, axis=1, keepdims=True)
    small[4000] = small[17]
    start = time.process_time()
    assert suspected_leaks(small, [str(n) for n in range(5000)])[1][0][:2] == (17, 4000)
    assert time.process_time() - start < 20
