"""The table of a comparison: every method against the model as it is, and the choice of the best method.

One test decides for all rows: `max_t` over the test patients. Headline, table and p column quote its result.
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
)
from rl_reward_network.report.table import Row, change_interval, make_row, p_words, word

OWN = "reward_net_segmentation"  # the reward network's own segmentation: a plain segmenter


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


@dataclass(frozen=True, eq=False)
class MethodRow:
    """A method in the table.

    Args:
        method: the method.
        results: of each seed.
        row: its values, of each image the mean over seeds, and Dice less that of the model as it is, paired.
        p: of that difference, two-sided, adjusted for all methods; None for the base.
        val: Dice on validation patients.
        seed_spread: standard deviation over seeds of the mean Dice on test patients; None with one seed.
    """

    method: Method
    results: tuple[MethodResult, ...]
    row: Row
    p: float | None
    val: Estimate
    seed_spread: float | None

    @property
    def dice(self) -> np.ndarray:
        """float64 (N,): Dice of each test image."""
        return self.row.values["dice"]

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
        """Minutes of training in words; a lower bound where a run was interrupted."""
        return f"{'≥ ' if self.cost.resumed else ''}{self.cost.minutes:.1f}"

    @property
    def answers(self) -> float:
        """Masks of Sa2VA per image."""
        return float(np.mean([result.answers for result in self.results]))

    @property
    def words(self) -> str:
        """What the method deploys, or the parameter chosen on validation patients; empty without either."""
        parameters = ["" if of.parameter is None else f"{of.parameter:g}" for of in self.results]
        pairs = zip((of.chosen_on_validation for of in self.results), parameters, strict=True)
        found = [", ".join(filter(None, pair)) for pair in pairs]
        return "; ".join(dict.fromkeys(word for word in found if word))


@dataclass(frozen=True)
class Choice:
    """What is deployed.

    Args:
        better: methods that are better than the model as it is on the test patients, in the order of the table.
        best: of these the one with the highest Dice on validation patients; the model as it is if there are none.
        cheapest: of these the cheapest that is shown to be at most a margin worse than the best one on the test
            patients.
    """

    better: tuple[str, ...]
    best: str
    cheapest: str


def make_table(results: Mapping[str, Sequence[MethodResult]], images: TestImages) -> tuple[MethodRow, ...]:
    """One row for each method, in the order of `METHODS`.

    Args:
        results: method -> its result with each seed; the base is among them.
        images: of the comparison.
    """
    methods = [method for method in METHODS if method.name in results]
    values = {method.name: _over_seeds(results[method.name]) for method in methods}
    base = values[BASE]["dice"]
    compared = [name for name in values if name != BASE]
    tested = _test([values[name]["dice"] for name in compared], base, images)
    p = dict(zip(compared, tested.p.tolist(), strict=True))
    return tuple(
        MethodRow(
            method,
            tuple(results[method.name]),
            make_row(method.name, of, {BASE: {"dice": of["dice"] - base}}, images.groups),
            p.get(method.name),
            mean_interval(
                np.mean([result.val for result in results[method.name]], axis=0), images.val_groups, bounds=UNIT
            ),
            _seed_spread(results[method.name], images.groups),
        )
        for method, of in zip(methods, values.values(), strict=True)
    )


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
    cheapest = min(as_good, key=_price)
    return Choice(tuple(row.method.name for row in better), best.method.name, cheapest.method.name)


def _test(dice: Sequence[np.ndarray], reference: np.ndarray, images: TestImages) -> MaxT:
    """Max-t test of the Dice of some methods less that of a reference, float64 (N,) each, on the test patients."""
    return max_t(np.reshape(dice, (len(dice), len(reference))) - reference, images.groups)


def _price(row: MethodRow) -> tuple[float, float, int]:
    """What is compared first to last: minutes of training, answers of Sa2VA per image, labelled images."""
    return row.cost.minutes, row.answers, row.cost.labelled_images


def verdict_lines(rows: Sequence[MethodRow], choice: Choice, images: TestImages, folder: str) -> tuple[str, ...]:
    """The verdict in sentences: the best method, the cheapest, how to deploy them, and the plain segmenter.

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
            f"The cheapest that is shown to be less than {NO_GAP} Dice worse than the best: {cheapest.method.title}; "
            f"{_price_words(cheapest)}."
        )
    lines += few_patients_note(best.to_base.groups)
    lines.append(f"Deploy the best: sa2va-rl segment --run {shlex.quote(f'{folder}/best')} image.png")
    if cheapest is not best:
        lines.append(f"Deploy the cheapest: sa2va-rl segment --run {shlex.quote(f'{folder}/cheapest')} image.png")
    if OWN in by_name:
        lines.append(_plain_segmenter_line(by_name, images))
    return tuple(lines)


def _best_line(best: MethodRow, compared: int) -> str:
    dice, patients = best.row.estimates["dice"], best.to_base.groups
    if best.method.name != BASE:
        rare = rare_loss(patients).capitalize()
        return f"Best: {_gain(best)}, Dice {dice} on {patients} test patients; {_price_words(best)}. {rare}."
    keep = f"keep the model as it is, Dice {dice}"
    if patients < MIN_PATIENTS:
        return f"Cannot tell: {patients} test patients, and no test can decide below {MIN_PATIENTS}; {keep}."
    return (
        f"No method is significantly better than the model as it is on {patients} test patients (adjusted for "
        f"{compared} method{'s' * (compared > 1)}): {keep}."
    )


def _gain(row: MethodRow) -> str:
    """The method, and its difference to the model as it is."""
    assert row.p is not None
    return f"{row.method.title} ({row.to_base.signed}, p {p_words(row.p)})"


def _price_words(row: MethodRow) -> str:
    return (
        f"{row.minutes} minutes of training, {row.cost.labelled_images} labelled images, "
        f"answers of Sa2VA per image: {row.answers:.2g}"
    )


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


def _over_seeds(results: Sequence[MethodResult]) -> dict[str, np.ndarray]:
    """Metric -> float64 (N,): its value on each test image, mean over seeds; metrics that all seeds have."""
    metrics = [name for name in results[0].test if all(name in result.test for result in results)]
    return {name: np.mean([result.test[name] for result in results], axis=0) for name in metrics}


def _seed_spread(results: Sequence[MethodResult], groups: Sequence[str]) -> float | None:
    """The standard deviation over seeds of the mean Dice over test patients."""
    means = group_means(np.array([result.test["dice"] for result in results]), groups).mean(axis=1)
    return float(means.std(ddof=1)) if len(results) > 1 else None
