"""The report of an evaluation: eval.json, tables per image and per patient, and one HTML page."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rl_reward_network.artefacts import write_json
from rl_reward_network.report import figures, page
from rl_reward_network.report.baselines import DEFAULT, DEPLOYED, FIXED, POLICY, Comparison, ComparisonRow
from rl_reward_network.report.bootstrap import INTERVALS, group_means
from rl_reward_network.report.legends import error_legend, mask_legend
from rl_reward_network.report.overlays import BLUE, GREEN, ORANGE, Overlay, draw_errors, draw_mask
from rl_reward_network.report.unlabelled import UnlabelledSection, section_html
from rl_reward_network.rewards.metrics import METRICS

_TITLES = {name: metric.column for name, metric in METRICS.items()} | {"score": "reward net's score"}


@dataclass(frozen=True, eq=False)
class EvaluationResult:
    """The content of the report; equal results give equal files.

    Args:
        comparison: rows, verdict and the scores of each test image.
        prompts: the P prompts, index 0 the default.
        config: model, data fingerprint, reward network, ...; JSON values.
        notes: in addition to those of the comparison.
        overlays: images of the page, see `overlay_picks`.
        rollouts: lines of the training's metrics.jsonl, for the plot of proxy and gold.
        names: hash of an image or a patient -> the name to write in its place; empty by default.
        origin: date, version, command and files, for the top of the page alone.
        unlabelled: the section on the run's unlabelled images.

    Raises:
        ValueError: the number of prompts is not that of the tables, or an overlay is of an image that was not compared.
    """

    comparison: Comparison
    prompts: tuple[str, ...]
    config: dict[str, Any]
    notes: tuple[str, ...] = ()
    overlays: tuple[Overlay, ...] = ()
    rollouts: tuple[dict[str, Any], ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    origin: page.Origin = field(default_factory=page.Origin)
    unlabelled: UnlabelledSection | None = None

    def __post_init__(self) -> None:
        """Check that the parts fit together."""
        expected, known = len(self.comparison.tables[0].scores), {table.sample_id for table in self.comparison.tables}
        if len(self.prompts) != expected:
            raise ValueError(f"prompts: got {len(self.prompts)}, expected {expected}, as in the tables")
        if unknown := [overlay.sample_id for overlay in self.overlays if overlay.sample_id not in known]:
            raise ValueError(
                f"overlays: {unknown} are not among the compared test images; select them by overlay_picks"
            )

    def named(self, hashed: str) -> str:
        """The name to write for the hash of an image or a patient."""
        return self.names.get(hashed, hashed)


def write_report(folder: Path, result: EvaluationResult) -> Path:
    """Write the report into `folder`, each file whole or not at all; returns the path of report.html, written last.

    Files: eval.json, eval.csv (per image), eval_patients.csv (per patient), report.html.
    """
    tables = {"eval.csv": _per_image(result), "eval_patients.csv": _per_patient(result)}
    beside = page.header(result.origin, folder, [*tables, "eval.json"])
    texts = tables | {"report.html": _page(result, beside)}
    write_json(folder / "eval.json", _summary(result))
    return page.write_files(folder, texts)


def _summary(result: EvaluationResult) -> dict[str, Any]:
    """The content of eval.json."""
    comparison = result.comparison
    rows = [
        {
            "name": row.name,
            "means": {column: asdict(mean) for column, mean in row.means.items()},
            f"{comparison.criterion}_minus_default": asdict(row.to_default),
            f"{comparison.criterion}_minus_best_fixed": asdict(row.to_fixed),
            "gap_closed": row.gap_closed,
            "prompts_asked_per_image": row.prompts_asked,
            "action_counts": row.weights.sum(axis=0).tolist(),
        }
        for row in comparison.rows
    ]
    return {
        "verdict": asdict(comparison.verdict),
        "deployment": asdict(comparison.deployment),
        "labelled": comparison.labelled,
        "images": len(comparison.tables),
        "patients": comparison.rows[0].to_fixed.groups,
        "prompts": list(result.prompts),
        "rows": rows,
        "notes": [*comparison.notes, *result.notes],
        "config": result.config,
        **({"unlabelled": result.unlabelled.summary} if result.unlabelled else {}),
    }


def _per_image(result: EvaluationResult) -> str:
    """CSV text: one line per test image and row; the prompt is empty if the row is an expectation over prompts."""
    comparison, columns = result.comparison, list(result.comparison.rows[0].means)
    lines: list[list[object]] = [["sample_id", "group_id", "row", "prompt", *columns]]
    for row in comparison.rows:
        values = np.stack([comparison.values(row, column) for column in columns], axis=1)  # (N, columns)
        for table, weights, numbers in zip(comparison.tables, row.weights, values, strict=True):
            prompt = int(weights.argmax()) if weights.max() == 1 else ""
            ids = [result.named(name) for name in (table.sample_id, table.group_id)]
            lines.append([*ids, row.name, prompt, *page.digits(numbers)])
    return page.csv_text(lines)


def _per_patient(result: EvaluationResult) -> str:
    """CSV text: one line per test patient and row, the means of the patient's images."""
    comparison, columns = result.comparison, list(result.comparison.rows[0].means)
    groups = [table.group_id for table in comparison.tables]
    images = Counter(groups)
    lines: list[list[object]] = [["group_id", "images", "row", *columns]]
    for row in comparison.rows:
        means = [group_means(comparison.values(row, column), groups) for column in columns]
        for group, numbers in zip(sorted(images), np.stack(means, axis=1), strict=True):
            lines.append([result.named(group), images[group], row.name, *page.digits(numbers)])
    return page.csv_text(lines)


