"""The pages of the site that are made from the source: the API, the flags of every command, every error message.

`docs/conf.py` calls `write_pages` before each build, so these pages cannot differ from the code. They are written below
`docs/reference/` and are not tracked.
"""

import ast
import io
import os
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from tools.api import api_index, modules, room_of, room_pages, source

ERRORS = ("Error", "ResetNeeded", "Full")  # how names of exceptions end
SPELLED = re.compile(r"(?<=--)[a-z][\w-]+")  # pages write flags with underscores; commands take both
WIDTH = "120"  # columns of the help; with more, boxes stand side by side


class Message(NamedTuple):
    """An error message: full name of its module, function or class, exception, words; `...` stands for a value."""

    module: str
    place: str
    error: str
    text: str


def write_pages(folder: Path) -> None:
    """Write `settings.md`, `errors.md` and `api/ROOM.md` into `docs/reference`."""
    rooms = room_pages()
    pages = {"settings": settings_page(), "errors": errors_page(), "api/index": api_index(sorted(rooms))}
    for name, text in (pages | {f"api/{room}": page for room, page in rooms.items()}).items():
        file = folder / f"{name}.md"
        file.parent.mkdir(exist_ok=True)
        if not file.exists() or file.read_text(encoding="utf-8") != text:  # or Sphinx reads the page again
            file.write_text(text, encoding="utf-8")


# ---- settings --------------------------------------------------------------------------------------------------------


def settings_page() -> str:
    """Every flag of every command with its default, as `--help-all` says it, each with an anchor of its own."""
    from rl_reward_network.cli.main import COMMANDS, SUBCOMMANDS

    lines = ["# Settings", "", "This page lists every flag of every command. `--help` shows the common ones alone.", ""]
    for name in sorted([*COMMANDS, *SUBCOMMANDS]):
        lines += [f"## {name}", "", "```{eval-rst}", f".. program:: {name}", "", *options(help_text(name)), "```", ""]
    return "\n".join(lines)


def options(text: str) -> list[str]:
    """reStructuredText of a help text: a rubric for each box but the usual two, an `option` for each flag."""
    entries = list[tuple[str, list[str]]]()  # rubric or option, and its words
    for line in text.splitlines():
        if title := re.match(r"╭─ (.+?) ─", line):
            entries += [] if title[1] in ("options", "positional arguments") else [(f".. rubric:: {title[1]}", [])]
        elif (inside := re.match(r"│( +)(.*?) *│$", line)) and inside[2]:
            spaces, words = inside.groups()
            if len(spaces) == 1:  # a new flag, with its text on the same line if it is short
                flag, _, words = re.sub(r"  +", "\0", words).partition("\0")
                entries += [(f".. option:: {SPELLED.sub(lambda name: name[0].replace('-', '_'), flag)}", [])]
            entries[-1][1].append(words)
    found = list[str]()
    for head, words in entries:
        if "--help" not in head:
            text = re.sub(r" *\(default: (None|False)\)$", "", " ".join(words).strip())
            found += [head, "", f"   {literal(text)}".rstrip(), ""]
    return found


def literal(words: str) -> str:
    """Words of a help text, whose flags keep their two hyphens and which have no other markup than backticks."""
    return re.sub(r"([*|\\]|(?<=\w)_(?=\W|$))", r"\\\1", words)


def help_text(name: str) -> str:
    """What `sa2va-rl NAME --help-all` prints."""
    from rl_reward_network.cli.main import main

    text = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # a StringIO has no encoding: boxes would have no lines
    plain = patch.dict(os.environ, {"COLUMNS": WIDTH, "NO_COLOR": "1", "TERM": "dumb"})
    try:
        with plain, redirect_stdout(text):
            main([*name.split(), "--help-all"])
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"sa2va-rl {name} --help-all ended with status {end.code}") from end
    text.seek(0)
    return text.read()


# ---- errors ----------------------------------------------------------------------------------------------------------


def errors_page() -> str:
    """Every error message, by the folder of its module."""
    lines = ["# Error messages", ""]
    lines += ["This page lists every error message of the package and where it is raised; `...` stands for a value."]
    lines += ["Search for the words of yours: a message says what was found, what is expected and what to do. Causes"]
    lines += ["of the most frequent ones, those of the shell files included, are in"]
    lines += ["[troubleshooting](../how-to/troubleshooting.md).", ""]
    room = ""
    for message in sorted(messages(), key=lambda message: room_of(message.module)):
        if (new := room_of(message.module)) != room:
            room = new
            lines += [f"## {room}", ""]
        text = message.text.replace("`", "'")
        lines += [f"- `{text}`<br>{message.error} in [{message.module}](#{message.module}), `{message.place}`"]
    return "\n".join([*lines, ""])


def messages() -> list[Message]:
    """Every message that the package raises, sorted by module, without doubles."""
    found: dict[Message, None] = {}
    for name in modules():
        tree = source(name)
        for place, error, node in _raised(tree, "", tree):
            for text in _texts(node, tree):
                if len(text.replace("...", "").strip()) > 8:  # others pass on a message that was made elsewhere
                    found[Message(name, place, error, text)] = None
    return list(found)


def _raised(node: ast.AST, place: str, around: ast.AST) -> Iterator[tuple[str, str, ast.AST]]:
    """Names of the functions and classes around, exception, and first argument, of each call that makes a message."""
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.FunctionDef | ast.ClassDef)
        inner = f"{place}.{child.name}".strip(".") if named else place  # type: ignore[attr-defined]
        if isinstance(child, ast.Call) and child.args and _called(child).endswith(ERRORS):
            words = child.args[0]
            yield inner, _called(child), _assigned(words, around) if isinstance(words, ast.Name) else words
        if isinstance(child, ast.Call) and _called(child) == "print" and _text(child.args[0]).startswith("error: "):
            yield inner, "printed", child.args[0]
        yield from _raised(child, inner, child if isinstance(child, ast.FunctionDef) else around)


def _called(node: ast.Call) -> str:
    return ast.unparse(node.func).rpartition(".")[2]


def _assigned(name: ast.Name, function: ast.AST) -> ast.AST:
    """What a name stands for in a function: the last value that is assigned to it, or else the name."""
    values = [
        node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name.id
    ]
    return values[-1] if values else name


def _texts(node: ast.AST, tree: ast.Module) -> list[str]:
    """The words of a message; of a call to a function of the module, the words of all that it returns."""
    if isinstance(node, ast.Call) and _called(node) != "join":
        bodies = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name == _called(node)]
        returned = [one.value for body in bodies for one in ast.walk(body) if isinstance(one, ast.Return) and one.value]
        return [" ".join(_text(value).split()) for value in returned]
    return [" ".join(_text(node).split())]


def _text(node: ast.AST) -> str:
    """Constant words as they are; values become `...`."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "..." for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.Call) and _called(node) == "join" and isinstance(node.args[0], ast.List):
        return "; ".join(_text(part) for part in node.args[0].elts)
    return "..."
