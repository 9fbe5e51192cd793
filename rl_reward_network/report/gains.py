"""The report of several models on the same N images: the Dice of each, and its gain over the model as it is.

results = gains_of({"the model as it is": before, "segmenter": after}, ids)
shown = [ReportItem("best", image, truth, mask_before, mask_after)]
gains = Gains(results, "segmenter", "Deployed: a segmenter, in improved/.", shown, origin=made_by(...))
gains.table(narrow=True).show("Dice, out of fold")
write_gains(folder, gains)  # report.html, eval.json, eval.csv
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rl_reward_network.report import page
from rl_reward_network.report.before_after import ReportItem, item_legend, item_picture
from rl_reward_network.report.statistics import INTERVALS, few_patients_note
from rl_reward_network.report.table import (
    Column,
    Results,
    Row,
    Table,
    Verdict,
    gain_verdict,
    make_row,
    p_words,
    table_of,
    word,
)

SHOWN = 6  # images at the top of the page


def gains_of(dice: Mapping[str, np.ndarray], ids: Sequence[tuple[str, str]]) -> Results:
    """The rows of a report: title -> Dice of each image, float64 (N,), first of the model as it is.

    `ids` are the image and the patient of each value.
    """
    (first, reference), groups = next(iter(dice.items())), [group for _, group in ids]
    rows = (make_row(name, {"dice": of}, {first: {"dice": of - reference}}, groups) for name, of in dice.items())
    return Results(tuple(rows), tuple(ids), "dice")


@dataclass(frozen=True, eq=False)
class Gains:
    """The content of the report."""

    results: Results  # see `gains_of`
    chosen: str  # title of the row that is deployed, on which the verdict is
    deployed: str  # what is deployed, a sentence
    shown: Sequence[ReportItem] = ()  # three to six images are at the top, the rest is folded
    notes: tuple[str, ...] = ()
    folded: Mapping[str, str] = field(default_factory=dict)  # title -> HTML of details
    config: Mapping[str, Any] = field(default_factory=dict)  # data and settings; JSON values
    origin: page.Origin = field(default_factory=page.Origin)
    whose: str = "labelled patients"

    @property
    def base(self) -> str:
        """Title of the model as it is."""
        return self.results.rows[0].name

    @cached_property
    def p(self) -> dict[str, float]:
        """Row -> p-value of its gain, adjusted for all rows."""
        return self.results.p(self.base)

    @property
    def few(self) -> tuple[str, ...]:
        """A note if there are few patients."""
        return few_patients_note(self.results.patients, self.whose)

    @property
    def verdict(self) -> Verdict:
        """The verdict on what is deployed."""
        if self.chosen == self.base:
            many = f"on {self.results.patients} {self.whose}"
            return Verdict("kept", f"Kept: {self.base}. No other row is better beyond chance {many}.")
        gain = self.results.difference(self.results.row(self.chosen), self.base)
        return gain_verdict("dice", gain, self.p[self.chosen], f"{self.chosen}, Dice")

    def table(self, narrow: bool = False) -> Table:
        """For a page, or, `narrow`, for a terminal."""

        def verdict_on(row: Row) -> str:
            gain = self.results.difference(row, self.base)
            return word("dice", gain.mean, self.p[row.name]) if row.name in self.p else ""

        columns: list[Column[Row]] = [
            ("", lambda row: f"{row.name} (deployed)" if row.name == self.chosen else row.name),
            ("Dice", lambda row: self.results.value(row).point()) if narrow else ("Dice [95 %]", self.results.value),
            ("gain [95 %]", lambda row: self.results.difference(row, self.base).signed if row.name in self.p else ""),
            ("p", lambda row: p_words(self.p.get(row.name))),
            ("", verdict_on),
        ]
        return table_of(self.results.rows, columns)


def write_gains(folder: Path, gains: Gains) -> Path:
    """Write the report with eval.csv (one line per row and image); returns the path of report.html."""
    lines = gains.results.per_image(lambda row, number: [row.name, *page.digits([row.values["dice"][number]])])
    table = page.csv_text([["sample_id", "group_id", "model", "dice"], *lines])
    return page.write_report(folder, _page(gains), _summary(gains), {"eval.csv": table})


def _summary(gains: Gains) -> dict[str, Any]:
    """The content of eval.json."""
    rows = [
        {
            "name": row.name,
            "means": row.means(),
            "dice_minus_base": asdict(gains.results.difference(row, gains.base)),
            "p": gains.p.get(row.name),
        }
        for row in gains.results.rows
    ]
    return {
        "verdict": asdict(gains.verdict),
        "deployed": gains.deployed,
        "chosen": gains.chosen,
        "images": len(gains.results.ids),
        "patients": gains.results.patients,
        "rows": rows,
        "notes": [*gains.few, *gains.notes],
        "config": gains.config,
    }


def _page(gains: Gains) -> page.Page:
    pictures = [item_picture(item) for item in gains.shown]
    counted = f"{len(gains.results.ids)} images of {gains.results.patients} {gains.whose}"
    return page.Page(
        f"Improvement: {gains.verdict.label}",
        "Are the masks better?",
        gains.deployed,
        gains.verdict.sentence,
        f"Before: {gains.base}; after: what is deployed.",
        pictures[:SHOWN],
        f"<p>{page.text(counted)}; means over patients. {INTERVALS}. Each p is adjusted for all rows.</p>"
        f"{gains.table().html()}",
        gains.notes,
        {**gains.folded, "More images": "".join(pictures[SHOWN:])},
        gains.config,
        gains.origin,
        item_legend(gains.shown),
        "".join(gains.few),
    )
