"""The report of an evaluation: eval.json for programs, eval.csv per image, report.html for people (one whole file)."""

import base64
import csv
import html
import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image
from skimage.segmentation import find_boundaries

from rl_reward_network.artefacts import whole_file, write_json
from rl_reward_network.evaluation.baselines import DEFAULT, NET, ORACLE, POLICY, Comparison

PANEL = 400  # pixels of the longer side of an overlay
TINT = 0.3  # opacity of a mask's inside
TRUTH, FIRST, CHOSEN = (0, 200, 90), (255, 160, 0), (60, 150, 255)  # contours: green, orange, blue
_TITLES = {"score": "reward", "dice": "Dice", "iou": "IoU", "cldice": "clDice"}
_STYLE = """
body { font-family: system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 0 1rem 3rem; line-height: 1.45; }
.verdict { border-left: .4rem solid #357; background: #eef3f8; padding: .6rem 1rem; font-size: 1.1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #ccc; text-align: left; white-space: nowrap; }
.panels { display: flex; flex-wrap: wrap; gap: .5rem; }
figure { margin: 0; flex: 1 1 9rem; max-width: 25rem; }
img { max-width: 100%; height: auto; }
"""


@dataclass(frozen=True, eq=False)
class Overlay:
    """One test image with the masks to draw on it.

    Args:
        title: why it is shown, such as "best".
        sample_id: hash that names the image.
        image: uint8 (H, W, 3), RGB.
        truth: bool (H, W), or None when unlabelled.
        default: bool (H, W), mask of the default prompt.
        policy: bool (H, W), mask of the prompt the policy chose.
    """

    title: str
    sample_id: str
    image: np.ndarray
    truth: np.ndarray | None
    default: np.ndarray
    policy: np.ndarray


@dataclass(frozen=True, eq=False)
class EvaluationResult:
    """All that the report is made of; the same result gives the same files.

    Args:
        comparison: rows, verdict and the table of each test image.
        prompts: the P prompts, index 0 the default.
        config: what was evaluated (model, data fingerprint, reward network, ...); values that JSON can hold.
        notes: further remarks; the comparison's own are always shown.
        overlays: images to show, see `overlay_picks`.

    Raises:
        ValueError: another number of prompts than in the tables, or an overlay of an image that was not compared.
    """

    comparison: Comparison
    prompts: tuple[str, ...]
    config: dict[str, Any]
    notes: tuple[str, ...] = ()
    overlays: tuple[Overlay, ...] = ()

    def __post_init__(self) -> None:
        """Refuse parts that do not belong together, before anything is written."""
        expected, known = len(self.comparison.tables[0].scores), {table.sample_id for table in self.comparison.tables}
        if len(self.prompts) != expected:
            raise ValueError(f"prompts: got {len(self.prompts)}; the tables have {expected}")
        if unknown := [overlay.sample_id for overlay in self.overlays if overlay.sample_id not in known]:
            raise ValueError(f"overlays: {unknown} are not among the compared test images; choose by overlay_picks")


