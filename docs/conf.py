"""Settings of the site: `python -m sphinx -n -W docs docs/_build`."""

import os
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ |= {"PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1"}  # also of processes that a notebook starts

from rl_reward_network import __version__  # noqa: E402
from tools.site import write_pages  # noqa: E402

project = "Reinforcement learning for Sa2VA"
author = "The rl-reward-network contributors"
version = release = __version__
html_title = f"{project} {release}"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_gallery.gen_gallery",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False

# Markdown
myst_heading_anchors = 4

# Tutorials: run at each build
sphinx_gallery_conf = {
    "examples_dirs": "../tutorials",
    "gallery_dirs": "tutorials",
    "filename_pattern": "tutorial_",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "run_stale_examples": True,  # the code that they call may have changed
    "show_signature": False,
    "download_all_examples": False,
    "min_reported_time": 1,
    "capture_repr": (),
}

# API
autodoc_default_options = {"ignore-module-all": True}  # what is imported is documented where it is defined
default_role = "code"  # docstrings write names in single backticks
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
toc_object_entries = False  # in the navigation, they would cost minutes
SEVERAL = re.compile(r"^ +\w+(, \w+)+: ")  # "image, mask: uint8 (H, W)"
NAPOLEON = Config(napoleon_use_rtype=False, napoleon_use_ivar=True)
# No inventory of another project is read, so names of other packages have no link; those of ours must have one.
nitpick_ignore_regex = [
    (r"py:.*", r"(?!rl_reward_network\.).*"),
    (r"py:class", r".*(Annotated\[.*|_ArgConfig.*)"),  # tyro's marks
    (r"py:class", r"rl_reward_network(\.\w+)+\.[A-Z]\w*"),
]

write_pages(HERE / "reference")


def setup(app: Sphinx) -> None:
    """Register the translation of docstrings, which are plain text with names in backticks."""
    app.connect("autodoc-process-docstring", translate)


def translate(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Make reStructuredText of Google's sections; napoleon alone would take "word: ..." of a field for a type."""
    escape(lines)
    kind = "object" if what in ("attribute", "data", "property") else what
    lines[:] = GoogleDocstring(lines, NAPOLEON, app, kind, name, obj, options).lines()


def escape(lines: list[str]) -> None:
    """Escape what has a meaning in reStructuredText only, outside of names in backticks and of examples."""
    for number, line in enumerate(lines):
        line = SEVERAL.sub(lambda names: names[0].replace(", ", ","), line)  # else the first one is taken for a type
        if line.lstrip().startswith("## "):  # Gymnasium's sections
            lines[number] = f".. rubric:: {line.lstrip()[3:]}\n"
        elif not line.lstrip().startswith(">>>"):
            parts = line.split("`")
            parts[::2] = [re.sub(r"([|*]|(?<=\w)_(?=\W|$))", r"\\\1", part) for part in parts[::2]]
            lines[number] = "`".join(parts)
    lines[:] = "\n".join(lines).split("\n")
