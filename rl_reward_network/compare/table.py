"""The table of a comparison: every road against the model as it is, with intervals, and the choice of the best road."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rl_reward_network.compare.measure import RoadResult
from rl_reward_network.compare.parts import Cost
from rl_reward_network.compare.roads import BASE, ROADS, Road
from rl_reward_network.evaluation.bootstrap import MIN_PATIENTS, Estimate, group_bootstrap
from rl_reward_network.evaluation.paired import holm, sign_flip_p

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
        p: of `to_base`, sign-flip test over patients, Holm-corrected over the roads; None for the base, and where
            there are fewer than two patients.
        val: Dice on validation patients.
        val_to_base: Dice less that of the model as it is on validation patients.
    """

    road: Road
    results: tuple[RoadResult, ...]
    means: dict[str, Estimate]
    to_base: Estimate
    p: float | None
    val: Estimate
    val_to_base: Estimate

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
    def asked(self) -> float:
        """Masks of Sa2VA per image."""
        return float(np.mean([result.asked for result in self.results]))

    @property
    def words(self) -> str:
        """What the road deploys, or the parameter chosen on validation patients; empty without either."""
        found = [", ".join(filter(None, [of.deploys, _parameter(of.parameter)])) for of in self.results]
        return "; ".join(dict.fromkeys(word for word in found if word))


@dataclass(frozen=True)
class Choice:
    """The best road and the cheapest within its interval, chosen on validation patients alone."""

    best: str
    cheapest: str
    enough: bool
    """Whether there are enough validation patients for an interval."""


def make_table(results: Mapping[str, Sequence[RoadResult]], images: TestImages, seed: int = 0) -> tuple[TableRow, ...]:
    """One row for each road, in the order of `ROADS`.

    Args:
        results: road -> its result with each seed; the base is among them.
        images: of the comparison.
        seed: of the bootstrap; all rows resample the same patients.
    """
    roads = [road for road in ROADS if road.name in results]
    base_test, base_val = _mean_test(results[BASE], "dice"), _mean_val(results[BASE])
    gains = {road.name: _mean_test(results[road.name], "dice") - base_test for road in roads}
    compared = [road.name for road in roads if road.name != BASE] if len(set(images.groups)) > 1 else []
    corrected = dict(zip(compared, holm([sign_flip_p(gains[name], images.groups) for name in compared]), strict=True))
    rows = []
    for road in roads:
        of_road = results[road.name]
        metrics = [name for name in of_road[0].test if all(name in result.test for result in of_road)]
        val = _mean_val(of_road)
        rows.append(
            TableRow(
                road,
                tuple(of_road),
                {name: group_bootstrap(_mean_test(of_road, name), images.groups, seed) for name in metrics},
                group_bootstrap(gains[road.name], images.groups, seed),
                float(corrected[road.name]) if road.name in corrected else None,
                group_bootstrap(val, images.val_groups, seed),
                group_bootstrap(val - base_val, images.val_groups, seed),
            )
        )
    return tuple(rows)


def choose(rows: Sequence[TableRow], images: TestImages, seed: int = 0) -> Choice:
    """The best road, and the cheapest whose difference to it has an interval that holds 0, on validation patients.

    A road is the best only if the interval of its gain over the model as it is lies above 0; else this is that model.
    With too few validation patients for an interval, the mean decides.
    """
    base = next(row for row in rows if row.road.name == BASE)
    best = max(rows, key=lambda row: row.val.mean)
    enough = base.val.groups >= MIN_PATIENTS
    if enough and best.val_to_base.sign <= 0:
        best = base
    within = [row for row in rows if _as_good(row, best, images, seed)] if enough else [best]
    return Choice(best.road.name, min(within, key=_price).road.name, enough)


def _as_good(row: TableRow, best: TableRow, images: TestImages, seed: int) -> bool:
    """Whether the interval of the difference to the best road holds 0."""
    if row is best:
        return True
    difference = group_bootstrap(_mean_val(best.results) - _mean_val(row.results), images.val_groups, seed)
    return difference.sign <= 0


