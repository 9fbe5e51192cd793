"""Parts of a report: a self-contained HTML page, its header, tables, embedded pictures, CSV text, and their files."""

import base64
import csv
import html
import io
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from rl_reward_network import __version__
from rl_reward_network.atomic_io import whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DENSE = {7: "dense", 8: "densest"}  # tables with more columns have smaller type; at last, intervals wrap, too
_STYLE = """
body { font-family: system-ui, sans-serif; max-width: 64rem; margin: 0 auto; padding: 0 1rem 3rem; line-height: 1.45; }
.verdict { border-left: .4rem solid #357; background: #eef3f8; padding: .6rem 1rem; font-size: 1.1rem; }
.scroll, .dense, .densest { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #ccc; text-align: left; vertical-align: top; }
td span { white-space: nowrap; }
.wrap td, code { overflow-wrap: anywhere; }
.dense { font-size: .8rem; line-height: 1.3; }
.densest { font-size: .66rem; line-height: 1.3; }
.dense th, .dense td { padding: .25rem .35rem; }
.densest th, .densest td { padding: .25rem .2rem; }
.densest td span { white-space: normal; }
.facts { font-size: .85rem; }
.facts th { font-weight: normal; color: #555; }
.facts th, .facts td { border: 0; padding: .1rem .7rem .1rem 0; }
.panels { display: flex; flex-wrap: wrap; gap: .5rem; }
figure { margin: 0; flex: 1 1 9rem; max-width: 25rem; }
figcaption, .legend { font-size: .9rem; }
.legend span { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
.legend img { vertical-align: middle; }
img { max-width: 100%; height: auto; }
@media (max-width: 40rem) { th, td { padding: .25rem .3rem; font-size: .85rem; } }
@page { size: A4 landscape; margin: 12mm; }
@media print {
  body { max-width: none; padding: 0; font-size: 9pt; }
  .scroll, .dense, .densest { overflow: visible; }
  .dense, .densest { font-size: 7pt; }
  h2, h3 { break-after: avoid; }
  tr, section, .verdict { break-inside: avoid; }
}
"""


@dataclass(frozen=True)
class Origin:
    """Where a report comes from.

    Args:
        facts: name -> text for the header, see `made_by`.
        files: name -> file or folder that the numbers rest on; those that do not exist are not linked.
    """

    facts: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)


def made_by(command: str, flags: Mapping[str, object], data: str, model: str, trained_by: str, logs: Path) -> Origin:
    """The header's facts: date, version, data, model, the command that made the report, and that of TensorBoard.

    Args:
        command: of `sa2va-rl`, such as "evaluate".
        flags: name -> value; None and False are left out, True is a flag without a value.
        data, model: in words.
        trained_by: version that trained the model.
        logs: TensorBoard folder of the run; left out if it does not exist.
    """
    given = {f"--{name}": value for name, value in flags.items() if value is not None and value is not False}
    words = [word for name, value in given.items() for word in ([name] if value is True else [name, str(value)])]
    facts = {
        "date": f"{datetime.now():%Y-%m-%d %H:%M}",
        "version": __version__ if trained_by == __version__ else f"{__version__}, trained by {trained_by}",
        "data": data,
        "model": model,
        "command": shlex.join(["sa2va-rl", command, *words]),
    }
    if not logs.is_dir():
        return Origin(facts)
    return Origin(facts | {"TensorBoard": shlex.join(["tensorboard", "--logdir", str(logs)])}, {"TensorBoard": logs})


def header(origin: Origin, folder: Path, written: Sequence[str] = ()) -> str:
    """HTML at the top of a report: the facts, and links to files.

    Args:
        origin: facts and files; without facts the header is empty.
        folder: of the report; links are relative to it, so that it can be moved with the files.
        written: names of the files that are written beside the report.
    """
    if not origin.facts:
        return ""
    targets = {name: name for name in written}
    targets |= {name: os.path.relpath(path, folder) for name, path in origin.files.items() if path.exists()}
    links = ", ".join(f'<a href="{text(quote(Path(to).as_posix()))}">{text(name)}</a>' for name, to in targets.items())
    cells = {
        name: f"<code>{text(fact)}</code>" if name in ("command", "TensorBoard") else text(fact)
        for name, fact in origin.facts.items()
    }
    rows = "".join(
        f"<tr><th>{text(name)}</th><td>{cell}</td></tr>\n" for name, cell in (cells | {"files": links}).items() if cell
    )
    return f'<div class="wrap"><table class="facts"><tbody>\n{rows}</tbody></table></div>'


