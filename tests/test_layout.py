"""The shape of the project: imports go one way, nothing tracked is ignored, each source file has its test."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "rl_reward_network"

# What each room may import of ours; docs/contributing.md draws the same. Nothing imports `cli` but the launchers.
LOW = {"artefacts", "flags", "depth", "data", "data_import", "models", "rewards", "env", "evaluation", "runs", "inputs"}
ROADS = {"reward_training", "prompt_policy", "post_processing", "grpo"}
MAY_IMPORT = {
    "artefacts": set(),
    "flags": set(),
    "depth": set(),
    "data": {"artefacts", "depth"},
    "data_import": {"artefacts", "depth", "data"},
    "models": {"artefacts", "depth"},
    "rewards": {"artefacts"},
    "env": {"artefacts", "rewards"},
    "evaluation": {"artefacts", "rewards"},
    "runs": {"artefacts", "data"},
    "embedded": {"artefacts", "data"},
    "inputs": {"artefacts", "flags", "depth", "data", "data_import", "models", "env", "evaluation", "runs", "embedded"},
    "embedded/nano": LOW | {"embedded"},
    "reward_training": LOW,
    "prompt_policy": LOW | {"embedded", "reward_training"},
    "grpo": LOW | {"embedded", "reward_training"},
    "post_processing": LOW | {"reward_training", "prompt_policy"},
    "compare": LOW | ROADS,
    "segment": LOW | {"reward_training", "prompt_policy", "compare"},
    "memory": LOW | {"grpo"},
    "demo": LOW | {"embedded", "grpo", "compare", "segment"},
    "cli": LOW | ROADS | {"embedded", "embedded/nano", "compare", "segment", "demo", "memory"},
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
    assert not any(name.split(".")[0] in ("scripts", "tests", "benchmarks") for name in names), file
    return {room_of(name.removeprefix("rl_reward_network.")) for name in names if name.startswith("rl_reward_network.")}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_go_one_way(room: str) -> None:
    sources = {file: str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py") if file.parent != PACKAGE}
    sources |= {PACKAGE / name: name for name in ("artefacts.py", "depth.py", "flags.py")}
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


def test_files_stay_readable() -> None:
    """At most 400 lines a file."""
    long = {
        name: lines for name in tracked_files() if name.endswith((".py", ".sh")) and (lines := line_count(name)) > 400
    }
    assert not long


def line_count(name: str) -> int:
    return len((ROOT / name).read_text().splitlines())


# Covered by the test of another file.
COVERED_BY = {
    "data_import/files.py": "data_import/test_paired_folders.py",
    "data_import/items.py": "data_import/test_write.py",
    "data_import/notes.py": "data_import/test_write.py",
    "data_import/polygons.py": "data_import/test_coco.py",
    "data_import/report.py": "data_import/test_survey.py",
    "models/fingerprint.py": "models/test_reward_network.py",
    "models/sa2va/templates.py": "models/sa2va/test_processing_sa2va.py",
    "models/sa2va/body_sa2va.py": "models/sa2va/test_modeling_sa2va.py",
    "embedded/nano/model.py": "embedded/nano/test_train.py",
    "post_processing/evaluate.py": "post_processing/test_stage.py",
    "post_processing/policy.py": "post_processing/test_stage.py",
    "post_processing/report.py": "post_processing/test_stage.py",
    "compare/deployed.py": "compare/test_stage.py",
    "compare/report.py": "compare/test_stage.py",
    "compare/tools.py": "compare/test_stage.py",
    "segment/maker.py": "cli/test_segment.py",
    "segment/roads.py": "compare/test_stage.py",
    "cli/compare_parts.py": "cli/test_compare.py",
    "cli/grpo_flags.py": "cli/test_grpo.py",
    "cli/merge.py": "grpo/test_merge.py",
    "cli/nano.py": "embedded/nano/test_stage.py",
    "cli/prompts.py": "prompt_policy/test_stage.py",
    "cli/reward.py": "test_old_runs.py",
}
INDIRECTLY = {
    "segment/maker.py",
    "segment/roads.py",
    "models/sa2va/templates.py",
    "models/sa2va/body_sa2va.py",
    "models/fingerprint.py",
    "post_processing/evaluate.py",
    "post_processing/report.py",
    "compare/report.py",
    "compare/tools.py",
}


def test_every_source_file_has_its_test() -> None:
    """`a/b.py` is tested by `tests/a/test_b.py`, which imports it or calls it as a command."""
    sources = {str(path.relative_to(PACKAGE)): path for path in PACKAGE.rglob("*.py") if path.stem[:2] != "__"}
    assert COVERED_BY.keys() <= sources.keys()
    for name in sources:
        test = ROOT / "tests" / COVERED_BY.get(name, str(Path(name).with_name(f"test_{Path(name).name}")))
        assert test.exists(), f"{name} has no {test.relative_to(ROOT)}"
        module = f"rl_reward_network.{name.removesuffix('.py').replace('/', '.')}"
        uses = imports(test, module) or (name.startswith("cli/") and calls(test, Path(name).stem))
        assert uses or name in INDIRECTLY, f"{test.relative_to(ROOT)} does not import {name}"


def calls(file: Path, command: str) -> bool:
    """Whether a file holds the name of a command as a string."""
    constants = {node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)}
    return command.replace("_", "-") in constants


def imports(file: Path, module: str) -> bool:
    """Whether a file imports a module, or something from it."""
    package, _, name = module.rpartition(".")
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            if node.module == module or (node.module == package and name in {alias.name for alias in node.names}):
                return True
        elif isinstance(node, ast.Import) and module in {alias.name for alias in node.names}:
            return True
    return False


def test_the_rooms_are_drawn() -> None:
    """docs/contributing.md draws every room."""
    text = (ROOT / "docs" / "contributing.md").read_text()
    drawing = re.search(r"## Structure\n.*?```\n(.*?)```", text, flags=re.DOTALL)
    assert drawing, "docs/contributing.md has no section 'Structure' with a drawing"
    assert {room for room in MAY_IMPORT if (PACKAGE / room).is_dir()} <= set(drawing[1].split())
