"""Render the embedded data sets: angiograms with vessel masks, or scenes of coloured objects with captions.

    sa2va-rl data             # data/angiograms
    sa2va-rl data --no_gap    # data/angiograms_no_gap, where no choice of prompt can help
    sa2va-rl data --regions   # data/regions_lamplight, in GAR's Arrow layout
    sa2va-rl data import SOURCE --to FOLDER --write    # your own images, see data_import.py

Nothing is downloaded, and equal versions give equal files. Existing data sets are kept. The angiograms have the same
format as your own data (docs/how-to/your-data.md): 160 patients, two series each, three frames per series.
"""

from dataclasses import dataclass
from pathlib import Path

from rl_reward_network.embedded.datasets import DEFAULT_FOLDER, embedded_angiograms, embedded_regions


@dataclass(frozen=True)
class Args:
    """Render the embedded data sets. Your own images: sa2va-rl data import SOURCE."""

    folder: Path = DEFAULT_FOLDER
    """Where the data sets are kept."""
    no_gap: bool = False
    """Render the angiograms in which one prompt is the best for every image, instead."""
    regions: bool = False
    """Render the scenes of coloured objects instead, under a warm lamp."""
    daylight: bool = False
    """With --regions: in the lighting of sa2va-nano's training images, instead."""


def main(args: Args) -> None:
    """Render the data set if it does not exist yet."""
    if args.regions and args.no_gap:
        raise ValueError("regions and no_gap are both True, expected one data set; leave one of them out")
    if args.daylight and not args.regions:
        raise ValueError("daylight is True, but regions is False; add --regions, or leave it out")
    if args.regions:
        folder = embedded_regions(args.folder, args.daylight)
    else:
        folder = embedded_angiograms(args.folder, args.no_gap)
    print(f"embedded data: {folder}")
