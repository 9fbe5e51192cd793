"""The command of the comparison: its flags, and the settings that it hands to GRPO."""

import pytest

from rl_reward_network.cli import compare
from rl_reward_network.flags import parse


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["quick", "--methods", "combined"], "give weights as well"),
        (["quick", "--seeds", "1", "1"], r"seeds are \[1, 1\]"),
        (["quick", "--seeds", "-1"], r"seeds are \[-1\]"),
        (["quick", "--gpu", "1"], "gpu is 1, expected 0 or -1"),
        (["quick", "--resume", "--run_folder", "none"], "none holds no run; leave --resume out"),
    ],
)
def test_flags_that_cannot_be_are_refused_early(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare.check(parse(compare.Args, words))


def test_methods_keep_their_order_and_seeds_follow_seed() -> None:
    plan = compare.check(parse(compare.Args, ["quick", "--methods", "fusion", "prompts", "--seed", "4"]))
    assert plan.groups == ("prompts", "fusion")
    assert plan.seeds == (4,)