def write_report(folder: Path, result: EvaluationResult) -> Path:
    """Write eval.json, eval.csv and report.html into `folder`, each whole or not at all; the path of the last."""
    page, table, summary = _page(result), _per_image(result), _summary(result)
    write_json(folder / "eval.json", summary)
    for name, text in (("eval.csv", table), ("report.html", page)):
        with whole_file(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8", newline="")
    return folder / "report.html"


def _summary(result: EvaluationResult) -> dict[str, Any]:
    """What eval.json holds."""
    comparison = result.comparison
    rows = [
        {
            "name": row.name,
            "means": {column: asdict(mean) for column, mean in row.means.items()},
            f"{comparison.criterion}_minus_default": asdict(row.to_default),
            f"{comparison.criterion}_minus_best_fixed": asdict(row.to_fixed),
            "action_counts": row.weights.sum(axis=0).tolist(),
        }
        for row in comparison.rows
    ]
    return {
        "verdict": asdict(comparison.verdict),
        "labelled": comparison.labelled,
        "images": len(comparison.tables),
        "patients": comparison.rows[0].to_fixed.groups,
        "gap_closed": comparison.gap_closed,
        "best_fixed": comparison.best_fixed,
        "prompts": list(result.prompts),
        "rows": rows,
        "notes": [*comparison.notes, *result.notes],
        "config": result.config,
    }


def _per_image(result: EvaluationResult) -> str:
    """CSV text: one line per test image and row; the prompt is empty where a row is an expectation over all of them."""
    comparison, file = result.comparison, io.StringIO()
    writer, columns = csv.writer(file), list(comparison.rows[0].means)
    writer.writerow(["sample_id", "group_id", "row", "prompt", *columns])
    for row in comparison.rows:
        values = np.stack([comparison.values(row, column) for column in columns], axis=1)  # (N, columns)
        for table, weights, numbers in zip(comparison.tables, row.weights, values, strict=True):
            prompt = int(weights.argmax()) if weights.max() == 1 else ""
            writer.writerow(
                [table.sample_id, table.group_id, row.name, prompt, *(f"{number:.6f}" for number in numbers)]
            )
    return file.getvalue()


def _page(result: EvaluationResult) -> str:
    """The HTML file."""
    comparison, verdict = result.comparison, result.comparison.verdict
    criterion, patients = _TITLES[comparison.criterion], comparison.rows[0].to_fixed.groups
    columns = list(comparison.rows[0].means)
    closed = "not defined" if comparison.gap_closed is None else f"{comparison.gap_closed:.0%}"
    chosen = comparison.row(POLICY).weights.sum(axis=0)
    parts = [
        "<h1>Which prompt suits which image?</h1>",
        f'<p class="verdict">{_text(verdict.sentence)}</p>',
        f"<p>{len(comparison.tables)} test images of {patients} patients. Share of the oracle's gap to the best fixed "
        f"prompt that PPO closes: <strong>{closed}</strong>.</p>",
        "".join(f"<p>Note: {_text(note)}</p>" for note in (*comparison.notes, *result.notes)),
        "<h2>Results</h2><p>Means over patients, in [0, 1], with 95 % intervals from drawing patients again. "
        "An empty mask scores 1 where the truth is empty too, else 0.</p>",
        _table(
            ["row", *(_TITLES.get(column, column) for column in columns)],
            [[row.name, *(row.means[column] for column in columns)] for row in comparison.rows],
        ),
        f"<h2>Differences of {criterion}</h2><p>Paired, image by image; sure where the interval leaves 0 out.</p>",
        _table(
            ["row", "minus default", "minus best fixed"],
            [[row.name, row.to_default, row.to_fixed] for row in comparison.rows],
        ),
        "<h2>Choices</h2>",
        _figure(_histogram(comparison), "How often each prompt is chosen"),
        _table(["index", "prompt", "chosen"], zip(range(len(chosen)), result.prompts, chosen.astype(int), strict=True)),
        "<h2>Reward and truth</h2>" + _figure(_scatter(comparison), "Reward against Dice")
        if comparison.labelled
        else "",
        "<h2>Images</h2>" if result.overlays else "",
        *(_overlay(overlay, comparison) for overlay in result.overlays),
        "<h2>What was evaluated</h2>",
        _table(["setting", "value"], result.config.items()),
    ]
    head = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Prompt policy: {_text(verdict.label)}</title><style>{_STYLE}</style></head>"
    )
    return head + "<body>\n" + "\n".join(part for part in parts if part) + "\n</body></html>\n"


def _text(value: object) -> str:
    """Text that cannot be read as markup."""
    return html.escape(str(value))


