"""Names that documents and docstrings quote exist: files, modules and what they define."""

import ast
import re
import subprocess
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("rl_reward_network", "benchmarks", "tools", "examples")
CODE = {room: list((ROOT / room).rglob("*.py")) for room in ROOMS}
SUFFIXES = r"py|sh|md|safetensors|json|jsonl|csv|html|txt|zip|png|pt|tex|toml|yaml|npz|ply|jpg|dcm|avi|mp4"
HISTORY = (
    "docs/log.md",
    "docs/reference/errors.md",
    "docs/reference/settings.md",
)  # names of the version that an entry is about
PAGES = [
    path
    for path in [
        *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/*/*.md")),
        *(ROOT / "rl_reward_network/assets" / name for name in ("llms.txt", "SKILL.md")),
    ]
    if str(path.relative_to(ROOT)) not in HISTORY
]


def docstrings(path: Path) -> str:
    """All docstrings of a file."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]
    return "\n".join(filter(None, (ast.get_docstring(node) for node in nodes)))


def prose(path: Path) -> str:
    """A page without its blocks of code, which other tests run; or the docstrings of a file."""
    if path.suffix == ".py":
        return docstrings(path)
    return re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)


@cache
def tracked_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    return listed or [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.is_file()]


@cache
def definitions() -> dict[str, set[str]]:
    """Name of a module or class of ours -> the names that it defines or sets."""
    found: dict[str, set[str]] = {}
    for path in (path for paths in CODE.values() for path in paths):
        tree = ast.parse(path.read_text())
        module = path.parent.name if path.stem == "__init__" else path.stem
        found.setdefault(module, set()).update(names_in(tree), (inner.stem for inner in path.parent.glob("*.py")))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                own = names_in(node) | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
                found.setdefault(node.name, set()).update(own)
    return found


def names_in(node: ast.Module | ast.ClassDef) -> set[str]:
    """What the body of a module or class defines or imports."""
    names = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.ClassDef):
            names.add(inner.name)
        elif isinstance(inner, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in inner.names}
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            names.add(inner.id)
    return names


def is_known(name: str) -> bool:
    """Whether a dotted name resolves, as far as its first part is a module or class of ours; others' are not judged."""
    parts = name.removeprefix("rl_reward_network.").split(".")
    for owner, inner in pairwise(parts):
        if owner not in definitions():
            return True
        if inner not in definitions()[owner] and inner not in definitions():
            return False
    return True


def unknown_names(text: str) -> list[str]:
    """Quoted names and files that do not exist."""
    quoted = re.findall(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\(\))?`", text)
    wrong = [name for name in quoted if not re.search(rf"\.({SUFFIXES})$", name) and not is_known(name)]
    files = set(re.findall(r"(?<![\w/.<{*-])((?:[\w-]+/)+[\w-]+\.(?:py|sh))\b", text))
    return wrong + [name for name in files if not any(f"/{file}".endswith(f"/{name}") for file in tracked_files())]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_names_in_documents_exist(page: Path) -> None:
    assert unknown_names(prose(page)) == []


@pytest.mark.parametrize("room", ROOMS)
def test_names_in_docstrings_exist(room: str) -> None:
    wrong = {path.relative_to(ROOT).as_posix(): unknown_names(prose(path)) for path in CODE[room]}
    assert {file: names for file, names in wrong.items() if names} == {}
