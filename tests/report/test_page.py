"""Pieces of a report: nothing that came from outside is read as markup, and the page needs no other file."""

import base64
import csv
import io
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image
from skimage.color import deltaE_ciede2000, rgb2lab
from skimage.segmentation import find_boundaries

from rl_reward_network import __version__
from rl_reward_network.report import overlays, page
from rl_reward_network.report.overlays import (
    AFTER,
    AGREE,
    BEFORE,
    FALSE,
    GREY,
    MISSED,
    PANEL,
    TRUTH,
    draw_errors,
    draw_mask,
    paint_mask,
)
from rl_reward_network.report.statistics import Estimate
from tests.report.html_page import Page

IMAGE = np.full((90, 120, 3), 128, np.uint8)
MASK = np.zeros((90, 120), bool)
MASK[20:60, 30:50] = True


def test_every_report_has_one_order_and_leaves_empty_parts_out(tmp_path: Path) -> None:
    pictures = [overlays.picture("best: <u>s1", IMAGE, [("true mask", MASK, TRUTH)])]
    made = page.Page(
        "a < b", "What?", "Deployed: <q>.", "<i>Better.", "Best.", pictures, page.table(["Dice"], [["0.9"]]),
        ["Few.", "<em>"], {"Costs": "<p>Two</p>", "Empty": ""}, {"mode": "<s>"}, page.Origin({"command": "a b"}),
        "<p>Colours</p>", "Few.",
    )  # fmt: skip
    assert page.write_report(tmp_path, made, {"verdict": 1}, {"eval.csv": "1\r\n"}) == tmp_path / "report.html"
    whole = (tmp_path / "report.html").read_text(encoding="utf-8")
    shown = Page(whole)
    assert whole.startswith('<!DOCTYPE html>\n<html lang="en">')
    assert "<title>a &lt; b</title>" in whole
    assert "landscape" in whole
    assert not {"i", "em", "s", "q", "u", "after"} & set(shown.tags)
    words = "What?|Few.|Deployed: <q>.|<i>Better.|Best.|Colours|<u>s1|Results|0.9|<em>|Costs|Two|mode|a b|eval.csv"
    order = [shown.text.index(part) for part in words.split("|")]
    assert order == sorted(order)
    assert "Empty" not in shown.text
    assert shown.text.count("Few.") == 1, "a banner is no note, too"
    assert whole.index("<details>") > whole.index("&lt;em&gt;"), "pictures, the table and notes are not folded"
    assert (tmp_path / "eval.csv").read_bytes() == b"1\r\n"
    with pytest.raises(UnicodeEncodeError):
        page.write_report(tmp_path, replace(made, verdict="\ud800"), {}, {})
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == whole, "whole or not written"


@pytest.mark.parametrize(
    ("columns", "style", "box"),
    [
        *((2, "scroll", "scroll"), (7, "scroll", "scroll"), (8, "scroll", "dense"), (9, "scroll", "densest")),
        (11, "wrap", "wrap"),
    ],
)
def test_a_table_stands_in_a_box_of_its_own(columns: int, style: str, box: str) -> None:
    cells = ["a & b", "<script>", "0.812 [0.790, 0.834]", "see [the log]", *range(columns)][:columns]
    made = page.table(["<i>"] * columns, [cells], style)
    shown = Page(made)
    assert made.startswith(f'<div class="{box}"><table>')
    assert (shown.loose_tables, shown.tags.count("th"), shown.tags.count("td")) == (0, columns, columns)
    assert not {"script", "i"} & set(shown.tags)
    assert made.count("<span>") == made.count("0.812 <span>[0.790, 0.834]</span>") == (columns > 2)
    empty = '<div class="scroll"><table><thead><tr><th>a</th></tr></thead><tbody>\n</tbody></table></div>'
    assert page.table(["a"], []) == empty


def test_pictures_are_inside_the_page_and_their_words_are_escaped() -> None:
    data = bytes(range(256))
    shown = Page(page.panels("<worst>", [("a & b", data), ('says "hi" <b>', b"2")]))
    kind, _, encoded = shown.links[0].partition(",")
    assert (kind, base64.b64decode(encoded)) == ("data:image/jpeg;base64", data)
    assert shown.tags.count("figure") == shown.tags.count("img") == 2
    assert not {"worst", "b"} & set(shown.tags)


def test_csv_comes_back_as_it_was() -> None:
    lines = [["id", "said"], ["1", 'a "red", round\ncircle'], ["2", ""]]
    assert list(csv.reader(io.StringIO(page.csv_text(lines), newline=""))) == lines
    assert page.digits([1 / 3, -2.0, np.nan]) == ["0.333333", "-2.000000", "nan"]