def _table(header: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """An HTML table that scrolls sideways on a narrow screen."""
    head = "".join(f"<th>{_text(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def _figure(figure: Figure, description: str) -> str:
    """A matplotlib figure inside the page."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110, metadata={"Software": None})
    return _image(file.getvalue(), "png", description)


def _image(data: bytes, kind: str, description: str) -> str:
    """An image inside the page."""
    encoded = base64.b64encode(data).decode()
    return f'<img src="data:image/{kind};base64,{encoded}" alt="{_text(description)}">'


def _histogram(comparison: Comparison) -> Figure:
    """How often PPO, and the best possible choice that is known, take each prompt."""
    other = ORACLE if comparison.labelled else NET
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    for shift, name in ((-0.2, POLICY), (0.2, other)):
        counts = comparison.row(name).weights.sum(axis=0)
        axes.bar(np.arange(len(counts)) + shift, counts, 0.4, label=name)
    axes.set(xlabel="index of the prompt", ylabel="test images", xticks=np.arange(len(counts)))
    axes.legend()
    return figure


def _scatter(comparison: Comparison) -> Figure:
    """Each mask's Dice over its reward: what PPO is paid for and what is wanted."""
    figure = Figure(figsize=(5, 4.5), layout="constrained")
    axes = figure.subplots()
    scores, dices = ([table.column(name) for table in comparison.tables] for name in ("score", "dice"))
    axes.scatter(np.concatenate(scores), np.concatenate(dices), s=8, alpha=0.3, label="all prompts")
    policy = comparison.row(POLICY)
    axes.scatter(comparison.values(policy, "score"), comparison.values(policy, "dice"), s=14, label=POLICY)
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    axes.set(xlabel="reward (score)", ylabel="Dice", xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), aspect="equal")
    axes.legend()
    return figure


def _overlay(overlay: Overlay, comparison: Comparison) -> str:
    """One image: plain, and with the contours of truth, default prompt and policy, side by side or below each other."""
    place = next(place for place, table in enumerate(comparison.tables) if table.sample_id == overlay.sample_id)
    panels: list[tuple[str, np.ndarray | None, tuple[int, int, int]]] = [("image", None, TRUTH)]
    if overlay.truth is not None:
        panels.append(("truth", overlay.truth, TRUTH))
    for name, mask, colour in ((DEFAULT, overlay.default, FIRST), (POLICY, overlay.policy, CHOSEN)):
        value = comparison.values(comparison.row(name), comparison.criterion)[place]
        panels.append((f"{name}: {_TITLES[comparison.criterion]} {value:.3f}", mask, colour))
    images = [(name, _image(_drawn(overlay.image, mask, colour), "jpeg", name)) for name, mask, colour in panels]
    figures = "".join(f"<figure>{image}<figcaption>{_text(name)}</figcaption></figure>" for name, image in images)
    return f'<h3>{_text(overlay.title)}: {_text(overlay.sample_id)}</h3><div class="panels">{figures}</div>'


def _drawn(image: np.ndarray, mask: np.ndarray | None, colour: tuple[int, int, int]) -> bytes:
    """JPEG of the image (uint8 (H, W, 3)) at most `PANEL` pixels wide or high, with the mask tinted and outlined."""
    picture = Image.fromarray(image)
    picture.thumbnail((PANEL, PANEL))
    pixels = np.array(picture)
    if mask is not None:
        grey = Image.fromarray(np.where(mask, np.uint8(255), np.uint8(0)))
        small = np.asarray(grey.resize(picture.size, Image.Resampling.BOX)) > 64  # nearest would lose thin vessels
        pixels[small] = TINT * np.array(colour) + (1 - TINT) * pixels[small]  # shows a mask without an outline too
        pixels[find_boundaries(small, mode="inner")] = colour
    file = io.BytesIO()
    # full colour resolution: a contour one pixel wide would be washed out otherwise
    Image.fromarray(pixels).save(file, format="JPEG", quality=90, subsampling=0)
    return file.getvalue()
