import numpy as np
import pytest

from rl_reward_network.embedded.angiograms import LOOKS
from rl_reward_network.embedded.nano.prompt_targets import BITS, READINGS, SWELLING, TABLE, target
from rl_reward_network.embedded.vessel_tree import BRANCH, CATHETER, THIN, TRUNK
from rl_reward_network.env.prompts import PROMPTS

PARTS = np.zeros((32, 32), np.uint8)
PARTS[4:8] = TRUNK
PARTS[6:14, 10] |= BRANCH
PARTS[20, 4:9] = THIN
PARTS[:, 25] |= CATHETER


def test_the_table_has_a_known_reading_for_every_prompt_and_look() -> None:
    assert set(TABLE) == {(prompt, look) for prompt in PROMPTS for look in LOOKS}
    assert set(TABLE.values()) <= set(READINGS) == set(BITS)


def test_every_look_has_a_prompt_that_fits_and_no_prompt_fits_every_look() -> None:
    fits = {look: {prompt for prompt in PROMPTS if TABLE[prompt, look] == "tree"} for look in LOOKS}
    assert all(fits.values())
    assert not set.intersection(*fits.values())
    assert TABLE[PROMPTS[0], "plain"] == "tree"


def test_one_prompt_fits_both_looks_without_a_gap() -> None:
    from rl_reward_network.embedded.datasets import NO_GAP_LOOKS

    assert any(all(TABLE[prompt, look] == "tree" for look in NO_GAP_LOOKS) for prompt in PROMPTS)


@pytest.mark.parametrize(
    ("reading", "expected"),
    [
        ("tree", (PARTS & (TRUNK | BRANCH | THIN)) > 0),
        ("main", (PARTS & (TRUNK | BRANCH)) > 0),
        ("main + catheter", (PARTS & (TRUNK | BRANCH | CATHETER)) > 0),
        ("tree + catheter", PARTS > 0),
        ("trunk", (PARTS & TRUNK) > 0),
        ("thin", (PARTS & THIN) > 0),
        ("nothing", np.zeros_like(PARTS, bool)),
    ],
)
def test_readings_are_unions_of_parts(reading: str, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(target(PARTS, reading), expected)


def test_swollen_is_everything_within_the_swelling_along_the_axes_and_diagonals() -> None:
    dot = np.zeros((21, 21), np.uint8)
    dot[10, 10] = THIN
    rows, cols = np.mgrid[0:21, 0:21]
    np.testing.assert_array_equal(target(dot, "swollen"), np.abs(rows - 10) + np.abs(cols - 10) <= SWELLING)
