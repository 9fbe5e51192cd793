"""GRPO killed anywhere and resumed, on the embedded model. Minutes: run by

python -m pytest -m slow tests/grpo/test_faults.py
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from rl_reward_network.embedded.regions import write_regions
from tests.test_faults import ENVIRONMENT, finished, started

pytestmark = pytest.mark.slow
KILLS = 10
FLAGS = "--data_root regions --batch_size 8 --max_steps 8 --save_steps 2 --num_iterations 2 --eval_steps 3 --gpu -1"
TRAIN = [sys.executable, "-P", "-m", "rl_reward_network.cli", "grpo", "quick", *FLAGS.split()]
TRAINED = ("trainable/trainable.safetensors", "trainable/adapter_model.safetensors")


def numbers(run: Path, steps: int = 8) -> dict[str, Any]:
    """Everything that is learned or logged, to the last bit."""
    result: dict[str, Any] = {}
    last = run / f"checkpoint-{steps}"
    for name in (*TRAINED, "ema.safetensors"):
        result[name] = {key: array.tobytes() for key, array in load_file(last / name).items()}
    result["metrics"] = (run / "metrics.jsonl").read_text()
    for name in TRAINED:
        final = load_file(run / "final_model" / name)
        result[f"final {name}"] = {key: array.tobytes() for key, array in final.items()}
    return result


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("user")
    write_regions(folder / "regions", 8, 5)
    return folder


@pytest.fixture(scope="module")
def unkilled(user: Path) -> tuple[dict[str, Any], float]:
    """The numbers of a run that nobody killed, and how many seconds it takes."""
    began = time.monotonic()
    finished([*TRAIN, "--run_folder", "whole"], user)
    return numbers(user / "whole"), time.monotonic() - began


@pytest.mark.parametrize("kill", range(KILLS))
def test_killed_at_a_random_point_and_resumed(user: Path, unkilled: tuple[dict[str, Any], float], kill: int) -> None:
    expected, seconds = unkilled
    run = user / f"killed_{kill}"
    command = [*TRAIN, "--run_folder", str(run)]
    process = started(command, user, user / "output")
    began = time.monotonic()
    while not (run / "config.json").exists():  # before it there is nothing to resume
        time.sleep(0.005)
    left = seconds - (time.monotonic() - began)
    time.sleep(np.random.default_rng([7, kill]).uniform(0, 0.8) * left)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it was over before it could be killed"
    finished([*command, "--resume"], user)
    result = numbers(run)
    assert [name for name in expected if result[name] != expected[name]] == []


def test_two_ranks_killed_in_the_second_epoch_and_resumed(user: Path) -> None:
    """Both at once, as a machine that goes down kills them; with a curriculum and weights that follow the gradients."""
    launcher = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
    more = ["--max_steps", "12", "--num_iterations", "1", "--curriculum", "--adaptive_loop_weights"]
    command = [*launcher, *TRAIN[TRAIN.index("rl_reward_network.cli") :], *more, "--run_folder"]
    finished([*command, "whole_pair"], user)
    whole, killed = numbers(user / "whole_pair", 12), user / "killed_pair"
    (epoch,) = (line["epoch"] for line in whole["metrics"] if line["step"] == 11)
    assert epoch > 1
    with (user / "said").open("wb") as said:
        process = subprocess.Popen(
            [*command, str(killed)], cwd=user, env=ENVIRONMENT, stdout=said, stderr=said, start_new_session=True
        )
    while not (killed / "checkpoint-10").exists():
        assert process.poll() is None, (user / "said").read_text()
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (killed / "final_model").exists(), "it was over before it could be killed"
    finished([*command, str(killed), "--resume"], user)
    result = numbers(killed, 12)
    assert [name for name in whole if result[name] != whole[name]] == []


def test_two_processes_cannot_train_in_one_folder(user: Path) -> None:
    command = [*TRAIN, "--max_steps", "500", "--run_folder", "twice"]
    process = started(command, user, user / "said")
    while not (user / "twice" / "metrics.jsonl").exists():
        assert process.poll() is None, (user / "said").read_text()
        time.sleep(0.02)
    second = subprocess.run(
        [*command, "--resume"], cwd=user, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert process.poll() is None, "the first must still be at it"
    process.kill()
    process.wait()
    assert second.returncode == 2, second.stdout
    assert "another process is working on this run" in second.stderr
