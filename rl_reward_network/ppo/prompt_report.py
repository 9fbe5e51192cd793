"""The report of a policy: eval.json, tables per image and per patient, and one HTML page."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rl_reward_network.ppo.baselines import DEPLOYED, NET, POLICY, PROMPTS, Comparison
from rl_reward_network.report import page
from rl_reward_network.report.metrics import SCORE
from rl_reward_network.report.overlays import AFTER, BEFORE, TRUTH, Colour, legend, picture
from rl_reward_network.report.statistics import INTERVALS, few_patients_note, group_means, rounded
from rl_reward_network.report.table import (
    ORACLE,
    TITLES,
    Column,
    Row,
    metric_columns,
    p_words,
    percent,
    table_of,
)

VALIDATION = {"custom/val_score": f"val: {TITLES[SCORE]} (proxy)", "custom/val_gt_dice": "val: Dice (gold)"}


@dataclass(frozen=True, eq=False)
class Overlay:
    """One test image with the masks to draw on it, bool (H, W)."""

    title: str
    """Why it was selected: best, median or worst."""
    number: int
    """In the comparison."""
    image: np.ndarray
    """uint8 (H, W, 3), RGB."""
    truth: np.ndarray | None
    default: np.ndarray
    deployed: np.ndarray
    error_map: np.ndarray | None
    """float (H, W) in [0, 1]: probability that `deployed` is wrong at a pixel; None without a reward network."""


@dataclass(frozen=True, eq=False)
class EvaluationResult:
    """The content of a policy's report; equal results give equal files. `config` are JSON values."""

    comparison: Comparison
    prompts: tuple[str, ...]
    """The P prompts, index 0 the default, or sequences of operations in words."""
    config: dict[str, Any]
    notes: tuple[str, ...] = ()
    overlays: tuple[Overlay, ...] = ()
    rollouts: tuple[dict[str, Any], ...] = ()
    """Lines of the training's metrics.jsonl, for the plot of proxy and gold."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Hash of an image or a patient -> the name to write in its place."""
    origin: page.Origin = field(default_factory=page.Origin)

    @property
    def all_notes(self) -> tuple[str, ...]:
        """Those of the comparison, and its own."""
        return *self.comparison.notes, *self.notes

    def named(self, hashed: str) -> str:
        """The name to write for the hash of an image or a patient."""
        return self.names.get(hashed, hashed)


def write_report(folder: Path, result: EvaluationResult) -> Path:
    """Write the report with eval.csv (per image) and eval_patients.csv; returns the path of report.html."""
    tables = {"eval.csv": _per_image(result), "eval_patients.csv": _per_patient(result)}
    return page.write_report(folder, _page(result), _summary(result), tables)


def _summary(result: EvaluationResult) -> dict[str, Any]:
    """The content of eval.json."""
    comparison, results, names = result.comparison, result.comparison.results, result.comparison.names
    of_default, of_fixed = results.p(names.default), results.p(names.fixed)
    rows = [
        {
            "name": row.name,
            "means": row.means(),
            f"{results.criterion}_minus_default": asdict(results.difference(row, names.default)),
            "p_minus_default": of_default.get(row.name),
            f"{results.criterion}_minus_best_fixed": asdict(results.difference(row, names.fixed)),
            "p_minus_best_fixed": of_fixed.get(row.name),
            "gap_closed": comparison.closed(row),
            "prompts_asked_per_image": comparison.prompts_asked[row.name],
            "action_counts": comparison.weights[row.name].sum(axis=0).tolist(),
        }
        for row in results.rows
    ]
    return {
        "verdict": asdict(comparison.verdict),
        "deployment": asdict(comparison.deployment),
        "labelled": comparison.labelled,
        "images": len(results.ids),
        "patients": results.patients,
        "prompts": list(result.prompts),
        "rows": rows,
        "notes": list(result.all_notes),
        "config": result.config,
    }


def _per_image(result: EvaluationResult) -> str:
    """CSV text: one line per test image and row; the prompt is empty if the row is an expectation over prompts."""
    comparison, results = result.comparison, result.comparison.results

    def cells(row: Row, number: int) -> list[object]:
        weights = comparison.weights[row.name][number]
        prompt = int(weights.argmax()) if weights.max() == 1 else ""
        return [row.name, prompt, *page.digits(column[number] for column in row.values.values())]

    lines = [[*map(result.named, line[:2]), *line[2:]] for line in results.per_image(cells)]  # type: ignore[arg-type]
    return page.csv_text([["sample_id", "group_id", "row", "prompt", *results.rows[0].values], *lines])


