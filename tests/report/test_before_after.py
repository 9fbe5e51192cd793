"""The report of a model before and after fine-tuning: its numbers, and a page that is whole and escaped."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest

from rl_reward_network.report.before_after import (
    CAPTION_LEGEND,
    MASK_LEGEND,
    BeforeAfter,
    ReportItem,
    label,
    legend,
    write_before_after,
)
from rl_reward_network.report.statistics import sign_of
from rl_reward_network.report.table import Results, paired_rows
from tests.report.html_page import Page

GROUPS = [f"g{number}" for number in range(8)]


def result(criterion="meteor", **changed):
    """Eight items of a group each; after is better by 0.1 in METEOR and as good in Dice."""
    before = {"meteor": np.linspace(0.2, 0.6, 8), "dice": np.linspace(0.5, 0.9, 8)}
    after = {"meteor": before["meteor"] + 0.1, "dice": before["dice"]}
    mask = np.zeros((20, 30), dtype=bool)
    mask[5:9, 5:20] = True
    image, words = np.full((20, 30, 3), 90, np.uint8), ("<b>red</b>", "a & b", '"c"')
    ids = tuple((f"s{number}", group) for number, group in enumerate(GROUPS))
    made = BeforeAfter(
        Results(paired_rows(before, after, GROUPS), ids, criterion),
        {"cIoU": (0.5, 0.75)},
        {"mode": "quick", "data": "<script>alert(1)</script>", "METEOR": "exact+stem", "weights": "of step 7 of 9"},
        ("An <em>extra</em> note.",),
        tuple(
            ReportItem(f"{title}: +0.1", image, mask, None, ~mask, words) for title in ("best", "b", "c", "lost most")
        ),
        tuple({"step": step, "loop1/reward_mean": step / 10} for step in range(1, 21)),
    )
    return replace(made, **changed)


def test_the_verdict_is_on_the_criterion():
    verdict = result().verdict
    assert verdict.label == "better"
    assert verdict.sentence == (
        "Better: METEOR (exact+stem) +0.10 [+0.10, +0.10] on 8 groups, p 0.008; "
        "a loss larger than any seen, in up to 3/8 of the patients, cannot be excluded."
    )
    assert result("dice").verdict.label == "cannot tell"
    assert result(notice="It got worse.").verdict.sentence.startswith("It got worse. Better: METEOR")
    assert label("own", "exact") == "own"
    assert legend(["dice"]) == MASK_LEGEND


def test_words_are_adjusted_for_all_metrics_and_know_which_are_better_when_low():
    """One of eight metrics has p 0.03 by itself, as in one of four reports on nothing; HD95 falls surely."""
    rng = np.random.default_rng(1)
    names = ("iou", "recall", "precision", "cldice", "betti0", "betti1", "hd95")
    before = {name: rng.normal(0.5, 0.01, 20) for name in ("dice", *names)}
    after = {name: of + rng.normal(0, 0.01, 20) for name, of in before.items()}
    after["dice"] = before["dice"] + 0.0055 + np.resize((0.01, -0.01), 20) * np.linspace(0.8, 1.2, 20)
    after["hd95"] = before["hd95"] - 0.1 + rng.normal(0, 0.01, 20)
    groups = [str(number) for number in range(20)]
    ids = tuple((group, group) for group in groups)
    found = BeforeAfter(Results(paired_rows(before, after, groups), ids, "dice"), {}, {})
    assert sign_of(after["dice"] - before["dice"], groups) == 1
    assert found.verdict_of("dice") == found.verdict.label == "cannot tell"
    assert found.verdict_of("hd95") == "better"


def test_the_files_hold_the_numbers(tmp_path):
    write_before_after(tmp_path, result())
    assert {path.name for path in tmp_path.iterdir()} == {"eval.json", "eval.csv", "report.html"}
    actual = json.loads((tmp_path / "eval.json").read_text())
    assert (actual["items"], actual["criterion"], actual["verdict"]["label"]) == (8, "meteor", "better")
    assert [(row["metric"], row["verdict"]) for row in actual["rows"]] == [
        ("meteor", "better"),
        ("dice", "cannot tell"),
    ]
    assert list(actual["rows"][0]) == ["metric", "before", "after", "gain", "p", "verdict"]
    assert actual["rows"][0]["gain"] == pytest.approx({"mean": 0.1, "low": 0.1, "high": 0.1, "groups": 8})
    assert actual["totals"] == {"cIoU": {"before": 0.5, "after": 0.75}}
    head, *lines = csv.reader((tmp_path / "eval.csv").read_text().splitlines())
    assert head == ["sample_id", "group_id", "model", "meteor", "dice"]
    assert (len(lines), lines[0]) == (16, ["s0", "g0", "before", "0.200000", "0.500000"])
    assert lines[8] == ["s0", "g0", "after", "0.300000", "0.500000"]


def test_the_page_is_self_contained_and_escaped(tmp_path):
    actual = Page(write_before_after(tmp_path, result()).read_text(encoding="utf-8"))
    assert not {"script", "em", "b"} & set(actual.tags)
    assert actual.loose_tables == 0
    assert actual.tags.count("img") == 4 * 4 + 1, "image, truth, before, after of each item, and the curve"
    assert all(link.startswith("data:image/") for link in actual.links)
    for shown in (
        *("truth: <b>red</b>", "before: a & b", 'after: "c"', "<script>alert(1)</script>", "An <em>extra</em>"),
        *("Better: METEOR (exact+stem) +0.10", MASK_LEGEND, CAPTION_LEGEND, "8 test items", "cIoU", "0.75"),
        *("\u25a0 truth, \u25a0 before, \u25a0 after.", "METEOR fell for 0 of 8 captions", "weights of step 7 of 9"),
    ):
        assert shown in actual.text
    order = [actual.text.index(words) for words in ("Better:", "best: +0.1", "Results", "lost most: +0.1")]
    assert order == sorted(order), "further items are folded below"


def test_what_there_is_not_has_no_heading(tmp_path):
    bare = result(shown=(), curves=({"step": 1, "loss/mask": 0.1},), totals={}, notes=())
    actual = Page(write_before_after(tmp_path, bare).read_text(encoding="utf-8"))
    assert "img" not in actual.tags
    assert (actual.tags.count("table"), actual.tags.count("details")) == (2, 2)
    assert not [word for word in ("Images", "Training", "Note:") if word in actual.text]
