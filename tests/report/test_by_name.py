"""The section on classes that are asked for by name: every number by hand."""

import numpy as np
import pytest

from rl_reward_network.report import statistics
from rl_reward_network.report.by_name import ALL_CLASSES, Answers, Questions, mean_of_classes, names_section
from rl_reward_network.report.statistics import max_t, mean_interval

NAMES = ["left", "left", "left", "right", "right", "right"]
QUESTIONS = Questions(NAMES, ["a", "a", "b", "a", "b", "c"], np.array([True, True, True, True, False, False]))
DICE = np.array([0.2, 0.4, 0.9, 0.6, 1.0, 0.0])
EMPTY = np.array([True, False, False, False, True, False])


def test_classes_weigh_alike_and_groups_within_a_class():
    section = names_section(QUESTIONS, {"before": Answers(DICE * 0, ~EMPTY), "after": Answers(DICE, EMPTY)})
    left, right, every = section.rows
    assert (left.name, left.images, left.absent, left.recognised) == ("left", 3, 0, (None, None))
    assert left.dice[1].mean == pytest.approx((0.3 + 0.9) / 2)
    assert left.missed[1].mean == pytest.approx((0.5 + 0) / 2)
    assert (right.images, right.absent) == (1, 2)
    assert [one.mean for one in right.recognised] == pytest.approx([0.5, 0.5])
    assert every.name == ALL_CLASSES
    assert [one.mean for one in every.dice] == pytest.approx([0, (0.6 + 0.6) / 2])


def test_one_class_has_the_interval_of_all_other_reports_and_classes_are_over_groups():
    rng = np.random.default_rng(0)
    values, groups = rng.random(60), [str(number % 30) for number in range(60)]
    assert mean_of_classes(values, ["v"] * 60, groups) == mean_interval(values, groups)
    groups, names = [str(number % 50) for number in range(100)], ["left"] * 50 + ["right"] * 50
    of_group = np.tile(rng.random(50), 2)  # both classes of a group are alike: pairs tell no more than one of them
    both, one = mean_of_classes(of_group, names, groups), mean_interval(of_group[:50], groups[:50])
    assert (both.mean, both.low) == (pytest.approx(one.mean), pytest.approx(one.low, abs=0.01))
    assert mean_of_classes(np.array([0.2, 0.4]), ["left", "right"], ["a", "a"]).low is None


def test_means_of_classes_cover_and_stay_within_bounds(monkeypatch):
    """Each group has one to three of three classes; Dice near 1, and answers that are right in nine of ten."""
    monkeypatch.setattr(statistics, "RESAMPLES", 200)
    rng, classes = np.random.default_rng(2), ["left", "right", "middle"]
    covered = []
    for _ in range(200):
        asked = [(str(group), name) for group in range(10) for name in rng.permutation(classes)[: rng.integers(1, 4)]]
        groups, names = zip(*asked, strict=True)
        dice = mean_of_classes(rng.beta(9.1, 0.9, len(asked)), names, groups)
        share = mean_of_classes((rng.random(len(asked)) < 0.9).astype(float), names, groups)
        assert all(0 <= one.low <= one.mean <= one.high <= 1 for one in (dice, share))
        covered.append((dice.low <= 0.91 <= dice.high, share.low <= 0.9 <= share.high))
    assert (np.mean(covered, axis=0) >= (0.9, 0.93)).all()


def test_words_of_classes_are_adjusted_for_all_classes():
    """Two classes of 20 groups each; one gains surely, the other by chance."""
    rng, groups = np.random.default_rng(0), [str(group) for group in range(20)] * 2
    names, before = ["left"] * 20 + ["right"] * 20, rng.uniform(0.4, 0.6, 40)
    gain = np.concatenate([rng.normal(0.1, 0.02, 20), rng.normal(0, 0.02, 20)])
    models = {"before": Answers(before, before < 0), "after": Answers(before + gain, before < 0)}
    section = names_section(Questions(names, groups, np.ones(40, dtype=bool)), models)
    assert [row.verdict for row in section.rows] == ["better", "cannot tell", ""]
    alone = max_t(gain[None, 20:], groups[:20]).p[0]
    assert section.rows[1].p == pytest.approx(alone, abs=0.01), "the step down leaves one class"
    assert section.tables()["classes that are there"].head[-1] == "after against before"


def test_tables_show_absences_apart():
    found, absent = names_section(QUESTIONS, {"after": Answers(DICE, EMPTY)}).tables(intervals=False).values()
    assert found.head == ("class", "images", "Dice, after", "missed, after")
    assert found.lines[0] == ("left", 3, "0.60", "0.25")
    assert absent.lines == (("right", 2, "0.50"), (ALL_CLASSES, 2, "0.50"))