def _per_patient(result: EvaluationResult) -> str:
    """CSV text: one line per test patient and row, the means of the patient's images."""
    results = result.comparison.results
    groups = [group for _, group in results.ids]
    images = Counter(groups)
    lines: list[list[object]] = [["group_id", "images", "row", *results.rows[0].values]]
    for row in results.rows:
        means = np.stack([group_means(column, groups) for column in row.values.values()], axis=1)
        for group, numbers in zip(sorted(images), means, strict=True):
            lines.append([result.named(group), images[group], row.name, *page.digits(numbers)])
    return page.csv_text(lines)


def _page(result: EvaluationResult) -> page.Page:
    comparison, results = result.comparison, result.comparison.results
    criterion, arm = TITLES[results.criterion], comparison.names.arm
    what = _deployed_words(comparison, f" (index {comparison.deployment.best_fixed})")
    curves = page.curves(result.rollouts, {"mean of the greedy policy": VALIDATION}, f"{arm}s tried in training")
    return page.Page(
        f"{arm.capitalize()} policy: {comparison.verdict.label}",
        f"Which {arm} suits which image?",
        deployed_sentence(comparison),
        comparison.verdict.sentence,
        f"Shown is what is deployed: {what}. Best, median and worst are the test images by its {criterion}.",
        [_picture(result, overlay) for overlay in result.overlays],
        _table(comparison),
        result.all_notes,
        {
            "All metrics, and differences": _all_metrics(comparison),
            f"Which {arm}s are chosen": _choices(result),
            "Reward and ground truth": _reward_and_truth(comparison),
            "Training": page.figure(curves, "Reward and Dice in training") if curves else "",
        },
        result.config,
        result.origin,
        legend(_colours(comparison), any(overlay.error_map is not None for overlay in result.overlays)),
        "".join(few_patients_note(results.patients)),
    )


def _colours(comparison: Comparison) -> dict[str, Colour]:
    """Name -> colour of each mask in the pictures."""
    truth = {"truth": TRUTH} if comparison.labelled else {}
    return truth | {f"before: {comparison.names.default}": BEFORE, f"after: {DEPLOYED}": AFTER}


def deployed_sentence(comparison: Comparison) -> str:
    """The deployed choice and its reason, in a sentence."""
    return f"Deployed: {_deployed_words(comparison)}, because {comparison.deployment.reason}."


def fixed_sentence(comparison: Comparison) -> str:
    """The best fixed choice, and what chose it, in a sentence."""
    deployment = comparison.deployment
    return f"The {comparison.names.fixed} is index {deployment.best_fixed}, chosen by {deployment.fixed_by}."


def _deployed_words(comparison: Comparison, index: str = "") -> str:
    """What is deployed, in words; `index` is added to the best fixed choice."""
    names = comparison.names
    as_it_is = {} if names is PROMPTS else {"as_it_is": f"the {names.default}"}
    return comparison.deployment.words(names.fixed + index, **as_it_is)


NAME: Column[Row] = ("row", lambda row: row.name)


def _table(comparison: Comparison) -> str:
    """HTML: the criterion of each row, its difference to the best fixed prompt, and the gap closed."""
    results = comparison.results
    columns: list[Column[Row]] = [
        NAME,
        (TITLES[results.criterion], lambda row: results.value(row).point()),
        ("to best fixed", lambda row: results.difference(row, comparison.names.fixed).point("+")),
        ("gap closed", lambda row: percent(comparison.closed(row))),
    ]
    return (
        f"<p>{page.text(TITLES[results.criterion])} on {len(results.ids)} test images, mean over {results.patients} "
        f"patients, in [0, 1]; the difference to the {comparison.names.fixed}; and the share of the oracle's gain over "
        f"it (gap closed). {page.text(fixed_sentence(comparison))}</p>{table_of(results.rows, columns).html()}"
    )


