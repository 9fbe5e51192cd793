"""The table of a comparison, in which one test of all rows, `max_t`, decides; the choice of methods, and the report."""

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from rl_reward_network.data.items import Sample
from rl_reward_network.methods.methods import METHODS, Method
from rl_reward_network.methods.view import BASE
from rl_reward_network.report import page
from rl_reward_network.report.deployment import Cost
from rl_reward_network.report.metrics import SCORE
from rl_reward_network.report.overlays import AFTER, BEFORE, TRUTH, legend, picture
from rl_reward_network.report.statistics import (
    MIN_PATIENTS,
    NO_GAP,
    UNIT,
    Estimate,
    MaxT,
    few_patients_note,
    group_means,
    max_t,
    mean_interval,
    rare_loss,
    rounded,
)
from rl_reward_network.report.table import (
    TITLES,
    Column,
    Row,
    Table,
    change_interval,
    make_row,
    metric_columns,
    p_words,
    percent,
    table_of,
    word,
)
from rl_reward_network.rewards.metrics import FAILED, METRICS, empty_rules

OWN = "reward_net_segmentation"  # the reward network's own segmentation: a plain segmenter
MAIN = tuple(name for name, metric in METRICS.items() if metric.main)
CONVENTIONS = (
    "Means over test patients with 95 % intervals over patients, for each row alone; values of an image are means over "
    f"seeds. {empty_rules()} p: test of the difference in Dice over "
    "patients, two-sided and adjusted for all methods (max-t): among methods without a difference, the chance that any "
    "has p <= 0.05 is 5 %."
)
VALIDATION = "validation patients"
LIMITS = ("mean", "low", "high")
ANOTHER_TRAINING = "The intervals are over patients and do not cover what another training would change"
COSTS = (
    "Minutes: training of everything that the method needs, mean over seeds; * includes a run that was interrupted, "
    "which has done some steps twice. Pauses do not count. Masks: answers of Sa2VA for one new "
    "image. Labels: images whose masks training learned from, or that chose weights, parameters or what is deployed, "
    "those of validation patients included; the choice among the methods is not counted. Memory: largest of the "
    "training processes, where recorded."
)


@dataclass(frozen=True)
class MethodResult:
    """A method, measured on images of a comparison; all but `cost` is its file, since each run has its own cost."""

    method: str
    seed: int  # of what was trained for it
    weights: str  # of Sa2VA
    parameter: float | None  # of the method's grid, chosen on validation images; None without one
    val: tuple[float, ...]  # Dice of each validation image
    test: dict[str, tuple[float, ...]]  # `METRICS`, `ECE`, and `SCORE` with a reward network: of each test image
    answers: float  # of Sa2VA that one image needs, mean over test images
    cost: Cost = field(default_factory=Cost)  # of training
    chosen_on_validation: str = ""  # what a trained policy deploys, in words; empty without one


@dataclass(frozen=True)
class TestImages:
    """The images of a comparison, named by hashes."""

    val_groups: tuple[str, ...]  # patient of each validation image
    ids: tuple[str, ...]  # of each test image
    groups: tuple[str, ...]  # patient of each test image


@dataclass(frozen=True, eq=False)
class MethodRow:
    """A method in the table."""

    method: Method
    results: tuple[MethodResult, ...]  # of each seed
    row: Row  # of each image the mean over seeds, and Dice less that of the model as it is, paired
    p: float | None  # of that difference, two-sided, adjusted for all methods; None for the base
    val: Estimate  # Dice on validation patients
    seed_spread: float | None  # standard deviation over seeds of the mean Dice on test patients; None with one seed

    @property
    def dice(self) -> np.ndarray:
        """float64 (N,): Dice of each test image."""
        return self.row.values["dice"]

    @property
    def val_dice(self) -> np.ndarray:
        """float64 (V,): Dice of each validation image, mean over seeds."""
        return np.mean([result.val for result in self.results], axis=0)

    @property
    def to_base(self) -> Estimate:
        """Dice less that of the model as it is."""
        return self.row.differences[BASE]["dice"]

    @property
    def verdict(self) -> str:
        """better, worse or cannot tell: against the model as it is; empty for the base."""
        return "" if self.p is None else word("dice", self.to_base.mean, self.p)

    @property
    def cost(self) -> Cost:
        """The mean minutes over seeds; of the rest the largest."""
        costs = [result.cost for result in self.results]
        minutes = float(np.mean([cost.minutes for cost in costs]))
        labels = max(costs, key=lambda cost: cost.labelled_images).labels
        peaks = [cost.peak_gib for cost in costs if cost.peak_gib is not None]
        resumed = any(cost.resumed for cost in costs)
        return Cost(minutes, labels, max(cost.parameters for cost in costs), max(peaks, default=None), resumed)

    @property
    def minutes(self) -> str:
        """Minutes of training in words, with a mark where a run was interrupted."""
        return f"{self.cost.minutes:.1f}{' *' * self.cost.resumed}"

    @property
    def answers(self) -> float:
        """Masks of Sa2VA per image."""
        return float(np.mean([result.answers for result in self.results]))

    @property
    def price_words(self) -> str:
        """The price in words."""
        return (
            f"{self.minutes} minutes of training, {self.cost.labelled_images} labelled images, "
            f"answers of Sa2VA per image: {self.answers:.2g}"
        )

    @property
    def gain_words(self) -> str:
        """The method, and its difference to the model as it is."""
        return f"{self.method.title} ({self.to_base.signed}, p {p_words(self.p)})"

    @property
    def words(self) -> str:
        """What the method deploys, or the parameter chosen on validation patients; empty without either."""
        found = []
        for result in self.results:
            parameter = "" if result.parameter is None else f"{result.parameter:g}"
            found.append(", ".join(filter(None, (result.chosen_on_validation, parameter))))
        return "; ".join(dict.fromkeys(filter(None, found)))


