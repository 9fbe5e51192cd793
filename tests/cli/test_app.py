"""How every command starts: as a module or as a file, and with its flags looked at first."""

import runpy
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from rl_reward_network.cli import app as cli

ROOT = Path(__file__).resolve().parents[2]
AS_FILES = ("train_sa2va_rl", "finetune_sa2va_with_rl", "train_reward_network", "evaluate_rl_finetuned_sa2va")


@dataclass(frozen=True)
class Args:
    """A command."""

    size: int = 1
    """Its only flag."""


def refused(args: Args) -> None:
    raise ValueError(f"size is {args.size}")


def called(*flags: str) -> list[Args]:
    main: list[Args] = []
    cli.run(main.append, Args, "sa2va-rl command", flags, refused)
    return main


def test_only_the_check_runs_where_the_shell_files_ask_for_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called("--size", "3") == [Args(3)]
    monkeypatch.setenv(cli.ONLY_CHECK, "1")
    with pytest.raises(SystemExit) as stop:
        called("--size", "3")
    assert (stop.value.code, capsys.readouterr().err) == (2, "error: size is 3\n")


def test_the_hint_names_what_can_be_typed_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for environment, hint in (("", "sa2va-rl command --help"), ("bash run_x.sh", "bash run_x.sh --help")):
        monkeypatch.setenv(cli.CALLED_AS, environment)
        with pytest.raises(SystemExit):
            called("--syze", "3")
        assert hint in " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.parametrize("name", AS_FILES)
def test_commands_run_as_files_from_any_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python scripts/x.py`: the file's own folder is on the path, ours is not."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "__init__.py").write_text("raise SystemExit('a stranger')")
    monkeypatch.chdir(tmp_path)
    file = ROOT / "scripts" / f"{name}.py"
    path = [str(ROOT / "scripts"), *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT)]
    monkeypatch.setattr(sys, "path", path)
    monkeypatch.setattr(sys, "argv", [str(file), "--help"])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(file), run_name="__main__")
    assert stop.value.code == 0
    assert "--model-path" in capsys.readouterr().out
    assert sys.path[0] == str(ROOT)
