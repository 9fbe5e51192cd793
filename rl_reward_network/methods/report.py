"""The report of a comparison: table.csv, table.tex, eval.csv, eval.json and report.html."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_reward_network.atomic_io import write_json
from rl_reward_network.data.items import Sample
from rl_reward_network.methods.table import Choice, MethodRow, TestImages
from rl_reward_network.methods.view import BASE
from rl_reward_network.report import figures, page
from rl_reward_network.report.cost import cost_json
from rl_reward_network.report.overlays import BLUE, GREEN, picture
from rl_reward_network.report.statistics import Estimate, few_patients_note
from rl_reward_network.report.table import SCORE, TITLES, Column, Table, metric_columns, p_words, table_of
from rl_reward_network.rewards.metrics import METRICS, empty_rules

FILES = ("table.csv", "table.tex", "eval.csv", "eval.json")
MAIN = tuple(name for name, metric in METRICS.items() if metric.main)
CONVENTIONS = (
    "Means over test patients with 95 % intervals over patients, for each row alone; values of an image are means over "
    f"seeds. {empty_rules()} p: test of the difference in Dice over "
    "patients, two-sided and adjusted for all methods (max-t): among methods without a difference, the chance that any "
    "has p <= 0.05 is 5 %."
)
ONE_TRAINING = (
    "The intervals are over patients and do not cover what another training would change: --seeds 0 1 2 shows that."
)
SEVERAL_TRAININGS = (
    "The intervals are over patients and do not cover what another training would change; that is the standard "
    "deviation over seeds."
)
COSTS = (
    "Minutes: training of everything that the method needs, mean over seeds. Masks: answers of Sa2VA for one new "
    "image. Labels: images whose masks training learned from, or that chose weights, parameters or what is deployed, "
    "those of validation patients included; the choice among the methods is not counted. Memory: largest of the "
    "training processes, where recorded."
)

Picture = tuple[str, Sample, Mapping[str, np.ndarray]]


@dataclass(frozen=True, eq=False)
class Report:
    """The content of the report.

    Args:
        rows: of the table.
        choice: best and cheapest method.
        images: that were compared.
        lines: the verdict in sentences.
        facts: name -> text for the header and eval.json: date, version, data, model, command, ...
        runs: part -> its run, of the first seed.
        pictures: (why it was selected, sample, mask of each method).
    """

    rows: tuple[MethodRow, ...]
    choice: Choice
    images: TestImages
    lines: tuple[str, ...]
    facts: Mapping[str, str]
    runs: Mapping[str, Path]
    pictures: Sequence[Picture]

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the intervals must know, beside what `lines` say."""
        base = self.rows[0]
        few = few_patients_note(base.val.groups, "validation patients")
        return (*few, ONE_TRAINING if base.seed_spread is None else SEVERAL_TRAININGS)


def write_compare_report(folder: Path, report: Report) -> Path:
    """Write the files, each whole or not at all; returns the path of report.html, written last."""
    write_json(folder / "eval.json", _summary(report, folder))
    texts = {
        "table.csv": csv_table(report.rows).csv(),
        "table.tex": tex_table(report.rows).tex(),
        "eval.csv": page.csv_text(_image_lines(report)),
        "report.html": _page(report, folder),
    }
    return page.write_files(folder, texts)


def _summary(report: Report, folder: Path) -> dict[str, Any]:
    """The content of eval.json."""
    return {
        "verdict": list(report.lines),
        "notes": list(report.notes),
        "choice": asdict(report.choice),
        "images": len(report.images.ids),
        "rows": [_row_json(row) for row in report.rows],
        "config": {**report.facts, "runs": {part: os.path.relpath(run, folder) for part, run in report.runs.items()}},
    }


def _row_json(row: MethodRow) -> dict[str, Any]:
    return {
        "method": row.method.name,
        "title": row.method.title,
        "means": row.row.means(),
        "dice_minus_base": asdict(row.to_base),
        "p": row.p,
        "verdict": row.verdict,
        "val_dice": asdict(row.val),
        "dice_spread_over_seeds": row.seed_spread,
        "masks_per_image": row.answers,
        "cost": cost_json(row.cost),
        "chosen_on_validation": row.words,
        "weights": [result.weights for result in row.results],
    }


def _metrics(rows: Sequence[MethodRow]) -> list[str]:
    """The metrics that all rows have."""
    return [name for name in TITLES if all(name in row.row.estimates for row in rows)]


def csv_table(rows: Sequence[MethodRow]) -> Table:
    """Every number with the limits of its interval; columns as in table.csv."""
    columns: list[Column[MethodRow]] = [
        ("method", lambda row: row.method.name),
        ("title", lambda row: row.method.title),
    ]
    for name in _metrics(rows):
        columns += _limits(name, _estimate(name))
    columns += _limits("dice_minus_base", lambda row: row.to_base) + _limits("val_dice", lambda row: row.val)
    columns += [
        ("p", lambda row: row.p),
        ("verdict", lambda row: row.verdict),
        ("dice_spread_over_seeds", lambda row: row.seed_spread),
        ("minutes", lambda row: row.cost.minutes),
        ("masks_per_image", lambda row: row.answers),
        ("labelled_images", lambda row: row.cost.labelled_images),
        ("trained_parameters", lambda row: row.cost.parameters),
        ("peak_memory_gib", lambda row: row.cost.peak_gib),
        ("chosen_on_validation", lambda row: row.words),
    ]
    return table_of(rows, columns)


