"""The plots of a comparison."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rl_reward_network.methods.table import Choice, TableRow
from rl_reward_network.methods.view import BASE

LABEL_PIXELS = 12  # about the height of a label at 100 dots per inch


def slopes(rows: Sequence[TableRow], choice: Choice) -> Figure:
    """Dice of each test image: a line from the model as it is to the best road; green rises, red falls."""
    by_name = {row.method.name: row for row in rows}
    best = by_name[choice.best]
    start, end = (dice_of(row) for row in (by_name[BASE], best))
    figure = Figure(figsize=(5, 4.5), layout="constrained")
    axes = figure.subplots()
    for left, right in zip(start, end, strict=True):
        axes.plot([0, 1], [left, right], color="tab:green" if right >= left else "tab:red", alpha=0.4, linewidth=0.9)
    axes.plot([0, 1], [start.mean(), end.mean()], color="black", marker="o", label="mean over images")
    axes.set(ylabel="Dice", ylim=(-0.02, 1.02), xlim=(-0.1, 1.1))
    axes.set_xticks([0, 1], ["as it is", best.method.title], wrap=True)
    axes.legend(loc="lower right")
    return figure


def dice_over_minutes(rows: Sequence[TableRow]) -> Figure:
    """Dice on test patients over minutes of training, one point with interval for each road, numbered as there."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for number, row in enumerate(rows):
        dice = row.means["dice"]
        low, high = (dice.mean if limit is None else limit for limit in (dice.low, dice.high))
        axes.errorbar(
            row.cost.minutes, dice.mean, yerr=[[dice.mean - low], [high - dice.mean]], fmt="o", color=f"C{number % 10}"
        )
    axes.set(xlabel="minutes of training, everything the road needs", ylabel="Dice on test patients")
    _label(axes, {number: (row.cost.minutes, row.means["dice"].mean) for number, row in enumerate(rows)})
    return figure


def proxy_over_gold(rows: Sequence[TableRow]) -> Figure | None:
    """Score of the reward network over Dice, mean of each road; None without a network."""
    scored = [(number, row) for number, row in enumerate(rows) if "score" in row.means]
    if not scored:
        return None
    figure = Figure(figsize=(5, 4.5), layout="constrained")
    axes = figure.subplots()
    points = {number: (row.means["dice"].mean, row.means["score"].mean) for number, row in scored}
    for number, point in points.items():
        axes.plot(*point, "o", color=f"C{number % 10}")
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    axes.set(xlabel="Dice (gold)", ylabel="reward network's score (proxy)", xlim=(0, 1), ylim=(0, 1), aspect="equal")
    _label(axes, points)
    return figure


def _label(axes: Axes, points: dict[int, tuple[float, float]]) -> None:
    """The numbers of the roads beside their points; roads at one place share a label."""
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]  # now data have places in pixels
    labels: list[tuple[np.ndarray, list[int]]] = []  # place in pixels of the first, and all numbers there
    for number, point in points.items():
        place = axes.transData.transform(point)
        near = next((numbers for other, numbers in labels if np.abs(place - other).max() < LABEL_PIXELS), None)
        if near is None:
            labels.append((place, [number]))
        else:
            near.append(number)
    for _, numbers in labels:
        text = ", ".join(map(str, numbers))
        axes.annotate(text, points[numbers[0]], xytext=(4, 4), textcoords="offset points")


def dice_of(row: TableRow) -> np.ndarray:
    """float64 (N,): Dice of each test image, mean over seeds."""
    return np.mean([result.test["dice"] for result in row.results], axis=0)