@dataclass(frozen=True)
class Choice:
    """What is deployed."""

    better: tuple[str, ...]  # methods that are better than the model as it is on the test patients, as in the table
    best: str  # of these, by Dice on validation patients; the model as it is if there are none
    cheapest: str  # of these that are shown to be at most a margin worse than the best one on the test patients


def make_table(results: Mapping[str, Sequence[MethodResult]], images: TestImages) -> tuple[MethodRow, ...]:
    """One row for each method, in the order of `METHODS`; `results` are those of each seed, of the base, too."""
    methods = [method for method in METHODS if method.name in results]
    values = {}
    for method in methods:
        tests = [result.test for result in results[method.name]]
        metrics = [name for name in tests[0] if all(name in test for test in tests)]
        values[method.name] = {name: np.mean([test[name] for test in tests], axis=0) for name in metrics}
    base = values[BASE]["dice"]
    compared = [name for name in values if name != BASE]
    tested = _test([values[name]["dice"] for name in compared], base, images)
    p = dict(zip(compared, tested.p.tolist(), strict=True))
    rows = []
    for method in methods:
        of, columns = results[method.name], values[method.name]
        row = make_row(method.name, columns, {BASE: {"dice": columns["dice"] - base}}, images.groups)
        val = mean_interval(np.mean([result.val for result in of], axis=0), images.val_groups, bounds=UNIT)
        means = group_means(np.array([result.test["dice"] for result in of]), images.groups).mean(axis=1)
        spread = float(means.std(ddof=1)) if len(of) > 1 else None
        rows.append(MethodRow(method, tuple(of), row, p.get(method.name), val, spread))
    return tuple(rows)


def _test(dice: Sequence[np.ndarray], reference: np.ndarray, images: TestImages) -> MaxT:
    """Max-t test of the Dice of some methods less that of a reference, float64 (N,) each, on the test patients."""
    return max_t(np.reshape(dice, (len(dice), len(reference))) - reference, images.groups)


def choose(rows: Sequence[MethodRow], images: TestImages, margin: float = NO_GAP) -> Choice:
    """The best method, and the cheapest that is shown to be less than `margin` Dice worse.

    Only methods that are better than the model as it is are deployed. Which of them is the best, validation patients
    decide: the test patients say whether a method is better at all, a claim that is adjusted for all methods. The
    cheapest must pass the same test, one-sided at 2.5 %: few patients, who show nothing, leave the best one alone.
    """
    better = [row for row in rows if row.verdict == "better"]
    if not better:
        return Choice((), BASE, BASE)
    best = max(better, key=lambda row: row.val.mean)
    signs = _test([row.dice for row in better], best.dice - margin, images).signs
    as_good = [row for row, sign in zip(better, signs, strict=True) if sign > 0 or row is best]
    cheapest = min(as_good, key=lambda row: (row.cost.minutes, row.answers, row.cost.labelled_images))
    return Choice(tuple(row.method.name for row in better), best.method.name, cheapest.method.name)


