"""The plots of the reports, from plain numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rl_reward_network.report.statistics import Estimate

LABEL_PIXELS = 12  # about the height of a label at 100 dots per inch


def histogram(counts: Mapping[str, np.ndarray], xlabel: str) -> Figure:
    """How often each choice is taken: bars side by side for each name, float (P,)."""
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    for number, (name, heights) in enumerate(counts.items()):
        axes.bar(np.arange(len(heights)) + 0.27 * (number - 1), heights, 0.27, label=name)
    axes.set(xlabel=xlabel, ylabel="test images", xticks=np.arange(len(heights)))
    axes.legend()
    return figure


def scatter(points: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Figure:
    """Dice over reward of masks: the proxy that PPO maximises, and the goal; the first of the names are in the back."""
    figure, axes = _unit_square("reward net's score", "Dice", margin=0.03)
    for number, (name, (scores, dices)) in enumerate(points.items()):
        axes.scatter(scores, dices, s=14 if number else 8, alpha=1 if number else 0.3, label=name)
    axes.legend()
    return figure


def slopes(start: np.ndarray, end: np.ndarray, title: str) -> Figure:
    """Dice of each test image: a line from the model as it is to another method; green rises, red falls."""
    figure = Figure(figsize=(5, 4.5), layout="constrained")
    axes = figure.subplots()
    for left, right in zip(start, end, strict=True):
        axes.plot([0, 1], [left, right], color="tab:green" if right >= left else "tab:red", alpha=0.4, linewidth=0.9)
    axes.plot([0, 1], [start.mean(), end.mean()], color="black", marker="o", label="mean over images")
    axes.set(ylabel="Dice", ylim=(-0.02, 1.02), xlim=(-0.1, 1.1))
    axes.set_xticks([0, 1], ["as it is", title], wrap=True)
    axes.legend(loc="lower right")
    return figure


def dice_over_minutes(methods: Sequence[tuple[float, Estimate]]) -> Figure:
    """Dice on test patients over minutes of training: a point with interval for each method, with its number."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for number, (minutes, dice) in enumerate(methods):
        low, high = (dice.mean if limit is None else limit for limit in (dice.low, dice.high))
        error = [[dice.mean - low], [high - dice.mean]]
        axes.errorbar(minutes, dice.mean, yerr=error, fmt="o", color=f"C{number % 10}")
    axes.set(xlabel="minutes of training, everything the method needs", ylabel="Dice on test patients")
    _label(axes, {number: (minutes, dice.mean) for number, (minutes, dice) in enumerate(methods)})
    return figure


def proxy_over_gold(points: Mapping[int, tuple[float, float]]) -> Figure:
    """Score of the reward network over Dice, mean of each method, with its number."""
    figure, axes = _unit_square("Dice (gold)", "reward network's score (proxy)")
    for number, point in points.items():
        axes.plot(*point, "o", color=f"C{number % 10}")
    _label(axes, dict(points))
    return figure


def curves(lines: Sequence[dict[str, Any]], panels: Mapping[str, Mapping[str, str]], xlabel: str) -> Figure | None:
    """What was logged, one panel beside the other; None without any of it.

    Args:
        lines: of metrics.jsonl, each with `step`.
        panels: title -> tag -> name in the legend.
        xlabel: what a step is.
    """
    logged = {tag for line in lines for tag in line}
    shown = {
        title: {tag: name for tag, name in names.items() if tag in logged}
        for title, names in panels.items()
        if logged & names.keys()
    }
    if not shown:
        return None
    figure = Figure(figsize=(5 * len(shown), 3), layout="constrained")
    for axes, (title, tags) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown.items(), strict=True):
        for number, (tag, name) in enumerate(tags.items()):
            _plot(axes, [(line["step"], line[tag]) for line in lines if tag in line], f"C{number}", name)
        axes.set(xlabel=xlabel, title=title)
        axes.legend()
    return figure


def _plot(axes: Axes, points: Sequence[tuple[float, float]], colour: str, name: str) -> None:
    """A line with markers; with 20 points or more, a pale line and its running mean."""
    steps, values = np.array(points, dtype=float).T
    width = len(values) // 10
    if width < 2:
        axes.plot(steps, values, marker="o", color=colour, label=name)
        return
    axes.plot(steps, values, alpha=0.3, color=colour)
    axes.plot(steps[width - 1 :], np.convolve(values, np.ones(width) / width, "valid"), color=colour, label=name)


def _unit_square(xlabel: str, ylabel: str, margin: float = 0.0) -> tuple[Figure, Axes]:
    """Axes from 0 to 1 with a diagonal."""
    figure = Figure(figsize=(5, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    limits = (-margin, 1 + margin)
    axes.set(xlabel=xlabel, ylabel=ylabel, xlim=limits, ylim=limits, aspect="equal")
    return figure, axes


def _label(axes: Axes, points: dict[int, tuple[float, float]]) -> None:
    """The numbers of the methods beside their points; methods at one place share a label."""
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
        axes.annotate(", ".join(map(str, numbers)), points[numbers[0]], xytext=(4, 4), textcoords="offset points")