def test_the_facts_say_when_by_what_and_how(tmp_path: Path) -> None:
    flags = {"model_path": "out/my run", "images": None, "gpu": -1, "show_names": True, "other": False}
    origin = page.made_by("evaluate", flags, "40 images", "nano", __version__, tmp_path / "logs")
    assert list(origin.facts) == ["date", "version", "data", "model", "command"]
    assert origin.facts["version"] == __version__
    assert origin.facts["command"] == "sa2va-rl evaluate --model_path 'out/my run' --gpu -1 --show_names"
    assert origin.files == {}, "no TensorBoard files, no link"
    (tmp_path / "logs").mkdir()
    other = page.made_by("evaluate", {}, "40 images", "nano", "0.6 or earlier", tmp_path / "logs")
    assert other.facts["version"] == f"{__version__}, trained by 0.6 or earlier"
    assert other.facts["TensorBoard"] == f"tensorboard --logdir {tmp_path / 'logs'}"
    assert other.files == {"TensorBoard": tmp_path / "logs"}


def test_the_header_links_what_exists_relative_to_the_report(tmp_path: Path) -> None:
    (tmp_path / "run <1>").mkdir()
    files = {"run & more": tmp_path / "run <1>", "gone": tmp_path / "gone"}
    made = page.header(page.Origin({"data": "<b>", "command": "a b"}, files), tmp_path / "report", ["eval.csv"])
    shown = Page(made)
    assert shown.links == ["eval.csv", "../run%20%3C1%3E"]
    assert shown.loose_tables == 0
    assert "b" not in shown.tags
    assert "gone" not in shown.text
    assert "<code>a b</code>" in made
    assert page.header(page.Origin(), tmp_path) == ""


def opened(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)


def test_painting_tints_the_inside_draws_a_line_around_it_and_leaves_the_rest() -> None:
    before = IMAGE.copy()
    painted = paint_mask(IMAGE, MASK, AFTER, opacity=0.5)
    np.testing.assert_array_equal(IMAGE, before)
    inside = np.round((128 + np.array(AFTER)) / 2)
    np.testing.assert_array_equal(painted[MASK], np.broadcast_to(inside, (MASK.sum(), 3)))
    outline = find_boundaries(MASK, mode="outer")
    np.testing.assert_array_equal(painted[outline], np.broadcast_to(AFTER, (outline.sum(), 3)))
    np.testing.assert_array_equal(painted[~MASK & ~outline], IMAGE[~MASK & ~outline])
    np.testing.assert_array_equal(paint_mask(IMAGE, MASK, AFTER, opacity=0)[MASK], IMAGE[MASK])
    pixels = opened(draw_mask(IMAGE, MASK, TRUTH))
    assert np.abs(pixels[20:60, 29] - TRUTH).max() < 40
    assert np.abs(opened(draw_mask(IMAGE, None, TRUTH)) - 128).max() < 6


def test_thin_lines_survive_shrinking() -> None:
    line = np.zeros((900, 1200), bool)
    line[455:458] = True
    assert (paint_mask(IMAGE, line, TRUTH, opacity=1) == TRUTH).all(axis=2).any(axis=0).all()
    large, line = np.full((1000, 2000, 3), 128, np.uint8), np.zeros((1000, 2000), bool)
    line[500:502] = True
    pixels = opened(draw_mask(large, line, TRUTH))
    assert max(pixels.shape) == PANEL
    assert (np.abs(pixels - TRUTH).max(axis=2) < 60).any(axis=0).mean() > 0.9


def test_errors_glow_where_they_are_expected_in_the_colours_of_the_scale() -> None:
    pixels = opened(draw_errors(IMAGE, MASK * 0.8))
    inside, outside = pixels[30:50, 34:46].mean(axis=(0, 1)), pixels[70:].mean(axis=(0, 1))
    assert inside[0] > outside[0] + 80
    assert np.ptp(outside) < 3, "grey where nothing is expected"
    figure = overlays.error_scale()
    FigureCanvasAgg(figure).draw()
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["0", "0.25", "0.5", "0.75", "1"]
    colours = np.asarray(figure.axes[0].images[0].get_array())[0].astype(int)
    for share in (0.0, 0.25, 0.6, 1.0):
        pixel = opened(draw_errors(np.full((32, 32, 3), GREY, np.uint8), np.full((32, 32), share)))[16, 16]
        assert np.abs(pixel - colours[round(share * 255)]).max() < 6, share


