"""Ctrl-C at any stage: a clean message, never a traceback, and a run that can be resumed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import write_tiny_data

ROOT = Path(__file__).resolve().parents[1]
STOPPED = "stopped; finished files are kept. Run the same command again, with --resume where it has that flag"
USUAL = ["--model_path", "model", "--data_root", "data", "--output_dir", "outputs"]
STEP_1 = ["rl_reward_network.cli", "reward", "quick", "--steps", "6", *USUAL]
STEP_2 = ["rl_reward_network.cli", "prompts", "quick", "--reward_steps", "8", "--total_timesteps", "60000", *USUAL]


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("user")
    (folder / "model").symlink_to(tiny_checkpoint)
    return write_tiny_data(folder / "data").parent


def interrupted(command: list[str], folder: Path, at: str) -> tuple[int, str]:
    """Exit status and output, after Ctrl-C (to the whole group, as a terminal sends it) once `at` was printed."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VIRTUAL_ENV": sys.prefix}
        | {"PATH": f"{sys.prefix}/bin:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"}
        | {"MODEL_PATH": "model", "DATA_ROOT": "data", "OUTPUT_DIR": "outputs"}
        | {"SA2VA_RL_TERMINAL": "/dev/stdout"},  # bars as on a terminal; a log gets a line every half a minute
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    )
    assert process.stdout is not None
    output, deadline = b"", time.monotonic() + 200
    while at.encode() not in output:
        piece = os.read(process.stdout.fileno(), 4096)
        assert piece, f"it ended before {at!r}: {output.decode()}"
        assert time.monotonic() < deadline
        output += piece
    os.killpg(process.pid, signal.SIGINT)
    rest = process.communicate(timeout=100)[0]
    return process.returncode, (output + rest).decode()


@pytest.mark.parametrize(
    ("command", "at"),
    [
        (STEP_1, "masks:"),
        pytest.param(STEP_1, "3 members:", marks=pytest.mark.slow),
        pytest.param(STEP_1, "calibrating on val patients:", marks=pytest.mark.slow),
        pytest.param(STEP_1, "test patients:", marks=pytest.mark.slow),
        pytest.param(STEP_2, "PPO:", marks=pytest.mark.slow),
    ],
)
def test_every_stage_stops_with_one_message(folder: Path, command: list[str], at: str) -> None:
    code, output = interrupted([sys.executable, "-P", "-m", *command], folder, at)
    assert code == -signal.SIGINT, "the shell must know that it was interrupted"
    assert output.rstrip().endswith(STOPPED), output
    assert "Traceback" not in output


def test_in_the_imports_too(folder: Path) -> None:
    """They take seconds; -v prints when torch is imported."""
    code, output = interrupted([sys.executable, "-P", "-v", "-m", *STEP_1], folder, "import 'torch.types'")
    assert code == -signal.SIGINT
    assert STOPPED in output
    assert "Traceback" not in output


@pytest.mark.slow  # starts Python four times
def test_the_shell_file_keeps_the_message_in_its_log(folder: Path) -> None:
    command = ["bash", str(ROOT / "run_experiment3.sh"), "quick", "--steps", "6"]
    code, output = interrupted(command, folder, "run folder:")
    assert code in (-signal.SIGINT, 130)
    assert STOPPED in output
    (log,) = (folder / "outputs" / "logs").glob("experiment3_*.log")
    assert STOPPED in log.read_text()


@pytest.mark.slow
def test_an_interrupted_run_is_resumed(folder: Path) -> None:
    """Interrupted in training, then resumed: it finishes in the same folder."""
    interrupted([sys.executable, "-P", "-m", *STEP_1, "--seed", "3"], folder, "3 members:")
    before = set((folder / "outputs").glob("reward_net_*"))
    done = subprocess.run(
        [sys.executable, "-P", "-m", *STEP_1, "--seed", "3", "--resume"],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert set((folder / "outputs").glob("reward_net_*")) == before
    newest = max(before, key=lambda run: run.stat().st_mtime)
    assert f"reward network: outputs/{newest.name}/best_reward_net" in done.stdout
    assert (newest / "agreement.json").exists()
