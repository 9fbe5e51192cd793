"""Into which Python the shell files install: an environment of its own, whatever is active, never the global one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import packaging
import pytest

ROOT = Path(__file__).resolve().parents[1]
PIP = """import os, sys
assert os.environ["PIP_USER"] == "0", "installs into ~/.local"
open(os.environ["CALLS"], "a").write(sys.prefix + " " + " ".join(sys.argv[1:]) + "\\n")
"""
PYTHON3 = """#!/usr/bin/env bash
[[ "$*" != *"-m pip"* ]] || { echo "global $*" >> "$CALLS"; exit; }
[[ "$1 $2" == "-m venv" ]] || exec "$REAL" "$@"
"$REAL" -m venv --without-pip "${@:3}" && cp -r "$FAKE_PIP" "${@: -1}"/lib/python3*/site-packages
"""
ASKED = "SA2VA_RL_INSTALL_INTO_ACTIVE"
ENSURE = 'root="$1"; source "$1/scripts/common.sh"; ensure_environment "" && echo "$VIRTUAL_ENV|$(command -v python)"'


class Machine:
    """A copy of the project, a global Python that must stay as it is, and a pip that only notes where it installs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.project, self.binaries = folder, folder / "project", folder / "global"
        (self.project / "scripts").mkdir(parents=True)
        for name in (
            "pyproject.toml",
            *(f"scripts/{name}" for name in ("common.sh", "environment.py", "train_sa2va_rl.py")),
        ):
            shutil.copyfile(ROOT / name, self.project / name)
        (self.project / "requirements.txt").write_text("# two\ntqdm>=4.67,<5  # bars\n\npillow[extra]>=12,<14\n")
        self.binaries.mkdir()
        for name in ("python", "python3"):
            (self.binaries / name).write_text(PYTHON3)
            (self.binaries / name).chmod(0o755)
        (folder / "pip").mkdir()
        (folder / "pip" / "__init__.py").touch()
        (folder / "pip" / "__main__.py").write_text(PIP)

    def environment(self, name: str, tqdm: str = "4.68", inner: str | None = "2.1") -> Path:
        """A virtual environment that has all packages, with this tqdm, and `inner`, which pillow[extra] asks for."""
        made = self.folder / name
        subprocess.run([self.binaries / "python3", "-m", "venv", made], check=True, env=self.variables())
        (site,) = made.glob("lib/python3*/site-packages")
        shutil.copytree(Path(packaging.__file__).parent, site / "packaging")
        extras = ["inner<1; python_version < '3'", "inner>=2; extra == 'extra'", "no; extra == 'other'"]
        wants = {"pillow": "".join(f"Requires-Dist: {line}\n" for line in extras)}
        for package, version in {"tqdm": tqdm, "pillow": "12.0.1", "inner": inner}.items():
            if version is not None:
                (site / f"{package}-{version}.dist-info").mkdir()
                text = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n{wants.get(package, '')}"
                (site / f"{package}-{version}.dist-info" / "METADATA").write_text(text)
        return made

    def variables(self, **further: object) -> dict[str, str]:
        own = {
            "PATH": f"{self.binaries}:/usr/bin:/bin",
            "REAL": os.path.realpath(sys.executable),
            "FAKE_PIP": str(self.folder / "pip"),
            "CALLS": str(self.folder / "calls"),
        }
        return own | {name: str(value) for name, value in further.items()}

    def ensure(self, **variables: object) -> tuple["subprocess.CompletedProcess[str]", set[str], list[str]]:
        """What was said, the environments that packages went into, and the calls of pip."""
        calls = self.folder / "calls"
        calls.write_text("")
        command = ["bash", "-c", ENSURE, "run_x.sh", str(self.project)]
        done = subprocess.run(command, env=self.variables(**variables), capture_output=True, text=True)
        lines = calls.read_text().splitlines()
        return done, {line.split()[0] for line in lines}, [line.partition(" ")[2] for line in lines]

    def used(self, **variables: object) -> str:
        """The environment that is used. Packages go into that alone, and only if it is .venv or it was asked for."""
        done, prefixes, _ = self.ensure(**variables)
        assert done.returncode == 0, done.stderr
        folder, python = done.stdout.splitlines()[-1].split("|")
        installs = folder == f"{self.project}/.venv" or ASKED in variables
        assert (python, prefixes) == (f"{folder}/bin/python", {folder} if installs else set())
        return folder


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_an_active_environment_there_is_one_in_the_project(machine: Machine) -> None:
    assert machine.used() == f"{machine.project}/.venv"
    done, prefixes, _ = machine.ensure()
    assert (done.returncode, prefixes) == (0, set()), "later runs install nothing"


