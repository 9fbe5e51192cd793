"""Legends of the pictures in a report: the colours of masks, and the scale of expected errors."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from rl_reward_network.report import page
from rl_reward_network.report.figures import png
from rl_reward_network.report.overlays import paint_errors

GREY = 128  # of 255: brightness of the image below the colours of the scale


def mask_legend(colours: Mapping[str, tuple[int, int, int]]) -> str:
    """HTML: a square in the colour (RGB, 0..255) of each mask, and its name."""
    squares = (f'<span style="color: rgb{colour}">&#9632;</span> {page.text(name)}' for name, colour in colours.items())
    return f'<p class="legend">Masks, tinted and outlined: {", ".join(squares)}.</p>'


def error_legend() -> str:
    """HTML: the colours of `overlays.draw_errors` with their values."""
    words = "Expected errors: predicted probability that the mask is wrong at a pixel"
    return f'<p class="legend">{words}. {page.image(png(error_scale()), "png", "Colour scale from 0 to 1")}</p>'


def error_scale() -> Figure:
    """A colour bar from 0 to 1, as over a grey image."""
    figure = Figure(figsize=(3.2, 0.55), layout="constrained")
    axes = figure.subplots()
    shares = np.linspace(0, 1, 256)[None]
    axes.imshow(paint_errors(np.full_like(shares, GREY), shares), aspect="auto", extent=(0, 1, 0, 1))
    ticks = (0, 0.25, 0.5, 0.75, 1)
    axes.set(yticks=[], xticks=ticks, xticklabels=[f"{tick:g}" for tick in ticks])
    axes.tick_params(labelsize=8)
    return figure
