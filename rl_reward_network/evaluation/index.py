"""`outputs/index.html`: all runs of a folder, the settings that differ, their main results and their reports."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rl_reward_network.artefacts import read_json
from rl_reward_network.evaluation import page

INDEX = "index.html"
HEAD = "<h1>Runs in "
LONGEST = 40  # letters of a value; longer ones are lists and fingerprints
RESULTS = ("agreement.json", "eval.json", "evaluation*/eval.json")  # where a kind of run keeps its numbers


@dataclass(frozen=True)
class Run:
    """A line of the index.

    Args:
        folder: of the run.
        config: its config.json.
        settings: name -> value, of nested settings with dots.
    """

    folder: Path
    config: Mapping[str, Any]
    settings: Mapping[str, str]

    @property
    def stage(self) -> str:
        """What was trained or compared."""
        return str(self.config.get("stage", "unknown"))

    @property
    def began(self) -> float:
        """Time stamp of config.json, which is written first."""
        return (self.folder / "config.json").stat().st_mtime


def write_index(output_dir: Path) -> Path:
    """Write `output_dir`/index.html about all runs in it, the newest first; a run that cannot be read is named so.

    An index.html of another origin is left as it is.

    Args:
        output_dir: parent of run folders.
    """
    path = output_dir / INDEX
    if path.exists() and HEAD not in path.read_text(encoding="utf-8", errors="replace"):
        return path
    runs = sorted(_runs(output_dir), key=lambda run: -run.began)
    rows = []
    for run in runs:
        differing = _differing(run, [other for other in runs if other.stage == run.stage])
        rows.append(
            f"<tr><td>{datetime.fromtimestamp(run.began):%Y-%m-%d %H:%M}</td><td>{_link(output_dir, run.folder)}</td>"
            f"<td>{page.text(run.stage)}</td><td>{page.text(differing)}</td><td>{page.text(_result(run.folder))}</td>"
            f"<td>{' '.join(_link(output_dir, path) for path in _reports(run.folder))}</td></tr>"
        )
    names = ("began", "run", "what", "settings that differ", "result", "reports")
    head = "".join(f"<th>{name}</th>" for name in names)
    table = f'<div class="dense"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    text = page.whole_page("Runs", [f"{HEAD}{page.text(output_dir.resolve().name)}</h1>", table])
    return page.write_files(output_dir, {INDEX: text})


def _runs(output_dir: Path) -> Iterator[Run]:
    for path in output_dir.glob("*/config.json"):
        try:
            config = read_json(path)
            if not isinstance(config, dict):
                raise ValueError(f"{path}: not a table")
        except ValueError:
            config = {"stage": "damaged config.json"}
        yield Run(path.parent, config, dict(_flat(config.get("origin", {}))))


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)


def _differing(run: Run, alike: list[Run]) -> str:
    """The settings in which runs of one kind differ, with the values of this run."""
    found = []
    for name, value in run.settings.items():
        if any(other.settings.get(name) != value for other in alike):
            found.append(f"{name}: {value}" if len(value) <= LONGEST else f"{name}: {value[: LONGEST // 2]}...")
    return ", ".join(found)


def _result(folder: Path) -> str:
    """The first verdict of the newest evaluation, or what stands for one."""
    paths = [path for pattern in RESULTS for path in folder.glob(pattern)]
    if not paths:
        return "not evaluated"
    try:
        values = read_json(max(paths, key=lambda path: path.stat().st_mtime))
        verdict = values.get("verdict")
        if isinstance(verdict, list):
            return str(verdict[0])
        if isinstance(verdict, dict):
            return str(verdict["sentence"])
        return f"own segmentation: Dice {values['own_dice']:.3f} on test patients"
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return "its results are damaged or of another version"


def _reports(folder: Path) -> list[Path]:
    names = ("report.html", "sheet.png", "evaluation*/report.html")
    return sorted(path for name in names for path in folder.glob(name))


def _link(output_dir: Path, path: Path) -> str:
    relative = os.path.relpath(path, output_dir)
    return f'<a href="{page.text(quote(Path(relative).as_posix()))}">{page.text(path.stem)}</a>'
