"""`outputs/index.html`: all runs of a folder, the settings that differ, their main results and their reports."""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rl_reward_network.artefacts import read_json
from rl_reward_network.report import page
from rl_reward_network.run import began, run_folders

INDEX = "index.html"
HEAD = "<h1>Runs in "
LONGEST = 40  # letters of a value; longer ones are cut
FINGERPRINT = re.compile("[0-9a-f]{16,}")
RESULTS = ("agreement.json", "eval.json", "evaluation*/eval.json")  # where a kind of run keeps its numbers


@dataclass(frozen=True)
class Entry:
    """A line of the index.

    Args:
        folder: of the run.
        config: its config.json.
        settings: name -> short value, of nested settings with dots.
    """

    folder: Path
    config: Mapping[str, Any]
    settings: Mapping[str, str]

    @property
    def stage(self) -> str:
        """What was trained or compared."""
        return str(self.config.get("stage", "unknown"))


def write_index(output_dir: Path) -> Path:
    """Write `output_dir`/index.html about all runs in it, the newest first; a run that cannot be read is named so.

    An index.html of another origin is left as it is, also a folder.

    Args:
        output_dir: parent of run folders.
    """
    path = output_dir / INDEX
    if path.exists() and not _is_ours(path):
        return path
    runs = list(_runs(output_dir))
    rows = [_row(output_dir, run, [other for other in runs if other.stage == run.stage]) for run in runs]
    names = ("began", "run", "what", "settings that differ", "result", "reports")
    head = "".join(f"<th>{name}</th>" for name in names)
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    table = f'<div class="dense wrap"><table style="min-width: 48rem">{body}</table></div>'  # a phone scrolls
    text = page.whole_page("Runs", [f"{HEAD}{page.text(output_dir.resolve().name)}</h1>", table])
    return page.write_files(output_dir, {INDEX: text.encode(errors="replace").decode()})  # names of other encodings


def _is_ours(path: Path) -> bool:
    return path.is_file() and HEAD in path.read_text(encoding="utf-8", errors="replace")


def _row(output_dir: Path, run: Entry, alike: list[Entry]) -> str:
    links = (_link(output_dir, path, _report_name(run.folder, path)) for path in _reports(run.folder))
    cells = (
        f"<span>{began(run.folder):%Y-%m-%d %H:%M}</span>",
        _link(output_dir, run.folder, run.folder.name),
        *(page.text(words) for words in (run.stage, _differing(run, alike), _result(run.folder))),
        " ".join(f"<span>{link}</span>" for link in links),
    )
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _runs(output_dir: Path) -> Iterator[Entry]:
    for folder in run_folders(output_dir):
        try:
            config = read_json(folder / "config.json")
        except (ValueError, OSError):
            config = None
        if not isinstance(config, dict):
            config = {"stage": "damaged config.json"}
        origin = config.get("origin")
        yield Entry(folder, config, dict(_flat(origin if isinstance(origin, dict) else {})))


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _short(value)


def _short(value: Any) -> str:
    """A value in few letters; values that differ look different."""
    words = str(value)
    digest = hashlib.sha256(words.encode(errors="replace")).hexdigest()[:6]
    if FINGERPRINT.fullmatch(words):
        return words[:8]
    if len(words) <= LONGEST:
        return words
    return f"list of {len(value)} ({digest})" if isinstance(value, list) else f"{words[: LONGEST // 2]}... ({digest})"


def _differing(run: Entry, alike: list[Entry]) -> str:
    """The settings in which runs of one kind differ, with the values of this run."""
    found = []
    for name, value in run.settings.items():
        if any(other.settings.get(name) != value for other in alike):
            found.append(f"{name}: {value}")
    return ", ".join(found)


def _result(folder: Path) -> str:
    """The first verdict of each evaluation, or what stands for one; several begin with their names."""
    paths = sorted(path for pattern in RESULTS for path in folder.glob(pattern))
    if len(paths) < 2:
        return _verdict(paths[0]) if paths else "not evaluated"
    return " ".join(f"{_report_name(folder, path)}: {_verdict(path)}" for path in paths)


def _verdict(path: Path) -> str:
    try:
        values = read_json(path)
        verdict = values.get("verdict")
        if isinstance(verdict, list):
            return str(verdict[0])
        return str(verdict["sentence"]) if isinstance(verdict, dict) else _agreement(values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return "its results are damaged or of another version"


def _agreement(values: Mapping[str, Any]) -> str:
    """How well a reward network predicts the Dice of Sa2VA's masks, how wide its intervals are, and its own Dice."""
    error = values["tables"]["Sa2VA"]["network"]["mae"]
    half = values.get("intervals", {}).get("Sa2VA", {}).get("half_width")  # None: the run has no interval
    width = "" if half is None else f", 90 % intervals of ±{half:.3f}"
    own = "unknown" if values["own_dice"] is None else f"Dice {values['own_dice']:.3f} on test patients"
    return f"predicted Dice of Sa2VA's masks: mean absolute error {error:.3f}{width}; own segmentation: {own}"


def _reports(folder: Path) -> list[Path]:
    names = ("report.html", "sheet.png", "evaluation*/report.html")
    return sorted(path for name in names for path in folder.glob(name))


def _report_name(folder: Path, path: Path) -> str:
    """`report` of a run, `evaluation_20` of an evaluation."""
    return path.stem if path.parent == folder else path.parent.name


def _link(output_dir: Path, path: Path, name: str) -> str:
    address = quote(os.fsencode(path.relative_to(output_dir).as_posix()))
    return f'<a href="{page.text(address)}">{page.text(name).replace("_", "_<wbr>")}</a>'