def whole_page(title: str, parts: Iterable[str]) -> str:
    """The HTML file; empty parts are left out."""
    head = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{_STYLE}</style></head>"
    )
    return head + "<body>\n" + "\n".join(part for part in parts if part) + "\n</body></html>\n"


def report(
    title: str,
    question: str,
    header: str,
    verdict: Iterable[str],
    sentences: Iterable[str],
    notes: Iterable[str],
    parts: Iterable[str],
    settings: Mapping[str, object] | None = None,
) -> str:
    """The HTML file of a report.

    Args:
        title: of the window.
        question: that the report answers, its heading.
        header: see `header`.
        verdict: sentences that come first.
        sentences: what else must be known, such as what is deployed.
        notes: limits of the data.
        parts: HTML of the tables, plots and pictures.
        settings: what was evaluated, at the end.
    """
    about = ["<h2>What was evaluated</h2>", table(["setting", "value"], settings.items(), "wrap")] if settings else []
    return whole_page(
        title,
        [
            f"<h1>{text(question)}</h1>",
            header,
            "".join(f'<p class="verdict">{text(sentence)}</p>' for sentence in verdict),
            *(f"<p>{text(sentence)}</p>" for sentence in sentences),
            "".join(f"<p>Note: {text(note)}</p>" for note in notes),
            *parts,
            *about,
        ],
    )


def text(value: object) -> str:
    """HTML-escaped text."""
    return html.escape(str(value))


def table(header: Sequence[str], rows: Iterable[Iterable[object]], style: str = "scroll") -> str:
    """An HTML table; words wrap, an interval in brackets stays on one line.

    On a narrow screen it scrolls sideways (style "scroll") or breaks words (style "wrap"). More than seven columns are
    set in smaller type; from nine, intervals wrap, too. So 16 columns fit 1,000 pixels.
    """
    if style == "scroll":
        style = next((name for columns, name in reversed(_DENSE.items()) if len(header) > columns), style)
    head = "".join(f"<th>{text(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f'<div class="{style}"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def _cell(value: object) -> str:
    """HTML-escaped text, with intervals such as [0.1, 0.2] in spans."""
    return re.sub(r"\[[-+\d., ]+\]", r"<span>\g<0></span>", text(value))


def image(data: bytes, kind: str, description: str) -> str:
    """An image embedded in the page."""
    encoded = base64.b64encode(data).decode()
    return f'<img src="data:image/{kind};base64,{encoded}" alt="{text(description)}">'


def png(plot: "Figure") -> bytes:
    """A plot as PNG; equal plots give equal bytes."""
    file = io.BytesIO()
    plot.savefig(file, format="png", dpi=110, metadata={"Software": None})
    return file.getvalue()


def figure(plot: "Figure", description: str) -> str:
    """A plot embedded in the page."""
    return image(png(plot), "png", description)


def panels(title: str, pictures: Iterable[tuple[str, bytes]], legend: str = "") -> str:
    """A heading, and JPEG pictures side by side, each with its caption, above a legend (HTML)."""
    figures = "".join(
        f"<figure>{image(data, 'jpeg', caption)}<figcaption>{text(caption)}</figcaption></figure>"
        for caption, data in pictures
    )
    return f'<section><h3>{text(title)}</h3><div class="panels">{figures}</div>{legend}</section>'


def csv_text(lines: Iterable[Iterable[object]]) -> str:
    """Lines as CSV."""
    file = io.StringIO()
    csv.writer(file).writerows(lines)
    return file.getvalue()


def digits(numbers: Iterable[float]) -> list[str]:
    """Six decimals each."""
    return [f"{number:.6f}" for number in numbers]


def write_files(folder: Path, texts: dict[str, str]) -> Path:
    """Write text files in the given order, each whole or not at all; returns the path of the last."""
    for name, content in texts.items():
        with whole_file(folder / name) as temporary:
            temporary.write_text(content, encoding="utf-8", newline="")
    return folder / name
