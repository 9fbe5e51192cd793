import numpy as np
import pytest

from rl_reward_network.report.topology import betti_errors, betti_numbers


def mask_of(*lines):
    return np.array([[pixel == "#" for pixel in line] for line in lines])


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (("....", "...."), (0, 0)),
        (("####", "####"), (1, 0)),
        (("#.#.", "....", "#.##"), (4, 0)),
        (("#...", ".#..", "..##"), (1, 0)),  # a diagonal line is connected
        ((".#.", "#.#", ".#."), (1, 1)),  # and closes a loop
        (("###", "#.#", "###"), (1, 1)),
        (("###", "#.#", "#.#"), (1, 0)),  # open at the border: no hole
        (("#####", "#.#.#", "##.##", "#####"), (1, 3)),  # three holes that touch at corners alone
        (("#######", "#.....#", "#.###.#", "#.#.#.#", "#.###.#", "#.....#", "#######"), (2, 2)),
    ],
)
def test_numbers_of_drawings(lines, expected):
    assert betti_numbers(mask_of(*lines)) == expected


def flood(open_pixels, steps):
    """Number of components of a set of pixels, by flood fill."""
    left, count = set(open_pixels), 0
    while left:
        count += 1
        stack = [left.pop()]
        while stack:
            row, column = stack.pop()
            for step in steps:
                neighbour = (row + step[0], column + step[1])
                if neighbour in left:
                    left.remove(neighbour)
                    stack.append(neighbour)
    return count


def test_random_masks_agree_with_a_flood_fill_and_with_euler():
    rng = np.random.default_rng(0)
    cross = [(0, 1), (1, 0), (0, -1), (-1, 0)]
    square = [*cross, (1, 1), (1, -1), (-1, 1), (-1, -1)]
    for _ in range(60):
        mask = rng.random((9, 12)) < rng.uniform(0.1, 0.9)
        foreground = set(zip(*np.nonzero(mask), strict=True))
        padded = {(row, column) for row in range(-1, 10) for column in range(-1, 13)} - foreground
        numbers = betti_numbers(mask)
        assert numbers == (flood(foreground, square), flood(padded, cross) - 1)
        assert numbers[0] - numbers[1] == euler(mask)


def euler(mask):
    """Corners less edges plus faces of the closed pixels, in which diagonal neighbours share a corner."""
    corners, edges = set(), set()
    for row, column in zip(*np.nonzero(mask), strict=True):
        corners |= {(row + i, column + j) for i in (0, 1) for j in (0, 1)}
        edges |= {("h", row, column), ("h", row + 1, column), ("v", row, column), ("v", row, column + 1)}
    return len(corners) - len(edges) + int(mask.sum())


def test_errors_are_absolute_and_per_pair():
    ring, dots, empty = mask_of("###.", "#.#.", "###."), mask_of("#..#", "....", "#..."), np.zeros((3, 4), dtype=bool)
    components, holes = betti_errors(np.stack([ring, dots, empty, ring]), np.stack([dots, ring, ring, ring]))
    assert components.dtype == holes.dtype == np.float64
    assert components.tolist() == [2, 2, 1, 0]
    assert holes.tolist() == [1, 1, 1, 0]
    none = np.zeros((0, 4, 4), dtype=bool)
    assert [len(errors) for errors in betti_errors(none, none)] == [0, 0]


def test_other_shapes_and_types_are_refused():
    masks = np.zeros((2, 4, 4), dtype=bool)
    for bad in (masks[:1], masks[0], masks.astype(float)):
        with pytest.raises(ValueError, match="masks must"):
            betti_errors(masks, bad)
