"""The report of a reward network: how far its numbers can be trusted, and pictures of its errors."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_reward_network.atomic_io import whole_file
from rl_reward_network.report import page
from rl_reward_network.run import BEST_REWARD_NET, Run

HEADS = {
    "mae": "MAE",
    "pearson": "r",
    "spearman": "rho",
    "within_image_spearman": "rho img",
    "top1_regret": "regret",
    "auroc_poor": "AUROC",
    "pearson_middle": "r .7-.9",
}

LEGEND = (
    "Predicted against true Dice. MAE: mean absolute error; r: Pearson; rho: Spearman; rho img: rho among the masks of "
    "one image; regret: Dice lost by the mask with the highest score; AUROC: tells Dice < 0.7 from the rest; r .7-.9: "
    "Pearson of masks with Dice in between. Rows: mean of the members; one of them; mean - k * spread, the reward; "
    "two constants: mean of the training masks, and of these masks."
)


def write_network_report(run: Run, result: Mapping[str, Any], sheet: Path) -> Path:
    """Write report.html of a run from the content of agreement.json and sheet.png; returns its path."""
    tables = {source: _table(rows, int(result["masks"][source])) for source, rows in result["tables"].items()}
    first, *others = tables.items()
    shown = page.Page(
        "Reward network",
        "How well does the network predict the quality of masks?",
        f"Trained: {BEST_REWARD_NET}, an ensemble that predicts Dice without a true mask.",
        next(line for line in agreement_lines(result) if "own segmentation" in line or "no true mask" in line),
        "Masks of test patients, the errors that the network predicts, and the true ones.",
        [page.image(sheet.read_bytes(), "png", "masks, predicted and true errors")],
        f"<p>{page.text(LEGEND)}</p><h3>{page.text(first[0])}</h3>{first[1]}",
        list(agreement_lines(result)),
        dict(others),
    )
    with whole_file(run / "report.html") as temporary:
        temporary.write_text(shown.html(run.path, []), encoding="utf-8")
    return run / "report.html"


def _table(rows: Mapping[str, Mapping[str, float | None]], masks: int) -> str:
    """HTML: agreement of each predictor on masks of one source."""
    cells = [
        [name, *("-" if (value := row[column]) is None else f"{value:.3f}" for column in HEADS)]
        for name, row in rows.items()
    ]
    return f"<p>{masks} masks of test patients.</p>{page.table(['', *HEADS.values()], cells)}"


def agreement_lines(result: Mapping[str, Any], sources: Collection[str] | None = None) -> Iterator[str]:
    """The lines below the tables, from agreement.json; intervals of these sources alone, or of all."""
    chosen = {name: row for name, row in result["intervals"].items() if sources is None or name in sources}
    for source, row in chosen.items():
        if row["refusal"]:
            yield f"90 % interval, {source}: none can be given ({row['refusal']})"
        else:
            held = f"holds the true Dice of {row['coverage']:.1%}, median half width {row['half_width']:.3f}"
            yield f"90 % interval, {source}: {held}"
    if (ascent := result["ascent"])["raised"] is not None:
        yield (
            f"ten steps up the score raise the true Dice of {ascent['raised']:.1%} of shifted true masks, "
            f"in the mean from {ascent['dice_before']:.3f} to {ascent['dice_after']:.3f}"
        )
    empty = result["without_foreground"]
    if result["own_dice"] is None:
        yield f"no true mask of the {empty} test images has foreground: how well the network segments is unknown"
    else:
        left_out = f" ({empty} with an empty true mask are left out)" if empty else ""
        yield (
            f"the network's own segmentation of the test images has Dice {result['own_dice']:.3f}{left_out}; where "
            "Sa2VA's prompts stay below that, a plain segmenter serves these images better than any choice among them"
        )
    yield (
        f"its own segmentation gets a higher number than the true mask on {result['own_above_truth']:.0%} of them, "
        f"means {result['predicted_own']:.3f} and {result['predicted_truth']:.3f}; {result['outside']} of them are "
        "outside its domain, where no number is given"
    )
    yield from result["notes"]
    for name, n in result["used"].items():
        yield f"{name}: {n['images']} images of {n['patients']} patients, {n['series']} series"
    if n := result.get("unlabelled"):
        yield f"without masks, by a mean teacher: {n['images']} images of {n['patients']} patients"
    yield f"masks of Sa2VA: {result['bank']['computed']} computed, {result['bank']['reused']} read from the bank"
    seconds = ", ".join(f"{name} {value:.0f}" for name, value in result["seconds"].items())
    yield f"seconds: {seconds}" + (" (it was interrupted)" if result["resumed"] else "")