def _all_metrics(comparison: Comparison) -> str:
    """HTML: all metrics with intervals, and the differences with their p."""
    results, names = comparison.results, comparison.names
    rows, of_default, of_fixed = results.rows, results.p(names.default), results.p(names.fixed)
    prompts: Column[Row] = ("prompts per image", lambda row: comparison.prompts_asked[row.name] or "needs truth")
    differences: list[Column[Row]] = [
        NAME,
        ("minus default", lambda row: results.difference(row, names.default)),
        ("p", lambda row: p_words(of_default.get(row.name))),
        ("minus best fixed", lambda row: results.difference(row, names.fixed)),
        ("p", lambda row: p_words(of_fixed.get(row.name))),
    ]
    return (
        f"<p>{INTERVALS}. An empty mask scores 1 if the ground truth is empty, else 0. Prompts per image: number of "
        "prompts that Sa2VA must answer per new image.</p>"
        + table_of(rows, [NAME, *metric_columns(rows[0].estimates, lambda row: row), prompts]).html()
        + f"<p>Differences of {page.text(TITLES[results.criterion])}, paired per image; each p is adjusted for all "
        f"rows.</p>{table_of(rows, differences).html()}"
    )


def show_comparison(result: EvaluationResult) -> None:
    """Print the rows of a policy's evaluation, and the verdict."""
    comparison, results, names = result.comparison, result.comparison.results, result.comparison.names
    columns: list[Column[Row]] = [
        ("", lambda row: row.name),
        ("mean [95 %]", results.value),
        *([("recall", lambda row: row.estimates["recall"].point())] if comparison.labelled else []),
        ("-default", lambda row: results.difference(row, names.default).point("+")),
        ("-fixed", lambda row: results.difference(row, names.fixed).point("+")),
        ("closed", lambda row: percent(comparison.closed(row))),
    ]
    table_of(results.rows, columns).show(f"mean over patients ({results.criterion}), minus default and best fixed")
    sentences = comparison.verdict.sentence, deployed_sentence(comparison), fixed_sentence(comparison)
    print("\n".join((*sentences, *result.all_notes)))


def _choices(result: EvaluationResult) -> str:
    """HTML: histogram and table of what was selected."""
    comparison, arm = result.comparison, result.comparison.names.arm
    reference = ORACLE if comparison.labelled else NET
    counts = {name: comparison.weights[name].sum(axis=0) for name in (DEPLOYED, POLICY, reference)}
    chosen = [counts[name].astype(int) for name in (POLICY, DEPLOYED)]
    lines = zip(range(len(result.prompts)), result.prompts, *chosen, strict=True)
    return page.figure(page.histogram(counts, f"index of the {arm}"), f"How often each {arm} is chosen") + page.table(
        ["index", arm, POLICY, DEPLOYED], lines, "wrap"
    )


def _reward_and_truth(comparison: Comparison) -> str:
    """HTML: Dice over the reward of every mask; "" without either."""
    if not (comparison.labelled and SCORE in comparison.results.rows[0].values):
        return ""
    arm = comparison.names.arm
    every = [np.concatenate([table.column(name) for table in comparison.tables]) for name in (SCORE, "dice")]
    deployed = comparison.results.row(DEPLOYED).values
    points = {f"all {arm}s": (every[0], every[1]), DEPLOYED: (deployed[SCORE], deployed["dice"])}
    words = f"The masks of all {arm}s on all test images, and those of the deployed choice."
    return f"<p>{words}</p>{page.figure(page.scatter(points), 'Reward against Dice')}"


def _picture(result: EvaluationResult, overlay: Overlay) -> str:
    """HTML of one test image: the true mask, that of the default prompt, and what is deployed with expected errors."""
    comparison, results = result.comparison, result.comparison.results
    measure, default = TITLES[results.criterion], comparison.names.default
    masks = [] if overlay.truth is None else [("truth", overlay.truth, TRUTH)]
    for name, mask, colour in ((default, overlay.default, BEFORE), (DEPLOYED, overlay.deployed, AFTER)):
        value = rounded(results.row(name).values[results.criterion][overlay.number], results.patients)
        masks.append((f"{name} (index {comparison.prompts(name)[overlay.number]}): {measure} {value}", mask, colour))
    title = f"{overlay.title} of the deployed choice, by {measure}: {result.named(results.ids[overlay.number][0])}"
    words = f"{DEPLOYED}: errors expected by the reward net"
    errors = None if overlay.error_map is None else (words, overlay.error_map)
    return picture(title, overlay.image, masks, errors)
