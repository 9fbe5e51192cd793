"""A report: its files, and its HTML page with tables, plots and pictures, which needs no other file."""

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
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rl_reward_network import __version__
from rl_reward_network.atomic_io import whole_file, write_json
from rl_reward_network.report.statistics import Estimate

LABEL_PIXELS = 12  # about the height of a label at 100 dots per inch
_DENSE = {7: "dense", 8: "densest"}  # tables with more columns have smaller type; at last, intervals wrap, too
_STYLE = """
body { font-family: system-ui, sans-serif; max-width: 64rem; margin: 0 auto; padding: 0 1rem 3rem; line-height: 1.45; }
.verdict { border-left: .4rem solid #357; background: #eef3f8; padding: .6rem 1rem; font-size: 1.1rem; }
.banner { border: 1px solid #b80; background: #fff6dd; padding: .3rem 1rem; }
.scroll, .dense, .densest {
  overflow-x: auto; /* and a shadow at the right as long as there is more */
  background: linear-gradient(to left, #fff 1rem, #fff0) right / 2rem 100% no-repeat local,
    linear-gradient(to left, #0004, #0000) right / .8rem 100% no-repeat scroll;
}
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #ccc; text-align: left; vertical-align: top; }
td span { white-space: nowrap; }
.wrap td, code { overflow-wrap: anywhere; }
.dense { font-size: .8rem; line-height: 1.3; }
.densest { font-size: .66rem; line-height: 1.3; }
.dense th, .dense td { padding: .25rem .35rem; }
.densest th, .densest td { padding: .25rem .2rem; }
.densest td span { white-space: normal; }
details { border-top: 1px solid #ccc; padding: .4rem 0; }
summary { cursor: pointer; font-weight: 600; }
.notes { font-size: .9rem; }
.facts { font-size: .85rem; }
.facts th { font-weight: normal; color: #555; }
.facts th, .facts td { border: 0; padding: .1rem .7rem .1rem 0; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .5rem; }
figure { margin: 0; max-width: 25rem; }
figure img { width: 100%; }
figcaption, .legend { font-size: .9rem; }
.legend span { white-space: nowrap; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
.legend img { vertical-align: middle; }
img { max-width: 100%; height: auto; }
@media (max-width: 40rem) {
  figure { flex-basis: 40%; }
  th, td { padding: .25rem .3rem; font-size: .85rem; }
  td span { white-space: normal; }
}
@page { size: A4 landscape; margin: 12mm; }
@media print {
  body { max-width: none; padding: 0; font-size: 9pt; }
  .banner { border: 1px solid #b80; background: #fff6dd; padding: .3rem 1rem; }
.scroll, .dense, .densest { overflow: visible; }
  .dense, .densest { font-size: 7pt; }
  h2, h3 { break-after: avoid; }
  tr, section, .verdict, .banner { break-inside: avoid; }
  details::details-content { content-visibility: visible; height: auto; }
}
"""


@dataclass(frozen=True)
class Origin:
    """Where a report comes from."""

    facts: Mapping[str, str] = field(default_factory=dict)  # name -> text for the header, see `made_by`
    files: Mapping[str, Path] = field(default_factory=dict)  # what the numbers rest on; what does not exist has no link


def made_by(command: str, flags: Mapping[str, object], data: str, model: str, trained_by: str, logs: Path) -> Origin:
    """The header's facts: date, version, data, model, the command that made the report, and that of TensorBoard.

    Of `flags`, None and False are left out, True is one without a value, and a tuple one with several. Left out is
    TensorBoard, too, without a folder `logs`.
    """
    given = {f"--{name}": value for name, value in flags.items() if value is not None and value is not False}
    values = {
        name: value if isinstance(value, tuple) else () if value is True else (value,) for name, value in given.items()
    }
    words = [word for name, several in values.items() for word in (name, *map(str, several))]
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


