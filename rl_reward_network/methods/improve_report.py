"""What an improvement measured, and its report: what is deployed, whether it is better, images, all candidates."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rl_reward_network.data.items import Sample
from rl_reward_network.report import page
from rl_reward_network.report.before_after import ReportItem, item_legend, item_picture
from rl_reward_network.report.statistics import INTERVALS, Estimate, few_patients_note, max_t_of, rounded
from rl_reward_network.report.table import (
    Results,
    Row,
    change_interval,
    gain_verdict,
    make_row,
    metric_columns,
    p_words,
    picks,
    table_of,
    word,
)
from rl_reward_network.rewards.metrics import METRICS
from rl_reward_network.run import Run

START, SEGMENTER, SIDE, TEACHER, FUSION = "as it is", "segmenter", "side_network", "mean_teacher", "fusion"
TITLES = {
    START: "Sa2VA as it is",
    SEGMENTER: "plain segmenter",
    SIDE: "Sa2VA with a side network",
    TEACHER: "Sa2VA, mean teacher",
    FUSION: "fusion of the segmenter and Sa2VA",
}
IMPROVED = "improved"  # folder of the model that is deployed
RULE = (
    "The choice is the highest mean where the choice itself, judged on patients that did not choose, beats the start."
)
RULE_TUNES = "The choice is the highest mean; it is deployed where the choice itself, out of fold, has a higher mean."
SHOWN = ("dice", "precision", "recall", "cldice")  # metrics of the page; eval.csv has all


@dataclass(frozen=True, eq=False)
class Judged:
    """N labelled images of patients that no measured model was trained on."""

    samples: list[Sample]
    values: dict[str, dict[str, np.ndarray]]  # row -> metric -> float64 (N,)
    masks: dict[str, list[np.ndarray]]  # row -> of each image, bool (H, W) as packed bits

    @property
    def groups(self) -> list[str]:
        """The patient of each image."""
        return [sample.group_id for sample in self.samples]

    def dice(self, rows: Sequence[str]) -> np.ndarray:
        """float64 (R, N)."""
        return np.array([self.values[row]["dice"] for row in rows])

    def mask(self, row: str, number: int) -> np.ndarray:
        """bool (H, W) of an image."""
        height, width = self.samples[number].size
        return np.unpackbits(self.masks[row][number], count=height * width).reshape(height, width).astype(bool)

    @cached_property
    def results(self) -> Results:
        """The rows with intervals, and differences to the start."""

        def changes(row: str) -> dict[str, np.ndarray]:
            return {name: values - self.values[START][name] for name, values in self.values[row].items()}

        rows = [
            make_row(row, values, {START: changes(row)} if row != START else {}, self.groups)
            for row, values in self.values.items()
        ]
        ids = tuple((sample.sample_id, sample.group_id) for sample in self.samples)
        return Results(tuple(rows), ids, "dice")


@dataclass(frozen=True, eq=False)
class Improvement:
    """What an improvement did."""

    folds: int  # whose patients decide; 1: those of the val split
    judged: Judged  # on the patients that decide
    chosen: str  # the row that is deployed; the start where nothing was better
    gain: np.ndarray  # float64 (N,): Dice of the choice less that of the start, on patients that did not choose
    tested: Judged | None  # on test patients, who neither train nor decide; None without any
    elsewhere: bool = False  # whether the images of `--unlabelled_root` are of another place, and left out
    tunes: bool = False  # whether the start has learned masks elsewhere, and the best estimate is deployed
    collapsed: tuple[str, ...] = ()  # the trainings whose mean teacher has collapsed

    @property
    def gain_interval(self) -> Estimate:
        """The gain in Dice of the choice, out of fold."""
        return change_interval("dice", self.gain, self.judged.groups)

    @property
    def facts(self) -> dict[str, Any]:
        """The content of eval.json."""
        parts = {"judged": self.judged, **({"test": self.tested} if self.tested else {})}
        return {
            "chosen": self.chosen,
            "deployed": None if self.chosen == START else IMPROVED,
            "elsewhere": self.elsewhere,
            "gain_out_of_fold": asdict(self.gain_interval),
            **{name: {row.name: row.means() for row in judged.results.rows} for name, judged in parts.items()},
        }

    @property
    def deployed_line(self) -> str:
        """What is deployed, in a sentence."""
        if self.chosen == START:
            why = "has a higher Dice, out of fold" if self.tunes else "is better beyond chance"
            return f"Deployed: nothing. No candidate {why}; use the model as it is."
        patients, title = len(set(self.judged.groups)), TITLES[self.chosen]
        how = f"trained on all {patients} labelled patients" if self.folds > 1 else "as it was judged"
        estimate = " It is the best estimate; these patients are few." if self.tunes else ""
        return f"Deployed: {title}, {how}.{estimate}"

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out, and why, in sentences."""
        apart = "The images of --unlabelled_root are of another place, where no mask judges: they are left out."
        where = ", ".join(self.collapsed)
        collapse = f"The mean teacher has collapsed in {where}: neither it nor the fusion is a candidate."
        return (*([apart] * self.elsewhere), *([collapse] * bool(where)))

    @property
    def verdict(self) -> str:
        """Whether the deployed choice is better, in a sentence."""
        p = max_t_of({"choice": self.gain}, self.judged.groups)["choice"]
        verdict = gain_verdict("dice", self.gain_interval, p, "Dice of the choice less the start")
        before, after = (self.judged.results.row(row).estimates["dice"] for row in (START, self.chosen))
        who = f"{self.folds} folds of patients, none judged by a model that saw them"
        change = f"Dice {before} before, {after} after, on unseen patients. " if self.chosen != START else ""
        return f"{change}{verdict.sentence} Judges: {who if self.folds > 1 else 'the val split'}."

    @property
    def test_line(self) -> str:
        """The gain on test patients; "" without any."""
        if self.tested is None or self.chosen == START:
            return ""
        row = self.tested.results.row(self.chosen)
        gain = row.differences[START]["dice"]
        return f"On {gain.groups} test patients, who decided nothing: Dice {row.estimates['dice']}, {gain.signed}."


