"""How well each class is found that is asked for by its name, and whether an absent one is recognised.

Axes: N questions, each about one class in one image; M models (or wordings) answer all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress

import numpy as np

from rl_reward_network.report.statistics import UNIT, Estimate, group_means, interval_of, max_t_of, share_interval
from rl_reward_network.report.table import Column, Table, table_of, word

ALL_CLASSES = "mean of classes"
EXPLAINED = (
    "Each image is asked for the classes by name. An absent class is recognised where the mask is empty; every other "
    "answer is a false alarm. Missed: an empty mask of a class that is there, whose Dice is 0. The mean of classes "
    "weighs them alike. Words are adjusted for all classes; fewer than six groups have neither words nor intervals. "
    "The held-out wording is in no training question."
)


@dataclass(frozen=True, eq=False)
class Questions:
    """N questions: class and group (patient) of each, and whether the true mask has a pixel, bool (N,)."""

    names: Sequence[str]
    groups: Sequence[str]
    there: np.ndarray


@dataclass(frozen=True, eq=False)
class Answers:
    """A model's answers to N questions."""

    dice: np.ndarray  # float64 (N,) in [0, 1]
    empty: np.ndarray  # bool (N,), whether the mask has no pixel, or is missing


@dataclass(frozen=True)
class ClassRow:
    """One class; estimates are means over groups, in the order of the models."""

    name: str  # or `ALL_CLASSES`
    images: int  # that have the class
    dice: tuple[Estimate | None, ...]  # of these images, an empty answer counts as 0
    missed: tuple[Estimate | None, ...]  # share of them with an empty answer
    absent: int  # images that certainly lack the class
    recognised: tuple[Estimate | None, ...]  # share of these with an empty answer; the rest are false alarms
    p: float | None = None  # of the second model's Dice less the first's, adjusted for all classes; None without one

    @property
    def verdict(self) -> str:
        """better, worse or cannot tell: the second model against the first."""
        if self.p is None or self.dice[0] is None or self.dice[1] is None:
            return ""
        return word("dice", self.dice[1].mean - self.dice[0].mean, self.p)


@dataclass(frozen=True)
class NamesSection:
    """The section of a report on classes that are asked for by name."""

    models: tuple[str, ...]  # titles of the M models
    rows: tuple[ClassRow, ...]  # of each class, and of all

    def tables(self, intervals: bool = True) -> dict[str, Table]:
        """Title -> table; with `intervals` False of means alone, for a terminal."""

        def cell(key: str, number: int, interval: bool, row: ClassRow) -> str:
            estimate: Estimate | None = getattr(row, key)[number]
            return "-" if estimate is None else str(estimate) if interval else estimate.point()

        found: list[Column[ClassRow]] = [("class", lambda row: row.name), ("images", lambda row: row.images)]
        absent: list[Column[ClassRow]] = [("class", lambda row: row.name), ("absent in", lambda row: row.absent)]
        for number, model in enumerate(self.models):
            found.append((f"Dice, {model}", partial(cell, "dice", number, intervals)))
            found.append((f"missed, {model}", partial(cell, "missed", number, False)))
            absent.append((f"recognised, {model}", partial(cell, "recognised", number, intervals)))
        if any(row.verdict for row in self.rows):
            found.append((f"{self.models[1]} against {self.models[0]}", lambda row: row.verdict))
        tables = {"classes that are there": table_of([row for row in self.rows if row.images], found)}
        if lacking := [row for row in self.rows if row.absent]:
            tables["classes that are certainly absent"] = table_of(lacking, absent)
        return tables


def names_section(questions: Questions, models: Mapping[str, Answers], seed: int = 0) -> NamesSection:
    """The section of N questions, from the answers of models by their titles; `seed` is of the bootstrap."""
    answers, names = list(models.values()), np.asarray(questions.names)
    there, p = questions.there, dict[str, float]()
    if len(answers) > 1:
        change = answers[1].dice - answers[0].dice
        known = {name: there & (names == name) for name in dict.fromkeys(questions.names)}
        p = max_t_of({name: np.where(of, change, np.nan) for name, of in known.items() if of.any()}, questions.groups)

    def estimates(columns: Sequence[np.ndarray], counted: np.ndarray) -> tuple[Estimate | None, ...]:
        if not counted.any():
            return (None,) * len(columns)
        groups = list(compress(questions.groups, counted))
        return tuple(mean_of_classes(column[counted], names[counted].tolist(), groups, seed) for column in columns)

    dice, empty = [one.dice for one in answers], [one.empty.astype(float) for one in answers]
    rows = []
    for name in (*dict.fromkeys(questions.names), ALL_CLASSES):
        own = (names == name) | (name == ALL_CLASSES)
        has, lacks = own & there, own & ~there
        of_images = int(has.sum()), estimates(dice, has), estimates(empty, has)
        rows.append(ClassRow(name, *of_images, int(lacks.sum()), estimates(empty, lacks), p.get(name)))
    return NamesSection(tuple(models), tuple(rows))


def class_means(values: np.ndarray, names: Sequence[str], groups: Sequence[str]) -> np.ndarray:
    """float64 (classes, groups), both in sorted order: means of values, float (N,); NaN where there are none."""
    classes, of_class = np.unique(np.asarray(names), return_inverse=True)
    asked = np.where(of_class == np.arange(len(classes))[:, None], np.asarray(values, dtype=float), np.nan)
    return group_means(asked, groups)


def mean_of_classes(
    values: np.ndarray, names: Sequence[str], groups: Sequence[str], seed: int = 0, bounds: tuple[float, float] = UNIT
) -> Estimate:
    """The mean over classes of the means over groups, each with the same weight, and its 95 % interval over groups.

    With one class it is `mean_interval`. The interval is that of one number per group, its influence on the mean; of
    values that are all 0 or 1 it is Wilson's, of as many groups as have the classes. `values` are float (N,), finite,
    each with its class and group; the rest is as in `mean_interval`.
    """
    means = class_means(values, names, groups)
    counts = (~np.isnan(means)).sum(axis=1, keepdims=True)
    of_classes, count = np.nanmean(means, axis=1, keepdims=True), means.shape[1]
    if bounds == UNIT and np.isin(values, UNIT).all():
        return share_interval(float(of_classes.mean()), count, float((counts**-0.5).mean()) ** -2)
    unbiased = np.sqrt(counts / np.maximum(counts - 1, 1) * (count - 1) / count) if count > 1 else 1.0
    influence = np.nan_to_num(means - of_classes) * count / counts * unbiased
    return interval_of(of_classes.mean() + influence.mean(axis=0), seed, bounds)
