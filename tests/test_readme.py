"""The README cannot rot: its commands exist with the flags it names, its Python runs, its example data are read."""

import importlib
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tyro
from PIL import Image

from rl_reward_network.data.annotations import read_annotations
from rl_reward_network.models import sa2va
from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig
from tests.conftest import smooth_image, tube_image

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands(start: str) -> list[list[str]]:
    """Commands of the bash blocks that begin with `start`, comments and environment taken off, split into words."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    words = [[word for word in line if not re.match(r"[A-Z_]+=", word)] for line in words]
    return [line for line in words if " ".join(line).startswith(start)]


PYTHON_COMMANDS = {line[2]: line for line in commands("python -m") if line[2] != "pytest"}


@pytest.mark.parametrize("module", PYTHON_COMMANDS)
def test_every_flag_that_a_python_command_uses_is_in_its_help(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        tyro.cli(importlib.import_module(module).Args, args=["--help"])  # as a process of its own: 5 seconds each
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for line in commands(f"python -m {module}"):
        for flag in (word for word in line if word.startswith("--")):
            assert flag.replace("_", "-") in said, f"{module} has no {flag}"


@pytest.mark.parametrize("line", commands("bash"), ids=" ".join)
def test_every_shell_file_exists_and_knows_its_mode(line: list[str]) -> None:
    file = ROOT / line[1]
    assert file.exists()
    assert subprocess.run(["bash", "-n", str(file)]).returncode == 0
    if line[2:]:
        assert line[2] in ("quick", "full", "--help")
        wrong = subprocess.run(["bash", str(file), "neither"], capture_output=True, text=True)
        assert wrong.returncode == 2
        assert "quick|full" in wrong.stderr


def test_the_example_of_the_reward_network_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = (block for block in blocks("python") if "RewardNetwork" in block)
    RewardNetwork(RewardNetworkConfig(channels=(8,))).save_pretrained(tmp_path / "outputs/RUN/best_reward_net")
    monkeypatch.chdir(tmp_path)
    lines = example.strip().splitlines()
    lines[-2:] = [f"{name} = {line}" for name, line in zip(("scores", "truth"), lines[-2:], strict=True)]
    names: dict[str, Any] = {"image": smooth_image(60, 70), "masks": np.ones((3, 60, 70), dtype=np.float32)}
    exec("\n".join(lines), names)
    assert names["scores"].shape == (3,)
    assert names["truth"].shape == (60, 70)


def test_the_python_example_runs(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = (block for block in blocks("python") if "load_sa2va_model" in block)
    load = sa2va.load_sa2va_model
    monkeypatch.setattr(sa2va, "load_sa2va_model", lambda path, device: load(tiny_checkpoint))
    names: dict[str, Any] = {"image": smooth_image(60, 60)}
    exec(example, names)
    assert names["answer"]["prediction_masks"][0].shape == (1, 60, 60)


def test_the_example_annotations_are_read(tmp_path: Path) -> None:
    (example,) = blocks("json")
    (tmp_path / "annotations.json").write_text(example)
    for record in json.loads(example):
        image, mask = tube_image(100, 0)
        (tmp_path / "images").mkdir(exist_ok=True)
        Image.fromarray(image).save(tmp_path / "images" / record["image"])
        if "mask_png" in record:
            (tmp_path / "masks").mkdir(exist_ok=True)
            Image.fromarray(mask).save(tmp_path / record["mask_png"])
    samples = read_annotations(tmp_path)
    assert [sample.labelled for sample in samples] == [True, True, False]
    assert len({sample.group_id for sample in samples}) == 2
    polygon = samples[1].load_mask()
    assert polygon is not None
    assert polygon.any()


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_no_machine_path_is_written_anywhere() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    for name in listed:
        text = (ROOT / name).read_text(errors="ignore")
        assert not re.search(r"(?<![\w.])/(?:work|home|root|Users)/", text), name