def _page(result: EvaluationResult, header: str) -> str:
    """The HTML file."""
    comparison, verdict = result.comparison, result.comparison.verdict
    parts = [
        "<h1>Which prompt suits which image?</h1>",
        header,
        f'<p class="verdict">{page.text(verdict.sentence)}</p>',
        f"<p>{page.text(deployed_sentence(comparison))}</p>",
        f"<p>{len(comparison.tables)} test images of {comparison.rows[0].to_fixed.groups} patients.</p>",
        "".join(f"<p>Note: {page.text(note)}</p>" for note in (*comparison.notes, *result.notes)),
        *_results(comparison),
        *_choices(result),
        *section_html(result.unlabelled),
        *_curves(result),
        _images_heading(comparison) if result.overlays else "",
        *(_overlay(overlay, result) for overlay in result.overlays),
        "<h2>What was evaluated</h2>",
        page.table(["setting", "value"], result.config.items(), "wrap"),
    ]
    return page.whole_page(f"Prompt policy: {verdict.label}", parts)


def deployed_sentence(comparison: Comparison) -> str:
    """The deployed choice and its reason, in a sentence."""
    deployment = comparison.deployment
    fixed = f"The best fixed prompt is index {deployment.best_fixed}, chosen by {deployment.fixed_by}."
    return f"Deployed: {deployment.words(FIXED)}, because {deployment.reason}. {fixed}"


def _results(comparison: Comparison) -> list[str]:
    """HTML: the short table, all metrics, and the differences."""
    criterion, columns = _TITLES[comparison.criterion], list(comparison.rows[0].means)
    return [
        f"<h2>Results</h2><p>{criterion}, mean over patients, in [0, 1]; the difference to the best fixed prompt; "
        "and the share of the oracle's gain over that prompt (gap closed).</p>",
        page.table(
            ["row", criterion, "to best fixed", "gap closed"], [_short(row, comparison) for row in comparison.rows]
        ),
        f"<p>All metrics with {INTERVALS}. An empty mask scores 1 if the ground truth is "
        "empty, else 0. Prompts asked: number of prompts that Sa2VA must answer per new image.</p>",
        page.table(
            ["row", *(_TITLES[column] for column in columns), "prompts asked"],
            [
                [row.name, *(row.means[column] for column in columns), row.prompts_asked or "needs the ground truth"]
                for row in comparison.rows
            ],
        ),
        f"<h2>Differences of {criterion}</h2><p>Paired per image; significant if the interval excludes 0.</p>",
        page.table(
            ["row", "minus default", "minus best fixed"],
            [[row.name, row.to_default, row.to_fixed] for row in comparison.rows],
        ),
    ]


