"""The runs of an output folder: a damaged or foreign folder is passed over with a warning that names it."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_reward_network.runs.folder import (
    AGREEMENT,
    COMPARE_RUN,
    FINAL,
    GRPO_RUN,
    POLICY_RUN,
    POST_RUN,
    REWARD_RUN,
    began_with,
    read_object,
)

KINDS = {
    REWARD_RUN: ("reward network", AGREEMENT),
    POLICY_RUN: ("prompt policy", f"{FINAL}/config.json"),
    POST_RUN: ("post-processing policy", f"{FINAL}/config.json"),
    GRPO_RUN: ("grpo", f"{FINAL}/config.json"),
    COMPARE_RUN: ("comparison", "eval.json"),
}  # how the folder's name begins -> stage in config.json, and what a finished run holds, an object of JSON, too

Fits = Callable[[Path, Mapping[str, Any], bool], bool]
"""(run, its config.json, whether it is finished) -> whether it is the one; a ValueError says that it is damaged."""


def runs_that_fit(output_dir: Path, kind: str, fits: Fits) -> Iterator[Path]:
    """The runs of a kind, a key of `KINDS`, under the output folder for which `fits` is true, the newest first."""
    for path in sorted(output_dir.glob(f"{kind}_*/config.json"), reverse=True):
        run = path.parent
        try:
            is_fit = fits(run, run_config(run, kind), is_finished(run, kind))
        except ValueError as error:
            warnings.warn(f"passed over: {error}", stacklevel=1)  # always this line, so that it is shown once
            continue
        if is_fit:
            yield run


def began_alike(wanted: Mapping[str, Any]) -> Fits:
    """Fits runs whose `origin` has these settings, finished or interrupted."""
    return lambda _, config, finished: began_with(config, config["origin"], wanted, finished)


def run_config(run: Path, kind: str) -> dict[str, Any]:
    """config.json of a run of a kind.

    Raises:
        ValueError: it is damaged, or of something else; names the file.
    """
    config = read_object(run / "config.json")
    stage = KINDS[kind][0]
    if config.get("stage") != stage or not isinstance(config.get("origin"), dict):
        raise ValueError(f"{run / 'config.json'}: not of a run of this project (expected stage {stage!r} and origin)")
    return config


def is_finished(run: Path, kind: str) -> bool:
    """Whether a run is complete.

    Raises:
        ValueError: what is written last is damaged; names the file.
    """
    last = run / KINDS[kind][1]
    written = last if last.parent == run else last.parent
    if not written.exists():
        return False
    read_object(last)
    return True
