"""The report of a fine-tuned model beside the base model on N test items, with intervals over groups of items."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rl_reward_network.report import overlays, page
from rl_reward_network.report.by_name import EXPLAINED, NamesSection
from rl_reward_network.report.metrics import SCORE
from rl_reward_network.report.statistics import INTERVALS, Estimate, few_patients_note, max_t_of, rounded
from rl_reward_network.report.table import (
    TITLES,
    Column,
    Results,
    Row,
    Table,
    Verdict,
    gain_verdict,
    p_words,
    table_of,
    word,
)

METRIC_TITLES = {
    "cycle_iou": "IoU of mask'",
    "expected_cycle_iou": "IoU of mask', sampled",
    "cycle_iou_by_base": "IoU of mask', neutral",
    "meteor": "METEOR",
    "expected_meteor": "METEOR, sampled",
    "cycle_meteor": "METEOR of caption'",
    **TITLES,
}
CURVES = {
    "reward of sampled rollouts (training)": {f"loop{loop}/reward_mean": f"loop {loop}" for loop in (1, 2)},
    "validation": {
        "val/score": f"{TITLES[SCORE]} (proxy)",
        "val/gt_dice": "Dice (gold)",
        "val/name_exact": "exact names",
        **{f"val/{name}": METRIC_TITLES[name] for name in ("cycle_iou", "meteor", "cycle_meteor")},
    },
}
SHOWN = 3  # best, median and worst item
COLOURS = {"truth": overlays.TRUTH, "before": overlays.BEFORE, "after": overlays.AFTER}
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


@dataclass(frozen=True, eq=False)
class ReportItem:
    """A test item on the page: uint8 (H, W, 3) image, masks bool (H, W) or None, and a caption of each."""

    title: str
    image: np.ndarray
    truth: np.ndarray | None
    before: np.ndarray | None
    after: np.ndarray | None
    words: tuple[str, str, str] = ("", "", "")


@dataclass(frozen=True, eq=False)
class NamedItem:
    """A test image that is asked for classes by name: uint8 (H, W, 3), and by class masks, bool (H, W) or None."""

    title: str
    image: np.ndarray
    truth: Mapping[str, np.ndarray | None]
    after: Mapping[str, np.ndarray | None]


@dataclass(frozen=True, eq=False)
class BeforeAfter:
    """The content of the report."""

    results: Results  # the rows "before" and "after", see `paired_rows`
    totals: dict[str, tuple[float, float]]  # metrics over all items together, such as cIoU: name -> (before, after)
    config: dict[str, Any]  # models, data and settings; JSON values
    notes: tuple[str, ...] = ()
    shown: tuple[ReportItem, ...] = ()  # with pictures; the first `SHOWN` of them are not folded
    curves: tuple[dict[str, Any], ...] = ()  # lines of metrics.jsonl
    notice: str = ""  # a first sentence that matters more than the verdict: that training made the model worse
    origin: page.Origin = field(default_factory=page.Origin)  # for the top of the page alone
    by_name: NamesSection | None = None  # the section on classes that are asked for by name
    named: tuple[NamedItem, ...] = ()  # its pictures

    @property
    def before(self) -> Row:
        """The base model."""
        return self.results.row("before")

    @property
    def after(self) -> Row:
        """The fine-tuned model."""
        return self.results.row("after")

    @property
    def gains(self) -> Mapping[str, Estimate]:
        """Metric -> after less before."""
        return self.after.differences["before"]

    @property
    def groups(self) -> int:
        """The fewest groups of any metric."""
        return min(gain.groups for gain in self.gains.values())

    @cached_property
    def p(self) -> dict[str, float]:
        """Metric -> p-value of its gain, adjusted for all metrics of the report."""
        changes = {metric: self.after.values[metric] - self.before.values[metric] for metric in self.gains}
        return max_t_of(changes, [group for _, group in self.results.ids])

    def verdict_of(self, metric: str) -> str:
        """better, worse or cannot tell."""
        return word(metric, self.gains[metric].mean, self.p[metric])

    def label(self, metric: str) -> str:
        """Title of a metric in tables."""
        return label(metric, self.config.get("METEOR", ""))

    @property
    def verdict(self) -> Verdict:
        """The verdict on the criterion."""
        criterion = self.results.criterion
        verdict = gain_verdict(criterion, self.gains[criterion], self.p[criterion], self.label(criterion))
        return Verdict(verdict.label, f"{self.notice} {verdict.sentence}") if self.notice else verdict


def write_before_after(folder: Path, result: BeforeAfter) -> Path:
    """Write the report with eval.csv (one line per model and item); returns the path of report.html."""
    metrics = list(result.gains)
    lines = result.results.per_image(
        lambda row, number: [row.name, *page.digits(row.values[metric][number] for metric in metrics)]
    )
    table = page.csv_text([["sample_id", "group_id", "model", *metrics], *lines])
    return page.write_report(folder, _page(result), summary(result), {"eval.csv": table})


def summary(result: BeforeAfter) -> dict[str, Any]:
    """The content of eval.json."""
    return {
        "verdict": asdict(result.verdict),
        "criterion": result.results.criterion,
        "items": len(result.results.ids),
        "rows": [
            {
                "metric": metric,
                "before": asdict(result.before.estimates[metric]),
                "after": asdict(result.after.estimates[metric]),
                "gain": asdict(gain),
                "p": result.p[metric],
                "verdict": result.verdict_of(metric),
            }
            for metric, gain in result.gains.items()
        ],
        "totals": {name: {"before": old, "after": new} for name, (old, new) in result.totals.items()},
        "notes": list(result.notes),
        "config": result.config,
        **({"by_name": asdict(result.by_name)} if result.by_name else {}),
    }


def _page(result: BeforeAfter) -> page.Page:
    columns: list[Column[str]] = [
        ("metric", result.label),
        ("before", lambda metric: result.before.estimates[metric]),
        ("after", lambda metric: result.after.estimates[metric]),
        ("after - before", lambda metric: result.gains[metric].signed),
        ("p", lambda metric: p_words(result.p[metric])),
        ("", result.verdict_of),
    ]
    about = (
        f"{len(result.results.ids)} test items; means over groups. Groups are patients, or else images: {INTERVALS}. "
        f"p is adjusted for all {len(result.gains)} metrics."
    )
    totals = [[name, *(rounded(value, result.groups) for value in pair)] for name, pair in result.totals.items()]
    plot = page.curves(result.curves, CURVES, "optimisation step")
    names = result.by_name.tables() if result.by_name else {}
    about_images = "The measure in a title selected the image: its value after training, and the change."
    if "meteor" in result.before.values:
        falls = (result.after.values["meteor"] < result.before.values["meteor"]).sum()
        about_images += (
            " Masks before and after are segmented from the model's own caption (mask')."
            f" METEOR fell for {falls} of {len(result.results.ids)} captions."
        )
    pictures = [item_picture(item) for item in result.shown]
    return page.Page(
        f"Fine-tuning: {result.verdict.label}",
        "What did fine-tuning change?",
        f"Deployed: the fine-tuned model (after), weights {result.config.get('weights', 'not recorded')}.",
        result.verdict.sentence,
        about_images,
        pictures[:SHOWN],
        f"<p>{about}</p>{table_of(result.gains, columns).html()}",
        result.notes,
        {
            "What the numbers mean": f"<p>{legend(result.gains)}</p>",
            "Over all items together": page.table(["", "before", "after"], totals) if totals else "",
            "Classes by name": f"<p>{EXPLAINED}</p>" * bool(names)
            + "".join(f"<p>{title}:</p>{table.html()}" for title, table in names.items())
            + names_pictures(result.named),
            "Training": page.figure(plot, "Rewards and validation") if plot else "",
            "More images: largest gains and losses": "".join(pictures[SHOWN:]),
        },
        result.config,
        result.origin,
        item_legend(result.shown),
        "".join(few_patients_note(result.groups, "test groups")),
    )


def item_picture(item: ReportItem) -> str:
    """HTML of one test item: the image, and its masks with their captions; without a true mask, no panel of it."""
    masks = []
    for when, words, mask in zip(COLOURS, item.words, (item.truth, item.before, item.after), strict=True):
        caption = f"{when}: {words}" if words else when
        if mask is not None or when != "truth":
            masks.append((caption if mask is not None else f"{caption} (no mask)", mask, COLOURS[when]))
    return overlays.picture(item.title, item.image, masks)


def names_pictures(items: Sequence[NamedItem]) -> str:
    """HTML of images with the masks of all their classes, in the classes' colours; "" without any.

    Classes of less area are painted over those of more: parts over their whole.
    """
    areas = Counter[str]()
    for item in items:
        areas.update({name: 0 if mask is None else int(mask.sum()) for name, mask in item.truth.items()})
    colours = overlays.class_colours([name for name, _ in areas.most_common()])

    def drawn(image: np.ndarray, masks: Mapping[str, np.ndarray | None]) -> bytes:
        return overlays.draw_classes(image, {name: masks.get(name) for name in colours}, colours)

    pictures = [
        page.panels(one.title, [("truth", drawn(one.image, one.truth)), ("after", drawn(one.image, one.after))])
        for one in items
    ]
    return overlays.legend(colours) * bool(items) + "".join(pictures)


def item_legend(items: Sequence[ReportItem]) -> str:
    """HTML of what the colours in the pictures of some items mean."""
    known = any(item.truth is not None for item in items)
    return overlays.legend({when: colour for when, colour in COLOURS.items() if known or when != "truth"})


def show_changes(result: BeforeAfter) -> None:
    """Print the means of both models and the verdict."""
    lines: list[tuple[str, ...]] = []
    for metric, gain in result.gains.items():
        means = (row.estimates[metric].point() for row in (result.before, result.after))
        lines.append((result.label(metric), *means, gain.signed, result.verdict_of(metric)))
    for name, (old, new) in result.totals.items():
        numbers = (rounded(value, result.groups) for value in (old, new))
        lines.append((name, *numbers, rounded(new - old, result.groups, "+"), ""))
    Table(("", "before", "after", "change [95 %]", ""), tuple(lines)).show(
        "means over groups, before and after fine-tuning"
    )
    for title, table in result.by_name.tables(intervals=False).items() if result.by_name else ():
        table.show(title)
    print("\n".join((result.verdict.sentence, *result.notes)))
