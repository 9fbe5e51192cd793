"""Two models beside each other: rows by hand, the words, and a report that is whole and escaped."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from rl_reward_network.report import page
from rl_reward_network.report.before_after import (
    CAPTION_LEGEND,
    MASK_LEGEND,
    BeforeAfter,
    Difference,
    ReportItem,
    compare_models,
    curves,
    summary,
    write_before_after,
)
from rl_reward_network.report.statistics import Estimate, mean_interval
from tests.report.html_page import Page

GROUPS = [f"g{number}" for number in range(8)]
FLAT = np.zeros(8)


def row(low: float | None, high: float | None, groups: int = 8) -> Difference:
    estimate = Estimate(0.1, low, high, groups)
    return Difference("iou", estimate, estimate, estimate)


def result(**changed: Any) -> BeforeAfter:
    """Eight items of a group each; after is better by 0.1 in METEOR and as good in Dice."""
    before = {"meteor": np.linspace(0.2, 0.6, 8), "dice": np.linspace(0.5, 0.9, 8)}
    after = {"meteor": before["meteor"] + 0.1, "dice": before["dice"]}
    mask = np.zeros((20, 30), dtype=bool)
    mask[5:9, 5:20] = True
    item = ReportItem(
        "gained most: +0.1", np.full((20, 30, 3), 90, np.uint8), mask, None, ~mask, ("<b>red</b>", "a & b", '"c"')
    )
    made = BeforeAfter(
        compare_models(before, after, GROUPS),
        "meteor",
        {"cIoU": (0.5, 0.75)},
        {"before": before, "after": after},
        tuple((f"s{number}", group) for number, group in enumerate(GROUPS)),
        {"mode": "quick", "data": "<script>alert(1)</script>", "METEOR": "exact+stem"},
        ("An <em>extra</em> note.",),
        (item,),
        tuple({"step": step, "loop1/reward_mean": step / 10} for step in range(1, 21)),
    )
    return replace(made, **changed)


def test_rows_are_means_over_groups_and_of_paired_differences() -> None:
    before, after = {"dice": np.array([0.2, 0.4, 0.9])}, {"dice": np.array([0.6, 0.4, 0.7])}
    (actual,) = compare_models(before, after, ["a", "a", "b"])
    assert actual.metric == "dice"
    assert actual.before.mean == pytest.approx((0.3 + 0.9) / 2)
    assert actual.after.mean == pytest.approx((0.5 + 0.7) / 2)
    assert actual.gain.mean == pytest.approx((0.2 - 0.2) / 2)
    assert actual.gain.groups == 2
    assert actual.gain.high == pytest.approx(0.2 * stats.t.ppf(0.975, 1)), "Student's t of -0.2 and 0.2"


def test_many_groups_are_drawn_by_the_seed() -> None:
    gain, groups = np.random.default_rng(0).random(40), [f"g{number}" for number in range(40)]
    for seed in (0, 7):
        (actual,) = compare_models({"iou": np.zeros(40)}, {"iou": gain}, groups, seed)
        assert actual.gain == mean_interval(gain, groups, seed)
    assert mean_interval(gain, groups, 0) != mean_interval(gain, groups, 7)


def test_items_without_a_number_on_one_side_are_left_out() -> None:
    nan = np.nan
    before = {"iou": np.array([0.5, nan, 0.1, 0.2]), "recall": np.full(4, nan)}
    after = {"iou": np.array([0.7, 0.9, nan, 0.3]), "recall": np.ones(4)}
    (actual,) = compare_models(before, after, ["a", "b", "c", "d"])
    assert actual.metric == "iou", "a metric that one model has nowhere has no row"
    assert (actual.before.mean, actual.after.mean) == (pytest.approx(0.35), pytest.approx(0.5))
    assert (actual.gain.mean, actual.gain.groups) == (pytest.approx(0.15), 2)


@pytest.mark.parametrize(
    ("shift", "word"), [(0.2 + FLAT, "better"), (FLAT - 0.2, "worse"), (np.tile([0.2, -0.2], 4), "cannot tell")]
)
def test_the_word_is_that_of_the_interval(shift: np.ndarray, word: str) -> None:
    before = np.linspace(0.3, 0.7, 8)
    (actual,) = compare_models({"iou": before}, {"iou": before + shift}, GROUPS)
    assert actual.word == word
    assert actual.gain.mean == pytest.approx(shift.mean())


def test_few_groups_decide_nothing() -> None:
    before = np.linspace(0.3, 0.7, 8)
    (actual,) = compare_models({"iou": before}, {"iou": before + 0.2}, [f"g{n % 5}" for n in range(8)])
    assert actual.gain.low == pytest.approx(0.2)
    assert actual.word == "cannot tell", "all 5 groups gained, but 5 are too few"
    assert row(0.01, 0.2, 6).word == "better"
    assert row(None, None, 1).word == "cannot tell"


def test_an_interval_that_ends_at_0_tells_nothing() -> None:
    assert row(0.0, 0.2).word == "cannot tell"
    assert row(-0.2, 0.0).word == "cannot tell"
    assert row(-0.2, -0.1).word == "worse"


def test_the_verdict_is_on_the_criterion() -> None:
    verdict = result().verdict
    assert verdict.label == "better"
    assert verdict.sentence == "Better: METEOR (exact+stem) +0.100 [+0.100, +0.100] on 8 groups."
    assert result(criterion="dice").verdict.label == "cannot tell"
    single = compare_models({"own": FLAT[:1]}, {"own": FLAT[:1] - 1}, ["a"])
    alone = result(rows=single, criterion="own").verdict
    assert alone.sentence == "Cannot tell: own -1.000 on 1 groups."


def test_the_summary_is_plain_json(tmp_path: Path) -> None:
    write_before_after(tmp_path, result())
    actual = json.loads((tmp_path / "eval.json").read_text())
    assert actual == json.loads(json.dumps(summary(result())))
    assert (actual["items"], actual["criterion"], actual["verdict"]["label"]) == (8, "meteor", "better")
    assert [entry["metric"] for entry in actual["rows"]] == ["meteor", "dice"]
    assert actual["rows"][0]["gain"]["mean"] == pytest.approx(0.1)
    assert [entry["word"] for entry in actual["rows"]] == ["better", "cannot tell"]
    assert actual["totals"] == {"cIoU": {"before": 0.5, "after": 0.75}}
    assert actual["notes"] == ["An <em>extra</em> note."]


def test_the_table_has_a_line_for_each_item_and_model(tmp_path: Path) -> None:
    write_before_after(tmp_path, result())
    with (tmp_path / "eval.csv").open(newline="") as file:
        head, *lines = list(csv.reader(file))
    assert head == ["sample_id", "group_id", "model", "meteor", "dice"]
    assert len(lines) == 16
    assert lines[0] == ["s0", "g0", "before", "0.200000", "0.500000"]
    assert lines[8] == ["s0", "g0", "after", "0.300000", "0.500000"]


def test_the_page_is_self_contained_and_escaped(tmp_path: Path) -> None:
    path = write_before_after(tmp_path, result())
    assert path == tmp_path / "report.html"
    actual = Page(path.read_text(encoding="utf-8"))
    assert not {"script", "em", "b"} & set(actual.tags)
    assert actual.loose_tables == 0
    assert actual.tags.count("img") == 4 + 1, "image, truth, before, after, and the curve"
    assert "\u25a0 truth, \u25a0 before, \u25a0 after." in actual.text
    assert "METEOR fell for 0 of 8 captions" in actual.text
    assert all(link.startswith("data:image/") for link in actual.links)
    for shown in ("truth: <b>red</b>", "before: a & b", 'after: "c"', "<script>alert(1)</script>", "An <em>extra</em>"):
        assert shown in actual.text
    for shown in (
        "Better: METEOR (exact+stem) +0.100",
        MASK_LEGEND,
        CAPTION_LEGEND,
        "8 test items",
        "+0.100 [+0.100, +0.100]",
        "cIoU",
        "0.750",
    ):
        assert shown in actual.text


def test_curves_show_what_was_paid_and_proxy_beside_gold() -> None:
    lines = [{"step": step, "loop2/reward_mean": step / 10} for step in range(1, 31)]
    lines += [{"step": step, "val/score": 0.5 + step / 100, "val/gt_dice": 0.5 - step / 100} for step in (0, 15, 30)]
    figure = curves(lines)
    assert figure is not None
    left, right = figure.axes
    assert [axes.get_title() for axes in (left, right)] == ["reward of sampled rollouts (training)", "validation"]
    smooth = left.get_lines()[-1]
    np.testing.assert_allclose(smooth.get_ydata(), np.arange(2, 30) / 10)
    shown = {str(line.get_label()): (line.get_xdata(), line.get_ydata()) for line in right.get_lines()}
    assert list(shown) == ["reward net's score (proxy)", "Dice (gold)"]
    np.testing.assert_allclose(shown["Dice (gold)"], [[0, 15, 30], [0.5, 0.35, 0.2]])
    assert curves([{"step": 1, "loss/mask": 0.1}]) is None


def test_what_there_is_not_has_no_heading(tmp_path: Path) -> None:
    bare = result(shown=(), curves=({"step": 1, "loss/mask": 0.1},), totals={}, notes=())
    actual = Page(write_before_after(tmp_path, bare).read_text(encoding="utf-8"))
    assert "img" not in actual.tags
    assert actual.tags.count("table") == 2
    assert "Images" not in actual.text
    assert "Training" not in actual.text
    assert "Note:" not in actual.text


def test_files_are_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_before_after(tmp_path, result())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(before) == {"eval.json", "eval.csv", "report.html"}

    def broken(*_: Any) -> str:
        raise RuntimeError("stopped")

    monkeypatch.setattr(page, "whole_page", broken)
    with pytest.raises(RuntimeError, match="stopped"):
        write_before_after(tmp_path, result(criterion="dice"))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    monkeypatch.setattr(page, "whole_page", lambda title, parts: "\ud800")  # cannot be written as UTF-8
    with pytest.raises(UnicodeEncodeError):
        write_before_after(tmp_path, result())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