def test_the_active_environment_is_used(machine: Machine) -> None:
    mine, conda, other = (machine.environment(name) for name in ("mine", "conda", "other"))
    assert machine.used(VIRTUAL_ENV=mine, CONDA_PREFIX=conda, CONDA_DEFAULT_ENV="work") == str(mine)
    assert machine.used(CONDA_PREFIX=conda, CONDA_DEFAULT_ENV="work") == str(conda)
    assert machine.used(VIRTUAL_ENV="/deleted", CONDA_PREFIX=other, CONDA_DEFAULT_ENV="work") == str(other)
    assert not (machine.project / ".venv").exists()


@pytest.mark.parametrize(
    ("packages", "lacking"),
    [
        ({"tqdm": "4.60.0"}, "tqdm<5,>=4.67 (version 4.60.0 is there)"),
        ({"inner": None}, "inner>=2"),
        ({"inner": "1.0"}, "inner>=2 (version 1.0 is there)"),
    ],
)
def test_an_active_environment_whose_packages_would_change_stays_as_it_is(
    machine: Machine, packages: dict[str, str], lacking: str
) -> None:
    """As an environment of Sa2VA with transformers 4.42; what one of our packages asks for counts, too."""
    mine = machine.environment("mine", **packages)
    before = sorted(mine.rglob("*"))
    for variables in ({"VIRTUAL_ENV": mine}, {"CONDA_PREFIX": mine, "CONDA_DEFAULT_ENV": "work"}):
        assert machine.used(**variables) == f"{machine.project}/.venv"
        shutil.rmtree(machine.project / ".venv")
    assert sorted(mine.rglob("*")) == before
    done, _, _ = machine.ensure(VIRTUAL_ENV=mine)
    assert done.stderr == (
        f"note: the active environment {mine} lacks packages (first: {lacking}), so {machine.project}/.venv is used; "
        f"{ASKED}=1 would install them\n"
    )
    assert machine.used(VIRTUAL_ENV=mine, **{ASKED: 1}) == str(mine)


def test_an_active_environment_of_the_project_comes_before_conda(machine: Machine) -> None:
    own, conda = machine.used(), machine.environment("conda")
    assert machine.ensure(VIRTUAL_ENV=own, CONDA_PREFIX=conda)[0].stdout.startswith(own)


def test_the_base_of_conda_stays_as_it_is(machine: Machine) -> None:
    base = machine.environment("base")
    assert machine.used(CONDA_PREFIX=base, CONDA_DEFAULT_ENV="base") == f"{machine.project}/.venv"
    (base / "condabin").mkdir()
    shutil.rmtree(machine.project / ".venv")
    assert machine.used(CONDA_PREFIX=base) == f"{machine.project}/.venv"


@pytest.mark.parametrize("damage", ["deleted", "no Python", "broken link", "no pyvenv.cfg"])
def test_a_stale_environment_is_named_and_not_used(machine: Machine, damage: str) -> None:
    mine = machine.environment("mine")
    if damage == "deleted":
        shutil.rmtree(mine)
    elif damage == "no pyvenv.cfg":  # its Python is then the global one
        (mine / "pyvenv.cfg").unlink()
    else:
        (mine / "bin" / "python").unlink()
        if damage == "broken link":
            (mine / "bin" / "python").symlink_to("/deleted/bin/python")
    assert machine.used(VIRTUAL_ENV=mine) == f"{machine.project}/.venv"
    done, _, _ = machine.ensure(VIRTUAL_ENV=mine)
    message = f"note: the active environment {mine} has no Python of its own (deleted or moved?), so it is not used\n"
    assert done.stderr == message


