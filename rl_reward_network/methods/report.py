"""The report of a comparison: table.csv, table.tex, eval.csv, eval.json and report.html."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_reward_network.artefacts import write_json
from rl_reward_network.data.items import Sample
from rl_reward_network.methods import figures
from rl_reward_network.methods.table import Choice, TableRow, TestImages, p_words
from rl_reward_network.report import page
from rl_reward_network.report.cost import cost_json
from rl_reward_network.report.figures import png
from rl_reward_network.report.overlays import BLUE, GREEN, draw_mask
from rl_reward_network.report.statistics import few_patients_note
from rl_reward_network.rewards.metrics import METRICS, empty_rules

TITLES = {name: metric.column for name, metric in METRICS.items()} | {"score": "reward network's score"}
FILES = ("table.csv", "table.tex", "eval.csv", "eval.json")
MAIN = tuple(name for name, metric in METRICS.items() if metric.main)
CONVENTIONS = (
    "Means over test patients with 95 % intervals over patients, for each row alone; values of an image are means over "
    f"seeds. {empty_rules()} p: sign-flip test of the difference in Dice over "
    "patients, two-sided and adjusted for all roads (max-t): among roads without a difference, the chance that any has "
    "p <= 0.05 is 5 %."
)
ONE_TRAINING = (
    "The intervals are over patients and do not cover what another training would change: --seeds 0 1 2 shows that."
)
SEVERAL_TRAININGS = (
    "The intervals are over patients and do not cover what another training would change; that is the standard "
    "deviation over seeds."
)
COSTS = (
    "Minutes: training of everything that the road needs, mean over seeds. Masks: answers of Sa2VA for one new image. "
    "Labels: images whose masks training learned from, or that chose weights, parameters or what is deployed, those of "
    "validation patients included; the choice among the roads is not counted. Memory: largest of the training "
    "processes, where recorded."
)

Picture = tuple[str, Sample, Mapping[str, np.ndarray]]


@dataclass(frozen=True, eq=False)
class Report:
    """The content of the report.

    Args:
        rows: of the table.
        choice: best and cheapest road.
        images: that were compared.
        lines: the verdict in sentences.
        facts: name -> text for the header and eval.json: date, version, data, model, command, ...
        runs: part -> its run, of the first seed.
        pictures: (why it was selected, sample, mask of each road).
    """

    rows: tuple[TableRow, ...]
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
        "table.csv": page.csv_text(_table_lines(report.rows)),
        "table.tex": table_tex(report.rows),
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


def _row_json(row: TableRow) -> dict[str, Any]:
    return {
        "road": row.method.name,
        "title": row.method.title,
        "means": {name: asdict(mean) for name, mean in row.means.items()},
        "dice_minus_base": asdict(row.to_base),
        "p": row.p,
        "word": row.word,
        "val_dice": asdict(row.val),
        "dice_spread_over_seeds": row.seed_spread,
        "masks_per_image": row.answers,
        "cost": cost_json(row.cost),
        "deploys": row.words,
        "weights": [result.weights for result in row.results],
    }


def _table_lines(rows: Sequence[TableRow]) -> list[list[object]]:
    """Lines of table.csv: every number with the limits of its interval."""
    metrics = [name for name in TITLES if all(name in row.means for row in rows)]
    limits = [f"{name}_{end}" for name in (*metrics, "dice_minus_base", "val_dice") for end in ("mean", "low", "high")]
    costs = ["minutes", "masks_per_image", "labelled_images", "trained_parameters", "peak_memory_gib"]
    lines: list[list[object]] = [["road", "title", *limits, "p", "word", "dice_spread_over_seeds", *costs, "deploys"]]
    for row in rows:
        estimates = [*(row.means[name] for name in metrics), row.to_base, row.val]
        numbers = [value for estimate in estimates for value in (estimate.mean, estimate.low, estimate.high)]
        cost = row.cost
        values = [row.seed_spread, cost.minutes, row.answers, cost.labelled_images, cost.parameters, cost.peak_gib]
        verdict = [_cell(row.p), row.word]
        lines.append(
            [row.method.name, row.method.title, *map(_cell, numbers), *verdict, *map(_cell, values), row.words]
        )
    return lines


def _cell(value: float | int | None) -> str:
    """A number for CSV; empty if there is none."""
    return "" if value is None else f"{value:.6g}"


def table_tex(rows: Sequence[TableRow]) -> str:
    """The main columns as a LaTeX table; it needs the package booktabs."""
    titles = " & ".join(_escaped(TITLES[name]) for name in MAIN[1:])
    lines = [
        rf"\begin{{tabular}}{{l{'r' * (len(MAIN) + 3)}}}",
        r"\toprule",
        rf"road & Dice [95\,\%] & {titles} & difference [95\,\%] & $p$ & minutes \\",
        r"\midrule",
    ]
    for row in rows:
        cells = [row.method.title, row.means["dice"], *(f"{row.means[name].mean:.3f}" for name in MAIN[1:])]
        cells += [row.to_base.signed, "--" if row.p is None else p_words(row.p), row.minutes.replace("≥", r"$\geq$")]
        lines.append(" & ".join(_escaped(str(cell)) for cell in cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _escaped(cell: str) -> str:
    """Text for LaTeX."""
    for letter in "&%_#":
        cell = cell.replace(letter, f"\\{letter}")
    return cell.replace("<", "$<$")


def _image_lines(report: Report) -> list[list[object]]:
    """Lines of eval.csv: one per test image, road and seed."""
    metrics = [name for name in TITLES if all(name in row.means for row in report.rows)]
    lines: list[list[object]] = [["sample_id", "group_id", "road", "seed", *metrics]]
    for row in report.rows:
        for result in row.results:
            values = zip(*(result.test[name] for name in metrics), strict=True)
            for sample, group, numbers in zip(report.images.ids, report.images.groups, values, strict=True):
                lines.append([sample, group, row.method.name, result.seed, *page.digits(np.array(numbers))])
    return lines


def _page(report: Report, folder: Path) -> str:
    """The HTML file."""
    patients, rows = report.rows[0].to_base.groups, report.rows
    parts = [
        "<h1>Which road is worth it on these data?</h1>",
        page.header(page.Origin(report.facts, report.runs), folder, FILES),
        "".join(f'<p class="verdict">{page.text(line)}</p>' for line in report.lines),
        f"<p>{len(report.images.ids)} test images of {patients} patients. {CONVENTIONS}</p>",
        "".join(f"<p>Note: {page.text(note)}</p>" for note in report.notes),
        page.table(
            ["", "road", *(TITLES[name] for name in MAIN), "Dice less base", "p", "", "SD over seeds"],
            map(_quality, *_numbered(rows)),
        ),
        "<h2>Other metrics</h2>",
        _other_metrics(rows),
        f"<h2>What it costs</h2><p>{COSTS}</p>",
        page.table(
            ["", "road", "minutes", "masks", "labels", "trained parameters", "memory (GiB)", "Dice on validation",
             "chosen on validation"],
            map(_costs, *_numbered(rows)),
        ),
        "<h2>Plots</h2><p>Numbers are those of the first column.</p>",
        *_plots(report),
        "<h2>Images</h2><p>Best, median and worst test image of the model as it is, by Dice. Green: true mask; blue: "
        "mask of the road.</p>",
        *(_picture(rows, report, picture) for picture in report.pictures),
    ]  # fmt: skip
    return page.whole_page("Comparison of all roads", parts)


def _numbered(rows: Sequence[TableRow]) -> tuple[range, Sequence[TableRow]]:
    return range(len(rows)), rows


def _quality(number: int, row: TableRow) -> list[object]:
    p = "" if row.p is None else p_words(row.p)
    spread = "" if row.seed_spread is None else f"{row.seed_spread:.3f}"
    return [number, row.method.title, *(row.means[name] for name in MAIN), row.to_base.signed, p, row.word, spread]


def _other_metrics(rows: Sequence[TableRow]) -> str:
    names = [name for name in TITLES if name not in MAIN and all(name in row.means for row in rows)]
    lines = ([number, row.method.title, *(row.means[name] for name in names)] for number, row in enumerate(rows))
    return page.table(["", "road", *(TITLES[name] for name in names)], lines)


def _costs(number: int, row: TableRow) -> list[object]:
    cost = row.cost
    peak = "not recorded" if cost.peak_gib is None else f"{cost.peak_gib:.1f}"
    parameters = f"{cost.parameters:,}"
    minutes, asked = row.minutes, f"{row.answers:.3g}"
    return [number, row.method.title, minutes, asked, cost.labelled_images, parameters, peak, row.val, row.words]


def _plots(report: Report) -> list[str]:
    plots = [
        ("Dice of each image, as it is and with the best road", figures.slopes(report.rows, report.choice)),
        ("Dice over minutes of training", figures.dice_over_minutes(report.rows)),
        ("Reward network's score over Dice", figures.proxy_over_gold(report.rows)),
    ]
    return [page.image(png(figure), "png", title) for title, figure in plots if figure is not None]


def _picture(rows: Sequence[TableRow], report: Report, picture: Picture) -> str:
    """HTML of one test image: untouched, with the truth, and with the mask of every road."""
    title, sample, masks = picture
    image, place = sample.load_image(), report.images.ids.index(sample.sample_id)
    panels = [("image", draw_mask(image, None, GREEN)), ("true mask", draw_mask(image, sample.load_mask(), GREEN))]
    for number, row in enumerate(rows):
        value = row.results[0].test["dice"][place]
        panels.append(
            (f"{number} {row.method.title}: Dice {value:.3f}", draw_mask(image, masks[row.method.name], BLUE))
        )
    return page.panels(f"{title}: {sample.sample_id}", panels)
