"""The site is built without a warning, its notebooks run, and every public name and every error message is on it."""

import ast
import csv
import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sphinx.util.inventory import InventoryFile

from tools.site import help_text, messages, modules

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted(path.stem for path in (ROOT / "tutorials").glob("tutorial_*.py"))


@pytest.fixture(scope="module")
def site() -> Path:
    """The folder of the site, built by the command of the README."""
    words = [sys.executable, "-m", "sphinx", "-q", "-E", "-n", "-W", "--keep-going", "docs", "docs/_build"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-8000:]
    return ROOT / "docs/_build"


def test_every_page_is_built(site: Path) -> None:
    sources = {*ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/**/*.rst")} - {*ROOT.glob("docs/_build/**/*")}
    pages = {source.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for source in sources}
    assert len(pages) > 60
    pages -= {"sg_execution_times.html", "tutorials/sg_execution_times.html"}
    assert [page for page in pages if not (site / page).exists()] == []


def test_the_three_notebooks_ran(site: Path) -> None:
    assert len(NOTEBOOKS) == 3
    costs = [json.loads((ROOT / f"docs/tutorials/{name}.cost.json").read_text())["time"] for name in NOTEBOOKS]
    assert all(cost > 1 for cost in costs), costs
    for name in NOTEBOOKS:
        page = (site / f"tutorials/{name}.html").read_text()
        assert "sphx-glr-script-out" in page, "printed output"
        assert "sphx_glr_" in page, "pictures"
        assert f"{name}.ipynb" in page, "a notebook to download"


def test_every_public_function_and_class_is_in_the_api(site: Path) -> None:
    with (site / "objects.inv").open("rb") as file:
        found = {name for kind in InventoryFile.load(file, "", os.path.join).values() for name in kind}
    names = [f"{module}.{name}" for module in modules() for name in public_names(module)]
    assert len(names) > 1000
    assert [name for name in names if name not in found] == []


def public_names(module: str) -> list[str]:
    """Functions and classes of a module, without those that begin with an underscore."""
    path = ROOT / module.replace(".", "/")
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    kinds = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
    return [node.name for node in ast.parse(text).body if isinstance(node, kinds) and not node.name.startswith("_")]


def test_every_error_message_is_on_its_page(site: Path) -> None:
    page = html.unescape(re.sub(r"<[^>]+>", "", (site / "reference/errors.html").read_text()))
    words = " ".join(page.split())
    missing = [one.text for one in messages() if one.text.replace("`", "'") not in words]
    assert len(messages()) > 450
    assert missing == []


@pytest.mark.parametrize("words", ["no known layout", "no such command", "no group (patient) in the file name"])
def test_a_message_that_is_made_elsewhere_is_found(words: str) -> None:
    assert any(words in message.text for message in messages())


def test_a_message_says_where_it_is_raised() -> None:
    own = [message for message in messages() if message.place == "own_rewards"]
    assert {message.module for message in own} == {"rl_reward_network.rewards.table"}
    assert {message.error for message in own} == {"ValueError"}
    assert "...: defines no function; define one of (masks, image) for each reward" in {one.text for one in own}


def test_the_settings_are_those_of_the_commands(site: Path) -> None:
    page = (site / "reference/settings.html").read_text()
    flags = re.findall(r"--[a-z][\w-]+", help_text("grpo"))
    assert len(set(flags)) > 80
    assert [flag for flag in flags if flag not in page] == []


def test_each_measurement_of_the_first_page_is_in_the_section_that_it_names(site: Path) -> None:
    sections = re.split(r"^#+ ", (ROOT / "docs/results.md").read_text(), flags=re.MULTILINE)
    by_name = {re.sub(r"[^\w\- ]", "", text.split("\n")[0].lower()).replace(" ", "-"): text for text in sections}
    with (ROOT / "docs/which-method.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 15
    assert [row for row in rows if row["dice"] not in by_name[row["source"]]] == []
    results = (ROOT / "docs/results.md").read_text()
    numbers = re.findall(r"\b0\.\d{3}\b", (ROOT / "docs/index.md").read_text())
    assert [number for number in numbers if number not in results] == []
    assert (site / "index.html").exists()
