"""A fine-tuned model beside the model as it was, item by item: rows with intervals, a verdict, a page with pictures.

Groups (images, videos or patients) are drawn again, not items. Axes: N test items.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rl_reward_network.artefacts import whole_file, write_json
from rl_reward_network.evaluation import page
from rl_reward_network.evaluation.bootstrap import MIN_PATIENTS, Estimate, Verdict, group_bootstrap
from rl_reward_network.evaluation.figures import png
from rl_reward_network.evaluation.overlays import BLUE, GREEN, ORANGE, draw_mask

NAMES = {
    "iou_of_drawn": "IoU of mask'",
    "expected_iou_of_drawn": "IoU of mask', sampled",
    "iou_of_drawn_by_base": "IoU of mask', neutral",
    "meteor": "METEOR",
    "expected_meteor": "METEOR, sampled",
    "cycle_meteor": "METEOR of caption'",
    "iou": "IoU",
    "dice": "Dice",
    "precision": "precision",
    "recall": "recall",
    "learned": "reward net's score",
}
VALIDATION = {
    "val/score": "reward net's score (proxy)",
    "val/gt_dice": "Dice (gold)",
    "val/iou_of_drawn": "IoU of mask'",
    "val/meteor": "METEOR",
    "val/cycle_meteor": "METEOR of caption'",
}
WHEN = ("truth", "before", "after")
MASK_LEGEND = "IoU, Dice, precision and recall are of the mask that the item's question asks for."
CAPTION_LEGEND = (
    "Mask' is drawn from the model's own caption of the true region (the reward of loop 1); neutral: drawn by the "
    "model as it was, so that a private language between captioner and drawer does not count. Caption' describes the "
    "mask drawn from the reference caption (the reward of loop 2). Sampled: captions at temperature 1 in place of the "
    "likeliest. METEOR is divided by the reference's own."
)


def legend(metrics: Collection[str]) -> str:
    """What the metrics of a table are."""
    return f"{MASK_LEGEND} {CAPTION_LEGEND}" if "meteor" in metrics else MASK_LEGEND


def label(metric: str, meteor: str) -> str:
    """How a metric is called in tables; METEOR with its variant, for other variants give other numbers."""
    name = NAMES.get(metric, metric)
    return f"{name} ({meteor})" if "METEOR" in name and meteor else name


@dataclass(frozen=True)
class Difference:
    """One metric of both models, and their paired difference."""

    metric: str
    before: Estimate
    after: Estimate
    gain: Estimate

    @property
    def word(self) -> str:
        """better, worse or cannot tell."""
        if self.gain.groups < MIN_PATIENTS or self.gain.low is None or self.gain.high is None:
            return "cannot tell"
        return "better" if self.gain.low > 0 else "worse" if self.gain.high < 0 else "cannot tell"


@dataclass(frozen=True, eq=False)
class ShownItem:
    """A test item to look at: uint8 (H, W, 3) image, masks bool (H, W) or None, and what was said."""

    title: str
    image: np.ndarray
    truth: np.ndarray | None
    before: np.ndarray | None
    after: np.ndarray | None
    words: tuple[str, str, str]


@dataclass(frozen=True, eq=False)
class BeforeAfter:
    """All that the report is made of.

    Args:
        rows: one per metric.
        criterion: the metric the verdict is on.
        totals: what exists for all items together only, name -> (before, after), such as cIoU.
        values: model -> metric -> float64 (N,), for the CSV file.
        ids: (sample, group) of each item.
        config: what was evaluated.
        notes: remarks.
        shown: pictures.
        curves: lines of metrics.jsonl.
    """

    rows: tuple[Difference, ...]
    criterion: str
    totals: dict[str, tuple[float, float]]
    values: dict[str, dict[str, np.ndarray]]
    ids: tuple[tuple[str, str], ...]
    config: dict[str, Any]
    notes: tuple[str, ...] = ()
    shown: tuple[ShownItem, ...] = ()
    curves: tuple[dict[str, Any], ...] = ()

    def label(self, metric: str) -> str:
        """How a metric is called in tables."""
        return label(metric, self.config.get("METEOR", ""))

    @property
    def verdict(self) -> Verdict:
        """What the numbers allow to say."""
        row = next(row for row in self.rows if row.metric == self.criterion)
        name = self.label(row.metric)
        return Verdict(row.word, f"{row.word.capitalize()}: {name} {row.gain.signed} on {row.gain.groups} groups.")


def compare_models(
    before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray], groups: Sequence[str], seed: int = 0
) -> tuple[Difference, ...]:
    """A row for each metric that both have a value of, on the items where both have one."""
    rows = []
    for metric in before:
        known = ~(np.isnan(before[metric]) | np.isnan(after[metric]))
        if known.any():
            own = [group for group, is_known in zip(groups, known, strict=True) if is_known]
            old, new = before[metric][known], after[metric][known]
            estimates = [group_bootstrap(values, own, seed) for values in (old, new, new - old)]
            rows.append(Difference(metric, *estimates))
    return tuple(rows)


def write_before_after(folder: Path, result: BeforeAfter) -> Path:
    """Write eval.json, eval.csv and report.html, each whole or not at all; the path of the last."""
    whole = _page(result)
    write_json(folder / "eval.json", summary(result))
    for name, content in (("eval.csv", _per_item(result)), ("report.html", whole)):
        with whole_file(folder / name) as temporary:
            temporary.write_text(content, encoding="utf-8", newline="")
    return folder / "report.html"


def summary(result: BeforeAfter) -> dict[str, Any]:
    """What eval.json holds."""
    return {
        "verdict": asdict(result.verdict),
        "criterion": result.criterion,
        "items": len(result.ids),
        "rows": [{**asdict(row), "word": row.word} for row in result.rows],
        "totals": {name: {"before": old, "after": new} for name, (old, new) in result.totals.items()},
        "notes": list(result.notes),
        "config": result.config,
    }


def _per_item(result: BeforeAfter) -> str:
    metrics = [row.metric for row in result.rows]
    lines: list[list[object]] = [["sample_id", "group_id", "model", *metrics]]
    for model, values in result.values.items():
        for number, ids in enumerate(result.ids):
            lines.append([*ids, model, *page.digits(np.array([values[metric][number] for metric in metrics]))])
    return page.csv_text(lines)


def _page(result: BeforeAfter) -> str:
    verdict = result.verdict
    parts = [
        "<h1>What did fine-tuning change?</h1>",
        f'<p class="verdict">{page.text(verdict.sentence)}</p>',
        f"<p>{len(result.ids)} test items; means over groups with 95 % intervals from drawing groups again.</p>",
        "".join(f"<p>Note: {page.text(note)}</p>" for note in result.notes),
        page.table(
            ["metric", "before", "after", "after - before", ""],
            [_cells(result.label(row.metric), row) for row in result.rows],
        ),
        f"<p>{legend([row.metric for row in result.rows])}</p>",
        page.table(["all items together", "before", "after"], _totals(result)) if result.totals else "",
        *_training(result.curves),
        "<h2>Images</h2>" if result.shown else "",
        *(_item(item) for item in result.shown),
        "<h2>What was evaluated</h2>",
        page.table(["setting", "value"], result.config.items(), "wrap"),
    ]
    return page.whole_page(f"Fine-tuning: {verdict.label}", parts)


def _cells(name: str, row: Difference) -> list[str]:
    return [name, str(row.before), str(row.after), row.gain.signed, row.word]


def _totals(result: BeforeAfter) -> list[list[str]]:
    return [[name, f"{old:.3f}", f"{new:.3f}"] for name, (old, new) in result.totals.items()]


def _item(item: ShownItem) -> str:
    named = [f"{when}: {said}" if said else when for when, said in zip(WHEN, item.words, strict=True)]
    panels = zip(named, (item.truth, item.before, item.after), (GREEN, ORANGE, BLUE), strict=True)
    figures = "".join(
        f"<figure>{page.image(draw_mask(item.image, mask, colour), 'jpeg', name)}"
        f"<figcaption>{page.text(name)}</figcaption></figure>"
        for name, mask, colour in panels
    )
    return f'<h3>{page.text(item.title)}</h3><div class="panels">{figures}</div>'


def _training(lines: Sequence[dict[str, Any]]) -> list[str]:
    figure = curves(lines)
    return ["<h2>Training</h2>", page.image(png(figure), "png", "Rewards and validation")] if figure else []


def curves(lines: Sequence[dict[str, Any]]) -> Figure | None:
    """What was paid in training, and beside it what validation items said; None without either."""
    rewards = {f"loop{loop}/reward_mean": f"loop {loop}" for loop in (1, 2)}
    panels = {
        "reward of sampled rollouts (training)": {tag: name for tag, name in rewards.items() if _has(lines, tag)},
        "validation": {tag: name for tag, name in VALIDATION.items() if _has(lines, tag)},
    }
    drawn = {title: tags for title, tags in panels.items() if tags}
    if not drawn:
        return None
    figure = Figure(figsize=(5 * len(drawn), 3), layout="constrained")
    for axes, (title, tags) in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn.items(), strict=True):
        for number, (tag, name) in enumerate(tags.items()):
            _plot(axes, *_points(lines, tag), f"C{number}", name)
        axes.set(xlabel="optimisation step", title=title)
        axes.legend()
    return figure


def _has(lines: Sequence[dict[str, Any]], tag: str) -> bool:
    return any(tag in line for line in lines)


def _points(lines: Sequence[dict[str, Any]], tag: str) -> tuple[np.ndarray, np.ndarray]:
    points = [(line["step"], line[tag]) for line in lines if tag in line]
    steps, values = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    return steps, values


def _plot(axes: Axes, steps: np.ndarray, values: np.ndarray, colour: str, name: str) -> None:
    """A line with its points; a pale line under its running mean where there are many."""
    width = len(values) // 10
    if width < 2:
        axes.plot(steps, values, marker="o", color=colour, label=name)
        return
    axes.plot(steps, values, alpha=0.3, color=colour)
    axes.plot(steps[width - 1 :], np.convolve(values, np.ones(width) / width, "valid"), color=colour, label=name)
