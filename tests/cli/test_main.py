"""`sa2va-rl`: the overview, and how long the help of each command takes."""

import getpass
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rl_reward_network import __version__
from rl_reward_network.cli.main import COMMANDS, WANTS, main

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 2  # of processor time
HEAVY = {"torch", "transformers", "datasets", "stable_baselines3", "matplotlib", "skimage"}  # a second or more each
HELP = f"""
import json, sys, time
from rl_reward_network.cli.main import main
try:
    main([sys.argv[1], "--help"])
except SystemExit as stop:
    print(json.dumps([stop.code, time.process_time(), sorted({HEAVY!r} & sys.modules.keys())]))
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}


def python(*words: str) -> str:
    command = [sys.executable, *words]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_fast_and_loads_nothing_heavy(command: str) -> None:
    *text, report = python("-c", HELP, command).splitlines()
    code, seconds, heavy = json.loads(report)
    assert (code, heavy) == (0, [])
    assert seconds < SECONDS
    assert text[0].startswith(f"usage: sa2va-rl {command} ")


def test_the_help_of_the_module_names_the_module() -> None:
    """As torchrun starts it: `-m rl_reward_network.cli grpo`."""
    assert python("-m", "rl_reward_network.cli", "data", "--help").startswith(
        "usage: python -m rl_reward_network.cli data "
    )


def test_importing_the_package_registers_the_environment_and_is_fast() -> None:
    code = f"""
import json, sys, time, rl_reward_network
seconds, heavy = time.process_time(), sorted({HEAVY!r} & sys.modules.keys())
import gymnasium
print(json.dumps([seconds, heavy, rl_reward_network.ENV_ID in gymnasium.registry, rl_reward_network.__version__]))
"""
    seconds, *facts = json.loads(python("-c", code))
    assert facts == [[], True, __version__]
    assert seconds < SECONDS


def test_the_overview_is_one_screen_and_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["-h"]):
        main(words)
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) <= 24
        assert max(map(len, lines)) <= 80
        assert [line.split()[0] for line in lines if line.startswith("  ")] == list(COMMANDS)
        assert [line[:-1] for line in lines if line.endswith(":")] == list(WANTS), "grouped by what a user wants"
    main(["--version"])
    assert capsys.readouterr().out == f"{__version__}\n"


def test_env_is_a_table_without_names_of_user_machine_and_folders(capsys: pytest.CaptureFixture[str]) -> None:
    main(["env"])
    printed = capsys.readouterr().out
    rows = dict(line.strip("| ").split(" | ", 1) for line in printed.splitlines()[2:])
    assert rows["rl-reward-network"].startswith(f"{__version__}, commit ")
    assert rows.keys() >= {"python", "torch", "transformers", "peft", "stable-baselines3", "gymnasium", "numpy", "CPU"}
    private = {getpass.getuser(), socket.gethostname(), str(ROOT), str(Path.home())}
    assert not [name for name in private if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", printed)]


def test_an_unknown_command_is_refused_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["segmnet"])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: sa2va-rl segmnet: ")
    assert all(f"  {command} " in message for command in COMMANDS)


@pytest.mark.parametrize("words", ["", "data --help"])
def test_a_reader_that_stops_early_is_no_error(words: str) -> None:
    """As `sa2va-rl | head -1`, with a reader that is gone before anything is written."""
    script = f'"{sys.executable}" -m rl_reward_network.cli {words} | true; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", script], env=ENVIRONMENT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
