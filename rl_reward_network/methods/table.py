"""The table of a comparison: every road against the model as it is, and the choice of the best road.

One test decides for all rows: max-t over the test patients (`report/max_t.py`). Headline, table and p column quote
its result.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rl_reward_network.methods.measure import MethodResult
from rl_reward_network.methods.methods import METHODS, Method
from rl_reward_network.methods.view import BASE
from rl_reward_network.report.cost import Cost
from rl_reward_network.report.statistics import (
    LEVEL,
    MIN_PATIENTS,
    Estimate,
    MaxT,
    few_patients_note,
    group_means,
    max_t,
    mean_interval,
)

OWN = "own"  # the road of the reward network's own segmentation: a plain segmenter


@dataclass(frozen=True)
class TestImages:
    """The images of a comparison.

    Args:
        val_groups: patient of each validation image, a hash.
        ids: of each test image, a hash.
        groups: patient of each test image, a hash.
    """

    val_groups: tuple[str, ...]
    ids: tuple[str, ...]
    groups: tuple[str, ...]


@dataclass(frozen=True)
class TableRow:
    """A road in the table; values of an image are means over seeds.

    Args:
        road: the road.
        results: of each seed.
        means: metric -> mean over test patients.
        to_base: Dice less that of the model as it is, paired.
        p: of `to_base`, two-sided, adjusted for all roads; None for the base.
        val: Dice on validation patients.
        seed_spread: standard deviation over seeds of the mean Dice on test patients; None with one seed.
    """

    method: Method
    results: tuple[MethodResult, ...]
    means: dict[str, Estimate]
    to_base: Estimate
    p: float | None
    val: Estimate
    seed_spread: float | None

    @property
    def word(self) -> str:
        """better, worse or cannot tell: against the model as it is; empty for the base."""
        if self.p is None:
            return ""
        return "cannot tell" if self.p > LEVEL else "better" if self.to_base.mean > 0 else "worse"

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
        """Minutes of training in words; a lower bound where a run was interrupted."""
        return f"{'≥ ' if self.cost.resumed else ''}{self.cost.minutes:.1f}"

    @property
    def answers(self) -> float:
        """Masks of Sa2VA per image."""
        return float(np.mean([result.answers for result in self.results]))

    @property
    def words(self) -> str:
        """What the road deploys, or the parameter chosen on validation patients; empty without either."""
        found = [", ".join(filter(None, [of.deploys, _parameter(of.parameter)])) for of in self.results]
        return "; ".join(dict.fromkeys(word for word in found if word))


@dataclass(frozen=True)
class Choice:
    """What is deployed.

    Args:
        better: roads that are better than the model as it is on the test patients, in the order of the table.
        best: of these the one with the highest Dice on validation patients; the model as it is if there are none.
        cheapest: of these the cheapest that is not worse than the best one on the test patients.
    """

    better: tuple[str, ...]
    best: str
    cheapest: str


def make_table(results: Mapping[str, Sequence[MethodResult]], images: TestImages) -> tuple[TableRow, ...]:
    """One row for each road, in the order of `METHODS`.

    Args:
        results: road -> its result with each seed; the base is among them.
        images: of the comparison.
    """
    methods = [method for method in METHODS if method.name in results]
    compared = [method.name for method in methods if method.name != BASE]
    p = dict(zip(compared, _test(results, compared, BASE, images).p.tolist(), strict=True))
    base = _mean_test(results[BASE], "dice")
    rows = []
    for method in methods:
        of_method = results[method.name]
        metrics = [name for name in of_method[0].test if all(name in result.test for result in of_method)]
        values = {name: _mean_test(of_method, name) for name in metrics}
        rows.append(
            TableRow(
                method,
                tuple(of_method),
                {name: mean_interval(values[name], images.groups) for name in metrics},
                mean_interval(values["dice"] - base, images.groups),
                p.get(method.name),
                mean_interval(_mean_val(of_method), images.val_groups),
                _seed_spread(of_method, images.groups),
            )
        )
    return tuple(rows)


def choose(rows: Sequence[TableRow], images: TestImages) -> Choice:
    """The best road, and the cheapest that is not significantly worse.

    Only roads that are better than the model as it is are deployed. Which of them is the best, validation patients
    decide: the test patients say whether a road is better at all, a claim that is adjusted for all roads.
    """
    results = {row.method.name: row.results for row in rows}
    better = {row.method.name: row for row in rows if row.word == "better"}
    if not better:
        return Choice((), BASE, BASE)
    best = max(better, key=lambda name: better[name].val.mean)
    signs = _test(results, list(better), best, images).signs
    as_good = [row for row, sign in zip(better.values(), signs, strict=True) if sign >= 0]
    return Choice(tuple(better), best, min(as_good, key=_price).method.name)


def _test(
    results: Mapping[str, Sequence[MethodResult]], names: Sequence[str], reference: str, images: TestImages
) -> MaxT:
    """Max-t test of the Dice of some roads less that of a reference road, on the test patients."""
    less = _mean_test(results[reference], "dice")
    gains = [_mean_test(results[name], "dice") - less for name in names]
    return max_t(np.reshape(gains, (len(names), len(less))), images.groups)


def _price(row: TableRow) -> tuple[float, float, int]:
    """What is compared first to last: minutes of training, answers of Sa2VA per image, labelled images."""
    return row.cost.minutes, row.answers, row.cost.labelled_images


def verdict_lines(rows: Sequence[TableRow], choice: Choice, images: TestImages, folder: str) -> tuple[str, ...]:
    """The verdict in sentences: the best road, the cheapest, how to deploy them, and the plain segmenter.

    Args:
        rows: of the table.
        choice: from `choose`.
        images: of the comparison.
        folder: of the comparison, as the user types it.
    """
    by_name = {row.method.name: row for row in rows}
    best, cheapest = by_name[choice.best], by_name[choice.cheapest]
    lines = [_best_line(best, len(rows) - 1)]
    if others := [by_name[name] for name in choice.better if name != choice.best]:
        lines.append(f"Better than the model as it is, too: {'; '.join(map(_gain, others))}.")
    if cheapest is not best:
        lines.append(
            f"The cheapest that is not significantly worse than the best: {cheapest.method.title}; "
            f"{_price_words(cheapest)}."
        )
    lines += few_patients_note(best.to_base.groups)
    lines.append(f"Deploy the best: sa2va-rl segment --run {shlex.quote(f'{folder}/best')} image.png")
    if cheapest is not best:
        lines.append(f"Deploy the cheapest: sa2va-rl segment --run {shlex.quote(f'{folder}/cheapest')} image.png")
    if OWN in by_name:
        lines.append(_plain_segmenter_line(by_name, images))
    return tuple(lines)


def _best_line(best: TableRow, compared: int) -> str:
    dice, patients = best.means["dice"], best.means["dice"].groups
    if best.method.name != BASE:
        return f"Best: {_gain(best)}, Dice {dice} on {patients} test patients; {_price_words(best)}."
    keep = f"keep the model as it is, Dice {dice}"
    if patients < MIN_PATIENTS:
        return f"Cannot tell: {patients} test patients, and no test can decide below {MIN_PATIENTS}; {keep}."
    return (
        f"No road is significantly better than the model as it is on {patients} test patients (adjusted for {compared} "
        f"road{'s' * (compared > 1)}): {keep}."
    )


def _gain(row: TableRow) -> str:
    """The road, and its difference to the model as it is."""
    assert row.p is not None
    return f"{row.method.title} ({row.to_base.signed}, p {p_words(row.p)})"


def p_words(p: float) -> str:
    """A p-value with three decimals."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _price_words(row: TableRow) -> str:
    return (
        f"{row.minutes} minutes of training, {row.cost.labelled_images} labelled images, "
        f"answers of Sa2VA per image: {row.answers:.2g}"
    )


