"""A disk that is full, or takes nothing: one line with the remedy, and no file that is half-written."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from rl_reward_network.atomic_io import LOCK_FILE
from rl_reward_network.cli import doctor
from tests.conftest import write_tiny_data
from tests.test_bad_input import STANDARD, patients, save_network

COMMAND = f"{sys.executable} -P -m rl_reward_network.cli"
TRAIN = f"{COMMAND} reward quick --steps 2 {' '.join(STANDARD)} --output_dir small"
WRITERS = {
    "reward": TRAIN,
    "prompts": f"{COMMAND} prompts quick {' '.join(STANDARD)} --reward_net net --output_dir small",
    "convert": f"{COMMAND} convert model small/ours",
    "data": f"{COMMAND} data --folder small/data",
}
needs_mount = pytest.mark.skipif(
    subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode != 0,
    reason="this machine does not let a test mount a small disk of its own",
)


def on_a_disk(options: str, command: str) -> subprocess.CompletedProcess[str]:
    """The command with a disk of its own mounted at `small`; what it leaves there is copied to `left`."""
    Path("small").mkdir()
    script = f"mount -t tmpfs -o {options} tmpfs small && {command}; code=$?; cp -r small left; exit $code"
    return subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, timeout=300)


@pytest.fixture
def user(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder with a model, data and a reward network."""
    shutil.copytree(tiny_checkpoint, tmp_path / "model")
    write_tiny_data(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    save_network(patients("reward"), patients("val"))


@needs_mount
@pytest.mark.parametrize(
    ("command", "kilobytes"),
    [
        pytest.param("reward", 64, marks=pytest.mark.slow),
        ("reward", 900),
        pytest.param("prompts", 64, marks=pytest.mark.slow),
        pytest.param("convert", 200, marks=pytest.mark.slow),
        ("data", 300),
    ],
)
def test_a_full_disk(user: None, command: str, kilobytes: int) -> None:
    """The command ends in one line, and every file that it leaves is whole."""
    done = on_a_disk(f"size={kilobytes}k", WRITERS[command])
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert "the disk is full" in last
    assert "OUTPUT_DIR" in last
    for path in Path("left").rglob("*"):
        assert path.name == LOCK_FILE or not path.name.startswith("."), "half-written"
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".safetensors":
            load_file(path)


@needs_mount
def test_a_disk_that_is_read_only(user: None) -> None:
    done = on_a_disk("ro", WRITERS["reward"])
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: small/: cannot be written")
    assert "Read-only file system" in last
    assert "OUTPUT_DIR" in last
    assert not list(Path("left").iterdir())


def test_the_doctor_sees_a_folder_that_takes_nothing(user: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        doctor.main(doctor.Args("model", Path("data"), output_dir=Path("data/annotations.json/outputs")))
    assert "nothing can be written in" in " ".join(capsys.readouterr().out.replace("│", " ").split())
