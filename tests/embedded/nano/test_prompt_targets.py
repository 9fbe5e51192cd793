import numpy as np
import pytest

from rl_reward_network.embedded.angiograms import BRANCH, CATHETER, LOOKS, THIN, TRUNK
from rl_reward_network.embedded.nano.prompt_targets import PARTS, PROMPT_TARGETS, SWELLING, TARGETS, target_mask
from rl_reward_network.env.prompts import PROMPTS

PART_MAP = np.zeros((32, 32), np.uint8)
PART_MAP[4:8] = TRUNK
PART_MAP[6:14, 10] |= BRANCH
PART_MAP[20, 4:9] = THIN
PART_MAP[:, 25] |= CATHETER


def test_the_table_has_a_known_target_for_every_prompt_and_look() -> None:
    assert set(PROMPT_TARGETS) == {(prompt, look) for prompt in PROMPTS for look in LOOKS}
    assert set(PROMPT_TARGETS.values()) <= set(TARGETS) == set(PARTS)


def test_every_look_has_a_prompt_that_fits_and_no_prompt_fits_every_look() -> None:
    fits = {look: {prompt for prompt in PROMPTS if PROMPT_TARGETS[prompt, look] == "tree"} for look in LOOKS}
    assert all(fits.values())
    assert not set.intersection(*fits.values())
    assert PROMPT_TARGETS[PROMPTS[0], "plain"] == "tree"


def test_one_prompt_fits_both_looks_without_a_gap() -> None:
    from rl_reward_network.embedded.datasets import NO_GAP_LOOKS

    assert any(all(PROMPT_TARGETS[prompt, look] == "tree" for look in NO_GAP_LOOKS) for prompt in PROMPTS)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("tree", (PART_MAP & (TRUNK | BRANCH | THIN)) > 0),
        ("main", (PART_MAP & (TRUNK | BRANCH)) > 0),
        ("main + catheter", (PART_MAP & (TRUNK | BRANCH | CATHETER)) > 0),
        ("tree + catheter", PART_MAP > 0),
        ("trunk", (PART_MAP & TRUNK) > 0),
        ("thin", (PART_MAP & THIN) > 0),
        ("nothing", np.zeros_like(PART_MAP, bool)),
    ],
)
def test_targets_are_unions_of_parts(target: str, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(target_mask(PART_MAP, target), expected)


def test_swollen_is_everything_within_the_swelling_along_the_axes_and_diagonals() -> None:
    dot = np.zeros((21, 21), np.uint8)
    dot[10, 10] = THIN
    rows, cols = np.mgrid[0:21, 0:21]
    np.testing.assert_array_equal(target_mask(dot, "swollen"), np.abs(rows - 10) + np.abs(cols - 10) <= SWELLING)