def test_a_picture_holds_every_mask_with_its_caption_and_the_legend() -> None:
    shown = Page(overlays.picture("best: s1", IMAGE, [("true mask", MASK, TRUTH), ("none", None, AFTER)]))
    assert (shown.tags.count("img"), shown.text) == (3, "best: s1imagetrue masknone")
    assert Page(overlays.picture("t", IMAGE, [], ("e", MASK * 0.5))).text == "timagee"
    made = overlays.legend({"truth": TRUTH, "<after>": AFTER})
    assert Page(made).text == "Masks: \u25a0 truth, \u25a0 <after>."
    assert made.index(f"rgb{TRUTH}") < made.index(" truth<") < made.index(f"rgb{AFTER}")
    errors = overlays.legend({"truth": TRUTH}, errors=True)
    assert "probability that the mask is wrong" in errors
    assert Page(errors).tags == ["p", "span", "span", "p", "img"], "with the scale"


def test_plots_are_repeatable_and_methods_at_one_place_share_a_label() -> None:
    lines = page.slopes(np.array([0.2, 0.8]), np.array([0.4, 0.6]), "best").axes[0].lines
    assert [line.get_color() for line in lines] == ["tab:blue", "tab:red", "black"]
    same = [(0.0, Estimate(0.5, 0.4, 0.6, 9)), *[(9.0, Estimate(0.9, None, None, 1))] * 2]
    assert [text.get_text() for text in page.dice_over_minutes(same).axes[0].texts] == ["0", "1, 2"]
    assert page.png(page.proxy_over_gold({0: (0.5, 0.6)})) == page.png(page.proxy_over_gold({0: (0.5, 0.6)}))


def test_curves_show_what_was_logged_and_smooth_long_lines() -> None:
    lines = [{"step": step, "reward": step / 10} for step in range(1, 31)]
    lines += [{"step": step, "score": 0.5 + step / 100, "dice": 0.5 - step / 100} for step in (0, 15, 30)]
    panels = {"training": {"reward": "loop 1"}, "validation": {"score": "proxy", "dice": "gold", "gone": "no"}}
    figure = page.curves(lines, panels, "step")
    assert figure is not None
    left, right = figure.axes
    assert [axes.get_title() for axes in (left, right)] == ["training", "validation"]
    np.testing.assert_allclose(left.get_lines()[-1].get_ydata(), np.arange(2, 30) / 10)
    shown = {str(line.get_label()): (line.get_xdata(), line.get_ydata()) for line in right.get_lines()}
    assert list(shown) == ["proxy", "gold"]
    np.testing.assert_allclose(shown["gold"], [[0, 15, 30], [0.5, 0.35, 0.2]])
    assert page.curves([{"step": 1, "loss/mask": 0.1}], panels, "step") is None


# Colours of red, green, blue light in linear RGB, as seen without long, middle or short cones (Machado et al. 2009).
SEEN = {
    "all": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


@pytest.mark.parametrize("vision", SEEN)
def test_everybody_tells_the_colours_of_masks_apart(vision: str) -> None:
    """CIEDE2000; 2.3 is just noticeable, and green beside orange has 6 without long cones."""

    def lab(colour: tuple[int, int, int]) -> np.ndarray:
        light = np.array(colour) / 255
        linear = np.where(light <= 0.04045, light / 12.92, ((light + 0.055) / 1.055) ** 2.4)
        seen = np.clip(np.array(SEEN[vision]) @ linear, 0, 1)
        return np.asarray(rgb2lab(np.where(seen <= 0.0031308, seen * 12.92, 1.055 * seen ** (1 / 2.4) - 0.055)))

    for palette in ((TRUTH, BEFORE, AFTER), (AGREE, MISSED, FALSE)):
        assert min(deltaE_ciede2000(lab(a), lab(b)) for a, b in combinations(palette, 2)) > 15
    for grey in (40, 90, 130, 170, 215):
        assert min(deltaE_ciede2000(lab(a), lab((grey,) * 3)) for a in (TRUTH, BEFORE, AFTER)) > 15


def test_a_mask_against_the_truth_shows_what_is_missed_and_what_is_false() -> None:
    mask, truth = np.array([[1, 1, 0, 0]], bool), np.array([[1, 0, 1, 0]], bool)
    assert overlays.compare_masks(mask, truth)[0].tolist() == [list(of) for of in (AGREE, FALSE, MISSED, (0, 0, 0))]