def _estimate(metric: str) -> Callable[[MethodRow], Estimate]:
    return lambda row: row.row.estimates[metric]


def _mean(estimate: Callable[[MethodRow], Estimate]) -> Callable[[MethodRow], str]:
    return lambda row: estimate(row).point()


def _limits(name: str, estimate: Callable[[MethodRow], Estimate]) -> list[Column[MethodRow]]:
    return [
        (f"{name}_mean", lambda row: estimate(row).mean),
        (f"{name}_low", lambda row: estimate(row).low),
        (f"{name}_high", lambda row: estimate(row).high),
    ]


def tex_table(rows: Sequence[MethodRow]) -> Table:
    """The main columns, with heads in LaTeX."""
    first, *others = MAIN
    estimates = {name: _estimate(name) for name in MAIN}
    means: list[Column[MethodRow]] = [(TITLES[name], _mean(estimates[name])) for name in others]
    columns: list[Column[MethodRow]] = [
        ("method", lambda row: row.method.title),
        (rf"{TITLES[first]} [95\,\%]", estimates[first]),
        *means,
        (r"difference [95\,\%]", lambda row: row.to_base.signed),
        ("$p$", lambda row: "--" if row.p is None else p_words(row.p)),
        ("minutes", lambda row: row.minutes),
    ]
    return table_of(rows, columns)


def _image_lines(report: Report) -> list[list[object]]:
    """Lines of eval.csv: one per test image, method and seed."""
    metrics = _metrics(report.rows)
    lines: list[list[object]] = [["sample_id", "group_id", "method", "seed", *metrics]]
    for row in report.rows:
        for result in row.results:
            values = zip(*(result.test[name] for name in metrics), strict=True)
            for sample, group, numbers in zip(report.images.ids, report.images.groups, values, strict=True):
                lines.append([sample, group, row.method.name, result.seed, *page.digits(numbers)])
    return lines


def _page(report: Report, folder: Path) -> str:
    """The HTML file."""
    rows, others = report.rows, [name for name in _metrics(report.rows) if name not in MAIN]
    number: Column[MethodRow] = ("", rows.index)
    title: Column[MethodRow] = ("method", lambda row: row.method.title)

    main: list[Column[MethodRow]] = metric_columns(MAIN, lambda row: row.row)
    further: list[Column[MethodRow]] = metric_columns(others, lambda row: row.row)
    quality: list[Column[MethodRow]] = [
        ("Dice less base", lambda row: row.to_base.signed),
        ("p", lambda row: "" if row.p is None else p_words(row.p)),
        ("", lambda row: row.verdict),
        ("SD over seeds", lambda row: "" if row.seed_spread is None else f"{row.seed_spread:.3f}"),
    ]
    costs: list[Column[MethodRow]] = [
        ("minutes", lambda row: row.minutes),
        ("masks", lambda row: f"{row.answers:.3g}"),
        ("labels", lambda row: row.cost.labelled_images),
        ("trained parameters", lambda row: f"{row.cost.parameters:,}"),
        ("memory (GiB)", lambda row: "not recorded" if row.cost.peak_gib is None else f"{row.cost.peak_gib:.1f}"),
        ("Dice on validation", lambda row: row.val),
        ("chosen on validation", lambda row: row.words),
    ]
    return page.report(
        "Comparison of all methods",
        "Which method is worth it on these data?",
        page.header(page.Origin(report.facts, report.runs), folder, FILES),
        report.lines,
        [f"{len(report.images.ids)} test images of {rows[0].to_base.groups} patients. {CONVENTIONS}"],
        report.notes,
        [
            table_of(rows, [number, title, *main, *quality]).html(),
            "<h2>Other metrics</h2>",
            table_of(rows, [number, title, *further]).html(),
            f"<h2>What it costs</h2><p>{COSTS}</p>",
            table_of(rows, [number, title, *costs]).html(),
            "<h2>Plots</h2><p>Numbers are those of the first column.</p>",
            *_plots(report),
            "<h2>Images</h2><p>Best, median and worst test image of the model as it is, by Dice. Green: true mask; "
            "blue: mask of the method.</p>",
            *(_picture(report, *shown) for shown in report.pictures),
        ],
    )


def _plots(report: Report) -> list[str]:
    by_name = {row.method.name: row for row in report.rows}
    best = by_name[report.choice.best]
    plots = {
        "Dice of each image, as it is and with the best method": figures.slopes(
            by_name[BASE].dice, best.dice, best.method.title
        ),
        "Dice over minutes of training": figures.dice_over_minutes(
            [(row.cost.minutes, row.row.estimates["dice"]) for row in report.rows]
        ),
    }
    scored = {
        number: (row.row.estimates["dice"].mean, row.row.estimates[SCORE].mean)
        for number, row in enumerate(report.rows)
        if SCORE in row.row.estimates
    }
    if scored:
        plots["Reward network's score over Dice"] = figures.proxy_over_gold(scored)
    return [page.figure(plot, title) for title, plot in plots.items()]


def _picture(report: Report, title: str, sample: Sample, masks: Mapping[str, np.ndarray]) -> str:
    """HTML of one test image: untouched, with the truth, and with the mask of every method."""
    place = report.images.ids.index(sample.sample_id)
    shown = [("true mask", sample.load_mask(), GREEN)]
    for number, row in enumerate(report.rows):
        caption = f"{number} {row.method.title}: Dice {row.results[0].test['dice'][place]:.3f}"
        shown.append((caption, masks[row.method.name], BLUE))
    return picture(f"{title}: {sample.sample_id}", sample.load_image(), shown, {})
