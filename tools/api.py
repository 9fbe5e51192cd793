"""The pages of the API, written from the source: signatures as they are typed, docstrings as reStructuredText.

The source is parsed, not imported, so types stay short, and tyro's marks on them are left out.
"""

import ast
import re
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from textwrap import indent
from typing import Any

from sphinx.ext.napoleon import Config
from sphinx.ext.napoleon.docstring import GoogleDocstring

import rl_reward_network

PACKAGE = Path(rl_reward_network.__file__).parent
FIRST = (  # what a user calls first
    "models.sa2va.loading_sa2va.load_sa2va_model",
    "models.sa2va.generation_sa2va.predict_forward",
    "models.sa2va.generation_sa2va.segment",
    "models.reward_network.RewardNetwork",
    "rewards.learned.predict_mask_quality",
    "rewards.metrics.dice",
    "rewards.table.own_rewards",
    "env.sa2va_finetune_env.Sa2VAFinetuneEnv",
    "grpo.trainer.Sa2VAGRPOTrainer",
    "grpo.grpo_config.Sa2VAGRPOConfig",
    "data.readers.read_images",
)
SURFACE = """```python
from rl_reward_network import RewardNetwork, improve, load

answer = load("sa2va-nano").segment("a.png", "the vessel")   # a folder or a hub id, too
answer.save("mask.png")                                      # .mask .soft .text .score
improve("DATA", unlabelled_root="IMAGES")                    # as `sa2va-rl improve`
```"""
MARKS = ("Annotated", "Rare", "tyro")  # around a type; its first argument is the type
NAPOLEON: Any = Config(napoleon_use_rtype=False, napoleon_use_ivar=True)
SEVERAL = re.compile(r"^ +\w+(, \w+)+: ")  # "image, mask: uint8 (H, W)"
Documented = ast.FunctionDef | ast.ClassDef


