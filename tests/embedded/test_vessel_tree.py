import numpy as np
import pytest

from rl_reward_network.embedded.angiograms import (
    BRANCH,
    CATHETER,
    CLEARANCE,
    THIN,
    THINNEST_RADIUS,
    TRUNK,
    Tube,
    catheter,
    depth,
    grow_tree,
    moved,
    pacing_lead,
    part_map,
    turned,
)


def straight(row: float, radius: float, part: int = TRUNK) -> Tube:
    """A tube from edge to edge along a row."""
    xs = np.arange(-10.0, 266.0)
    return Tube(np.stack([xs, np.full_like(xs, row)], axis=1), np.full(len(xs), radius), part)


def test_depth_is_the_half_chord_squared_of_a_round_tube() -> None:
    rows = np.arange(256)[:, None] * np.ones((1, 256))
    expected = np.clip(7.5**2 - (rows - 100) ** 2, 0, None)
    np.testing.assert_allclose(depth([straight(100.0, 7.5)]), expected, atol=1e-9)


def test_between_points_the_tube_is_a_little_thinner_at_most() -> None:
    shifted = straight(100.0, 7.5)
    shifted.points[:, 0] += 0.5  # pixel centres now lie half way between points
    loss = depth([straight(100.0, 7.5)]) - depth([shifted])
    assert 0 <= loss.max() <= 0.25 + 1e-9  # half a pixel, squared


def test_overlapping_tubes_are_a_union() -> None:
    a, b = straight(100.0, 7.5), straight(104.0, 5.0)
    np.testing.assert_allclose(depth([a, b]), np.maximum(depth([a]), depth([b])))


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


def test_equal_generators_grow_equal_trees_and_others_do_not() -> None:
    first, same, other = (grow_tree(np.random.default_rng(seed), 4, 5) for seed in (3, 3, 4))
    assert all((a.points == b.points).all() and a.part == b.part for a, b in zip(first, same, strict=True))
    assert not np.array_equal(first[0].points[:50], other[0].points[:50])


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
