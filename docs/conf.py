"""Settings of the site: `python -m sphinx -n -W docs docs/_build`."""

import os
import sys
from pathlib import Path

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
    "sphinx_gallery.gen_gallery",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_extra_path = ["../rl_reward_network/assets/llms.txt"]
html_search_scorer = str(HERE / "scorer.js")  # how-to pages before the API
smartquotes = False  # "--flag" keeps its two hyphens

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
default_role = "code"  # docstrings write names in single backticks
add_module_names = False
maximum_signature_line_length = 100
toc_object_entries = False  # in the navigation, they would cost minutes
# No inventory of another project is read, so names of other packages have no link; those of ours must have one.
nitpick_ignore_regex = [(r"py:.*", r"(?!rl_reward_network\.).*"), (r"py:class", r"rl_reward_network(\.\w+)+\.[A-Z]\w*")]

write_pages(HERE / "reference")
