"""The shape of the project: imports go one way, nothing tracked is ignored."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "rl_reward_network"

# What each room may import of ours; CONTRIBUTING.md draws the same. Nothing imports `cli` but the launchers.
LOW = {
    "atomic_io",
    "flags",
    "bit_depth",
    "data",
    "data_import",
    "models",
    "rewards",
    "env",
    "report",
    "run",
    "curves",
    "inputs",
}
ROADS = {"reward_training", "ppo", "grpo"}
MAY_IMPORT = {
    "atomic_io": set(),
    "flags": set(),
    "bit_depth": set(),
    "data": {"atomic_io", "bit_depth"},
    "data_import": {"atomic_io", "bit_depth", "data"},
    "models": {"atomic_io", "bit_depth"},
    "rewards": {"atomic_io"},
    "env": {"atomic_io", "data", "rewards"},
    "report": {"atomic_io", "rewards", "run"},
    "run": {"atomic_io", "curves"},
    "curves": {"atomic_io"},
    "embedded": {"atomic_io", "data"},
    "inputs": {"atomic_io", "flags", "bit_depth", "data", "data_import", "models", "env", "report", "run", "embedded"},
    "reward_training": LOW,
    "ppo": LOW | {"embedded", "reward_training"},
    "grpo": LOW | {"embedded", "reward_training"},
    "methods": LOW | ROADS,
    "segment": LOW | ROADS | {"methods"},
    "api": LOW | ROADS | {"methods", "segment"},
    "cli": LOW | ROADS | {"embedded", "methods", "segment"},
}


def tracked_files() -> list[str]:
    """What git tracks, or would track with `git add`."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout, so there is no list of tracked files")
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def room_of(module: str) -> str:
    """The room of a dotted name or path below the package: the longest that has a rule."""
    parts = module.replace("/", ".").removesuffix(".py").split(".")
    rooms = [room for room in MAY_IMPORT if parts[: room.count("/") + 1] == room.split("/")]
    assert rooms, f"{module} lies in no room that MAY_IMPORT names"
    return max(rooms, key=len)


def imported_rooms(file: Path) -> set[str]:
    """Rooms of our package that a file imports, inside functions too."""
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    assert not any(name.split(".")[0] in ("scripts", "tests", "benchmarks", "tools", "examples") for name in names), (
        file
    )
    return {room_of(name.removeprefix("rl_reward_network.")) for name in names if name.startswith("rl_reward_network.")}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_go_one_way(room: str) -> None:
    sources = {file: str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py") if file.parent != PACKAGE}
    alone = ("api.py", "atomic_io.py", "curves.py", "bit_depth.py", "flags.py", "run.py")
    sources |= {PACKAGE / name: name for name in alone}
    files = [file for file, name in sources.items() if room_of(name) == room]
    assert files
    for file in files:
        assert imported_rooms(file) <= MAY_IMPORT[room] | {room}, file


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
        "tools/nano",
        "examples/demo",
    }
    ignored = subprocess.run(
        ["git", "check-ignore", "--no-index", *sorted(folders)], cwd=ROOT, capture_output=True, text=True
    )
    if ignored.returncode == 128:
        pytest.skip("not a git checkout, so nothing can be ignored")
    assert ignored.stdout == ""


def test_no_module_needs_what_windows_lacks_to_be_imported() -> None:
    only_unix = {"fcntl", "grp", "pty", "pwd", "resource", "termios"}
    for file in PACKAGE.rglob("*.py"):
        imported = re.findall(r"^(?:import|from) (\w+)", file.read_text(), flags=re.MULTILINE)
        assert not only_unix & set(imported), file


def test_the_rooms_are_drawn() -> None:
    """CONTRIBUTING.md draws every room."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    drawing = re.search(r"## Structure\n.*?```\n(.*?)```", text, flags=re.DOTALL)
    assert drawing, "CONTRIBUTING.md has no section 'Structure' with a drawing"
    assert {room for room in MAY_IMPORT if (PACKAGE / room).is_dir()} <= set(drawing[1].split())
