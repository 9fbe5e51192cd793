"""The picture of the first page: what each method reaches on real angiograms, by the number of masks.

    python -m tools.which_method

`docs/which-method.csv` has a row for each measurement, with the section of `docs/results.md` that has its command.
"""

import csv
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import tyro

STYLES = {  # method -> colour, and where its numbers stand: right and up of the point, in points
    "as it is": ("0.6", (0, 6)),
    "best of 11 prompts by the reward network": ("tab:purple", (0, 6)),
    "supervised": ("tab:orange", (0, -14)),
    "supervised with a side network": ("tab:blue", (0, -22)),
    "the same, then a mean teacher": ("tab:green", (0, 7)),
    "plain segmenter": ("black", (0, -14)),
    "plain segmenter, images resized": ("0.4", (0, 0)),
}
SAME, OTHER = "ARCADE", "DCA1"
Points = dict[str, list[tuple[int, float]]]  # method -> (number of masks, Dice)


@dataclass(frozen=True)
class Args:
    """Draw the picture of the first page from the table of measurements."""

    table: Path = Path("docs/which-method.csv")
    """The measurements: data, method, masks, dice, source."""
    picture: Path = Path("docs/pictures/which_method.png")
    """Where the picture is written."""


def read_rows(table: Path, data: str) -> Points:
    """The rows of a data set, in the order of the table."""
    points: Points = defaultdict(list)
    with table.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["data"] == data:
                points[row["method"]].append((int(row["masks"]), float(row["dice"])))
    return dict(points)


def draw(same: Points, other: Points, picture: Path) -> None:
    """Left a line for each method over the number of masks, right the Dice at another hospital; a PNG file."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.2), dpi=110, width_ratios=(3, 2))
    for method, points in same.items():
        colour, offset = STYLES[method]
        left.plot(*zip(*points, strict=True), "o-", color=colour, label=method, markersize=4)
        for point in points:
            left.annotate(
                f"{point[1]:.3f}"[1:], point, offset, "data", "offset points", fontsize=7, ha="center", color=colour
            )
    left.set_xscale("log")
    left.set_xticks([20, 50, 195], ["20 + 48", "50 + 48", "195 + 48"])
    left.minorticks_off()
    left.set(xlim=(16, 270), ylim=(0, 0.8), xlabel="masks: training + validation", ylabel="Dice")
    left.grid(axis="y", alpha=0.3)
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False, fontsize=8)
    left.set_title("the same hospital", fontsize=10)
    for place, (method, ((_, dice),)) in enumerate(reversed(other.items())):
        right.barh(place, dice, color=STYLES[method][0])
        right.annotate(
            f"{method}  {dice:.3f}"[:-5] + f"{dice:.3f}"[1:], (0.01, place), va="center", fontsize=8, color="w"
        )
    right.set(xlim=(0, 0.8), yticks=[], xlabel="Dice")
    right.set_title("another hospital, 195 + 48 masks of the first", fontsize=10)
    figure.tight_layout()
    figure.savefig(picture)
    plt.close(figure)


if __name__ == "__main__":
    given = tyro.cli(Args)
    draw(read_rows(given.table, SAME), read_rows(given.table, OTHER), given.picture)
