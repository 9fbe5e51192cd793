"""The shape of the project: imports go one way, nothing tracked is ignored, the README's tree is the tree."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "rl_reward_network"

# What each part may import of ours. `scripts` may import everything and nothing imports `scripts`.
MAY_IMPORT = {
    "artefacts": set(),
    "data": {"artefacts"},
    "models": {"artefacts"},
    "rewards": set(),
    "env": {"artefacts"},
    "evaluation": {"artefacts", "rewards"},
    "training": {"artefacts", "data", "models", "rewards", "env", "evaluation"},
}


def tracked_files() -> list[str]:
    """What git tracks, or would track with `git add`."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout, so there is no list of tracked files")
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def imported_parts(file: Path) -> set[str]:
    """Parts of our package that a file imports."""
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("rl_reward_network.")} | {
        "scripts" for name in names if name.split(".")[0] == "scripts"
    }


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_imports_go_one_way(part: str) -> None:
    files = [PACKAGE / f"{part}.py"] if part == "artefacts" else sorted((PACKAGE / part).rglob("*.py"))
    assert files
    for file in files:
        assert imported_parts(file) <= MAY_IMPORT[part] | {part}, file


def test_there_are_no_circles_between_files() -> None:
    """Within a part too: following imports never leads back."""
    graph: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        found = re.findall(r"^from (rl_reward_network[\w.]+) import", file.read_text(), flags=re.MULTILINE)
        graph[name] = set(found)

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        for following in graph.get(name, ()):
            walk(following, (*path, name))

    for name in graph:
        walk(name, ())


def test_no_package_folder_is_ignored() -> None:
    """The stock Python ignore list would swallow env/ and data/."""
    folders = {str(path.parent.relative_to(ROOT)) for path in PACKAGE.rglob("*.py")} | {
        "scripts",
        "tests",
        "benchmarks",
    }
    ignored = subprocess.run(
        ["git", "check-ignore", "--no-index", *sorted(folders)], cwd=ROOT, capture_output=True, text=True
    )
    if ignored.returncode == 128:
        pytest.skip("not a git checkout, so nothing can be ignored")
    assert ignored.stdout == ""


def test_files_stay_readable() -> None:
    """At most 400 lines a file."""
    long = {
        name: lines for name in tracked_files() if name.endswith((".py", ".sh")) and (lines := line_count(name)) > 400
    }
    assert not long


def line_count(name: str) -> int:
    return len((ROOT / name).read_text().splitlines())


def test_the_readme_names_every_file_of_the_package_and_no_other() -> None:
    """The tree in the README is the tree on disk."""
    tree = re.search(r"## Where things are\n.*?```\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert tree, "README.md has no section 'Where things are' with a tree"
    named = set(re.findall(r"[\w./-]+\.(?:py|sh|md|txt|toml)", tree[1]))
    files = {name for name in tracked_files() if name.endswith((".py", ".sh", ".md", ".txt", ".toml"))}
    real = {Path(name).name for name in files if not name.startswith("tests/") and not name.endswith("__init__.py")}
    tests = {Path(name).name for name in named if "test_" in name}
    assert {Path(name).name for name in named} - tests == real
    assert all((ROOT / "tests" / name).exists() for name in tests)


def test_every_source_file_has_its_test() -> None:
    """Tests mirror source files; these are covered where they are used."""
    elsewhere = {
        "templates",
        "fingerprint",
        "body_sa2va",
        "segmenter",
        "cli",
        "agreement",
    }
    tests = {path.stem for path in (ROOT / "tests").glob("test_*.py")}
    sources = {path.stem for path in PACKAGE.rglob("*.py")} - {"__init__"} - elsewhere
    missing = {name for name in sources if not any(test == f"test_{name}" or name in test for test in tests)}
    assert not missing
