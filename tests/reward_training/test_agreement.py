from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from rl_reward_network.cli.reward import own_dice_line
from rl_reward_network.data.ridges import LabelCheck
from rl_reward_network.models.reward_network import DiceInterval, RewardNetwork, RewardNetworkConfig
from rl_reward_network.reward_training import agreement as reward_agreement
from rl_reward_network.reward_training import calibration
from rl_reward_network.reward_training.agreement import (
    CAUTIOUS,
    MEAN,
    MEMBER,
    NETWORK,
    POOLED,
    SCALE,
    SOURCE_MEAN,
    SheetRow,
    _ascent,
    interval_row,
    measure_agreement,
    predicted_title,
    sheet_rows,
    write_sheet,
)
from rl_reward_network.reward_training.calibration import given_interval
from rl_reward_network.reward_training.masks import (
    DAMAGED,
    OWN,
    RIDGE,
    SEGMENTER,
    SHIFTED,
    SOURCES,
    RewardExample,
    true_dice,
)
from rl_reward_network.rewards.learned import ImageScorer


class KnowsTheTruth(RewardNetwork):
    """Sees the object exactly, because it is bright; the second member is a little less sure."""

    def foreground_probs(self, image):
        bright = (image.mean(dim=1, keepdim=True) > 0.5).float()
        return torch.stack([bright, 0.99 * bright])


INTERVALS = {source: DiceInterval(-0.2, 0.3, 0.01, 40) for source in SOURCES if source != RIDGE}
NETWORK_CONFIG = RewardNetworkConfig(channels=(8,), packing=2, members=2, ascent_step=0.4, intervals=INTERVALS)


def example(seed):
    truth = np.zeros((64, 80), dtype=bool)
    truth[20 + seed : 34 + seed, 10:70] = True
    image = np.repeat((40 + 180 * truth[..., None]).astype(np.uint8), 3, axis=2)
    return RewardExample(image, truth, np.stack([truth, np.roll(truth, 9, axis=0)]), f"p{seed}")


def measured(examples, masks=2, config=NETWORK_CONFIG):
    return measure_agreement(
        KnowsTheTruth(config), examples, lambda _, stack: np.linspace(0, 1, len(stack)), 0.6, masks, [0]
    )


@pytest.fixture(scope="module")
def result():
    return measured([example(seed) for seed in range(4)], 5)


def test_every_source_has_every_row(result):
    assert tuple(result["tables"]) == SOURCES == (SEGMENTER, DAMAGED, SHIFTED, RIDGE, OWN)
    assert result["masks"] == {SEGMENTER: 8, DAMAGED: 20, SHIFTED: 20, RIDGE: 24, OWN: 4}
    for rows in result["tables"].values():
        assert tuple(rows) == (NETWORK, MEMBER, CAUTIOUS, POOLED, MEAN, SOURCE_MEAN)
        assert rows[MEAN]["pearson"] is rows[SOURCE_MEAN]["pearson"] is None


def test_a_network_that_knows_the_truth_is_found_to_know_it(result):
    for source, rows in result["tables"].items():
        assert rows[NETWORK]["mae"] < 0.01
        assert rows[MEMBER]["mae"] < 0.005
        assert source == OWN or rows[NETWORK]["mae"] < min(rows[name]["mae"] for name in (POOLED, MEAN, SOURCE_MEAN))
    assert result["own_dice"] == 1
    assert result["without_foreground"] == 0
    assert (result["own_above_truth"], result["outside"]) == (0, 0), "its own segmentation is the truth"
    assert result["predicted_own"] == result["predicted_truth"] > 0.99
    assert result["ascent"]["raised"] == 1
    assert result["ascent"]["dice_after"] > 0.99 > result["ascent"]["dice_before"]


class SeesMore(RewardNetwork):
    """Sure of an object that is larger than it is: it prefers its own segmentation to the truth."""

    def foreground_probs(self, image):
        wide = F.max_pool2d((image.mean(dim=1, keepdim=True) > 0.5).float(), 15, 1, 7)
        return torch.stack([wide, 0.97 * wide])


