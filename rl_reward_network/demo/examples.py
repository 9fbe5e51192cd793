"""Rendered images to pick from."""

from pathlib import Path

import numpy as np
from PIL import Image

from rl_reward_network.embedded.angiograms import render_series
from rl_reward_network.embedded.regions import make_scenes

LOOKS = ("plain", "bright", "faint")


def write_examples(folder: Path) -> list[Path]:
    """Write angiograms of three looks and a scene of coloured objects; returns the files."""
    folder.mkdir(parents=True)
    pictures = {look: next(render_series(np.random.default_rng(1), look, 1)).image for look in LOOKS}
    pictures["scene"] = next(make_scenes(1, 0)).image
    for name, picture in pictures.items():
        Image.fromarray(picture).save(folder / f"{name}.png")
    return [folder / f"{name}.png" for name in pictures]
