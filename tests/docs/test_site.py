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

from tools.api import modules
from tools.site import help_text, messages

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


def test_every_flag_has_an_anchor_among_the_settings(site: Path) -> None:
    page = (site / "reference/settings.html").read_text()
    for name in ("grpo", "segment", "data import"):
        boxes = help_text(name).split("╭", 1)[1]
        flags = {flag.replace("-", "_") for flag in re.findall(r"^│ --([a-z][\w-]+)", boxes, flags=re.MULTILINE)}
        assert len(flags) > 8
        anchors = {flag: f'id="cmdoption-{name.replace(" ", "-")}-{flag}"' for flag in flags}
        assert [flag for flag, anchor in anchors.items() if anchor not in page] == []
        assert "--learning_rate" in page


def test_what_is_copied_from_a_page_runs(site: Path) -> None:
    """Two hyphens stay two, lines of commands stay lines, and types have no marks of the command line."""
    pages = {path: path.read_text() for path in site.rglob("*.html")}
    assert len(pages) > 60
    joined = re.compile("[\u2013\u2014](?=[A-Za-z])")  # dashes, where hyphens were
    assert [path.name for path, text in pages.items() if joined.search(text)] == []
    api = "".join(text for path, text in pages.items() if path.parent.name == "api")
    assert "sa2va-rl merge outputs/" in html.unescape(re.sub(r"<[^>]+>", "", api))
    assert [word for word in ("tyro.conf", "Annotated[", "typing.Annotated") if word in api] == []
    copied = [html.unescape(re.sub(r"<[^>]+>", "", block)) for block in re.findall(r"<pre>(.*?)</pre>", api, re.DOTALL)]
    lines = [line for block in copied for line in block.splitlines() if line.startswith("sa2va-rl ")]
    assert len(lines) > 18
    assert [line for line in lines if line.count("sa2va-rl ") > 1] == []


def test_a_search_finds_how_to_pages_before_the_api(site: Path) -> None:
    """The text of API pages is not in the index, and their names come last."""
    index = json.loads((site / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")"))
    assert "segment" in {name for *_, name in index["objects"]["rl_reward_network.models.sa2va.generation_sa2va"]}
    found = [index["docnames"][number] for number in index["terms"]["segment"]]
    assert [name for name in found if name.startswith("reference/api/")] == ["reference/api/index"]
    assert len([name for name in found if name.startswith("how-to/")]) > 3
    assert "score + 20" in (site / "_static/language_data.js").read_text()


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
