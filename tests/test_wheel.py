"""The wheel, installed outside of the clone: what is in it, and that the main commands run. Minutes: run by

python -m pytest -m slow tests/test_wheel.py
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
from PIL import Image

from rl_reward_network import __version__
from tests.conftest import SMALLEST, tube_image

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
BUILD = ["pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir"]
ASSETS = "rl_reward_network/assets/sa2va-nano"


def run(command: list[str | Path], folder: Path) -> str:
    """What a command prints; without this process's PYTHONPATH, which would lead into the clone."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because a build leaves files in its source."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "requirements.txt", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, source / name)
    for name in ("rl_reward_network", "scripts", "tests", "benchmarks", "tools", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    run([sys.executable, "-m", *BUILD, target, source], target)
    (file,) = target.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def binaries(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a new environment with the wheel; the other packages are those of this one."""
    environment = tmp_path_factory.mktemp("venv")
    venv.create(environment, with_pip=False, symlinks=True)
    (site,) = environment.glob("lib/python*/site-packages")
    # Python does not read the .pth files of folders named in a .pth file, such as that of an editable install.
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = environment / "bin" / "python"
    run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-installed", "--no-index", wheel], site)
    return environment / "bin"


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """A folder inside a git repository that is not ours."""
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run(["git", *identity, "commit", "--quiet", "--allow-empty", "-m", "m"], cwd=tmp_path, check=True)
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"


def test_it_holds_the_package_alone_with_its_assets(wheel: Path) -> None:
    names = set(ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names} == {"rl_reward_network", f"rl_reward_network-{__version__}.dist-info"}
    assert {"rl_reward_network/py.typed"} | {f"{ASSETS}/{path.name}" for path in (ROOT / ASSETS).iterdir()} <= names
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "rl_reward_network").rglob("*.py")}
    assert sources == {name for name in names if name.endswith(".py")}


def test_the_installed_package_is_used(binaries: Path, empty: Path) -> None:
    code = "import rl_reward_network as p, gymnasium; print(p.__file__, p.__version__, p.ENV_ID in gymnasium.registry)"
    file, version, registered = run([binaries / "python", "-c", code], empty).split()
    assert Path(file).is_relative_to(binaries.parent)
    assert (version, registered) == (__version__, "True")
    assert run([binaries / "sa2va-rl", "--version"], empty) == f"{__version__}\n"


def test_segment_runs_on_the_embedded_model(binaries: Path, empty: Path) -> None:
    Image.fromarray(tube_image(64, 0)[0]).save(empty / "x.png")
    printed = run([binaries / "sa2va-rl", "segment", "x.png"], empty)
    assert printed.splitlines()[-1] == "written: x_mask.png x_overlay.png"
    assert np.asarray(Image.open(empty / "x_mask.png")).shape == (64, 64)


def test_prompts_runs_on_the_embedded_data_in_the_working_folder(binaries: Path, empty: Path) -> None:
    printed = run([binaries / "sa2va-rl", "prompts", "quick", "--gpu", "-1", *SMALLEST], empty)
    assert {path.name for path in empty.iterdir()} == {"data", "outputs"}
    assert [path.name for path in (empty / "data").iterdir()] == ["angiograms"]
    (run_dir,) = (empty / "outputs").glob("sa2va_rl_finetune_*")
    assert f"prompt policy: {run_dir.relative_to(empty)}/final_model" in printed
    config = json.loads((run_dir / "config.json").read_text())
    assert (config["version"], config["commit"]) == (__version__, None), "not the commit of the user's repository"
    report = run([binaries / "sa2va-rl", "evaluate", "--model_path", run_dir, "--images", "2"], empty)
    assert report.splitlines()[-1].startswith("report: ")
    doctor = run([binaries / "sa2va-rl", "doctor", "--gpu", "-1"], empty)
    assert "rendered angiograms" in doctor