def _plain_segmenter_line(rows: Mapping[str, TableRow], images: TestImages) -> str:
    """Whether any other road is better than the reward network's own segmentation, by one test of all of them."""
    results = {name: row.results for name, row in rows.items()}
    own_dice = _mean_test(results[OWN], "dice")
    others = [name for name in rows if not np.array_equal(_mean_test(results[name], "dice"), own_dice)]
    if not others:
        return "No road gives other masks than a plain segmenter."
    tested = _test(results, others, OWN, images)
    better = [name for name, sign in zip(others, tested.signs, strict=True) if sign > 0]
    top = max(better or others, key=lambda name: rows[name].val.mean)
    difference = mean_interval(_mean_test(results[top], "dice") - own_dice, images.groups)
    measured = (
        f"{rows[top].method.title} less {rows[OWN].method.title}: {difference.signed} Dice on the test patients, "
        f"p {p_words(float(tested.p[others.index(top)]))}"
    )
    if better:
        return f"A plain segmenter is worse than {len(better)} of {len(others)} other roads: {measured}."
    if (tested.signs < 0).all():
        return f"No road is better than a plain segmenter, which serves these images better: {measured}."
    return f"Cannot tell whether any road is better than a plain segmenter: {measured}."


def _mean_test(results: Sequence[MethodResult], metric: str) -> np.ndarray:
    """float64 (N,): a metric of each test image, mean over seeds."""
    return np.mean([result.test[metric] for result in results], axis=0)


def _mean_val(results: Sequence[MethodResult]) -> np.ndarray:
    """float64 (N,): Dice of each validation image, mean over seeds."""
    return np.mean([result.val for result in results], axis=0)


def _seed_spread(results: Sequence[MethodResult], groups: Sequence[str]) -> float | None:
    """The standard deviation over seeds of the mean Dice over test patients."""
    means = group_means(np.array([result.test["dice"] for result in results]), groups).mean(axis=1)
    return float(means.std(ddof=1)) if len(results) > 1 else None


def _parameter(value: float | None) -> str:
    return "" if value is None else f"{value:g}"
