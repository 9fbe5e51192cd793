"""Comparison of a fine-tuned model with the base model on test items: intervals, a verdict, a page with pictures.

Intervals are over groups (images, videos or patients), not over items. Axes: N test items.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rl_reward_network.artefacts import write_json
from rl_reward_network.report import page
from rl_reward_network.report.bootstrap import INTERVALS, Estimate, Verdict, mean_interval
from rl_reward_network.report.figures import png
from rl_reward_network.report.legends import mask_legend
from rl_reward_network.report.overlays import BLUE, GREEN, ORANGE, draw_mask
from rl_reward_network.report.unlabelled import UnlabelledSection, section_html
from rl_reward_network.rewards.metrics import METRICS

METRIC_TITLES = {
    "iou_of_drawn": "IoU of mask'",
    "expected_iou_of_drawn": "IoU of mask', sampled",
    "iou_of_drawn_by_base": "IoU of mask', neutral",
    "meteor": "METEOR",
    "expected_meteor": "METEOR, sampled",
    "cycle_meteor": "METEOR of caption'",
    **{name: metric.column for name, metric in METRICS.items()},
    "learned": "reward net's score",
}
REWARD_TITLES = {f"loop{loop}/reward_mean": f"loop {loop}" for loop in (1, 2)}
VALIDATION_TITLES = {
    "val/score": "reward net's score (proxy)",
    "val/gt_dice": "Dice (gold)",
    "val/iou_of_drawn": "IoU of mask'",
    "val/meteor": "METEOR",
    "val/cycle_meteor": "METEOR of caption'",
}
COLOURS = {"truth": GREEN, "before": ORANGE, "after": BLUE}
MASK_LEGEND = "IoU, Dice, precision and recall are of the mask that answers the item's question."
CAPTION_LEGEND = (
    "Mask' is segmented from the model's own caption of the true region (the reward of loop 1). Neutral: segmented by "
    "the base model, so that wording which only the fine-tuned model understands does not count. Caption' describes "
    "the mask segmented from the reference caption (the reward of loop 2). Sampled: captions at temperature 1 in place "
    "of greedy decoding. METEOR is divided by the METEOR of the reference with itself."
)


def legend(metrics: Collection[str]) -> str:
    """A description of the metrics in a table."""
    return f"{MASK_LEGEND} {CAPTION_LEGEND}" if "meteor" in metrics else MASK_LEGEND


def label(metric: str, meteor: str) -> str:
    """Title of a metric in tables; METEOR is followed by its variant, since variants differ in their values."""
    name = METRIC_TITLES.get(metric, metric)
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
        """better, worse or cannot tell, by the 95 % interval of the gain."""
        return {1: "better", -1: "worse"}.get(self.gain.sign, "cannot tell")


@dataclass(frozen=True, eq=False)
class ReportItem:
    """A test item on the page: uint8 (H, W, 3) image, masks bool (H, W) or None, and a caption of each."""

    title: str
    image: np.ndarray
    truth: np.ndarray | None
    before: np.ndarray | None
    after: np.ndarray | None
    words: tuple[str, str, str]


@dataclass(frozen=True, eq=False)
class BeforeAfter:
    """The content of the report.

    Args:
        rows: one per metric, in the order of the tables.
        criterion: metric of the verdict.
        totals: metrics over all items together, such as cIoU: name -> (before, after).
        values: model -> metric -> float64 (N,), for the CSV file.
        ids: (sample, group) of each item.
        config: models, data and settings; JSON values.
        notes: remarks.
        shown: items with pictures.
        curves: lines of metrics.jsonl.
        notice: a first sentence that matters more than the verdict, such as that training made the model worse.
        origin: date, version, command and files, for the top of the page alone.
        unlabelled: the section on the run's unlabelled images.
    """

    rows: tuple[Difference, ...]
    criterion: str
    totals: dict[str, tuple[float, float]]
    values: dict[str, dict[str, np.ndarray]]
    ids: tuple[tuple[str, str], ...]
    config: dict[str, Any]
    notes: tuple[str, ...] = ()
    shown: tuple[ReportItem, ...] = ()
    curves: tuple[dict[str, Any], ...] = ()
    notice: str = ""
    origin: page.Origin = field(default_factory=page.Origin)
    unlabelled: UnlabelledSection | None = None

    def label(self, metric: str) -> str:
        """Title of a metric in tables."""
        return label(metric, self.config.get("METEOR", ""))

    @property
    def verdict(self) -> Verdict:
        """The verdict on the criterion."""
        row = next(row for row in self.rows if row.metric == self.criterion)
        name = self.label(row.metric)
        sentence = f"{row.word.capitalize()}: {name} {row.gain.signed} on {row.gain.groups} groups."
        return Verdict(row.word, f"{self.notice} {sentence}" if self.notice else sentence)


def compare_models(
    before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray], groups: Sequence[str], seed: int = 0
) -> tuple[Difference, ...]:
    """One row per metric, over the items for which both models have a value; without such items, no row."""
    rows = []
    for metric in before:
        known = ~(np.isnan(before[metric]) | np.isnan(after[metric]))
        if known.any():
            known_groups = [group for group, is_known in zip(groups, known, strict=True) if is_known]
            old, new = before[metric][known], after[metric][known]
            estimates = [mean_interval(values, known_groups, seed) for values in (old, new, new - old)]
            rows.append(Difference(metric, *estimates))
    return tuple(rows)


def write_before_after(folder: Path, result: BeforeAfter) -> Path:
    """Write eval.json, eval.csv and report.html, each whole or not at all; returns the path of report.html."""
    header = page.header(result.origin, folder, ["eval.csv", "eval.json"])
    texts = {"eval.csv": _per_item(result), "report.html": _page(result, header)}
    write_json(folder / "eval.json", summary(result))
    return page.write_files(folder, texts)


def summary(result: BeforeAfter) -> dict[str, Any]:
    """The content of eval.json."""
    return {
        "verdict": asdict(result.verdict),
        "criterion": result.criterion,
        "items": len(result.ids),
        "rows": [{**asdict(row), "word": row.word} for row in result.rows],
        "totals": {name: {"before": old, "after": new} for name, (old, new) in result.totals.items()},
        "notes": list(result.notes),
        "config": result.config,
        **({"unlabelled": result.unlabelled.summary} if result.unlabelled else {}),
    }


def _per_item(result: BeforeAfter) -> str:
    """CSV text: one line per test item and model."""
    metrics = [row.metric for row in result.rows]
    lines: list[list[object]] = [["sample_id", "group_id", "model", *metrics]]
    for model, values in result.values.items():
        for number, ids in enumerate(result.ids):
            lines.append([*ids, model, *page.digits(np.array([values[metric][number] for metric in metrics]))])
    return page.csv_text(lines)


def _page(result: BeforeAfter, header: str) -> str:
    """The HTML file."""
    verdict = result.verdict
    figure = curves(result.curves)
    totals = [[name, f"{old:.3f}", f"{new:.3f}"] for name, (old, new) in result.totals.items()]
    parts = [
        "<h1>What did fine-tuning change?</h1>",
        header,
        f'<p class="verdict">{page.text(verdict.sentence)}</p>',
        f"<p>{len(result.ids)} test items; means over groups. Groups are patients, or else images: {INTERVALS}.</p>",
        "".join(f"<p>Note: {page.text(note)}</p>" for note in result.notes),
        page.table(
            ["metric", "before", "after", "after - before", ""],
            [[result.label(row.metric), row.before, row.after, row.gain.signed, row.word] for row in result.rows],
        ),
        f"<p>{legend([row.metric for row in result.rows])}</p>",
        page.table(["over all items", "before", "after"], totals) if totals else "",
        *section_html(result.unlabelled),
        "<h2>Training</h2>\n" + page.image(png(figure), "png", "Rewards and validation") if figure else "",
        _images_heading(result) if result.shown else "",
        *(_item(item) for item in result.shown),
        "<h2>What was evaluated</h2>",
        page.table(["setting", "value"], result.config.items(), "wrap"),
    ]
    return page.whole_page(f"Fine-tuning: {verdict.label}", parts)


def _images_heading(result: BeforeAfter) -> str:
    """HTML: what is shown and how many captions got worse."""
    words = "The images are selected by the measure in their title: its value after training, and the change."
    if "meteor" in result.values["before"]:
        falls = (result.values["after"]["meteor"] < result.values["before"]["meteor"]).sum()
        words += (
            " Masks before and after are segmented from the model's own caption (mask')."
            f" METEOR fell for {falls} of {len(result.ids)} captions."
        )
    return f"<h2>Images</h2><p>{words}</p>"


def _item(item: ReportItem) -> str:
    """HTML of one test item: the image, and its masks with their captions."""
    captions = [f"{when}: {words}" if words else when for when, words in zip(COLOURS, item.words, strict=True)]
    masks = zip((item.truth, item.before, item.after), COLOURS.values(), strict=True)
    pictures = [draw_mask(item.image, mask, colour) for mask, colour in masks]
    untouched = ("image", draw_mask(item.image, None, GREEN))
    return page.panels(item.title, [untouched, *zip(captions, pictures, strict=True)], mask_legend(COLOURS))


def curves(lines: Sequence[dict[str, Any]]) -> Figure | None:
    """Rewards in training beside metrics on validation items; None without either."""
    panels = {"reward of sampled rollouts (training)": REWARD_TITLES, "validation": VALIDATION_TITLES}
    logged = {tag for line in lines for tag in line}
    drawn = {
        title: {tag: name for tag, name in names.items() if tag in logged}
        for title, names in panels.items()
        if logged & names.keys()
    }
    if not drawn:
        return None
    figure = Figure(figsize=(5 * len(drawn), 3), layout="constrained")
    for axes, (title, tags) in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn.items(), strict=True):
        for number, (tag, name) in enumerate(tags.items()):
            _plot(axes, lines, tag, f"C{number}", name)
        axes.set(xlabel="optimisation step", title=title)
        axes.legend()
    return figure


def _plot(axes: Axes, lines: Sequence[dict[str, Any]], tag: str, colour: str, name: str) -> None:
    """A line with markers; with 20 points or more, a pale line and its running mean."""
    points = [(line["step"], line[tag]) for line in lines if tag in line]
    steps, values = np.array(points, dtype=float).T
    width = len(values) // 10
    if width < 2:
        axes.plot(steps, values, marker="o", color=colour, label=name)
        return
    axes.plot(steps, values, alpha=0.3, color=colour)
    axes.plot(steps[width - 1 :], np.convolve(values, np.ones(width) / width, "valid"), color=colour, label=name)