def verdict_lines(rows: Sequence[MethodRow], choice: Choice, images: TestImages) -> tuple[str, ...]:
    """The verdict in sentences: the method chosen, others that are better, the cheapest, and the plain segmenter."""
    by_name = {row.method.name: row for row in rows}
    best, cheapest = by_name[choice.best], by_name[choice.cheapest]
    others = [by_name[name] for name in choice.better if name != choice.best]
    lines = [_best_line(best, others, images, len(rows) - 1)]
    if others:
        lines.append(f"Better than the model as it is, too: {'; '.join(row.gain_words for row in others)}.")
    if cheapest is not best:
        lines.append(
            f"The cheapest that is shown to be less than {NO_GAP} Dice worse than the chosen one: "
            f"{cheapest.method.title}; {cheapest.price_words}."
        )
    return (*lines, *([_plain_segmenter_line(by_name, images)] if OWN in by_name else []))


def deploy_lines(choice: Choice, folder: str) -> tuple[str, ...]:
    """How to use what was chosen, from the `folder` of the comparison."""
    names = ["best", *(["cheapest"] if choice.cheapest != choice.best else [])]
    titles = {"best": "the chosen method", "cheapest": "the cheapest"}
    return tuple(
        f"Deploy {titles[name]}: sa2va-rl segment image.png --model_path {shlex.quote(f'{folder}/{name}')}"
        for name in names
    )


def _best_line(best: MethodRow, others: Sequence[MethodRow], images: TestImages, compared: int) -> str:
    dice, patients = best.row.estimates["dice"], best.to_base.groups
    if best.method.name != BASE:
        level = f"; level with {', '.join(titles)}" if (titles := _level(best, others, images)) else ""
        return (
            f"Chosen on validation ({best.val.groups} patients{level}): {best.gain_words}, Dice {dice} on {patients} "
            f"test patients; {best.price_words}. {rare_loss(patients).capitalize()}."
        )
    keep = f"keep the model as it is, Dice {dice}"
    if patients < MIN_PATIENTS:
        return f"Cannot tell: {patients} test patients, and no test can decide below {MIN_PATIENTS}; {keep}."
    return (
        f"No method is significantly better than the model as it is on {patients} test patients (adjusted for "
        f"{compared} method{'s' * (compared > 1)}): {keep}."
    )


def _level(best: MethodRow, others: Sequence[MethodRow], images: TestImages) -> list[str]:
    """Titles of the methods that the validation patients do not show to be worse than the chosen one."""
    changes = [row.val_dice - best.val_dice for row in others]
    signs = max_t(np.reshape(changes, (len(changes), len(images.val_groups))), images.val_groups).signs
    return [row.method.title for row, sign in zip(others, signs, strict=True) if sign == 0]


def _plain_segmenter_line(rows: Mapping[str, MethodRow], images: TestImages) -> str:
    """Whether any other method is better than the reward network's own segmentation, by one test of all of them."""
    own_dice = rows[OWN].dice
    others = [name for name, row in rows.items() if not np.array_equal(row.dice, own_dice)]
    if not others:
        return "No method gives other masks than a plain segmenter."
    tested = _test([rows[name].dice for name in others], own_dice, images)
    better = [name for name, sign in zip(others, tested.signs, strict=True) if sign > 0]
    top = max(better or others, key=lambda name: rows[name].val.mean)
    difference = change_interval("dice", rows[top].dice - own_dice, images.groups)
    measured = (
        f"{rows[top].method.title} less {rows[OWN].method.title}: {difference.signed} Dice on the test patients, "
        f"p {p_words(float(tested.p[others.index(top)]))}"
    )
    if better:
        return f"A plain segmenter is worse than {len(better)} of {len(others)} other methods: {measured}."
    if (tested.signs < 0).all():
        return f"No method is better than a plain segmenter, which serves these images better: {measured}."
    return f"Cannot tell whether any method is better than a plain segmenter: {measured}."


Picture = tuple[str, Sample, Mapping[str, np.ndarray]]  # why it was selected, sample, mask of each method


