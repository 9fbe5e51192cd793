"""Two levels of help in groups, and which flags differ from their defaults."""

from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import Annotated

import pytest
import tyro

from rl_reward_network.cli.main import COMMANDS
from rl_reward_network.flags import GROUP_OF, RARE, Rare, changed, check_at_least, flags_of, help_rules, parse


@dataclass
class Inner:
    """Settings of a part."""

    size: int = 1
    """Common, in
    two lines."""
    max_labelled: int = 0
    """Of the group that the table names."""
    slack: Annotated[float, tyro.conf.arg(aliases=["--play"]), RARE] = 0.5
    """Rare, with another name."""
    turned_round: Rare[bool | None] = None
    """Left to a preset."""


@dataclass(frozen=True)
class Outer:
    """A command."""

    inner: Annotated[Inner, tyro.conf.arg(name="")] = field(default_factory=lambda: Inner(size=3))
    depth: Rare[int | None] = None
    """Rare."""


@dataclass(frozen=True)
class Switched:
    """A command."""

    on: bool = False
    """Off by default."""


def help_of(capsys: pytest.CaptureFixture[str], hidden: set[str] | None = None) -> str:
    rules, config = help_rules(Outer, hidden), (tyro.conf.OmitArgPrefixes,)
    with pytest.raises(SystemExit):
        tyro.cli(Outer, args=["--help"], registry=rules, config=config, use_underscores=True)
    return capsys.readouterr().out


def test_rare_flags_are_hidden_and_come_back_each_in_its_group_under_one_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hidden: set[str] = set()
    short, whole = help_of(capsys, hidden), help_of(capsys)
    assert hidden == {"slack", "turned_round", "depth"}
    assert "Common, in two lines. (default: 3)" in short
    assert not any(name in short for name in ("--slack", "--depth"))
    assert all(name in whole for name in ("--size", "--slack", "--depth", "--turned_round"))
    assert "--play" not in whole
    data, training = whole.partition(" data options ")[2].split(" training options ")
    assert ("--max_labelled" in data, "--size" in data, "--size" in training) == (True, False, True)


def test_every_name_in_the_table_of_groups_is_a_flag_or_a_field() -> None:
    args = [import_module(f"rl_reward_network.cli.{command}").Args for command in COMMANDS]
    names = {name for one in args for name in (*flags_of(one), *(field.name for field in fields(one)))}
    assert GROUP_OF.keys() <= names


def test_rare_flags_are_parsed_as_all_others() -> None:
    for words in ("--play 0.25 --depth 2", "--play=0.25 --depth=2", "--slack 0.25 --depth 2"):
        assert parse(Outer, words.split()) == Outer(Inner(3, slack=0.25), 2)


def test_changed_flags_are_named() -> None:
    assert changed(Inner(), "size", "slack") == []
    assert changed(Inner(size=2, slack=1.0), "slack", "size") == ["--slack", "--size"]
    assert changed(Inner(size=2, slack=1.0), "slack") == ["--slack"]


def test_counts_are_one_or_more_or_not_given() -> None:
    check_at_least(Inner(size=1), 1, "size")
    check_at_least(Outer(), 1, "depth")
    for value in (0, -3):
        with pytest.raises(ValueError, match=f"size is {value}, expected 1 or more"):
            check_at_least(Inner(size=value), 1, "size")


def test_a_switch_can_be_turned_off_and_the_last_word_counts() -> None:
    words = ("", "--on", "--on --on False", "--on False --on")
    assert [parse(Switched, one.split()).on for one in words] == [False, True, False, True]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", None),
        ("--turned_round", True),
        ("--turned-round --depth 3", True),
        ("--turned_round False", False),
        ("--turned_round=False", False),
        ("--depth 3 --turned_round", True),
    ],
)
def test_a_switch_that_a_preset_may_turn_needs_no_value(words: str, expected: bool | None) -> None:
    assert parse(Outer, words.split()).inner.turned_round == expected
