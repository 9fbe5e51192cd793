"""Render the embedded data sets: angiograms with vessel masks, or scenes of coloured objects with captions.

    sa2va-rl data             # data/angiograms
    sa2va-rl data --no_gap    # data/angiograms_no_gap, where no choice of prompt can help
    sa2va-rl data --regions   # data/regions_lamplight, in GAR's Arrow layout

Nothing is downloaded, and equal versions give equal files. What is there already stays. The angiograms are in the same
format as your own data (README, "Your own data"): 160 patients, two series each, three frames per series.
"""

from dataclasses import dataclass
from pathlib import Path

from rl_reward_network.embedded.datasets import DEFAULT_FOLDER, embedded_angiograms, embedded_regions


@dataclass(frozen=True)
class Args:
    """Render the embedded data sets."""

    folder: Path = DEFAULT_FOLDER
    """Where the data sets are kept."""
    no_gap: bool = False
    """Render the angiograms in which one prompt is the best for every picture, instead."""
    regions: bool = False
    """Render the scenes of coloured objects instead, under a warm lamp."""
    daylight: bool = False
    """With --regions: in the light that sa2va-nano was trained in, instead."""


def main(args: Args) -> None:
    """Render what is not there."""
    if args.regions and args.no_gap:
        raise ValueError("regions and no_gap exclude each other: one set at a time")
    if args.daylight and not args.regions:
        raise ValueError("daylight is for --regions: angiograms have no light")
    if args.regions:
        made = embedded_regions(args.folder, args.daylight)
    else:
        made = embedded_angiograms(args.folder, args.no_gap)
    print(f"embedded data: {made}")
