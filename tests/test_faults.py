"""Faults, on the tiny model: stopped anywhere, twice at once, a folder that was moved, a disk that is full. Minutes:

python -m pytest -m slow tests/test_faults.py
"""

import csv
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from rl_reward_network.atomic_io import LOCK_FILE
from rl_reward_network.ppo.policy import load_policy
from tests.conftest import write_tiny_data

ROOT = Path(__file__).resolve().parents[1]
STOPPED = "stopped; finished files are kept. "
SAME = "Run the same command again, with --resume where it has that flag"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
COMMAND = [sys.executable, "-P", "-m", "rl_reward_network.cli"]
INPUTS = ["--model_path", "model", "--data_root", "data", "--gpu", "-1"]
STEP_1 = [*COMMAND, "reward", "quick", *INPUTS, "--steps", "6", "--output_dir"]
STEP_2 = [*COMMAND, "prompts", "quick", *INPUTS, "--reward_steps", "12", "--total_timesteps", "2000", "--output_dir"]
EVALUATE = [*COMMAND, "evaluate", "--model_path"]


@pytest.fixture(scope="module")
def user(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and data of 24 patients."""
    folder = tmp_path_factory.mktemp("user")
    shutil.copytree(tiny_checkpoint, folder / "model")
    return write_tiny_data(folder / "data", images=24).parent


def started(command: list[str], folder: Path, output: Path) -> subprocess.Popen[bytes]:
    """A command that prints into the file `output`, and that Ctrl-C reaches."""
    default = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731 - a job in the background ignores it
    with output.open("wb") as file:
        return subprocess.Popen(
            command, cwd=folder, env=ENVIRONMENT, stdout=file, stderr=subprocess.STDOUT, preexec_fn=default
        )


def finished(command: list[str], folder: Path) -> None:
    """The command, to its end."""
    assert started(command, folder, folder / "output").wait() == 0, (folder / "output").read_text()


def run_of(outputs: Path) -> Path:
    (run,) = (path.parent for path in outputs.glob("sa2va_rl_finetune_*/final_model"))
    return run


def numbers(outputs: Path) -> dict[str, Any]:
    """Everything that is measured or learned, to the last bit."""
    run = run_of(outputs)
    values: dict[str, Any] = {name: (run / name).read_text() for name in ("tables.json", "metrics.jsonl", "split.json")}
    values |= {name: (run / "evaluation" / name).read_text() for name in ("eval.csv", "eval_patients.csv")}
    summary = json.loads((run / "evaluation" / "eval.json").read_text())
    values |= {name: summary[name] for name in ("verdict", "deployment", "rows", "notes")}
    weights = {name: tensor.numpy().tobytes() for name, tensor in load_policy(run / "final_model").state_dict().items()}
    reward = {name: array.tobytes() for name, array in load_file(run / "reward_net" / "model.safetensors").items()}
    return values | {"policy": weights, "reward network": reward}


@pytest.fixture(scope="module")
def whole(user: Path) -> tuple[dict[str, Any], float, float]:
    """The numbers of an uninterrupted run, and the seconds of its training and of its evaluation."""
    times = [time.monotonic()]
    finished([*STEP_2, "whole"], user)
    times.append(time.monotonic())
    finished([*EVALUATE, str(run_of(user / "whole") / "final_model")], user)
    times.append(time.monotonic())
    return numbers(user / "whole"), *np.diff(times)


def stopped(command: list[str], user: Path, seconds: float, with_ctrl_c: bool) -> None:
    """Start a command, and stop it after `seconds`; Ctrl-C ends in one message, never in a traceback."""
    process = started(command, user, user / "output")
    time.sleep(seconds)
    process.send_signal(signal.SIGINT if with_ctrl_c else signal.SIGKILL)
    code, said = process.wait(), (user / "output").read_text()
    if code != 0 and with_ctrl_c:  # 0: it was over before
        assert (code, said.count("Traceback")) == (-signal.SIGINT, 0), "the shell must know that it was interrupted"
        again = said.rpartition(STOPPED)[2].strip()
        assert again in (SAME, f"Go on by: sa2va-rl {shlex.join(command[4:])} --resume"), said


@pytest.mark.slow
@pytest.mark.parametrize("number", range(16))
def test_stopped_anywhere_and_resumed_it_ends_in_the_same_numbers(
    user: Path, whole: tuple[dict[str, Any], float, float], number: int
) -> None:
    """By SIGKILL or Ctrl-C in masks, step 1, PPO, and (every fourth) in the evaluation."""
    expected, training, evaluation = whole
    share, outputs = np.random.default_rng(number).uniform(0.1, 0.95), user / f"stopped_{number}"
    train, with_ctrl_c = [*STEP_2, outputs.name], number % 2 == 1
    if number % 4 < 3:
        stopped(train, user, share * training, with_ctrl_c)
        finished([*train, *(["--resume"] if list(outputs.glob("sa2va_rl_finetune_*/config.json")) else [])], user)
    else:
        shutil.copytree(user / "whole", outputs)
        shutil.rmtree(run_of(outputs) / "evaluation")
        stopped([*EVALUATE, str(run_of(outputs) / "final_model")], user, share * evaluation, with_ctrl_c)
    finished([*EVALUATE, str(run_of(outputs) / "final_model")], user)
    resumed = numbers(outputs)
    assert [name for name in expected if resumed[name] != expected[name]] == []


def test_ctrl_c_in_the_imports_ends_in_one_message(user: Path) -> None:
    """They take seconds; -v prints when torch is imported."""
    command = [sys.executable, "-v", *STEP_1[1:], "imports"]
    process = started(command, user, user / "output")
    while "import 'torch.types'" not in (user / "output").read_text(errors="replace"):
        assert process.poll() is None, (user / "output").read_text(errors="replace")[-2000:]
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    said = (process.wait(), (user / "output").read_text(errors="replace"))[1]
    assert process.returncode == -signal.SIGINT
    assert f"{STOPPED}Go on by: sa2va-rl {shlex.join(command[5:])} --resume" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_two_runs_at_once_on_one_bank(user: Path, whole: tuple[dict[str, Any], float, float]) -> None:
    """Both start from nothing: each ends in the numbers it would have had alone, and every mask is whole."""
    both = [started([*STEP_2, "together"], user, user / f"said_{n}") for n in range(2)]
    assert [process.wait() for process in both] == [0, 0], [(user / f"said_{n}").read_text() for n in range(2)]
    alone, runs = run_of(user / "whole"), list((user / "together").glob("sa2va_rl_finetune_*"))
    assert len(runs) == 2
    for run in runs:
        for name in ("tables.json", "metrics.jsonl"):
            assert (run / name).read_text() == (alone / name).read_text()
    first, second = (
        {path.name: load_file(path) for path in (user / name / "mask_bank").iterdir()} for name in ("together", "whole")
    )
    assert len(both := first.keys() & second.keys()) >= 18
    assert all(np.array_equal(array, second[name][key]) for name in both for key, array in first[name].items())
    assert not any(name.startswith(".") for name in first)


@pytest.mark.slow
def test_a_run_folder_on_another_machine(user: Path, whole: tuple[dict[str, Any], float, float]) -> None:
    """The run folder alone, with model and data elsewhere; and the whole project moved, where no flag is needed."""
    expected, other = whole[0], user.parent / "other"
    shutil.copytree(run_of(user / "whole"), other / "runs" / "r", ignore=shutil.ignore_patterns("evaluation"))
    shutil.copytree(user / "model", other / "m")
    shutil.copytree(user / "data", other / "d")
    hidden = user.rename(user.with_name("hidden"))
    try:
        place = [*EVALUATE, "runs/r/final_model"]
        for flags, message in ([], "--data_root"), (["--data_root", "d"], "--base_model"):
            assert started([*place, *flags], other, other / "output").wait() == 2
            assert message in (other / "output").read_text()
        finished([*place, "--data_root", "d", "--base_model", "m"], other)
        assert (other / "runs/r/evaluation/eval.csv").read_text() == expected["eval.csv"]
        shutil.rmtree(run_of(hidden / "whole") / "evaluation")
        finished([*EVALUATE, str(run_of(hidden / "whole") / "final_model")], hidden)
        assert numbers(hidden / "whole") == expected
    finally:
        hidden.rename(user)


@pytest.mark.slow
def test_names_are_written_on_request_only(user: Path, whole: tuple[dict[str, Any], float, float]) -> None:
    run = run_of(user / "whole")
    plain = {path.name: path.read_text() for path in (run / "evaluation").iterdir()}
    for text in plain.values():
        assert "_1_frame_000001" not in text
        assert str(user) not in text
    finished([*EVALUATE, str(run / "final_model"), "--show_names"], user)
    with (run / "evaluation" / "eval.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert row["sample_id"] == f"P{int(row['group_id']):04d}({row['group_id']})_1_frame_000001.png"
    assert "_1_frame_000001.png" in (run / "evaluation" / "report.html").read_text()
    for name, text in plain.items():
        (run / "evaluation" / name).write_text(text)


WRITERS = {"reward": [*STEP_1, "small"], "data": [*COMMAND, "data", "--folder", "small/data"]}


@pytest.mark.skipif(
    subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode != 0,
    reason="this machine does not let a test mount a small disk of its own",
)
@pytest.mark.parametrize(
    ("command", "options"),
    [
        *(("data", "size=300k"), ("reward", "ro"), ("reward", "size=900k")),
        pytest.param("reward", "size=64k", marks=pytest.mark.slow),
    ],
)
def test_a_disk_that_takes_no_more_ends_in_one_line_and_whole_files(user: Path, command: str, options: str) -> None:
    """With a disk of its own mounted at `small`; what the command leaves there is copied to `left`."""
    for name in ("small", "left"):
        shutil.rmtree(user / name, ignore_errors=True)
    (user / "small").mkdir()
    words = " ".join(WRITERS[command])
    script = f"mount -t tmpfs -o {options} tmpfs small && {words}; code=$?; cp -r small left; exit $code"
    unshare = ["unshare", "-rm", "sh", "-c", script]
    done = subprocess.run(unshare, cwd=user, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, "Traceback" in done.stderr, last.startswith("error: ")) == (2, False, True), done.stderr
    assert ("Read-only file system" if options == "ro" else "the disk is full") in last
    assert "OUTPUT_DIR" in last
    left = list((user / "left").rglob("*"))
    assert left == [] or options != "ro"
    for path in left:
        assert path.name == LOCK_FILE or not path.name.startswith("."), "half-written"
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".safetensors":
            load_file(path)
