"""The section on unlabelled images: numbers by hand, what is said, and what the page shows."""

from dataclasses import asdict

import numpy as np
import pytest

from rl_reward_network.report.statistics import mean_interval
from rl_reward_network.report.unlabelled import (
    GOLD,
    LEFT_OUT,
    TEST,
    USED,
    JudgedImages,
    judged_images,
    judged_row,
    less_sure_note,
    section_html,
    unlabelled_section,
)
from rl_reward_network.rewards.learned import ForegroundMaps, predict_mask_quality
from rl_reward_network.rewards.metrics import dice
from tests.conftest import tube_image
from tests.models.test_reward_network import network_of

FACTS = {
    "looked_at": 8,
    "left_out": 2,
    "largest_spread": 0.05,
    "smallest_score": 0.0,
    "validation_spread": 0.01,
    "unlabelled_spread": 0.02,
    "validation_score": 0.9,
    "unlabelled_score": 0.8,
    "validation_images": 6,
}


def judged(count: int, own_spread: float, seed: int, labelled: bool = True) -> JudgedImages:
    rng = np.random.default_rng(seed)
    scores, spreads, dices = (rng.random((count, 2)) for _ in range(3))
    groups = tuple(f"{seed}-{number // 2}" for number in range(count))
    own = rng.random(count), np.full(count, own_spread)
    return JudgedImages(groups, scores, spreads, *own, dices if labelled else np.full((count, 2), np.nan))


def both_sure_and_unsure(labelled: bool) -> JudgedImages:
    parts = judged(6, 0.02, 1, labelled), judged(4, 0.09, 2, labelled)
    groups = parts[0].groups + parts[1].groups
    names = ("scores", "spreads", "own_scores", "own_spreads", "dices")
    return JudgedImages(groups, *(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def test_images_below_the_limit_of_the_score_were_left_out_too() -> None:
    unlabelled = both_sure_and_unsure(labelled=False)
    rows = unlabelled_section(judged(6, 0.01, 0), unlabelled, FACTS | {"smallest_score": 0.5}).rows
    joins = (unlabelled.own_scores >= 0.5) & (unlabelled.own_spreads <= 0.05)
    assert {row.name: row.images for row in rows[1:]} == {USED: joins.sum(), LEFT_OUT: (~joins).sum()}
    assert 0 < joins.sum() < 6


def test_a_row_holds_what_the_network_and_the_truth_say_of_both_masks() -> None:
    network = network_of()
    image, truth = tube_image(48, 0)
    maps = ForegroundMaps(network)
    before, after = truth.copy(), np.roll(truth, 3, axis=1)
    rows = [
        judged_row(maps, "a", image, (before, after), truth),
        judged_row(maps, "b", image, (None, after), None),
    ]
    result = judged_images(rows)
    quality = predict_mask_quality(network, image, np.stack([before, after]).astype(np.float32))
    np.testing.assert_allclose(result.scores[0], quality["score"], atol=1e-4)
    np.testing.assert_allclose(result.spreads[0], quality["spread"], atol=1e-4)
    np.testing.assert_allclose(result.dices[0], [1, dice(after[None], truth[None])[0]])
    assert result.scores[1, 0] == 0
    assert np.isnan(result.dices[1]).all()
    assert result.groups == ("a", "b")


def test_means_over_patients_by_part() -> None:
    tests, unlabelled = judged(6, 0.01, 0), both_sure_and_unsure(labelled=True)
    section = unlabelled_section(tests, unlabelled, FACTS, seed=3)
    assert [(row.name, row.images, row.labelled) for row in section.rows] == [
        (TEST, 6, 6),
        (USED, 6, 6),
        (LEFT_OUT, 4, 4),
    ]
    used = section.rows[1]
    first = unlabelled.pick(unlabelled.own_spreads <= 0.05)
    gain = first.dices[:, 1] - first.dices[:, 0]
    assert used.change("dice")[2] == mean_interval(gain, first.groups, 3, bounds=(-1, 1))
    assert used.change("score")[0] == mean_interval(first.scores[:, 0], first.groups, 3, bounds=(0, 1))
    assert used.change("spread")[1] == mean_interval(first.spreads[:, 1], first.groups, 3, bounds=(0, 1))
    assert used.own_spread == 0.02
    assert section.notes[0].startswith("2 of 8 unlabelled images were left out of training")
    patients = len(set(tests.groups))
    assert section.notes[-3].startswith(f"{patients} patients of the {TEST}, fewer than")
    assert section.summary["gold"] == GOLD == "labels read by the evaluation only"
    saved = section.summary["rows"][1]
    assert saved["dice"] == [asdict(estimate) for estimate in used.change("dice")]
    assert list(saved) == ["name", "images", "score", "spread", "dice", "labelled", "own_score", "own_spread"]
    assert unlabelled_section(tests, both_sure_and_unsure(labelled=False), FACTS).summary["rows"][1]["dice"] is None


@pytest.mark.parametrize(("spread", "notes"), [(0.01, 0), (0.02, 0), (0.021, 1)])
def test_twice_the_spread_is_noted(spread: float, notes: int) -> None:
    found = less_sure_note(judged(4, 0.01, 0), judged(4, spread, 1))
    assert len(found) == notes
    assert all("less sure" in note and "2.1 times" in note for note in found)


def test_gold_is_shown_only_where_unlabelled_images_have_masks() -> None:
    tests = judged(6, 0.01, 0)
    with_gold = "".join(section_html(unlabelled_section(tests, both_sure_and_unsure(True), FACTS)))
    without = "".join(section_html(unlabelled_section(tests, both_sure_and_unsure(False), FACTS)))
    assert GOLD in with_gold
    assert GOLD not in without
    assert "no Dice is known" in without
    assert "<h2>Unlabelled images</h2>" in without
    assert section_html(None) == []
