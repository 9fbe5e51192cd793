import numpy as np
import pytest

from rl_reward_network.embedded.angiograms import (
    BRANCH,
    CATHETER,
    CLEARANCE,
    LOOKS,
    SIDE,
    THIN,
    THINNEST_RADIUS,
    TREE,
    TRUNK,
    Angiogram,
    Tube,
    catheter,
    depth,
    grow_tree,
    moved,
    pacing_lead,
    part_map,
    render_series,
    turned,
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


def straight(row: float, radius: float, part: int = TRUNK) -> Tube:
    """A tube from edge to edge along a row."""
    xs = np.arange(-10.0, 266.0)
    return Tube(np.stack([xs, np.full_like(xs, row)], axis=1), np.full(len(xs), radius), part)


def test_depth_is_the_half_chord_squared_of_a_round_tube_and_tubes_are_a_union() -> None:
    rows = np.arange(256)[:, None] * np.ones((1, 256))
    a, b = straight(100.0, 7.5), straight(104.0, 5.0)
    np.testing.assert_allclose(depth([a]), np.clip(7.5**2 - (rows - 100) ** 2, 0, None), atol=1e-9)
    np.testing.assert_allclose(depth([a, b]), np.maximum(depth([a]), depth([b])))
    whole = depth([a])
    a.points[:, 0] += 0.5  # pixel centres now lie half way between points
    assert 0 <= (whole - depth([a])).max() <= 0.25 + 1e-9  # half a pixel, squared


def test_parts_keep_their_bits_where_they_cross() -> None:
    bits = part_map([straight(100.0, 6.0, TRUNK), straight(104.0, 5.0, CATHETER)])
    assert bits[96, 50] == TRUNK
    assert bits[102, 50] == TRUNK | CATHETER
    assert bits[108, 50] == CATHETER
    assert bits[120, 50] == 0


@pytest.mark.parametrize("offset", np.linspace(0, 0.99, 12))
def test_the_thinnest_mask_is_two_cells_of_the_mask_grid_wide(offset: float) -> None:
    """Wherever it lies between pixel centres, and 8 pixels are two cells of a 64 x 64 grid."""
    bits = part_map([straight(100.0 + offset, THINNEST_RADIUS)])
    assert (bits[:, 100] > 0).sum() >= 2 * 256 / 64


@pytest.mark.parametrize("seed", range(5))
def test_parts_differ_in_calibre_and_none_is_thinner_than_the_thinnest(seed: int) -> None:
    tree = grow_tree(np.random.default_rng(seed), 4, 12)
    assert {tube.part for tube in tree} == {TRUNK, BRANCH, THIN}
    assert min(float(tube.radius.min()) for tube in tree) >= THINNEST_RADIUS
    by_part = {part: np.mean([tube.radius.mean() for tube in tree if tube.part == part]) for part in (1, 2, 4)}
    assert by_part[TRUNK] > by_part[BRANCH] > by_part[THIN]


@pytest.mark.parametrize("seed", range(5))
def test_vessels_keep_clear_of_each_other_but_where_they_branch_off(seed: int) -> None:
    tree = grow_tree(np.random.default_rng(seed), 4, 10)
    for index, tube in enumerate(tree[1:], start=1):
        gaps = []
        for other in tree[:index]:
            walls = tube.radius[:, None] + other.radius[None]
            distance = np.linalg.norm(tube.points[:, None] - other.points[None], axis=2) - walls
            gaps.append(distance.min(axis=1))
        gaps = np.array(gaps)
        parent = int(gaps[:, 0].argmin())
        assert np.delete(gaps, parent, axis=0).min(initial=np.inf) > CLEARANCE - 3  # every third point is compared
        assert gaps[parent, 40:].min(initial=np.inf) > CLEARANCE - 3


def test_a_catheter_ends_at_its_tip_and_leaves_the_picture() -> None:
    wire = catheter(np.random.default_rng(0), np.array([80.0, 70.0]), 0.8)
    assert np.linalg.norm(wire.points[0] - (80, 70)) <= 1.001
    assert not ((wire.points[-1] > 0) & (wire.points[-1] < 256)).all()
    assert len(set(wire.radius)) == 1


def test_a_pacing_lead_crosses_the_picture() -> None:
    for seed in range(8):
        lead = pacing_lead(np.random.default_rng(seed))
        inside = ((lead.points > 0) & (lead.points < 256)).all(axis=1)
        assert inside.sum() > 100
        assert not inside[0]
        assert not inside[-1]


def test_turning_is_rigid_and_movement_small() -> None:
    tree = grow_tree(np.random.default_rng(1), 3, 2)
    around = turned(tree, 0.7, flip=True)
    spread = [np.linalg.norm(np.diff(tube.points[::20], axis=0), axis=1) for tube in (tree[0], around[0])]
    np.testing.assert_allclose(spread[0], spread[1])
    beat = moved(tree, np.array([1.0, -1.0]), np.array([0.5, 0.5]))
    distance = np.linalg.norm(beat[0].points - tree[0].points, axis=1)
    assert 0 < distance.max() < 3
