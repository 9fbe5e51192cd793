"""Results on N test images (or items): a `Row` per method, its verdict, and the `Table` that shows rows anywhere."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import compress
from typing import Any, TypeVar

import numpy as np

from rl_reward_network.report import page
from rl_reward_network.report.metrics import SCORE
from rl_reward_network.report.statistics import (
    LEVEL,
    MIN_PATIENTS,
    NO_GAP,
    Estimate,
    max_t_of,
    mean_interval,
    rare_loss,
)
from rl_reward_network.rewards.metrics import METRICS

ORACLE = "oracle"  # the row that chooses by the true mask: an upper bound, which no test is about
ECE = "ece"  # of soft masks, where a table has them
TITLES = {name: metric.column for name, metric in METRICS.items()} | {
    "betti": "Betti match",
    ECE: "ECE",
    SCORE: "reward network's score",
}
WORDS = {1: "better", -1: "worse", 0: "cannot tell"}
Values = Mapping[str, np.ndarray]  # metric -> float64 (N,); NaN where an image has no value


def bounds_of(metric: str, change: bool = False) -> tuple[float, float]:
    """The range of a metric, or of its changes; [0, 1] for the values of what is not in `METRICS`, such as a score."""
    highest = METRICS[metric].highest if metric in METRICS else 1.0
    highest = np.inf if highest is None else highest
    return -highest if change else 0.0, highest


def change_interval(metric: str, change: np.ndarray, groups: Sequence[str], seed: int = 0) -> Estimate:
    """The mean difference of a metric, float (N,), with its interval within what is possible."""
    return mean_interval(change, groups, seed, bounds=bounds_of(metric, change=True))


def word(metric: str, change: float, p: float) -> str:
    """better, worse or cannot tell: of a mean difference in a metric, by a p-value of `max_t`."""
    higher_is_better = METRICS[metric].higher_is_better if metric in METRICS else metric != ECE
    return WORDS[int(np.sign(change)) * (1 if higher_is_better else -1)] if p <= LEVEL else WORDS[0]


@dataclass(frozen=True, eq=False)
class Row:
    """A method, measured on the test images."""

    name: str
    values: Values
    estimates: Mapping[str, Estimate]  # metric -> mean over patients
    differences: Mapping[str, Mapping[str, Estimate]]  # name of another row -> metric -> paired difference to it

    def means(self) -> dict[str, Any]:
        """The estimates as JSON."""
        return {metric: asdict(estimate) for metric, estimate in self.estimates.items()}


def make_row(name: str, values: Values, differences: Mapping[str, Values], groups: Sequence[str], seed: int = 0) -> Row:
    """A row with intervals, and `differences` to other rows by name; rows of one seed resample the same patients."""
    changes = {other: _estimates(columns, groups, seed, True) for other, columns in differences.items()}
    return Row(name, values, _estimates(values, groups, seed), changes)


def _estimates(columns: Values, groups: Sequence[str], seed: int, change: bool = False) -> dict[str, Estimate]:
    """Metric -> mean over the patients who have a value; without any it is left out."""
    found = {}
    for metric, values in columns.items():
        known = ~np.isnan(values)
        if known.any():
            of_known, bounds = list(compress(groups, known)), bounds_of(metric, change)
            found[metric] = mean_interval(values[known], of_known, seed, bounds=bounds)
    return found


def paired_rows(before: Values, after: Values, groups: Sequence[str], seed: int = 0) -> tuple[Row, Row]:
    """The rows "before" and "after", the latter with differences; each metric of the images that have it in both."""
    gains = {metric: after[metric] - before[metric] for metric in before}
    gains = {metric: gain for metric, gain in gains.items() if not np.isnan(gain).all()}

    def row_of(name: str, values: Values, differences: Mapping[str, Values]) -> Row:
        shared = {metric: np.where(np.isnan(gain), np.nan, values[metric]) for metric, gain in gains.items()}
        return replace(make_row(name, shared, differences, groups, seed), values=values)

    return row_of("before", before, {}), row_of("after", after, {"before": gains})


@dataclass(frozen=True, eq=False)
class Results:
    """All rows on the same test images."""

    rows: tuple[Row, ...]
    ids: tuple[tuple[str, str], ...]  # (image, patient) of each image, hashes
    criterion: str  # metric of the verdict

    def row(self, name: str) -> Row:
        """The row of that name."""
        return next(row for row in self.rows if row.name == name)

    @property
    def patients(self) -> int:
        """Number of patients."""
        return len({group for _, group in self.ids})

    def value(self, row: Row) -> Estimate:
        """The row's criterion."""
        return row.estimates[self.criterion]

    def difference(self, row: Row, other: str) -> Estimate:
        """The row's criterion less that of the other row."""
        return row.differences[other][self.criterion]

    def p(self, other: str) -> dict[str, float]:
        """Row -> p-value of its difference to another row, adjusted for all rows but that one and the oracle."""
        reference = self.row(other).values[self.criterion]
        tested = [row for row in self.rows if row.name not in (other, ORACLE)]
        changes = {row.name: row.values[self.criterion] - reference for row in tested}
        return max_t_of(changes, [group for _, group in self.ids])

    def gap_closed(self, row: Row, fixed: str, oracle: str) -> float | None:
        """Share of the oracle's gain over the best fixed choice; None below `NO_GAP`, where noise dominates it."""
        if all(other.name != oracle for other in self.rows):
            return None
        gap = self.difference(self.row(oracle), fixed).mean
        return self.difference(row, fixed).mean / gap if gap >= NO_GAP else None

    def picks(self, name: str) -> dict[str, int]:
        """Indices of the images with the best, the median and the worst criterion of a row."""
        return picks(self.row(name).values[self.criterion])

    def per_image(self, cells: Callable[[Row, int], Iterable[object]]) -> list[list[object]]:
        """Lines of eval.csv, one per row and image: image, patient, and the cells of a row and the image's number."""
        return [[*ids, *cells(row, number)] for row in self.rows for number, ids in enumerate(self.ids)]


