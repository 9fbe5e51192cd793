import io

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image
from rl_reward_network.report.legends import GREY, error_legend, error_scale, mask_legend

from rl_reward_network.report.overlays import draw_errors
from tests.report.html_page import Page


def test_each_colour_stands_before_its_name():
    legend = mask_legend({"truth": (0, 200, 90), "<after>": (60, 150, 255)})
    assert Page(legend).text == "Masks, tinted and outlined: \u25a0 truth, \u25a0 <after>."
    assert legend.index("rgb(0, 200, 90)") < legend.index("truth") < legend.index("rgb(60, 150, 255)")


def test_the_scale_has_the_colours_of_the_error_map():
    figure = error_scale()
    FigureCanvasAgg(figure).draw()
    axes = figure.axes[0]
    colours = np.asarray(axes.images[0].get_array())[0].astype(int)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "0.25", "0.5", "0.75", "1"]
    for share in (0.0, 0.25, 0.6, 1.0):
        drawn = draw_errors(np.full((32, 32, 3), GREY, np.uint8), np.full((32, 32), share))
        pixel = np.asarray(Image.open(io.BytesIO(drawn)))[16, 16].astype(int)
        assert np.abs(pixel - colours[round(share * 255)]).max() < 6, share


def test_the_scale_is_embedded():
    page = Page(error_legend())
    assert page.links[0].startswith("data:image/png;base64,")
    assert "probability that the mask is wrong" in page.text