def modules() -> list[str]:
    """Full names of all modules and packages, sorted."""
    files = [file for file in PACKAGE.rglob("*.py") if file.stem != "__main__"]
    names = [file.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", ".") for file in files]
    return sorted(name.removesuffix(".__init__") for name in names)


def source(module: str) -> ast.Module:
    """The parsed source of a module or package."""
    file = PACKAGE.parent / module.replace(".", "/")
    return ast.parse((file / "__init__.py" if file.is_dir() else file.with_suffix(".py")).read_text(encoding="utf-8"))


def room_of(module: str) -> str:
    """The folder of a module below the package, or "package" for modules at its top."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (PACKAGE / parts[1]).is_dir() else "package"


def room_pages() -> dict[str, str]:
    """Room -> its page. The pages are out of the full-text search, which finds names of the API all the same."""
    pages: dict[str, list[str]] = {}
    for name in modules():
        room = room_of(name)
        first = f"This page documents the modules of `{room}`." if room != "package" else "This page documents the top."
        lines = pages.setdefault(room, ["---", "nosearch: true", "---", f"# {room}", "", first, ""])
        lines += [f"## {name.removeprefix('rl_reward_network.')}", "", "```{eval-rst}", *module_lines(name), "```", ""]
    return {room: "\n".join(lines) for room, lines in pages.items()}


def api_index(rooms: list[str]) -> str:
    """The page above those of the rooms: what is called first, then the first line of each room's docstring."""
    lines = ["# API", "", "This page lists what is called first, then every folder of the package.", ""]
    lines += ["## Called first", "", SURFACE, "", "| name | what it does |", "|---|---|"]
    for name in FIRST:
        lines += [f"| {{py:obj}}`~rl_reward_network.{name}` | {first_line(name)} |"]
    lines += ["", "## Folders", ""]
    for room in rooms:
        module = "rl_reward_network" if room == "package" else f"rl_reward_network.{room}"
        lines += [f"- [{room}]({room}.md): {(ast.get_docstring(source(module)) or '-').splitlines()[0]}"]
    return "\n".join([*lines, "", "```{toctree}", ":hidden:", "", *rooms, "```", ""])


def first_line(name: str) -> str:
    """The first line of the docstring of a function, class or method, by its name below the package."""
    module = max((one for one in modules() if f"rl_reward_network.{name}.".startswith(f"{one}.")), key=len)
    node: ast.AST = source(module)
    for part in f"rl_reward_network.{name}".removeprefix(f"{module}.").split("."):
        node = next(one for one in ast.iter_child_nodes(node) if isinstance(one, Documented) and one.name == part)
    assert isinstance(node, Documented)
    return (ast.get_docstring(node) or "").partition("\n")[0].replace("|", "\\|")  # of a cell


# ---- reStructuredText ------------------------------------------------------------------------------------------------


def module_lines(name: str) -> list[str]:
    """A module with all that is public and has a docstring."""
    tree = source(name)
    types = Types(tree, name)
    body = [f".. py:module:: {name}", "", *docstring(ast.get_docstring(tree) or "", "module")]
    return body + [line for text in members(tree, types, "") for line in text]


def members(parent: ast.Module | ast.ClassDef, types: "Types", kind: str) -> Iterator[list[str]]:
    """Lines of each function, class and value of a module (`kind` empty) or of a class ("class")."""
    for node, following in zip(parent.body, [*parent.body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            marks = {ast.unparse(mark).rpartition(".")[2] for mark in node.decorator_list}
            if "overload" in marks or not (text := ast.get_docstring(node)):
                continue
            if kind and marks & {"property", "cached_property"}:
                yield directive("py:property", node.name, text, {"type": types.shown(node.returns)})
            else:
                given = f"{node.name}({types.arguments(node.args, bool(kind) and 'staticmethod' not in marks)})"
                given += f" -> {types.shown(node.returns)}" if node.returns else ""
                fields: dict[str, str] = dict.fromkeys(marks & {"classmethod", "staticmethod"}, "")
                yield directive("py:method" if kind else "py:function", given, text, fields)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            inner = [indent(line, "   ") for text in members(node, types, "class") for line in text]
            yield [*directive("py:class", node.name + types.fields(node), ast.get_docstring(node) or "", {}), *inner]
        elif (name := assigned(node)) and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            shown = types.shown(node.annotation) if isinstance(node, ast.AnnAssign) else ""
            yield directive("py:attribute" if kind else "py:data", name, str(following.value.value), {"type": shown})


def assigned(node: ast.stmt) -> str:
    """The public name that a statement gives a value, or "" for none."""
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    return target.id if isinstance(target, ast.Name) and not target.id.startswith("_") else ""


def directive(kind: str, given: str, text: str, fields: dict[str, str]) -> list[str]:
    """A directive with its options; an option of the value "" is left out, but for those without a value."""
    named = [f"   :{name}: {value}".rstrip() for name, value in fields.items() if value or name != "type"]
    what = "object" if kind in ("py:attribute", "py:data", "py:property") else kind.removeprefix("py:")
    return [f".. {kind}:: {given}", *named, "", *(indent(line, "   ") for line in docstring(text, what)), ""]


def docstring(text: str, what: Any) -> list[str]:
    """reStructuredText of Google's sections, of names in backticks and of indented lines, which are literal.

    napoleon alone would take "word: ..." of a field for a type, so that `what` is "object" for values.
    """
    lines = escaped(cleandoc(text).splitlines())
    return [*GoogleDocstring(lines, NAPOLEON, what=what).lines(), ""]


def escaped(lines: list[str]) -> list[str]:
    """Escape what has a meaning in reStructuredText only, outside of names in backticks, examples and literal lines."""
    found, literal = list[str](), 0  # columns of the literal block
    for number, line in enumerate(lines):
        before = next((one for one in reversed(lines[:number]) if one.strip()), "")
        width = len(line) - len(line.lstrip())
        if line.strip() and width < literal:
            literal = 0
        if not literal and number and line.strip() and not lines[number - 1].strip():
            around = len(before) - len(before.lstrip())
            if width >= around + 4 and not before.lstrip().startswith(("- ", ">>>")):
                found += [" " * around + "::", ""]
                literal = width
        found += [line] if literal or line.lstrip().startswith(">>>") else escaped_line(line)
    return found


def escaped_line(line: str) -> list[str]:
    """A line of prose; a head of Gymnasium's sections becomes a rubric."""
    line = SEVERAL.sub(lambda names: names[0].replace(", ", ","), line)  # else the first one is taken for a type
    if line.lstrip().startswith("## "):
        return [f".. rubric:: {line.lstrip()[3:]}", ""]
    parts = line.split("`")
    parts[::2] = [re.sub(r"([|*]|(?<=\w)_(?=\W|$))", r"\\\1", part) for part in parts[::2]]
    return ["`".join(parts)]


class Types(ast.NodeTransformer):
    """Types of a module as they are shown: without tyro's marks, with the full names of our own classes for links."""

    def __init__(self, tree: ast.Module, module: str) -> None:
        """Read what a module imports and defines."""
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        ours = [node for node in imports if str(node.module).startswith("rl_reward_network")]
        defined = {name for node in tree.body if (name := getattr(node, "name", "") or assigned(node))}
        self.full = {name: f"{module}.{name}" for name in defined}
        self.full |= {one.asname or one.name: f"{node.module}.{one.name}" for node in ours for one in node.names}

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """The full name of what the package defines, of which Sphinx shows the last part where `~` stands before it."""
        full = self.full.get(node.id)
        return ast.UnaryOp(ast.Invert(), ast.Name(full)) if full else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """The type inside of a mark."""
        if ast.unparse(node.value).partition(".")[0] in MARKS:
            inner = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
            return self.visit(inner)
        return self.generic_visit(node)

    def shown(self, node: ast.expr | None) -> str:
        """A type, or "" for none."""
        return "" if node is None else ast.unparse(self.visit(ast.parse(ast.unparse(node), mode="eval").body))

    def arguments(self, given: ast.arguments, is_method: bool = False) -> str:
        """Arguments with types and defaults, without self."""
        copy = ast.parse(f"def f({ast.unparse(given)}): pass").body[0]
        assert isinstance(copy, ast.FunctionDef)
        if is_method:
            del (copy.args.posonlyargs or copy.args.args)[0]
        for one in ast.walk(copy.args):
            if isinstance(one, ast.arg) and one.annotation is not None:
                one.annotation = ast.parse(self.shown(one.annotation), mode="eval").body
        return ast.unparse(copy.args)

    def fields(self, node: ast.ClassDef) -> str:
        """The arguments of a class in brackets: of `__init__`, or else its fields where these have no docstrings."""
        for one in node.body:
            if isinstance(one, ast.FunctionDef) and one.name == "__init__":
                return f"({self.arguments(one.args, True)})"
        texts = [one for one in node.body[1:] if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)]
        values = [] if texts else [one for one in node.body if isinstance(one, ast.AnnAssign) and assigned(one)]
        shown = []
        for one in values:
            default = f" = {ast.unparse(one.value)}" if one.value and not isinstance(one.value, ast.Call) else ""
            shown += [f"{assigned(one)}: {self.shown(one.annotation)}{default}"]
        return f"({', '.join(shown)})" if shown else ""