@dataclass(frozen=True, eq=False)
class Page:
    """What a report shows, in the order of every report. Sentences and settings are escaped, HTML is not."""

    title: str  # of the window
    question: str  # that the report answers, its heading
    deployed: str  # what is deployed, in a sentence
    verdict: str  # the sentence on it
    shown: str  # what the pictures show, in a sentence
    pictures: Sequence[str]  # HTML of three to six test images with their masks, see `overlays.picture`
    table: str  # HTML of the one table that is not folded, with its explanation
    notes: Sequence[str] = ()  # limits of the data
    folded: Mapping[str, str] = field(default_factory=dict)  # title -> HTML of the rest; "" is left out
    settings: Mapping[str, object] = field(default_factory=dict)  # what was evaluated
    origin: Origin = field(default_factory=Origin)
    legend: str = ""  # HTML of the colours in the pictures, see `overlays.legend`
    banner: str = ""  # what limits every number, above all; it is left out of the notes

    def html(self, folder: Path, written: Sequence[str]) -> str:
        """The HTML file in a folder, which links the files that are written beside it."""
        about = table(["setting", "value"], self.settings.items(), "wrap") if self.settings else ""
        folded = {
            **self.folded,
            "What was evaluated": about,
            "Where it comes from": header(self.origin, folder, written),
        }
        notes = "".join(f"<li>{text(note)}</li>" for note in self.notes if note != self.banner)
        parts = [
            f"<h1>{text(self.question)}</h1>",
            f'<p class="banner">{text(self.banner)}</p>' if self.banner else "",
            f"<p>{text(self.deployed)}</p>",
            f'<p class="verdict">{text(self.verdict)}</p>',
            f"<h2>Images</h2><p>{text(self.shown)}</p>{self.legend}" if self.pictures else "",
            *self.pictures,
            f"<h2>Results</h2>{self.table}",
            f'<ul class="notes">{notes}</ul>' if notes else "",
            *(f"<details><summary>{text(name)}</summary>{part}</details>" for name, part in folded.items() if part),
        ]
        head = (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{text(self.title)}</title><style>{_STYLE}</style></head>"
        )
        return head + "<body>\n" + "\n".join(filter(None, parts)) + "\n</body></html>\n"


def write_report(folder: Path, page: Page, summary: Mapping[str, Any], tables: Mapping[str, str]) -> Path:
    """Write eval.json, the tables (file name -> text), and last report.html, whose path is returned; all atomically."""
    write_json(folder / "eval.json", summary)
    for name, content in {**tables, "report.html": page.html(folder, [*tables, "eval.json"])}.items():
        with whole_file(folder / name) as temporary:
            temporary.write_text(content, encoding="utf-8", newline="")
    return folder / "report.html"


def header(origin: Origin, folder: Path, written: Sequence[str] = ()) -> str:
    """HTML of the facts, and of links relative to the report: to the files `written` and to those that exist."""
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


def text(value: object) -> str:
    """HTML-escaped text."""
    return html.escape(str(value))


