"""Two processes build the bank that one builds, and a build that was cut off is finished by the next."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from rl_reward_network.cli.bank import Args, main
from rl_reward_network.inputs.config import RunConfig
from tests.conftest import write_tiny_data

ROOT = Path(__file__).resolve().parents[2]


def build(folder: Path, checkpoint: Path, output: str, *launcher: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    arguments = ["--model_path", str(checkpoint), "--data_root", "data", "--output_dir", output, "--gpu", "-1"]
    command = [sys.executable, "-m", *launcher, "rl_reward_network.cli", "bank", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def alone(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bank")
    data = write_tiny_data(folder / "data", images=5, size=64)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in `build`: more would round differently
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main(Args(RunConfig(str(tiny_checkpoint), data, folder / "alone", gpu=-1)))
    torch.set_num_threads(threads)
    assert "masks computed by Sa2VA: 55, read from the bank: 0; images encoded: 5" in printed.getvalue()
    assert printed.getvalue().strip().splitlines()[-1] == f"mask bank of 5 images: {folder / 'alone' / 'mask_bank'}"
    return folder


def banks_equal(first: Path, second: Path) -> None:
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    assert len(names) == 5
    for name in names:
        expected, actual = load_file(first / name), load_file(second / name)
        assert expected.keys() == actual.keys()
        for key, values in expected.items():
            np.testing.assert_array_equal(actual[key], values)


@pytest.mark.slow  # starts three processes
def test_two_ranks_build_the_same_bank(alone: Path, tiny_checkpoint: Path) -> None:
    printed = build(
        alone, tiny_checkpoint, "ranks", *("torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m")
    )
    assert "masks computed by Sa2VA: 55, read from the bank: 0; images encoded: 5" in printed, "of both ranks"
    banks_equal(alone / "alone" / "mask_bank", alone / "ranks" / "mask_bank")


@pytest.mark.slow
def test_a_build_that_was_cut_off_is_finished_and_nothing_is_computed_twice(alone: Path, tiny_checkpoint: Path) -> None:
    bank = alone / "cut" / "mask_bank"
    bank.mkdir(parents=True)
    for path in sorted((alone / "alone" / "mask_bank").iterdir())[:3]:
        (bank / path.name).write_bytes(path.read_bytes())
    (bank / ".remains_of_a_killed_process.safetensors").write_bytes(b"half")
    printed = build(alone, tiny_checkpoint, "cut")
    assert "masks computed by Sa2VA: 22, read from the bank: 33; images encoded: 2" in printed
    (bank / ".remains_of_a_killed_process.safetensors").unlink()
    banks_equal(alone / "alone" / "mask_bank", bank)
    assert "masks computed by Sa2VA: 0, read from the bank: 55; images encoded: 0" in build(
        alone, tiny_checkpoint, "cut"
    )