def picks(values: np.ndarray) -> dict[str, int]:
    """Indices of the best, the median and the worst of values, float (N,)."""
    order = np.argsort(values, kind="stable")
    return {"best": int(order[-1]), "median": int(order[len(order) // 2]), "worst": int(order[0])}


@dataclass(frozen=True)
class Verdict:
    """The conclusion from the numbers: a label of a fixed list, and a sentence."""

    label: str  # better, worse, cannot tell, no gap, unlabelled
    sentence: str


def gain_verdict(metric: str, gain: Estimate, p: float, name: str) -> Verdict:
    """The verdict on the difference of a metric, called `name`, between two models; p is from `max_t`."""
    label = word(metric, gain.mean, p)
    rare = f"; {rare_loss(gain.groups)}" if label == "better" else ""
    return Verdict(label, f"{label.capitalize()}: {name} {gain.signed} on {gain.groups} groups, p {p_words(p)}{rare}.")


def policy_verdict(
    gain: Estimate, p: float, what: str, many: str, measured: str, enough: str, rival: str, more: str = ""
) -> Verdict:
    """The verdict on a policy that chooses by the image: better only if it beats every single choice for all images.

    Args:
        gain: Dice of the policy less that of the best fixed choice, on test patients.
        what, many: what is chosen, such as "prompt", and what the policy chooses per image, such as "the prompt".
        enough: why one choice is enough for all images; empty if the oracle's gain is not negligible.
        rival: a single choice that the policy does not beat, in words; empty if there is none.
        more: what is added to a verdict that depends on the gain alone.
    """
    label = word("dice", gain.mean, p)
    if enough and label != "better":
        return Verdict("no gap", f"No gap: {enough}. {measured}")
    if gain.groups < MIN_PATIENTS:
        return Verdict("cannot tell", f"Cannot tell: fewer than {MIN_PATIENTS} test patients. {measured}")
    if label == "better" and rival:
        return Verdict("cannot tell", f"Cannot tell: it does not beat {rival}. {measured}")
    because = {
        "better": f"choosing {many} per image helps",
        "worse": f"one {what} for all images is better than this policy",
        "cannot tell": f"p {p_words(p)}, and {LEVEL} is needed",
    }[label]
    rare = f" {rare_loss(gain.groups).capitalize()}." if label == "better" else ""
    return Verdict(label, f"{label.capitalize()}: {because}. {measured}{more}{rare}")


Shown = TypeVar("Shown")
Column = tuple[str, Callable[[Shown], object]]  # title, and the cell of what a line shows


@dataclass(frozen=True)
class Table:
    """Lines with a head, in the formats of a report."""

    head: tuple[str, ...]
    lines: tuple[tuple[object, ...], ...]

    def html(self, style: str = "scroll") -> str:
        """An HTML table, see `page.table`."""
        return page.table(self.head, self.lines, style)

    def csv(self) -> str:
        """CSV text; numbers with six digits, empty for None."""
        lines = [[f"{cell:.6g}" if isinstance(cell, int | float) else cell for cell in line] for line in self.lines]
        return page.csv_text([self.head, *lines])

    def tex(self) -> str:
        """A LaTeX table, the first column to the left; it needs the package booktabs. The head is LaTeX already."""
        start = rf"\begin{{tabular}}{{l{'r' * (len(self.head) - 1)}}}"
        rows = [" & ".join(_tex_cell(cell) for cell in line) + r" \\" for line in self.lines]
        head = " & ".join(self.head) + r" \\"
        return "\n".join([start, r"\toprule", head, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}", ""])

    def show(self, title: str) -> None:
        """Print it in a terminal; words of the first column wrap where it is narrow, numbers do not."""
        from rich import box
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table as RichTable

        table = RichTable(title=title, box=box.SIMPLE)
        for number, name in enumerate(self.head):
            table.add_column(name, no_wrap=number > 0)
        for line in self.lines:
            table.add_row(*(escape(str(cell)) for cell in line))
        Console().print(table)


def _tex_cell(cell: object) -> str:
    return re.sub("([&%_#])", r"\\\1", str(cell)).replace("<", "$<$")


def table_of(shown: Iterable[Shown], columns: Sequence[Column[Shown]]) -> Table:
    """One line for each of what is shown, such as rows."""
    lines = (tuple(cell(one) for _, cell in columns) for one in shown)
    return Table(tuple(title for title, _ in columns), tuple(lines))


def metric_columns(metrics: Iterable[str], row_of: Callable[[Shown], Row]) -> list[Column[Shown]]:
    """A column with mean and interval for each metric."""

    def column(metric: str) -> Column[Shown]:
        return TITLES[metric], lambda shown: row_of(shown).estimates[metric]

    return [column(metric) for metric in metrics]


def percent(share: float | None) -> str:
    """A share without decimals; "-" if there is none."""
    return "-" if share is None else f"{share:.0%}"


def p_words(p: float | None) -> str:
    """A p-value with three decimals; "" without one."""
    return "" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"
