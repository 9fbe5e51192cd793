import numpy as np
import pytest

from rl_reward_network.embedded import angiograms


def one(look: str, seed: int) -> angiograms.Angiogram:
    (frame,) = angiograms.render_series(np.random.default_rng([99, seed]), look, 1)
    return frame


def contrast(frame: angiograms.Angiogram) -> float:
    """Mean grey outside the tree less inside it, catheter left out."""
    inside, device = frame.parts & angiograms.TREE > 0, frame.parts & angiograms.CATHETER > 0
    return float(frame.image[~inside & ~device].mean() - frame.image[inside & ~device].mean())


def test_looks_differ_in_what_they_are_named_for() -> None:
    series = {look: [one(look, seed) for seed in range(4)] for look in angiograms.LOOKS}
    mean = {look: np.mean([contrast(frame) for frame in frames]) for look, frames in series.items()}
    assert mean["bright"] < -10 < 10 < mean["plain"]
    assert 0 < mean["faint"] < 0.6 * mean["plain"]
    thin = {look: np.mean([(f.parts & angiograms.THIN > 0).mean() for f in frames]) for look, frames in series.items()}
    assert thin["branching"] > 2 * thin["plain"]
    edges = {
        look: np.mean(
            [np.abs(np.diff(f.image.astype(float), axis=0))[(f.parts & angiograms.TREE > 0)[1:]].mean() for f in frames]
        )
        for look, frames in series.items()
    }
    assert edges["blurred"] < edges["plain"]


def test_frames_of_a_series_are_nearly_identical_and_series_are_not() -> None:
    first, second, third = angiograms.render_series(np.random.default_rng([5, 5]), "plain", 3)
    other = one("plain", 7)

    def overlap(a: angiograms.Angiogram, b: angiograms.Angiogram) -> float:
        one, two = a.parts & angiograms.TREE > 0, b.parts & angiograms.TREE > 0
        return 2 * (one & two).sum() / (one.sum() + two.sum())

    assert min(overlap(first, second), overlap(second, third)) > 0.8
    assert overlap(first, other) < 0.5
    assert not np.array_equal(first.image, second.image)  # noise and filling are new in each frame


def straight(row: float, radius: float, part: int = angiograms.TRUNK) -> angiograms.Tube:
    xs = np.arange(-10.0, 266.0)
    return angiograms.Tube(np.stack([xs, np.full_like(xs, row)], axis=1), np.full(len(xs), radius), part)


def test_depth_is_the_half_chord_squared_and_parts_keep_their_bits_where_they_cross():
    rows = np.arange(256)[:, None] * np.ones((1, 256))
    a, b = straight(100.0, 7.5), straight(104.0, 5.0)
    np.testing.assert_allclose(angiograms.depth([a]), np.clip(7.5**2 - (rows - 100) ** 2, 0, None), atol=1e-9)
    np.testing.assert_allclose(angiograms.depth([a, b]), np.maximum(angiograms.depth([a]), angiograms.depth([b])))
    whole = angiograms.depth([a])
    a.points[:, 0] += 0.5  # pixel centres now lie half way between points
    assert 0 <= (whole - angiograms.depth([a])).max() <= 0.25 + 1e-9  # half a pixel, squared
    bits = angiograms.part_map([straight(100.0, 6.0, angiograms.TRUNK), straight(104.0, 5.0, angiograms.CATHETER)])
    assert bits[96, 50] == angiograms.TRUNK
    assert bits[102, 50] == angiograms.TRUNK | angiograms.CATHETER
    assert bits[108, 50] == angiograms.CATHETER
    assert bits[120, 50] == 0


@pytest.mark.parametrize("offset", np.linspace(0, 0.99, 12))
def test_the_thinnest_mask_is_two_cells_of_the_mask_grid_wide(offset: float) -> None:
    """Wherever it lies between pixel centres, and 8 pixels are two cells of a 64 x 64 grid."""
    assert (
        angiograms.part_map([straight(100.0 + offset, angiograms.THINNEST_RADIUS)])[:, 100] > 0
    ).sum() >= 2 * 256 / 64


@pytest.mark.parametrize("seed", range(5))
def test_vessels_keep_clear_of_each_other_but_where_they_branch_off(seed: int) -> None:
    tree = angiograms.grow_tree(np.random.default_rng(seed), 4, 10)
    for index, tube in enumerate(tree[1:], start=1):
        gaps = []
        for other in tree[:index]:
            walls = tube.radius[:, None] + other.radius[None]
            gaps.append((np.linalg.norm(tube.points[:, None] - other.points[None], axis=2) - walls).min(axis=1))
        gaps = np.array(gaps)
        parent = int(gaps[:, 0].argmin())
        assert (
            np.delete(gaps, parent, axis=0).min(initial=np.inf) > angiograms.CLEARANCE - 3
        )  # every third point is compared
        assert gaps[parent, 40:].min(initial=np.inf) > angiograms.CLEARANCE - 3