@dataclass(frozen=True, eq=False)
class Report:
    """The content of the report."""

    rows: tuple[MethodRow, ...]
    choice: Choice
    images: TestImages
    lines: tuple[str, ...]  # the verdict in sentences
    deploy: tuple[str, ...]  # how to use what was chosen
    facts: Mapping[str, str]  # for eval.json and the page: date, version, data, model, command, ...
    runs: Mapping[str, Path]  # part -> its run, of the first seed
    pictures: Sequence[Picture]

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the intervals must know, beside what `lines` say."""
        one = self.rows[0].seed_spread is None
        shown = ": --seeds 0 1 2 shows that." if one else "; that is the standard deviation over seeds."
        few = (*few_patients_note(self.rows[0].to_base.groups), *few_patients_note(self.rows[0].val.groups, VALIDATION))
        return (*few, f"{ANOTHER_TRAINING}{shown}")

    @property
    def shown(self) -> list[MethodRow]:
        """The rows as the page shows them: what was chosen, then by Dice on validation patients, by which it was."""
        chosen = self.choice.best, self.choice.cheapest
        return sorted(self.rows, key=lambda row: (*(row.method.name != name for name in chosen), -row.val.mean))

    def label(self, row: MethodRow) -> str:
        """A method with the number of its line, and a mark on what was chosen."""
        marks = {self.choice.cheapest: " (the cheapest)", self.choice.best: " (chosen)"}
        return f"{self.shown.index(row)}. {row.method.title}{marks.get(row.method.name, '')}"

    @property
    def metrics(self) -> list[str]:
        """The metrics that all rows have."""
        return [name for name in TITLES if all(name in row.row.estimates for row in self.rows)]

    def row(self, method: str) -> MethodRow:
        """The row of a method."""
        return next(row for row in self.rows if row.method.name == method)


def write_compare_report(folder: Path, report: Report) -> Path:
    """Write the report with table.csv, table.tex and eval.csv; returns the path of report.html."""
    tables = {
        "table.csv": _csv_table(report).csv(),
        "table.tex": _tex_table(report.rows).tex(),
        "eval.csv": page.csv_text(_image_lines(report)),
    }
    return page.write_report(folder, _page(report), _summary(report, folder), tables)


def _summary(report: Report, folder: Path) -> dict[str, Any]:
    """The content of eval.json."""
    rows = [
        {
            "method": row.method.name,
            "title": row.method.title,
            "means": row.row.means(),
            "dice_minus_base": asdict(row.to_base),
            "p": row.p,
            "verdict": row.verdict,
            "val_dice": asdict(row.val),
            "dice_spread_over_seeds": row.seed_spread,
            "masks_per_image": row.answers,
            "cost": asdict(row.cost),
            "chosen_on_validation": row.words,
            "weights": [result.weights for result in row.results],
        }
        for row in report.rows
    ]
    return {
        "verdict": [*report.lines, *report.deploy],
        "notes": list(report.notes),
        "choice": asdict(report.choice),
        "images": len(report.images.ids),
        "rows": rows,
        "config": {**report.facts, "runs": {part: os.path.relpath(run, folder) for part, run in report.runs.items()}},
    }


def _csv_table(report: Report) -> Table:
    """Every number with the limits of its interval."""
    lines = []
    for row in report.rows:
        estimates = {name: row.row.estimates[name] for name in report.metrics}
        estimates |= {"dice_minus_base": row.to_base, "val_dice": row.val}
        lines.append(
            {
                "method": row.method.name,
                "title": row.method.title,
                **{f"{name}_{part}": getattr(of, part) for name, of in estimates.items() for part in LIMITS},
                "p": row.p,
                "verdict": row.verdict,
                "dice_spread_over_seeds": row.seed_spread,
                "minutes": row.cost.minutes,
                "masks_per_image": row.answers,
                "labelled_images": row.cost.labelled_images,
                "trained_parameters": row.cost.parameters,
                "peak_memory_gib": row.cost.peak_gib,
                "chosen_on_validation": row.words,
            }
        )
    return Table(tuple(lines[0]), tuple(tuple(line.values()) for line in lines))


def _tex_table(rows: Sequence[MethodRow]) -> Table:
    """The main columns, with heads in LaTeX."""
    first, *others = MAIN
    lines = [
        (
            row.method.title,
            row.row.estimates[first],
            *(row.row.estimates[name].point() for name in others),
            row.to_base.signed,
            p_words(row.p) or "--",
            row.minutes,
        )
        for row in rows
    ]
    titles = rf"{TITLES[first]} [95\,\%]", *(TITLES[name] for name in others)
    return Table(("method", *titles, r"difference [95\,\%]", "$p$", "minutes"), tuple(lines))


def _image_lines(report: Report) -> list[list[object]]:
    """Lines of eval.csv: one per test image, method and seed."""
    lines: list[list[object]] = [["sample_id", "group_id", "method", "seed", *report.metrics]]
    for row in report.rows:
        for result in row.results:
            values = zip(*(result.test[name] for name in report.metrics), strict=True)
            for sample, group, numbers in zip(report.images.ids, report.images.groups, values, strict=True):
                lines.append([sample, group, row.method.name, result.seed, *page.digits(numbers)])
    return lines


def _page(report: Report) -> page.Page:
    rows, base, best = report.shown, report.row(BASE), report.row(report.choice.best)
    of: Callable[[MethodRow], Row] = attrgetter("row")
    first: list[Column[MethodRow]] = [("method", report.label)]
    main: list[Column[MethodRow]] = [
        *metric_columns(MAIN[:1], of),
        ("failures", lambda row: percent(row.row.estimates["failure"].mean)),
        *metric_columns(MAIN[1:], of),
        ("Dice less base", lambda row: row.to_base.signed),
        ("p", lambda row: p_words(row.p)),
        ("", lambda row: row.verdict),
    ]
    if best.seed_spread is not None:
        main.append(("SD over seeds", lambda row: rounded(row.seed_spread or 0.0, row.to_base.groups)))
    further = metric_columns((name for name in report.metrics if name not in MAIN), of)
    costs: list[Column[MethodRow]] = [
        ("minutes", lambda row: row.minutes),
        ("masks", lambda row: f"{row.answers:.3g}"),
        ("labels", lambda row: row.cost.labelled_images),
        ("trained parameters", lambda row: f"{row.cost.parameters:,}"),
        ("memory (GiB)", lambda row: "not recorded" if row.cost.peak_gib is None else f"{row.cost.peak_gib:.1f}"),
        ("Dice on validation", lambda row: row.val),
        ("chosen on validation", lambda row: row.words),
    ]
    shown, others = [base, *([best] if best is not base else [])], [row for row in rows if row not in (base, best)]
    colours = {"truth": TRUTH, "before: the model as it is": BEFORE}
    colours |= {"after: deployed": AFTER} if best is not base else {}
    return page.Page(
        "Comparison of all methods",
        "Which method is worth it on these data?",
        f"In best/: {best.method.title}. {'. '.join(report.deploy)}",
        report.lines[0],
        "Best, median and worst test image of the model as it is, by Dice, with its mask and that of what is deployed.",
        [_picture(report, one, shown, truth=True) for one in report.pictures],
        f"<p>{len(report.images.ids)} test images of {best.to_base.groups} patients; means over patients, with 95 % "
        f"intervals over patients. Failures: share of Dice below {FAILED}. p is adjusted for all methods. The rows: "
        f"what was chosen, then by Dice on validation patients.</p>{table_of(rows, [*first, *main]).html()}",
        (*report.lines[1:], *report.notes),
        {
            "Other metrics, and what the numbers mean": f"<p>{page.text(CONVENTIONS)}</p>"
            + table_of(rows, [*first, *further]).html(),
            "What it costs": f"<p>{COSTS}</p>{table_of(rows, [*first, *costs]).html()}",
            "Plots": f"<p>Numbers are those of the table.</p>{_plots(report, best)}",
            "Masks of the other methods": "".join(_picture(report, one, others) for one in report.pictures),
        },
        origin=page.Origin(report.facts, report.runs),
        legend=legend(colours),
        banner="".join(few_patients_note(best.to_base.groups)),
    )


def _plots(report: Report, best: MethodRow) -> str:
    plots = {
        "Dice of each image, as it is and with the chosen method": page.slopes(
            report.row(BASE).dice, best.dice, best.method.title
        ),
        "Dice over minutes of training": page.dice_over_minutes(
            [(row.cost.minutes, row.row.estimates["dice"]) for row in report.shown]
        ),
    }
    scored = {
        number: (row.row.estimates["dice"].mean, row.row.estimates[SCORE].mean)
        for number, row in enumerate(report.shown)
        if SCORE in row.row.estimates
    }
    if scored:
        plots["Reward network's score over Dice"] = page.proxy_over_gold(scored)
    return "".join(page.figure(plot, title) for title, plot in plots.items())


def _picture(report: Report, one: Picture, rows: Sequence[MethodRow], truth: bool = False) -> str:
    """HTML of one test image: untouched, with the truth if wanted, and with the masks of some methods."""
    title, sample, masks = one
    place = report.images.ids.index(sample.sample_id)
    shown = [("truth", sample.load_mask(), TRUTH)] if truth else []
    for row in rows:
        dice = rounded(row.results[0].test["dice"][place], row.to_base.groups)
        caption = f"{report.label(row)}: Dice {dice}"
        shown.append((caption, masks[row.method.name], BEFORE if row.method.name == BASE else AFTER))
    return picture(f"{title}: {sample.sample_id}", sample.load_image(), shown)