def _price(row: TableRow) -> tuple[float, float, int]:
    """What is compared first to last: minutes of training, answers of Sa2VA per image, labelled images."""
    return row.cost.minutes, row.asked, row.cost.labelled_images


def verdict_lines(rows: Sequence[TableRow], choice: Choice, images: TestImages, folder: str) -> tuple[str, ...]:
    """The verdict in sentences: the best road, the cheapest, how to deploy them, and the plain segmenter.

    Args:
        rows: of the table.
        choice: made on validation patients.
        images: of the comparison.
        folder: of the comparison, as the user types it.
    """
    by_name = {row.road.name: row for row in rows}
    best, cheapest = by_name[choice.best], by_name[choice.cheapest]
    lines = [_best_line(best, choice)]
    if cheapest is best:
        none = "No cheaper road lies within its interval." if choice.enough else "Too few patients for a cheaper road."
        lines.append(none)
    else:
        lines.append(f"The cheapest road within its interval: {_named(cheapest)}; {_price_words(cheapest)}.")
    lines.append(f"Deploy the best: sa2va-rl segment --run {shlex.quote(f'{folder}/best')} image.png")
    if cheapest is not best:
        lines.append(f"Deploy the cheapest: sa2va-rl segment --run {shlex.quote(f'{folder}/cheapest')} image.png")
    if OWN in by_name:
        lines.append(_plain_segmenter_line(rows, by_name[OWN], images))
    return tuple(lines)


def _best_line(best: TableRow, choice: Choice) -> str:
    count = best.val.groups
    patients = f"{count} validation patient{'s' * (count > 1)}"
    patients += "" if choice.enough else f" (fewer than {MIN_PATIENTS}: by the mean alone)"
    if best.road.name == BASE:
        better = "significantly better" if choice.enough else "better"
        return (
            f"No road is {better} than the model as it is on {patients}: keep the model as it is, Dice "
            f"{best.means['dice']} on the test patients."
        )
    return f"Best on {patients}: {_named(best)}; {_price_words(best)}."


def _named(row: TableRow) -> str:
    """The road and its result on the test patients."""
    if row.to_base.groups < MIN_PATIENTS:
        word = f"cannot tell, fewer than {MIN_PATIENTS} test patients"
    else:
        word = {1: "better", -1: "worse"}.get(row.to_base.sign, "cannot tell")
    return (
        f"{row.road.title}, Dice {row.means['dice']} on the test patients, {row.to_base.signed} against the model as "
        f"it is ({word})"
    )


def _price_words(row: TableRow) -> str:
    return (
        f"{row.minutes} minutes of training, {row.cost.labelled_images} labelled images, "
        f"answers of Sa2VA per image: {row.asked:.2g}"
    )


def _plain_segmenter_line(rows: Sequence[TableRow], own: TableRow, images: TestImages) -> str:
    """Whether the best other road by validation is better than the reward network's own segmentation."""
    own_dice = _mean_test(own.results, "dice")
    others = [row for row in rows if not np.array_equal(_mean_test(row.results, "dice"), own_dice)]
    if not others:
        return "No road gives other masks than a plain segmenter."
    top = max(others, key=lambda row: row.val.mean)
    difference = group_bootstrap(_mean_test(top.results, "dice") - own_dice, images.groups, 0)
    measured = f"{top.road.title} less {own.road.title}: {difference.signed} Dice on the test patients"
    if difference.sign > 0:
        return f"A plain segmenter is worse: {measured}."
    if difference.sign < 0:
        return f"No road is better than a plain segmenter, which serves these images better: {measured}."
    return f"Cannot tell whether any road is better than a plain segmenter: {measured}."


def _mean_test(results: Sequence[RoadResult], metric: str) -> np.ndarray:
    """float64 (N,): a metric of each test image, mean over seeds."""
    return np.mean([result.test[metric] for result in results], axis=0)


def _mean_val(results: Sequence[RoadResult]) -> np.ndarray:
    """float64 (N,): Dice of each validation image, mean over seeds."""
    return np.mean([result.val for result in results], axis=0)


def _parameter(value: float | None) -> str:
    return "" if value is None else f"{value:g}"
