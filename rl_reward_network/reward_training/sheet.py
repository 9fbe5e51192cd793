"""An image of masks with the predicted and the true error map beside each."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure

from rl_reward_network.artefacts import whole_file

COLUMNS = ("image", "mask (white)", "predicted error map", "true error map")
INCHES = 2.6  # of one picture
SCALE = 0.7  # inches of the colour bar
ERRORS = ScalarMappable(cmap="inferno")
ERRORS.set_clim(0, 1)


class SheetRow(NamedTuple):
    """One mask with its predicted and true errors."""

    image: np.ndarray
    """uint8 (H, W, 3), RGB."""
    mask: np.ndarray
    """bool (H, W)."""
    predicted_error: np.ndarray
    """float (H, W) in [0, 1]."""
    true_error: np.ndarray
    """bool (H, W)."""
    source: str
    """Source of the mask, one of `masks.SOURCES`."""
    predicted_dice: float
    interval: tuple[float, float] | None
    """Limits of the 90 % interval of the Dice; None where none can be given."""
    true_dice: float


def write_sheet(path: Path, rows: Sequence[SheetRow]) -> None:
    """Draw the rows into a PNG, which is written atomically.

    Raises:
        ValueError: there are no rows.
    """
    if not rows:
        raise ValueError(f"{path}: got no masks")
    figure = Figure(figsize=(INCHES * len(COLUMNS), (INCHES + 0.35) * len(rows) + SCALE), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), len(COLUMNS), squeeze=False)
    for row, line in zip(rows, axes, strict=True):
        pictures = (row.image, row.mask, row.predicted_error, row.true_error)
        for axis, picture in zip(line, pictures, strict=True):
            colours = "gray" if picture is row.mask else ERRORS.get_cmap()
            axis.imshow(picture, cmap=colours, vmin=0, vmax=1, interpolation="nearest")
            axis.set_axis_off()
        line[1].set_title(row.source, fontsize=9)
        line[2].set_title(predicted_title(row), fontsize=9)
        line[3].set_title(f"true Dice {row.true_dice:.2f}", fontsize=9)
    for axis, name in zip(axes[0], COLUMNS, strict=True):
        axis.set_title(f"{name}\n{axis.get_title()}".strip(), fontsize=9)
    words = "probability that the mask is wrong at a pixel (true errors: 0 or 1)"
    figure.colorbar(ERRORS, ax=axes, location="bottom", shrink=0.4, label=words)
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=90)


def predicted_title(row: SheetRow) -> str:
    """The predicted Dice with its interval, if one can be given."""
    limits = "no interval" if row.interval is None else "[{:.2f}, {:.2f}]".format(*row.interval)
    return f"predicted Dice {row.predicted_dice:.2f}, {limits}"
