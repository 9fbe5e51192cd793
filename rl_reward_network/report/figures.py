"""The plots of the report."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from rl_reward_network.report.baselines import DEPLOYED, NET, ORACLE, POLICY, Comparison


def png(figure: Figure) -> bytes:
    """A figure as PNG; equal figures give equal bytes."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110, metadata={"Software": None})
    return file.getvalue()


def histogram(comparison: Comparison) -> Figure:
    """How often the deployed choice, PPO and the oracle (unlabelled: argmax of the reward net) select each prompt."""
    reference = ORACLE if comparison.labelled else NET
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    for shift, name in ((-0.27, DEPLOYED), (0, POLICY), (0.27, reference)):
        counts = comparison.row(name).weights.sum(axis=0)
        axes.bar(np.arange(len(counts)) + shift, counts, 0.27, label=name)
    axes.set(xlabel="index of the prompt", ylabel="test images", xticks=np.arange(len(counts)))
    axes.legend()
    return figure


def scatter(comparison: Comparison) -> Figure:
    """Dice over reward of every mask: the proxy that PPO maximises, and the goal; the deployed masks stand out."""
    figure = Figure(figsize=(5, 4.5), layout="constrained")
    axes = figure.subplots()
    scores, dices = ([table.column(name) for table in comparison.tables] for name in ("score", "dice"))
    axes.scatter(np.concatenate(scores), np.concatenate(dices), s=8, alpha=0.3, label="all prompts")
    deployed = comparison.row(DEPLOYED)
    axes.scatter(comparison.values(deployed, "score"), comparison.values(deployed, "dice"), s=14, label=DEPLOYED)
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    axes.set(xlabel="reward net's score", ylabel="Dice", xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), aspect="equal")
    axes.legend()
    return figure


def proxy_and_gold(rollouts: Sequence[dict[str, Any]]) -> Figure:
    """Reward and Dice on validation images over the training; they should rise together.

    Args:
        rollouts: lines of metrics.jsonl, each with `step`.
    """
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    for tag, label in (("custom/val_score", "reward net's score (proxy)"), ("custom/val_gt_dice", "Dice (gold)")):
        points = [(row["step"], row[tag]) for row in rollouts if tag in row]
        if points:
            axes.plot(*zip(*points, strict=True), marker=".", label=f"val: {label}")
    axes.set(xlabel="prompts tried in training", ylabel="mean of the greedy policy")
    axes.legend()
    return figure