def test_an_active_python_that_is_too_old_is_not_used(machine: Machine) -> None:
    old = machine.folder / "old"
    (old / "bin").mkdir(parents=True)
    (old / "bin" / "python").write_text("#!/bin/sh\necho 3.9\nexit 3\n")
    (old / "bin" / "python").chmod(0o755)
    for variables in ({"VIRTUAL_ENV": old}, {"CONDA_PREFIX": old, "CONDA_DEFAULT_ENV": "old"}):
        done, prefixes, _ = machine.ensure(**variables)
        assert (done.returncode, old in prefixes) == (0, False)
        assert done.stderr.count("\n") == 1
        assert f"{old} has Python 3.9, and 3.11 or newer is needed, so it is not used" in done.stderr


def test_a_moved_project_goes_on_with_its_own_environment(machine: Machine) -> None:
    before = machine.used()
    machine.project = machine.project.rename(machine.folder / "moved")
    (machine.project / ".venv" / "kept").touch()
    for variables in ({}, {"VIRTUAL_ENV": before}):  # a shell in which it was activated knows the old place
        (machine.project / ".venv" / ".rl_reward_network_installed").unlink()
        assert machine.used(**variables) == f"{machine.project}/.venv"
    assert (machine.project / ".venv" / "kept").exists(), "gigabytes are not downloaded again"
    assert f"{machine.project}/.venv" in (machine.project / ".venv" / "bin" / "activate").read_text()


@pytest.mark.parametrize("damage", ["broken link", "no pip", "half made"])
def test_an_environment_of_ours_that_is_not_whole_is_made_again(machine: Machine, damage: str) -> None:
    own = Path(machine.used())
    if damage == "half made":
        shutil.rmtree(own / "bin")
    elif damage == "no pip":  # a newer Python has another folder of packages
        (pip,) = own.glob("lib/python3*/site-packages/pip")
        shutil.rmtree(pip)
    else:
        (own / "bin" / "python").unlink()
        (own / "bin" / "python").symlink_to("/deleted/bin/python")
    (own / "rest").touch()
    assert machine.used() == str(own)
    assert not (own / "rest").exists()


def test_nothing_is_asked_of_the_network_that_is_there(machine: Machine) -> None:
    """pip looks for what is missing alone; building the editable package needs setuptools, which torch brings."""
    _, _, calls = machine.ensure()
    assert [call.split()[-2:] for call in calls] == [
        ["-r", f"{machine.project}/requirements.txt"],
        ["--editable", str(machine.project)],
    ]
    assert "--no-build-isolation" in calls[1]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_checkout_is_not_written_to(machine: Machine) -> None:
    mine = machine.environment("mine")
    before = sorted(machine.project.rglob("*"))
    machine.project.chmod(0o555)
    try:
        done, prefixes, calls = machine.ensure(VIRTUAL_ENV=mine, **{ASKED: 1})
        refused, _, none = machine.ensure()
    finally:
        machine.project.chmod(0o755)
    assert (done.returncode, prefixes, len(calls)) == (0, {str(mine)}, 1), "sa2va-rl links to the folder"
    assert (refused.returncode, none) == (2, [])
    assert "read-only, so no .venv can be made there: activate a virtual environment" in refused.stderr
    assert sorted(machine.project.rglob("*")) == before


def test_packages_never_go_into_the_home_of_the_user(machine: Machine) -> None:
    """The pip of these tests refuses any other PIP_USER than 0; clusters set it to 1."""
    assert machine.used(PIP_USER="1") == f"{machine.project}/.venv"


def test_launchers_go_on_in_an_environment_that_has_the_packages(machine: Machine) -> None:
    """In a fresh shell `python3 train_sa2va_rl.py` is the Python of the system."""
    (machine.project / "train_sa2va_rl.py").symlink_to("scripts/train_sa2va_rl.py")
    fresh = [machine.environment("fresh", "4.60") / "bin" / "python", "train_sa2va_rl.py", "--learning_rate", "1e-5"]
    done = subprocess.run(fresh, cwd=machine.project, env=machine.variables(), capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "lacks tqdm<5,>=4.67 (version 4.60 is there); `bash " in done.stderr
    assert f"{machine.project}/scripts/install.sh` installs all into {machine.project}/.venv" in done.stderr
    own = machine.project / ".venv" / "bin"
    own.mkdir(parents=True)
    (own / "python").write_text('#!/bin/sh\necho "$@"\n')
    (own / "python").chmod(0o755)
    done = subprocess.run(fresh, cwd=machine.project, env=machine.variables(), capture_output=True, text=True)
    assert done.stdout == "train_sa2va_rl.py --learning_rate 1e-5\n"