def table(header: Sequence[str], rows: Iterable[Iterable[object]], style: str = "scroll") -> str:
    """An HTML table; intervals stay on one line. A narrow screen scrolls it ("scroll") or breaks its words ("wrap")."""
    if style == "scroll":
        style = next((name for columns, name in reversed(_DENSE.items()) if len(header) > columns), style)
    head = "".join(f"<th>{text(name)}</th>" for name in header)
    spans = partial(re.sub, r"\[[-+\d., ]+\]", r"<span>\g<0></span>")  # around an interval such as [0.1, 0.2]
    body = "".join("<tr>" + "".join(f"<td>{spans(text(cell))}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f'<div class="{style}"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def image(data: bytes, kind: str, description: str) -> str:
    """An image embedded in the page."""
    encoded = base64.b64encode(data).decode()
    return f'<img src="data:image/{kind};base64,{encoded}" alt="{text(description)}">'


def png(plot: Figure) -> bytes:
    """A plot as PNG; equal plots give equal bytes."""
    file = io.BytesIO()
    plot.savefig(file, format="png", dpi=110, metadata={"Software": None})
    return file.getvalue()


def figure(plot: Figure, description: str) -> str:
    """A plot embedded in the page."""
    return image(png(plot), "png", description)


def panels(title: str, pictures: Iterable[tuple[str, bytes]]) -> str:
    """A heading, and JPEG pictures side by side, each with its caption."""
    figures = "".join(
        f"<figure>{image(data, 'jpeg', f'{title}: {caption}')}<figcaption>{text(caption)}</figcaption></figure>"
        for caption, data in pictures
    )
    return f'<section><h3>{text(title)}</h3><div class="panels">{figures}</div></section>'


def csv_text(lines: Iterable[Iterable[object]]) -> str:
    """Lines as CSV."""
    file = io.StringIO()
    csv.writer(file).writerows(lines)
    return file.getvalue()


def digits(numbers: Iterable[float]) -> list[str]:
    """Six decimals each."""
    return [f"{number:.6f}" for number in numbers]


def histogram(counts: Mapping[str, np.ndarray], xlabel: str) -> Figure:
    """How often each choice is taken: bars side by side for each name, float (P,)."""
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    for number, (name, heights) in enumerate(counts.items()):
        axes.bar(np.arange(len(heights)) + 0.27 * (number - 1), heights, 0.27, label=name)
    axes.set(xlabel=xlabel, ylabel="test images", xticks=np.arange(len(heights)))
    axes.legend()
    return figure


def scatter(points: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Figure:
    """Dice over reward of masks: the proxy that PPO maximises, and the goal; the first of the names are in the back."""
    figure, axes = _unit_square("reward network's score", "Dice", margin=0.03)
    for number, (name, (scores, dices)) in enumerate(points.items()):
        axes.scatter(scores, dices, s=14 if number else 8, alpha=1 if number else 0.3, label=name)
    axes.legend()
    return figure


def slopes(start: np.ndarray, end: np.ndarray, title: str) -> Figure:
    """Dice of each test image: a line from the model as it is to another method; blue rises, red falls."""
    figure = Figure(figsize=(5, 4.5), layout="constrained")
    axes = figure.subplots()
    for left, right in zip(start, end, strict=True):
        axes.plot([0, 1], [left, right], color="tab:blue" if right >= left else "tab:red", alpha=0.4, linewidth=0.9)
    axes.plot([0, 1], [start.mean(), end.mean()], color="black", marker="o", label="mean over images")
    axes.set(ylabel="Dice", ylim=(-0.02, 1.02), xlim=(-0.1, 1.1))
    axes.set_xticks([0, 1], ["as it is", title], wrap=True)
    axes.legend(loc="lower right")
    return figure


def dice_over_minutes(methods: Sequence[tuple[float, Estimate]]) -> Figure:
    """Dice on test patients over minutes of training: a point with interval for each method, with its number."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for number, (minutes, dice) in enumerate(methods):
        low, high = (dice.mean if limit is None else limit for limit in (dice.low, dice.high))
        error = [[dice.mean - low], [high - dice.mean]]
        axes.errorbar(minutes, dice.mean, yerr=error, fmt="o", color=f"C{number % 10}")
    axes.set(xlabel="minutes of training, everything the method needs", ylabel="Dice on test patients")
    _label(axes, {number: (minutes, dice.mean) for number, (minutes, dice) in enumerate(methods)})
    return figure


def proxy_over_gold(points: Mapping[int, tuple[float, float]]) -> Figure:
    """Score of the reward network over Dice, mean of each method, with its number."""
    figure, axes = _unit_square("Dice (gold)", "reward network's score (proxy)")
    for number, point in points.items():
        axes.plot(*point, "o", color=f"C{number % 10}")
    _label(axes, dict(points))
    return figure


def curves(lines: Sequence[dict[str, Any]], panels: Mapping[str, Mapping[str, str]], xlabel: str) -> Figure | None:
    """Lines of metrics.jsonl, in a panel for each title of `panels`: tag -> name in the legend; None without any."""
    logged = {tag for line in lines for tag in line}
    shown = {
        title: {tag: name for tag, name in names.items() if tag in logged}
        for title, names in panels.items()
        if logged & names.keys()
    }
    if not shown:
        return None
    figure = Figure(figsize=(5 * len(shown), 3), layout="constrained")
    for axes, (title, tags) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown.items(), strict=True):
        for number, (tag, name) in enumerate(tags.items()):
            steps, values = np.array([(line["step"], line[tag]) for line in lines if tag in line], dtype=float).T
            width, colour = len(values) // 10, f"C{number}"
            if width < 2:
                axes.plot(steps, values, marker="o", color=colour, label=name)
            else:  # a pale line, and its running mean
                mean = np.convolve(values, np.ones(width) / width, "valid")
                axes.plot(steps, values, alpha=0.3, color=colour)
                axes.plot(steps[width - 1 :], mean, color=colour, label=name)
        axes.set(xlabel=xlabel, title=title)
        axes.legend()
    return figure


def _unit_square(xlabel: str, ylabel: str, margin: float = 0.0) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    limits = (-margin, 1 + margin)
    axes.set(xlabel=xlabel, ylabel=ylabel, xlim=limits, ylim=limits, aspect="equal")
    return figure, axes


def _label(axes: Axes, points: dict[int, tuple[float, float]]) -> None:
    """The numbers of the methods beside their points; methods at one place share a label."""
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]  # now data have places in pixels
    labels: list[tuple[np.ndarray, list[int]]] = []  # place in pixels of the first, and all numbers there
    for number, point in points.items():
        place = axes.transData.transform(point)
        near = next((numbers for other, numbers in labels if np.abs(place - other).max() < LABEL_PIXELS), None)
        if near is None:
            labels.append((place, [number]))
        else:
            near.append(number)
    for _, numbers in labels:
        axes.annotate(", ".join(map(str, numbers)), points[numbers[0]], xytext=(4, 4), textcoords="offset points")
