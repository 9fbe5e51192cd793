"""The release, built twice: equal bytes, and what is in it; the wheel, installed outside of the clone: that the main
commands run. Minutes: run by

python -m pytest -m slow tests/test_wheel.py
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
from PIL import Image

from rl_reward_network import __version__
from tests.conftest import SMALLEST, tube_image
from tests.test_release import tracked

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
BUILD = ["pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir"]
NAME = f"rl_reward_network-{__version__}"
COMMITTED = 1_700_000_000  # seconds, even, as times in a wheel are
TEXTS = {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "pyproject.toml", "requirements.txt", "MANIFEST.in"}

EGG_INFO = ("PKG-INFO", "SOURCES.txt", "dependency_links.txt", "entry_points.txt", "requires.txt", "top_level.txt")


def run(command: list[str | Path], folder: Path, umask: int = -1, **variables: str) -> str:
    """What a command prints; without this process's PYTHONPATH, which would lead into the clone."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **variables}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        command, cwd=folder, env=environment, umask=umask, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def clone(folder: Path) -> Path:
    """A repository with one commit of the files here, as they are now."""
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    run(["git", "init", "--quiet"], folder)
    run(["git", "add", "--all"], folder)
    moment = {"GIT_COMMITTER_DATE": f"{COMMITTED} +0000"}
    run(["git", *identity, "commit", "--quiet", "--message", "m"], folder, **moment)
    return folder


def build(source: Path, target: Path, **options: Any) -> Path:
    """The folder with the release; temporary folders are beside it."""
    run(["bash", source / "scripts" / "build_release.sh", target], source, TMPDIR=str(target.parent), **options)
    return target


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clone(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def release(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(source, tmp_path_factory.mktemp("release"))


@pytest.fixture(scope="module")
def wheel(release: Path) -> Path:
    return release / f"{NAME}-py3-none-any.whl"


@pytest.fixture(scope="module")
def archive(release: Path) -> Path:
    return release / f"{NAME}.tar.gz"


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


def test_the_release_has_the_same_bytes_when_it_is_built_elsewhere(
    release: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In a folder of another name and age, with another umask, time zone and language, and with files around."""
    other = clone(tmp_path_factory.mktemp("a_clone_of_another_name"))
    for name in ("outputs/run/config.json", ".venv/pyvenv.cfg", "rl_reward_network/mine.py", "build/lib/x.py"):
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        (other / name).write_text("not in the commit")
    os.utime(other / "README.md", (1, 1))
    again = build(other, tmp_path_factory.mktemp("again"), umask=0o077, TZ="Asia/Tokyo", LC_ALL="C.UTF-8")
    files = {path.name: path.read_bytes() for path in release.iterdir()}
    assert set(files) == {f"{NAME}-py3-none-any.whl", f"{NAME}.tar.gz", "SHA256SUMS"}
    assert [name for name, data in files.items() if (again / name).read_bytes() != data] == []


def test_a_wheel_from_the_source_archive_is_the_wheel(archive: Path, wheel: Path, tmp_path: Path) -> None:
    run([sys.executable, "-m", *BUILD, tmp_path, archive], tmp_path, umask=0o022, SOURCE_DATE_EPOCH=str(COMMITTED))
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()


def test_the_wheel_holds_the_package_alone(wheel: Path) -> None:
    names = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}
    expected = {*tracked("rl_reward_network"), *(f"{NAME}.dist-info/{name}" for name in names)}
    assert set(ZipFile(wheel).namelist()) == expected
    assert {entry.date_time[:3] for entry in ZipFile(wheel).infolist()} == {(2023, 11, 14)}, "of the commit"


def test_the_source_archive_holds_what_the_package_is_built_from(archive: Path) -> None:
    with tarfile.open(archive) as packed:
        members = packed.getmembers()
    assert {(member.mtime, member.uid, member.gid, member.uname) for member in members} == {(COMMITTED, 0, 0, "")}
    assert {member.mode for member in members if member.isfile()} == {0o644}
    written = {"PKG-INFO", "setup.cfg"} | {f"rl_reward_network.egg-info/{name}" for name in EGG_INFO}  # by setuptools
    expected = {*tracked("rl_reward_network"), *TEXTS, *written}
    assert {member.name for member in members if not member.isdir()} == {f"{NAME}/{name}" for name in expected}


def test_no_file_names_a_folder_of_a_machine(wheel: Path, archive: Path) -> None:
    with ZipFile(wheel) as packed:
        contents = {name: packed.read(name) for name in packed.namelist()}
    with tarfile.open(archive) as unpacked:
        files = {member.name: unpacked.extractfile(member) for member in unpacked.getmembers()}
        contents |= {name: file.read() for name, file in files.items() if file}
    assert {name for name, data in contents.items() if re.search(rb"/(home|root|tmp|Users)/\w", data)} == set()
    built = str(archive.parents[1]).encode()  # there, see `build`
    assert {name for name, data in contents.items() if built in data} == set()


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
    assert report.splitlines()[-2].startswith("report: ")
    doctor = run([binaries / "sa2va-rl", "doctor", "--gpu", "-1"], empty)
    assert "rendered angiograms" in doctor
