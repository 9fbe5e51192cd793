"""Rows, their verdicts, and one table in all its formats."""

import numpy as np
import pytest

from rl_reward_network.report.statistics import Estimate, mean_interval
from rl_reward_network.report.table import (
    Results,
    Row,
    gain_verdict,
    make_row,
    metric_columns,
    p_words,
    paired_rows,
    percent,
    policy_verdict,
    table_of,
    word,
)

GROUPS = tuple("abcdef")


def rows_of(fixed, policy, oracle):
    """Rows of Dice, each with its difference to the row "fixed"."""
    dice = {name: np.array(values) for name, values in (("fixed", fixed), ("PPO", policy), ("oracle", oracle))}
    return tuple(
        make_row(name, {"dice": values}, {"fixed": {"dice": values - dice["fixed"]}}, GROUPS)
        for name, values in dice.items()
    )


def results_of(*values):
    return Results(rows_of(*values), tuple((f"s{number}", group) for number, group in enumerate(GROUPS)), "dice")


def test_differences_are_paired():
    base = np.array([0.1, 0.9, 0.2, 0.8, 0.5, 0.4])
    row = rows_of(base, base + 0.1, base)[1]
    assert row.estimates["dice"] == mean_interval(base + 0.1, GROUPS, bounds=(0, 1))
    assert row.differences["fixed"]["dice"] == mean_interval(base + 0.1 - base, GROUPS)
    assert row.differences["fixed"]["dice"].low == pytest.approx(0.1)


def test_before_and_after_take_the_items_that_both_have():
    nan = np.nan
    before = {"iou": np.array([0.5, nan, 0.1, 0.2]), "recall": np.full(4, nan), "dice": np.array([0.2, 0.4, 0.9, 0.9])}
    after = {"iou": np.array([0.7, 0.9, nan, 0.3]), "recall": np.ones(4), "dice": np.array([0.6, 0.4, 0.7, 0.7])}
    first, second = paired_rows(before, after, ["a", "a", "b", "b"])
    gains = second.differences["before"]
    assert list(first.estimates) == list(second.estimates) == list(gains) == ["iou", "dice"], "recall has no pair"
    assert (first.estimates["iou"].mean, second.estimates["iou"].mean) == (pytest.approx(0.35), pytest.approx(0.5))
    assert (gains["iou"].mean, gains["iou"].groups) == (pytest.approx(0.15), 2)
    assert gains["dice"].mean == pytest.approx((0.2 - 0.2) / 2)
    assert gains["dice"].high is None, "two patients have no interval"


def test_the_gap_is_closed_by_a_share_unless_it_is_negligible():
    results = results_of([0.5] * 6, [0.6] * 6, [0.7] * 6)
    shares = [results.gap_closed(row, "fixed", "oracle") for row in results.rows]
    assert shares == pytest.approx([0, 0.5, 1])
    assert [percent(share) for share in (*shares, None)] == ["0%", "50%", "100%", "-"]
    assert results.gap_closed(results.rows[1], "fixed", "no such row") is None
    tiny = results_of([0.5] * 6, [0.6] * 6, [0.509] * 6)
    assert tiny.gap_closed(tiny.rows[1], "fixed", "oracle") is None


def test_results_pick_images_and_list_them():
    results = results_of([0.5, 0.9, 0.1, 0.7, 0.3, 0.6], [0.0] * 6, [1.0] * 6)
    assert results.picks("fixed") == {"best": 1, "median": 5, "worst": 2}
    assert results.patients == 6
    lines = results.per_image(lambda row, number: [row.name, number])
    assert (len(lines), lines[7]) == (18, ["s1", "b", "PPO", 1])


UP, DOWN = Estimate(0.03, 0.01, 0.05, 8), Estimate(-0.03, -0.05, -0.01, 8)
FEW = Estimate(0.03, None, None, 5)
RARE = "loss larger than any seen, in up to 3/8 of the patients, cannot be excluded"
HELPS = f"Better: choosing the prompt per image helps. Measured. More. A {RARE}."


