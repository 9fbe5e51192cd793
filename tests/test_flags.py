"""Two levels of help, and which flags differ from their defaults."""

from dataclasses import dataclass, field
from typing import Annotated

import pytest
import tyro
from tyro.constructors import ConstructorRegistry

from rl_reward_network.flags import RARE, Rare, changed, check_at_least, common_flags, parse


@dataclass
class Inner:
    """Settings of a part."""

    size: int = 1
    """Common."""
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


def help_of(settings: type, capsys: pytest.CaptureFixture[str], registry: ConstructorRegistry | None = None) -> str:
    with pytest.raises(SystemExit):
        tyro.cli(settings, args=["--help"], registry=registry)
    return capsys.readouterr().out


def test_rare_flags_are_hidden_and_come_back(capsys: pytest.CaptureFixture[str]) -> None:
    hidden: set[tuple[type, str]] = set()
    short = help_of(Outer, capsys, common_flags(hidden))
    assert hidden == {(Inner, "slack"), (Inner, "turned_round"), (Outer, "depth")}
    assert "--size" in short
    assert "Common." in short
    assert "(default: 3)" in short
    assert not any(name in short for name in ("--slack", "--play", "--depth"))
    assert all(name in help_of(Outer, capsys) for name in ("--size", "--slack", "--play", "--depth"))


def test_rare_flags_are_parsed_as_all_others() -> None:
    assert tyro.cli(Outer, args=["--play", "0.25", "--depth", "2"]) == Outer(Inner(3, 0.25), 2)


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