def _short(row: ComparisonRow, comparison: Comparison) -> list[str]:
    """Cells of the short table: name, criterion, difference, gap closed."""
    closed = "-" if row.gap_closed is None else f"{row.gap_closed:.0%}"
    return [row.name, f"{row.means[comparison.criterion].mean:.3f}", f"{row.to_fixed.mean:+.3f}", closed]


def _choices(result: EvaluationResult) -> list[str]:
    """HTML: histogram and table of the selected prompts."""
    comparison = result.comparison
    counts = [comparison.row(name).weights.sum(axis=0).astype(int) for name in (POLICY, DEPLOYED)]
    rows = zip(range(len(result.prompts)), result.prompts, *counts, strict=True)
    return [
        "<h2>Choices</h2>",
        page.image(figures.png(figures.histogram(comparison)), "png", "How often each prompt is chosen"),
        page.table(["index", "prompt", POLICY, DEPLOYED], rows, "wrap"),
    ]


def _curves(result: EvaluationResult) -> list[str]:
    """HTML: Dice over reward, and the validation curves of the training, as far as they exist."""
    parts = []
    if result.comparison.labelled:
        figure = page.image(figures.png(figures.scatter(result.comparison)), "png", "Reward against Dice")
        words = "The masks of all prompts on all test images, and those of the deployed choice."
        parts.append(f"<h2>Reward and ground truth</h2><p>{words}</p>{figure}")
    if any("custom/val_score" in row for row in result.rollouts):
        figure = page.image(figures.png(figures.proxy_and_gold(result.rollouts)), "png", "Reward and Dice in training")
        parts.append("<h2>Training</h2>" + figure)
    return parts


def _images_heading(comparison: Comparison) -> str:
    """HTML: what is shown, and by which measure the images were selected."""
    what = comparison.deployment.words(f"{FIXED} (index {comparison.deployment.best_fixed})")
    measure = _TITLES[comparison.criterion]
    words = f"Shown is what is deployed: {what}. Best, median and worst are the test images by its {measure}."
    return f"<h2>Images</h2><p>{page.text(words)}</p>"


def _overlay(overlay: Overlay, result: EvaluationResult) -> str:
    """HTML of one test image: plain, with the masks of truth, default and deployed prompt, and the expected errors."""
    comparison, measure = result.comparison, _TITLES[result.comparison.criterion]
    index = next(index for index, table in enumerate(comparison.tables) if table.sample_id == overlay.sample_id)
    panels, colours = [("image", draw_mask(overlay.image, None, GREEN))], {}
    if overlay.truth is not None:
        panels.append(("truth", draw_mask(overlay.image, overlay.truth, GREEN)))
        colours["truth"] = GREEN
    for name, mask, colour in ((DEFAULT, overlay.default, ORANGE), (DEPLOYED, overlay.deployed, BLUE)):
        row = comparison.row(name)
        value = comparison.values(row, comparison.criterion)[index]
        caption = f"{name} (index {row.weights[index].argmax()}): {measure} {value:.3f}"
        panels.append((caption, draw_mask(overlay.image, mask, colour)))
        colours[name] = colour
    panels.append((f"{DEPLOYED}: errors expected by the reward net", draw_errors(overlay.image, overlay.error_map)))
    heading = f"{overlay.title} of the deployed choice, by {measure}: {result.named(overlay.sample_id)}"
    return page.panels(heading, panels, mask_legend(colours) + error_legend())
