"""Faults, on the tiny model: killed anywhere, twice at once, one of two dies, a folder that was moved. Minutes:

python -m pytest -m slow tests/test_faults.py
"""

import csv
import json
import os
import re
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

from rl_reward_network.ppo.policy import load_policy
from tests.conftest import write_tiny_data

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
INPUTS = ["--model_path", "model", "--data_root", "data", "--gpu", "-1"]
SETTINGS = ["--reward_steps", "12", "--total_timesteps", "6000", "--n_steps", "64"]
FINETUNE = [sys.executable, "-P", "-m", "rl_reward_network.cli", "prompts", "quick", *INPUTS, *SETTINGS]
EVALUATE = [sys.executable, "-P", "-m", "rl_reward_network.cli", "evaluate", "--model_path"]
KILLS = 10
STAGES = {  # printed when a stage begins, and when it is over
    "bank": ("masks:", "masks of reward patients:"),
    "reward": ("3 members:", "calibrating on val patients:"),
    "ppo": ("PPO:", "prompt policy: "),
    "evaluation": ("test patients:", "report: "),
}


@pytest.fixture(scope="module")
def user(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and data of 24 patients."""
    folder = tmp_path_factory.mktemp("user")
    shutil.copytree(tiny_checkpoint, folder / "model")
    return write_tiny_data(folder / "data", images=24).parent


def started(command: list[str], folder: Path, output: Path) -> subprocess.Popen[bytes]:
    """A command that prints into the file `output`."""
    with output.open("wb") as file:
        return subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stdout=file, stderr=subprocess.STDOUT)


def wait_for(words: str, output: Path, process: subprocess.Popen[bytes]) -> float:
    """The time at which `words` were printed."""
    while words not in output.read_text():
        assert process.poll() is None or words in output.read_text(), output.read_text()
        time.sleep(0.005)
    return time.monotonic()


def finished(command: list[str], folder: Path, output: Path) -> None:
    """The command, to its end."""
    assert started(command, folder, output).wait() == 0, output.read_text()


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
def unkilled(user: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """The numbers of an uninterrupted run, and the seconds of each stage."""
    seconds = {}
    for stages, command in ((("bank", "reward", "ppo"), FINETUNE), (("evaluation",), EVALUATE)):
        arguments = ["--output_dir", "whole"] if command is FINETUNE else [str(run_of(user / "whole") / "final_model")]
        process = started([*command, *arguments], user, user / "output")
        for stage in stages:
            first, last = (wait_for(words, user / "output", process) for words in STAGES[stage])
            seconds[stage] = last - first
        assert process.wait() == 0
    return numbers(user / "whole"), seconds


def prepared(user: Path, outputs: Path, stage: str) -> None:
    """What a run has when the stage begins."""
    if stage in ("bank", "reward"):
        return
    shutil.copytree(user / "whole", outputs)
    shutil.rmtree(run_of(outputs) if stage == "ppo" else run_of(outputs) / "evaluation")


@pytest.mark.parametrize("kill", range(KILLS))
@pytest.mark.parametrize("stage", STAGES)
def test_killed_at_a_random_point_and_resumed(
    user: Path, unkilled: tuple[dict[str, Any], dict[str, float]], stage: str, kill: int
) -> None:
    expected, seconds = unkilled
    outputs, output = user / f"{stage}_{kill}", user / "output"
    prepared(user, outputs, stage)
    train = [*FINETUNE, "--output_dir", str(outputs)]
    command = [*EVALUATE, str(run_of(outputs) / "final_model")] if stage == "evaluation" else train
    process = started(command, user, output)
    wait_for(STAGES[stage][0], output, process)
    time.sleep(np.random.default_rng([list(STAGES).index(stage), kill]).uniform(0, 0.9) * seconds[stage])
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it was over before it could be killed"
    if stage != "evaluation":
        finished([*train, "--resume"], user, output)
        # PPO over prompts begins anew, and so does step 1 if it was killed before its first checkpoint.
        assert re.search("run folder: .*, (resumed from|no checkpoint yet)", output.read_text())
    finished([*EVALUATE, str(run_of(outputs) / "final_model")], user, output)
    resumed = numbers(outputs)
    assert [name for name in expected if resumed[name] != expected[name]] == []


def test_two_runs_at_once_on_one_bank(user: Path, unkilled: tuple[dict[str, Any], dict[str, float]]) -> None:
    """Both start from nothing: each ends in the numbers it would have had alone, and every mask is whole."""
    outputs = user / "together"
    both = [started([*FINETUNE, "--output_dir", "together"], user, user / f"said_{n}") for n in range(2)]
    assert [process.wait() for process in both] == [0, 0], [(user / f"said_{n}").read_text() for n in range(2)]
    alone, runs = run_of(user / "whole"), list(outputs.glob("sa2va_rl_finetune_*"))
    assert len(runs) == 2
    for run in runs:
        for name in ("tables.json", "metrics.jsonl"):
            assert (run / name).read_text() == (alone / name).read_text()
    assert same_banks(outputs, user / "whole") >= 18


def same_banks(one: Path, other: Path) -> int:
    """How many files both banks have; they are equal, and none is left half-written."""
    first, second = ({path.name: load_file(path) for path in (o / "mask_bank").iterdir()} for o in (one, other))
    both = first.keys() & second.keys()
    assert all(np.array_equal(array, second[name][key]) for name in both for key, array in first[name].items())
    assert not any(name.startswith(".") for name in first)
    return len(both)


def test_a_run_that_dies_leaves_a_bank_that_another_one_finishes(user: Path) -> None:
    """Two of step 1 begin at once with an empty bank, one is killed: the bank is that of a run by itself."""
    bank = user / "two" / "mask_bank"
    train = [*FINETUNE[:4], "reward", "quick", *INPUTS, "--steps", "6", "--output_dir"]
    first, second = (started([*train, "two"], user, user / f"said_{n}") for n in range(2))
    while not list(bank.glob("*.safetensors")):
        assert first.poll() is None, (user / "said_0").read_text()
        time.sleep(0.005)
    first.kill()
    assert first.wait() == -signal.SIGKILL
    assert second.wait() == 0, (user / "said_1").read_text()
    for path in bank.glob(".*"):
        path.unlink()  # half-written by the dead one, never read
    finished([*train, "alone"], user, user / "output")
    assert same_banks(bank.parent, user / "alone") == len(list(bank.iterdir())) >= 15


def test_a_run_folder_on_another_machine(user: Path, unkilled: tuple[dict[str, Any], dict[str, float]]) -> None:
    """The run folder alone, with model and data elsewhere; and the whole project moved, where no flag is needed."""
    expected, other = unkilled[0], user.parent / "other"
    shutil.rmtree(other, ignore_errors=True)
    shutil.copytree(run_of(user / "whole"), other / "runs" / "r", ignore=shutil.ignore_patterns("evaluation"))
    shutil.copytree(user / "model", other / "m")
    shutil.copytree(user / "data", other / "d")
    hidden = user.rename(user.with_name("hidden"))
    try:
        place = [*EVALUATE, "runs/r/final_model"]
        for flags, message in ([], "--data_root"), (["--data_root", "d"], "--base_model"):
            assert started([*place, *flags], other, other / "output").wait() == 2
            assert message in (other / "output").read_text()
        finished([*place, "--data_root", "d", "--base_model", "m"], other, other / "output")
        assert (other / "runs/r/evaluation/eval.csv").read_text() == expected["eval.csv"]
        shutil.rmtree(run_of(hidden / "whole") / "evaluation")
        finished([*EVALUATE, str(run_of(hidden / "whole") / "final_model")], hidden, hidden / "output")
        assert numbers(hidden / "whole") == expected
    finally:
        hidden.rename(user)


def test_names_are_written_on_request_only(user: Path, unkilled: tuple[dict[str, Any], dict[str, float]]) -> None:
    run = run_of(user / "whole")
    plain = {path.name: path.read_text() for path in (run / "evaluation").iterdir()}
    for text in plain.values():
        assert "_1_frame_000001" not in text
        assert str(user) not in text
    finished([*EVALUATE, str(run / "final_model"), "--show_names"], user, user / "output")
    with (run / "evaluation" / "eval.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert row["sample_id"] == f"P{int(row['group_id']):04d}({row['group_id']})_1_frame_000001.png"
    assert "_1_frame_000001.png</h3>" in (run / "evaluation" / "report.html").read_text()
    for name, text in plain.items():
        (run / "evaluation" / name).write_text(text)
