"""Pieces of a report: nothing that came from outside is read as markup, and the page needs no other file."""

import base64
import csv
import io
from pathlib import Path

import numpy as np
import pytest

from rl_reward_network import __version__
from rl_reward_network.report.page import (
    Origin,
    csv_text,
    digits,
    header,
    image,
    made_by,
    panels,
    table,
    text,
    whole_page,
    write_files,
)
from tests.report.html_page import Page


def test_text_is_never_markup() -> None:
    assert text("<b>\"a\" & 'b'</b>") == "&lt;b&gt;&quot;a&quot; &amp; &#x27;b&#x27;&lt;/b&gt;"
    assert text(3.5) == "3.5"
    assert text(None) == "None"


def test_a_page_nests_and_leaves_empty_parts_out() -> None:
    whole = whole_page("a < b", ["<h1>One</h1>", "", "<p>Two</p>"])
    page = Page(whole)
    assert whole.startswith('<!DOCTYPE html>\n<html lang="en">')
    assert whole.endswith("</body></html>\n")
    assert "<title>a &lt; b</title>" in whole
    assert "<body>\n<h1>One</h1>\n<p>Two</p>\n</body>" in whole
    assert page.tags == ["html", "head", "meta", "meta", "title", "style", "body", "h1", "p"]
    assert page.links == []


@pytest.mark.parametrize("style", ["scroll", "wrap"])
def test_a_table_stands_in_a_box_of_its_own(style: str) -> None:
    made = table(["name", "<i>"], [["a & b", 1], ["<script>", None]], style)
    page = Page(whole_page("t", [made]))
    assert made.startswith(f'<div class="{style}"><table>')
    assert page.loose_tables == 0
    assert (page.tags.count("th"), page.tags.count("td"), page.tags.count("tr")) == (2, 4, 3)
    assert "script" not in page.tags
    assert "i" not in page.tags
    assert page.text.split("t", 1)[1].count("<script>") == 1, "readers see it as it was"


def test_a_table_without_rows_keeps_its_head() -> None:
    assert (
        table(["a"], [])
        == '<div class="scroll"><table><thead><tr><th>a</th></tr></thead><tbody>\n</tbody></table></div>'
    )


def test_a_picture_is_inside_the_page() -> None:
    data = bytes(range(256))
    page = Page(whole_page("t", [image(data, "png", 'says "hi" <b>')]))
    (link,) = page.links
    kind, _, encoded = link.partition(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(encoded) == data
    assert "b" not in page.tags


def test_csv_comes_back_as_it_was() -> None:
    lines = [["id", "said"], ["1", 'a "red", round\ncircle'], ["2", ""]]
    written = csv_text(lines)
    assert list(csv.reader(io.StringIO(written, newline=""))) == lines
    assert written.startswith("id,said\r\n")


def test_numbers_have_six_decimals() -> None:
    assert digits(np.array([1 / 3, -2.0, np.nan])) == ["0.333333", "-2.000000", "nan"]


def test_panels_escape_their_words_and_hold_every_picture() -> None:
    page = Page(panels("<worst>", [("a & b", b"1"), ("c", b"2")]))
    assert page.tags.count("figure") == page.tags.count("img") == 2
    assert "worst" not in page.tags


def test_files_are_written_in_order_and_whole(tmp_path: Path) -> None:
    assert write_files(tmp_path, {"a.csv": "1\r\n", "b.html": "é"}) == tmp_path / "b.html"
    assert (tmp_path / "a.csv").read_bytes() == b"1\r\n"
    with pytest.raises(UnicodeEncodeError):
        write_files(tmp_path, {"a.csv": "2", "b.html": "\ud800"})
    assert (tmp_path / "b.html").read_text(encoding="utf-8") == "é"


def test_wide_tables_are_dense_and_intervals_are_not_broken() -> None:
    narrow, wide = (table(["n"] * columns, [["0.812 [0.790, 0.834]"] * columns]) for columns in (7, 8))
    assert narrow.startswith('<div class="scroll">')
    assert wide.startswith('<div class="dense">')
    assert table(["n"] * 9, []).startswith('<div class="densest">')
    assert table(["n"] * 11, [], "wrap").startswith('<div class="wrap">')
    assert wide.count("0.812 <span>[0.790, 0.834]</span>") == 8
    assert "<td>see [the log]</td>" in table(["n"], [["see [the log]"]])
    style = whole_page("t", [])
    assert "landscape" in style
    assert "nowrap" not in style.replace("td span { white-space: nowrap; }", ""), "words of headers wrap"


def test_the_facts_say_when_by_what_and_how(tmp_path: Path) -> None:
    flags = {"model_path": "out/my run", "images": None, "gpu": -1, "show_names": True, "other": False}
    origin = made_by("evaluate", flags, "40 images", "nano", __version__, tmp_path / "logs")
    assert list(origin.facts) == ["date", "version", "data", "model", "command"]
    assert origin.facts["version"] == __version__
    assert origin.facts["command"] == "sa2va-rl evaluate --model_path 'out/my run' --gpu -1 --show_names"
    assert origin.files == {}, "no TensorBoard files, no link"
    (tmp_path / "logs").mkdir()
    other = made_by("evaluate", {}, "40 images", "nano", "0.6 or earlier", tmp_path / "logs")
    assert other.facts["version"] == f"{__version__}, trained by 0.6 or earlier"
    assert other.facts["TensorBoard"] == f"tensorboard --logdir {tmp_path / 'logs'}"
    assert other.files == {"TensorBoard": tmp_path / "logs"}


def test_the_header_links_what_exists_relative_to_the_report(tmp_path: Path) -> None:
    (tmp_path / "run <1>").mkdir()
    files = {"run & more": tmp_path / "run <1>", "gone": tmp_path / "gone"}
    made = header(Origin({"data": "<b>", "command": "a b"}, files), tmp_path / "report", ["eval.csv"])
    page = Page(whole_page("t", [made]))
    assert page.links == ["eval.csv", "../run%20%3C1%3E"]
    assert page.loose_tables == 0
    assert "b" not in page.tags
    assert "gone" not in page.text
    assert "<code>a b</code>" in made
    assert header(Origin(), tmp_path) == ""
