import numpy as np
import pytest

from rl_reward_network.embedded.angiograms import (
    BRANCH,
    CATHETER,
    LOOKS,
    SIDE,
    THIN,
    TREE,
    TRUNK,
    Angiogram,
    render_series,
)


def one(look: str, seed: int) -> Angiogram:
    (frame,) = render_series(np.random.default_rng([99, seed]), look, 1)
    return frame


@pytest.mark.parametrize("look", LOOKS)
def test_frames_have_a_tree_and_a_catheter_only_where_the_look_says_so(look: str) -> None:
    frame = one(look, 0)
    assert frame.image.shape == frame.parts.shape == (SIDE, SIDE)
    assert frame.image.dtype == frame.parts.dtype == np.uint8
    for part in (TRUNK, BRANCH, THIN):
        assert (frame.parts & part).any()
    assert bool((frame.parts & CATHETER).any()) == LOOKS[look].with_catheter
    assert 0.05 < (frame.parts & TREE > 0).mean() < 0.35


def contrast(frame: Angiogram) -> float:
    """Mean grey outside the tree less inside it, catheter left out."""
    inside, device = frame.parts & TREE > 0, frame.parts & CATHETER > 0
    return float(frame.image[~inside & ~device].mean() - frame.image[inside & ~device].mean())


def test_looks_differ_in_what_they_are_named_for() -> None:
    series = {look: [one(look, seed) for seed in range(4)] for look in LOOKS}
    mean = {look: np.mean([contrast(frame) for frame in frames]) for look, frames in series.items()}
    assert mean["bright"] < -10 < 10 < mean["plain"]
    assert 0 < mean["faint"] < 0.6 * mean["plain"]
    thin = {look: np.mean([(f.parts & THIN > 0).mean() for f in frames]) for look, frames in series.items()}
    assert thin["branching"] > 2 * thin["plain"]
    edges = {
        look: np.mean([np.abs(np.diff(f.image.astype(float), axis=0))[(f.parts & TREE > 0)[1:]].mean() for f in frames])
        for look, frames in series.items()
    }
    assert edges["blurred"] < edges["plain"]


def test_a_catheter_is_darker_than_any_vessel() -> None:
    frame = one("catheter", 1)
    device = (frame.parts & CATHETER > 0) & (frame.parts & TREE == 0)
    assert device.sum() > 500
    assert frame.image[device].mean() < frame.image[frame.parts & TREE > 0].mean() - 20


def test_frames_of_a_series_are_nearly_identical_and_series_are_not() -> None:
    first, second, third = render_series(np.random.default_rng([5, 5]), "plain", 3)
    other = one("plain", 7)

    def overlap(a: Angiogram, b: Angiogram) -> float:
        one, two = a.parts & TREE > 0, b.parts & TREE > 0
        return 2 * (one & two).sum() / (one.sum() + two.sum())

    assert min(overlap(first, second), overlap(second, third)) > 0.8
    assert overlap(first, other) < 0.5
    assert not np.array_equal(first.image, second.image)  # noise and filling are new in each frame


def test_equal_generators_render_equal_frames() -> None:
    for look in ("blurred", "catheter"):
        first, again = one(look, 3), one(look, 3)
        np.testing.assert_array_equal(first.image, again.image)
        np.testing.assert_array_equal(first.parts, again.parts)
