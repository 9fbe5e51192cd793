"""The report of several models on the same images."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest

from rl_reward_network.report.before_after import ReportItem
from rl_reward_network.report.gains import SHOWN, Gains, gains_of, write_gains
from tests.report.html_page import Page

BEFORE, AFTER = np.linspace(0.2, 0.6, 9), np.linspace(0.2, 0.6, 9) + np.linspace(0.1, 0.18, 9)
IDS = tuple((f"i{number}", f"p{number // 3 if number < 4 else number}") for number in range(9))  # seven patients
MASK = np.eye(20, dtype=bool)


def gains(chosen: str = "segmenter", **changed: object) -> Gains:
    shown = [ReportItem(f"image {n}", np.full((20, 20, 3), 90, np.uint8), MASK, None, ~MASK) for n in range(SHOWN + 1)]
    results = gains_of({"as it is": BEFORE, "segmenter": AFTER, "fusion": BEFORE}, IDS)
    return replace(Gains(results, chosen, "Deployed: <it>.", shown, ("A note.",)), **changed)  # type: ignore[arg-type]


def test_the_page_says_what_is_deployed_shows_it_and_compares_all_rows(tmp_path) -> None:  # type: ignore[no-untyped-def]
    made = write_gains(tmp_path, gains()).read_text()
    page = Page(made)
    words = (
        *("Are the masks better?", "7 labelled patients, fewer than 20: the intervals are rough.", "Deployed: <it>."),
        *("Better: segmenter, Dice +0.1", "truth, \u25a0 before, \u25a0 after.", "image 5", "Results"),
        *("9 images of 7 labelled patients", "fusion", "A note.", "More images", "image 6"),
    )
    order = [page.text.rindex(part) for part in words]
    assert order == sorted(order)
    assert page.text.count("fewer than 20") == 1
    assert (page.loose_tables, page.tags.count("img")) == (0, 4 * (SHOWN + 1))
    saved = json.loads((tmp_path / "eval.json").read_text())
    means = [row["means"]["dice"]["mean"] for row in saved["rows"]]
    known = np.array([np.mean([of[:3].mean(), of[3], *of[4:]]) for of in (BEFORE, AFTER, BEFORE)])
    assert means == pytest.approx(known.tolist()), "patients have the same weight"
    assert saved["rows"][1]["dice_minus_base"]["mean"] == pytest.approx(known[1] - known[0]), "every digit"
    assert [row["p"] for row in saved["rows"]] == [None, pytest.approx(2 / 2**7), 1.0]
    assert (saved["verdict"]["label"], saved["chosen"]) == ("better", "segmenter")
    lines = list(csv.reader((tmp_path / "eval.csv").read_text().splitlines()))
    assert lines[10] == ["i0", "p0", "segmenter", "0.300000"]


def test_the_table_marks_what_is_deployed_and_a_model_that_is_kept_is_named() -> None:
    head, base, segmenter, _ = csv.reader(gains().table().csv().splitlines())
    assert head == ["", "Dice [95 %]", "gain [95 %]", "p", ""]
    assert (base[0], base[2:]) == ("as it is", ["", "", ""])
    assert (segmenter[0], segmenter[3:]) == ("segmenter (deployed)", ["0.016", "better"])
    assert gains().table(narrow=True).lines[0][1] == "0.44"
    kept = gains("as it is").verdict
    assert kept.sentence == "Kept: as it is. No other row is better beyond chance on 7 labelled patients."