def test_that_a_network_prefers_its_own_mask_to_the_truth_is_measured_and_calibrated():
    thick = [example(0)._replace(group_id=f"p{n}") for n in range(12)]
    for n, one in enumerate(thick):
        truth = np.zeros_like(one.truth)
        truth[20 : 32 + 3 * (n % 4), 10:70] = True
        image = np.repeat((40 + 180 * truth[..., None]).astype(np.uint8), 3, axis=2)
        thick[n] = one._replace(image=image, truth=truth, masks=np.stack([np.roll(truth, 25, axis=0)]))
    known, new = [one for n, one in enumerate(thick) if n not in (5, 6)], [thick[5], thick[6]]
    network = SeesMore(replace(NETWORK_CONFIG, intervals={}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "RewardNetwork", SeesMore)
        network = calibration.calibrated(network, known, [one.group_id for one in known], 2, [0])
    found = measure_agreement(network, new, lambda _, stack: np.zeros(len(stack)), 0.6, 2, [0])
    assert found["own_above_truth"] == 1
    assert found["predicted_own"] > found["predicted_truth"] + 0.1
    assert found["own_dice"] < 0.75, "the mask that it likes best is not good"
    assert found["intervals"][OWN]["coverage"] == 1
    scorer = ImageScorer(network, new[0].image)
    low, high = given_interval(network.config, scorer, scorer.own_mask, OWN)
    assert low <= true_dice(scorer.own_mask[None], new[0].truth)[0] <= high
    assert high < scorer.quality(scorer.own_mask[None].astype(np.float32))["dice"][0], "it is told that it is too sure"


def test_the_reward_is_compared_with_the_score_that_it_predicts():
    config = replace(NETWORK_CONFIG, intervals={}, score_weights=(0.0, 0.0, 1.0, 0.0))
    wide = [example(seed)._replace(masks=np.ones((1, 64, 80), dtype=bool)) for seed in range(2)]
    assert measured(wide, config=config)["tables"][SEGMENTER][CAUTIOUS]["mae"] < 0.01
    share = np.mean([e.truth.mean() for e in wide])  # the precision of a mask that covers everything; its Dice is 0.3
    assert 0.1 < share < 0.2


def test_masks_that_were_right_cannot_be_raised_and_do_not_count():
    assert _ascent(np.array([1.0, 0.5, 0.5]), np.array([1.0, 0.75, 0.25])) == {
        "raised": 0.5,
        "dice_before": 0.5,
        "dice_after": 0.5,
    }
    assert _ascent(np.ones(2), np.ones(2))["raised"] is None


def test_intervals_are_measured_by_source_and_none_is_given_for_a_source_that_was_not_calibrated(result):
    for source in INTERVALS:
        row = result["intervals"][source]
        assert row["refusal"] is None
        assert row["coverage"] == 1
        assert 0 < row["half_width"] < 0.01
    refused = result["intervals"][RIDGE]
    assert (refused["coverage"], refused["half_width"]) == (None, None)
    assert "not fitted" in refused["refusal"]


@pytest.mark.parametrize(("with_object", "own"), [(0, None), (1, 1.0)])
def test_images_without_foreground_do_not_count_for_the_networks_own_dice(with_object, own):
    """Nothing is found where nothing is: no praise for a segmenter."""
    dark = np.full((64, 80, 3), 40, np.uint8)
    empty = [RewardExample(dark, np.zeros((64, 80), bool), np.zeros((2, 64, 80), bool), f"e{n}") for n in range(2)]
    examples = [*empty, *(example(seed) for seed in range(with_object))]
    found = measured(examples)
    assert (found["own_dice"], found["without_foreground"]) == (own, 2)
    line = own_dice_line(found)
    assert ("1.000 (2 with an empty true mask are left out)" in line) == bool(with_object)
    assert ("no true mask of the 2 test images has foreground" in line) == (not with_object)


def test_coverage_and_half_width_of_intervals_in_numbers():
    dice, true = np.array([[0.5, 0.5], [0.9, 0.9], [0.01, 0.01], [0.5, 0.5]]), np.array([0.46, 0.99, 0.0, 0.7])
    row = interval_row(DiceInterval(-2.0, 4.0, 0.09, 30), dice, true)  # -0.06 to +0.12, limited to [0, 1]
    assert row == {"refusal": None, "coverage": 0.75, "half_width": pytest.approx(np.median([0.09, 0.08, 0.065, 0.09]))}
    for interval, why in ((DiceInterval(-2.0, 4.0, 0.09, 8), "got 8"), (DiceInterval(-2.0, 4.0, 0.21, 30), "0.21")):
        row = interval_row(interval, dice, true)
        assert why in row["refusal"]
        assert row["coverage"] is None


def test_labels_are_checked_on_the_test_images(monkeypatch):
    seen, examples = [], [example(n) for n in range(3)]
    monkeypatch.setattr(reward_agreement, "check_labels", lambda pairs: seen.extend(pairs) or LabelCheck(0.9, 3))
    found = measured(examples)["labels"]
    assert (found["unlabelled_ratio"], found["images"]) == (0.9, 3)
    assert "0.9 times" in found["note"]
    assert all(
        image is given.image and truth is given.truth for (image, truth), given in zip(seen, examples, strict=True)
    )


def test_the_sheet_shows_each_source_in_turn_with_its_true_numbers():
    examples = [example(seed) for seed in range(6)]
    rows = sheet_rows(KnowsTheTruth(NETWORK_CONFIG), examples, [0])
    assert [row.source for row in rows] == [*SOURCES, SEGMENTER]
    for row, shown in zip(rows, examples, strict=True):
        assert np.array_equal(row.true_error, row.mask ^ shown.truth)
        assert row.true_dice == pytest.approx(true_dice(row.mask[None], shown.truth)[0])
        np.testing.assert_allclose(row.predicted_error, row.true_error, atol=0.01)
    assert np.array_equal(rows[5].mask, examples[5].masks[1]), "the second mask of that source"
    assert "none was fitted" in rows[3].interval, "the ridge filter's has none"
    for row in rows[:3]:
        low, high = row.interval
        assert 0 <= low < row.predicted_dice < high <= 1


def test_a_sheet_is_a_picture_with_a_line_for_each_mask(tmp_path):
    def row(side=30):
        rng = np.random.default_rng(0)
        image, mask = rng.integers(0, 256, (side, side, 3), dtype=np.uint8), rng.random((side, side)) > 0.5
        return SheetRow(image, mask, rng.random((side, side)), ~mask, "Sa2VA", 0.7, (0.6, 0.8), 0.65)

    for count in (1, 3):
        write_sheet(tmp_path / f"{count}.png", [row(), row(50), row()][:count])
    one, three = (Image.open(tmp_path / f"{count}.png") for count in (1, 3))
    assert one.width == three.width
    scale = SCALE * 90  # pixels of the colour bar
    assert three.height - scale == pytest.approx(3 * (one.height - scale), abs=3)
    assert len(np.unique(np.asarray(three.convert("L")))) > 50
    assert predicted_title(row()) == "predicted Dice 0.70, [0.60, 0.80]"
    assert predicted_title(row()._replace(interval="why")) == "predicted Dice 0.70, no interval"
    assert predicted_title(row()._replace(predicted_dice=np.nan)) == "outside the network's domain"
