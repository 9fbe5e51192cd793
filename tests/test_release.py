"""What a release consists of: citation, dependencies and licences, what is shipped, and the container image.

tests/test_wheel.py builds the release and runs it.
"""

import re
import subprocess
import tomllib
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_reward_network import __version__

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "dependencies.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
KINDS = {".py", ".typed", ".json", ".md", ".png", ".safetensors", ".txt"}  # of files in the package
SPDX = {  # as older metadata say it
    "Apache": "Apache-2.0",
    "MIT": "MIT",
    "MPL-2.0": "MPL-2.0",
    "BSD": "BSD-",
    "Python Software Foundation": "PSF-2.0",
}


def rows(title: str) -> list[dict[str, str]]:
    """The table below a heading of the page, by the names of its columns."""
    section = PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*", section, re.M)]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def declared() -> dict[str, tuple[str, set[str]]]:
    """Each direct dependency -> its bound, and where it is declared."""
    lines = [line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    groups = {"run": [line for line in lines if line], "build": PROJECT["build-system"]["requires"]}
    groups |= {f"`{extra}`": listed for extra, listed in PROJECT["project"]["optional-dependencies"].items()}
    found: dict[str, tuple[str, set[str]]] = {}
    for group, requirements in groups.items():
        for requirement in requirements:
            name, bound = re.fullmatch(r"([\w.-]+)(.*)", requirement).groups()
            assert found.setdefault(name, (bound, set()))[0] == bound, f"{name} has two bounds"
            found[name][1].add(group)
    return found


def tracked(folder: str = ".") -> list[str]:
    """Files that git knows or would add; in a folder without git, all files."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", folder]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    files = listed or [path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*")]
    return [name for name in files if (ROOT / name).is_file() and "__pycache__" not in name]


# ---- citation --------------------------------------------------------------------------------------------------------


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert citation["license"] == PROJECT["project"]["license"]
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= set(citation), "required by CFF"
    assert "https://arxiv.org/abs/2501.04001" in [entry["url"] for entry in citation["references"]]


def test_the_date_of_the_citation_is_that_of_the_changelog() -> None:
    date = yaml.safe_load((ROOT / "CITATION.cff").read_text())["date-released"]
    heading = re.search(rf"^## {re.escape(__version__)}, (.*)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert heading, f"CHANGELOG.md has no heading of {__version__}"
    assert heading[1] == date.isoformat()


# ---- dependencies and licences ---------------------------------------------------------------------------------------


def test_every_direct_dependency_is_listed_with_its_bound() -> None:
    listed = {
        row["package"]: (row["bound"].strip("`"), set(row["for"].split(", "))) for row in rows("Direct dependencies")
    }
    assert listed == declared()


def test_every_bound_has_a_reason() -> None:
    table = rows("Direct dependencies")
    assert [row["package"] for row in table if not (row["lower bound"] and row["upper bound"])] == []
    assert [row["package"] for row in table if "<" not in row["bound"] and "==" not in row["bound"]] == ["setuptools"]


@pytest.mark.parametrize("row", rows("Direct dependencies"), ids=lambda row: row["package"])
def test_licences_are_those_of_the_metadata(row: dict[str, str]) -> None:
    try:
        found = metadata(row["package"])
    except PackageNotFoundError:
        pytest.skip(f"{row['package']} is not installed")
    if expression := found.get("License-Expression"):
        assert row["licence"] == expression
        return
    classifiers = [line for line in found.get_all("Classifier") or [] if line.startswith("License")]
    words = " ".join([(found.get("License") or "")[:60], *classifiers])
    expected = {spdx for word, spdx in SPDX.items() if word in words}
    assert expected or "FreeBSD" in words, f"no licence is known in {words!r}"
    assert all(spdx in row["licence"] for spdx in expected), (row["licence"], expected)


def test_everything_shipped_that_is_not_code_is_listed_with_its_licence() -> None:
    files = tracked("rl_reward_network")
    assert {Path(name).suffix for name in files} == KINDS
    shipped = {row["file"].strip("`"): row for row in rows("What is shipped")}
    assert set(shipped) == {name for name in files if Path(name).suffix not in (".py", ".typed")}
    assert all(row["origin"] and row["licence"] == "Apache-2.0" for row in shipped.values())


# ---- container image -------------------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, each on one line."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def arguments(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def sent(name: str) -> bool:
    """Whether .dockerignore lets a file through: of the patterns that fit it or a folder above it, the last decides."""
    answer = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!").removeprefix("**/")
        paths = [Path(name), *Path(name).parents][:-1]
        parts = [path.name if "**/" in line else path.as_posix() for path in paths]
        if any(fnmatch(part, pattern) and part.count("/") == pattern.count("/") for part in parts):
            answer = line.startswith("!")
    return answer


def copied() -> set[str]:
    """The tracked files that the Dockerfile copies from here."""
    found: set[str] = set()
    for source in (word for rest in arguments("COPY") if "--from" not in rest for word in rest.split()[:-1]):
        names = [path.relative_to(ROOT).as_posix() for path in ROOT.glob(source)]
        files = {name for name in tracked() for start in names if name == start or name.startswith(f"{start}/")}
        assert {name for name in files if sent(name)}, f"COPY {source}: no such file, or .dockerignore excludes it"
        found |= {name for name in files if sent(name)}
    return found


def test_the_image_gets_the_package_and_what_it_is_built_from_and_nothing_else() -> None:
    needed = {*tracked("rl_reward_network"), "pyproject.toml", "requirements.txt", "README.md", "LICENSE"}
    shell = {name for name in tracked() if re.fullmatch(r"run_\w+\.sh|scripts/.*", name)} - {"run_tests.sh"}
    assert copied() == needed | shell == {name for name in tracked() if sent(name)}


@pytest.mark.parametrize(
    "name",
    [".git/config", ".env", ".venv/bin/python", "data/a.png", "outputs/run/config.json", "logs/a.log", "key.pem"],
)
def test_nothing_private_is_sent_to_the_builder(name: str) -> None:
    assert not sent(name)


def test_what_python_leaves_behind_is_not_sent() -> None:
    assert sent("rl_reward_network/cli/main.py")
    assert not sent("rl_reward_network/cli/__pycache__/main.cpython-312.pyc")


def test_every_argument_of_the_build_is_used() -> None:
    following = instructions()
    names = [rest.split("=")[0] for rest in arguments("ARG")]
    assert names == ["BASE", "TORCH_INDEX"]
    for name in names:
        start = next(i for i, (kind, rest) in enumerate(following) if kind == "ARG" and rest.startswith(f"{name}="))
        assert any(re.search(rf"\$\{{?{name}\b", rest) for _, rest in following[start + 1 :]), name


def test_the_image_runs_the_command_as_a_user_in_the_mounted_folder() -> None:
    assert arguments("ENTRYPOINT") == ['["sa2va-rl"]']
    assert "sa2va-rl" in PROJECT["project"]["scripts"]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", arguments("USER")[-1]), "root is 0"
    assert arguments("WORKDIR")[-1] == "/data"
    environment = " ".join(arguments("ENV"))
    assert "HOME=/data " in environment
    assert "OUTPUT_DIR=/data/outputs" in environment


def test_the_pinned_torch_is_what_the_image_takes_from_the_index() -> None:
    (command,) = [rest for rest in arguments("RUN") if "TORCH_INDEX" in rest]
    pattern: Any = re.search(r"grep '(.*?)' requirements.txt > torch.txt", command)
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if re.search(pattern[1], line)]
    assert len(lines) == 1
    assert lines[0].startswith("torch==")