def write_improve_report(run: Run, result: Improvement, facts: dict[str, str], notes: Sequence[str] = ()) -> Path:
    """Write report.html, eval.json and eval.csv into the run; returns the path of report.html.

    `facts` are data, model and command, for the foot of the page, `notes` limits of the data.
    """
    how = "out of fold" if result.folds > 1 else "the val split"
    parts = {f"{len(set(result.judged.groups))} labelled patients, {how}": result.judged}
    parts |= {"Test patients": result.tested} if result.tested else {}
    tables = {name: _table(judged.results) for name, judged in parts.items()}
    first = "Test patients" if result.tested else next(iter(tables))
    shown = result.tested or result.judged
    rule = RULE_TUNES if result.tunes else RULE
    about = f"<p>{first}: {len(shown.samples)} images; {INTERVALS}. p is adjusted for all candidates. {rule}</p>"
    lines = [
        [name, *ids]
        for name, judged in parts.items()
        for ids in judged.results.per_image(
            lambda row, number: [row.name, *page.digits(row.values[metric][number] for metric in METRICS)]
        )
    ]
    files = {"eval.csv": page.csv_text([["part", "sample_id", "group_id", "row", *METRICS], *lines])}
    items, banner = _items(shown, result.chosen), few_patients_note(len(set(shown.groups)), "patients")
    made = page.Page(
        "Better masks of own images",
        "What makes the masks of these images better?",
        result.deployed_line,
        " ".join(filter(None, (result.verdict, result.test_line))),
        "The images with the best, the median and the worst Dice of what is deployed, by models that have not seen the "
        "patient.",
        [item_picture(item) for item in items],
        f"{about}{tables[first]}",
        notes,
        {name: table for name, table in tables.items() if name != first},
        facts,
        legend=item_legend(items),
        banner="".join(banner),
    )
    return page.write_report(run.path, made, result.facts, files)


def _table(results: Results) -> str:
    """HTML: a line for each row, the best first."""
    p = results.p(START)

    def gain(row: Row) -> str:
        return row.differences[START]["dice"].signed if row.differences else ""

    columns = [
        ("", lambda row: TITLES[row.name]),
        *metric_columns(SHOWN, lambda row: row),
        ("Dice less the start", gain),
        ("p", lambda row: p_words(p.get(row.name))),
        ("", lambda row: word("dice", row.differences[START]["dice"].mean, p[row.name]) if row.differences else ""),
    ]
    rows = sorted(results.rows, key=lambda row: -results.value(row).mean)
    return table_of(rows, columns).html()


def _items(judged: Judged, chosen: str) -> list[ReportItem]:
    """The images with the best, the median and the worst Dice of what is deployed."""
    items, patients = [], len(set(judged.groups))
    for title, number in picks(judged.values[chosen]["dice"]).items():
        sample = judged.samples[number]
        before, after = (judged.mask(row, number) for row in (START, chosen))
        start, end = (f"Dice {rounded(judged.values[row]['dice'][number], patients)}" for row in (START, chosen))
        items.append(ReportItem(title, sample.load_image(), sample.load_mask(), before, after, ("", start, end)))
    return items