@pytest.mark.parametrize(
    ("gain", "p", "enough", "rival", "sentence"),
    [
        (UP, 0.01, "", "", HELPS),
        (UP, 0.01, "one is enough", "", HELPS),
        (DOWN, 0.01, "", "", "Worse: one prompt for all images is better than this policy. Measured. More."),
        (UP, 0.051, "", "", "Cannot tell: p 0.051, and 0.05 is needed. Measured. More."),
        (FEW, 0.0625, "", "", "Cannot tell: fewer than 6 test patients. Measured."),
        (UP, 0.01, "", "prompt 5", "Cannot tell: it does not beat prompt 5. Measured."),
        (DOWN, 0.01, "one is enough", "", "No gap: one is enough. Measured."),
        (FEW, 0.0625, "one is enough", "prompt 5", "No gap: one is enough. Measured."),
    ],
)
def test_the_verdict_on_a_policy(gain, p, enough, rival, sentence):
    verdict = policy_verdict(gain, p, "prompt", "the prompt", "Measured.", enough, rival, " More.")
    assert (verdict.label, verdict.sentence) == (sentence.split(":")[0].lower(), sentence)


@pytest.mark.parametrize(
    ("gain", "p", "sentence"),
    [
        (UP, 0.04, f"Better: Dice +0.03 [+0.01, +0.05] on 8 groups, p 0.040; a {RARE}."),
        (DOWN, 0.04, "Worse: Dice -0.03 [-0.05, -0.01] on 8 groups, p 0.040."),
        (Estimate(-1, None, None, 1), 1.0, "Cannot tell: Dice -1.00 on 1 groups, p 1.000."),
    ],
)
def test_the_verdict_on_a_difference(gain, p, sentence):
    assert gain_verdict("dice", gain, p, "Dice").sentence == sentence


def test_words_of_p_values():
    assert [word("dice", change, p) for change, p in ((1, 0.05), (-1, 0.05), (1, 0.051), (0, 0.01))] == [
        *("better", "worse", "cannot tell", "cannot tell")
    ]
    for metric in ("hd95", "betti0", "betti1", "ece"):
        assert [word(metric, change, 0.01) for change in (1, -1)] == ["worse", "better"], metric
    assert [p_words(p) for p in (0.0004, 0.04567, None)] == ["< 0.001", "0.046", ""]


def test_intervals_stay_within_what_a_metric_can_be():
    groups, rng = [str(number) for number in range(8)], np.random.default_rng(0)
    near_one = np.append(np.ones(7), 0.2)
    far = np.append(np.zeros(7), 300.0)
    of = make_row(
        "a", {"dice": near_one, "hd95": far, "ece": rng.random(8) / 10}, {"b": {"dice": near_one - 1}}, groups
    )
    assert of.estimates["dice"].high == 1
    assert of.estimates["hd95"].low == 0
    assert of.differences["b"]["dice"].high <= 1
    every = [*of.estimates.values(), *of.differences["b"].values()]
    assert all(one.low <= one.mean <= one.high for one in every)


def test_one_table_in_all_formats(capsys):
    rows = rows_of([0.5] * 6, [0.5, 0.6, 0.7, 0.5, 0.6, 0.7], [0.75] * 6)
    table = table_of(
        [Row(f"{row.name} & <b>", row.values, row.estimates, row.differences) for row in rows],
        [
            ("row", lambda row: row.name),
            *metric_columns(["dice"], lambda row: row),
            ("gain", lambda row: round(row.differences["fixed"]["dice"].mean, 3) or None),
        ],
    )
    assert table.csv().splitlines() == [
        "row,Dice,gain",
        'fixed & <b>,"0.50 [0.50, 0.50]",',
        'PPO & <b>,"0.60 [0.48, 0.72]",0.1',
        'oracle & <b>,"0.75 [0.75, 0.75]",0.25',
    ]
    assert table.html() == (
        '<div class="scroll"><table><thead><tr><th>row</th><th>Dice</th><th>gain</th></tr></thead><tbody>\n'
        "<tr><td>fixed &amp; &lt;b&gt;</td><td>0.50 <span>[0.50, 0.50]</span></td><td>None</td></tr>\n"
        "<tr><td>PPO &amp; &lt;b&gt;</td><td>0.60 <span>[0.48, 0.72]</span></td><td>0.1</td></tr>\n"
        "<tr><td>oracle &amp; &lt;b&gt;</td><td>0.75 <span>[0.75, 0.75]</span></td><td>0.25</td></tr>\n"
        "</tbody></table></div>"
    )
    assert table.tex().splitlines()[:5] == [
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"row & Dice & gain \\",
        r"\midrule",
        r"fixed \& $<$b> & 0.50 [0.50, 0.50] & None \\",
    ]
    table.show("title")
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "title" in shown
    assert "oracle & <b> 0.75 [0.75, 0.75] 0.25" in shown
