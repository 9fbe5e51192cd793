"""Progress bars in a log and on a terminal."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tqdm import tqdm
from tqdm.auto import tqdm as of_transformers

from rl_reward_network.cli import progress

ROOT = Path(__file__).resolve().parents[2]


class Clock:
    """Time that passes when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("kind", [tqdm, of_transformers])
def test_a_log_gets_a_line_every_half_minute(
    kind: type, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(progress.time, "monotonic", clock)
    with progress.calm_bars():
        bar = kind(total=1000, desc="PPO", mininterval=0)
        for _ in range(1000):  # 100 seconds; a postfix draws at once, whatever the interval is
            clock.now += 0.1
            bar.set_postfix(reward=0.5)
            bar.update()
        list(kind(range(1000), desc="inner", leave=False, mininterval=0))
        bar.close()
    written = capsys.readouterr().err
    lines = written.splitlines()
    assert [line.split("|")[0].strip() for line in lines] == ["PPO:  30%", "PPO:  60%", "PPO:  90%"]
    assert written.isascii()
    assert "\r" not in written
    list(kind(range(3), mininterval=0))
    assert "\r" in capsys.readouterr().err, "outside of a command, bars are the caller's"


def test_bars_move_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress.calm_bars():
        list(tqdm(range(3), desc="PPO", mininterval=0))
    assert capsys.readouterr().err.count("\r") >= 4


def test_bars_of_a_shell_file_move_on_its_terminal_and_are_in_no_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("SA2VA_RL_TERMINAL", str(tmp_path / "tty"))
    with progress.calm_bars():
        list(tqdm(range(3), desc="PPO", mininterval=0))
    assert "100%" in (tmp_path / "tty").read_text()
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("SA2VA_RL_TERMINAL", str(tmp_path / "gone" / "tty"))
    with progress.calm_bars():
        list(tqdm(range(3), desc="PPO", mininterval=0))
    assert capsys.readouterr().err == "", "seconds need no line in a log"


def test_every_command_calms_them(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "rl_reward_network.cli", "data", "--folder", str(tmp_path), "--regions"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "\r" not in done.stderr
    assert "%|" not in done.stderr
