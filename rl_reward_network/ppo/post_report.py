"""The report of experiment 2: eval.json, eval.csv and report.html."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rl_reward_network.artefacts import write_json
from rl_reward_network.ppo.post_evaluate import AS_IS, DEPLOYED, ORACLE, SEQUENCE, PostResult, PostRow, summary
from rl_reward_network.report import page
from rl_reward_network.report.bootstrap import INTERVALS
from rl_reward_network.report.deployment import Deployment
from rl_reward_network.report.legends import mask_legend
from rl_reward_network.report.overlays import BLUE, GREEN, ORANGE, draw_mask
from rl_reward_network.rewards.metrics import METRICS


def write_post_report(folder: Path, result: PostResult, origin: page.Origin) -> Path:
    """Write the files, each whole or not at all; returns the path of report.html, written last.

    Args:
        folder: of the report.
        result: of the evaluation.
        origin: for the header.
    """
    write_json(folder / "eval.json", summary(result))
    return page.write_files(folder, {"eval.csv": _per_image(result), "report.html": _page(result, origin, folder)})


def _per_image(result: PostResult) -> str:
    """CSV text: one line per test image and row."""
    lines: list[list[object]] = [["sample_id", "group_id", "row", "dice", "operations"]]
    for row in result.rows:
        operations = row.operations or [""] * len(row.dice)
        for image, dice, words in zip(result.images, row.dice, operations, strict=True):
            lines.append([image.sample_id, image.group_id, row.name, f"{dice:.6f}", words])
    return page.csv_text(lines)


def _page(result: PostResult, origin: page.Origin, folder: Path) -> str:
    """The HTML file."""
    parts = [
        "<h1>Which operations suit which mask?</h1>",
        page.header(origin, folder, ("eval.json", "eval.csv")),
        f'<p class="verdict">{page.text(result.verdict.sentence)}</p>',
        f"<p>{page.text(_deployed_sentence(result))}</p>",
        f"<p>{len(result.images)} test images of {result.rows[0].to_as_is.groups} patients.</p>",
        "".join(f"<p>Note: {page.text(note)}</p>" for note in result.notes),
        page.table(
            ["row", "Dice", "less mask as it is", "less best fixed sequence", "gap closed"],
            [_short(row) for row in result.rows],
        ),
        f"<p>Means over patients with {INTERVALS}. Oracle: greedy by the true mask, with the "
        "same operations and steps. Gap closed: share of the oracle's gain over the best fixed sequence.</p>",
        page.table(
            ["row", *(metric.column for metric in METRICS.values())],
            [[row.name, *(row.means[name] for name in METRICS)] for row in result.rows],
        ),
        "<h2>Operations</h2>",
        page.table(["operations", DEPLOYED, ORACLE], _counts(result), "wrap"),
        "<h2>Images</h2><p>Best, median and worst of the deployed choice, by Dice.</p>",
        *(_picture(result, title, place) for title, place in _picks(result.row(DEPLOYED).dice).items()),
    ]
    return page.whole_page(f"Post-processing: {result.verdict.label}", parts)


def _deployed_sentence(result: PostResult) -> str:
    """What is deployed and why, and what stands beside it."""
    deployment = Deployment.from_json(result.config["deployment"])
    fixed = f"Best fixed sequence: {deployment.fixed_by}. Best threshold: {result.config['best_threshold']:g}."
    return f"Deployed: {deployment.words(SEQUENCE, f'the {AS_IS}')}, because {deployment.reason}. {fixed}"


def _short(row: PostRow) -> list[object]:
    closed = "-" if row.gap_closed is None else f"{row.gap_closed:.0%}"
    return [row.name, row.means["dice"], row.to_as_is.signed, row.to_sequence.signed, closed]


def _counts(result: PostResult) -> list[list[object]]:
    """How often each sequence is deployed and chosen by the oracle, the most frequent first."""
    deployed, oracle = (Counter(result.row(name).operations) for name in (DEPLOYED, ORACLE))
    names = [name for name, _ in (deployed + oracle).most_common(15)]
    return [[name, deployed[name], oracle[name]] for name in names]


def _picks(dices: Sequence[float]) -> dict[str, int]:
    order = np.argsort(dices, kind="stable")
    return {"best": int(order[-1]), "median": int(order[len(order) // 2]), "worst": int(order[0])}


def _picture(result: PostResult, title: str, place: int) -> str:
    """HTML of one test image: untouched, with the truth, the mask as it is, and the deployed one."""
    edited = result.images[place]
    image = edited.guide.image
    panels = [("image", draw_mask(image, None, GREEN)), ("true mask", draw_mask(image, edited.truth, GREEN))]
    for name, colour in ((AS_IS, ORANGE), (DEPLOYED, BLUE), (ORACLE, GREEN)):
        row = result.row(name)
        caption = f"{name}: Dice {row.dice[place]:.3f}; {row.operations[place]}"
        panels.append((caption, draw_mask(image, result.masks[name][place], colour)))
    legend = mask_legend({"true mask and oracle": GREEN, AS_IS: ORANGE, DEPLOYED: BLUE})
    return page.panels(f"{title}: {edited.sample_id}", panels, legend)
