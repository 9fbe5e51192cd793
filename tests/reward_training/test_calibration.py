from dataclasses import replace

import numpy as np
import pytest
import torch

from rl_reward_network.models.reward_network import DiceInterval, LevelCurve, RewardNetwork, RewardNetworkConfig
from rl_reward_network.reward_training import calibration
from rl_reward_network.reward_training.calibration import (
    CLIMBERS,
    KS,
    STEP_SIZES,
    QualityTable,
    calibrated,
    choose_ascent_step,
    choose_k,
    dice_after_ascent,
    fit_interval,
    fit_intervals,
    fit_levels,
    given_interval,
    levelled,
    measure,
    reconfigured,
)
from rl_reward_network.reward_training.masks import (
    DAMAGED,
    OWN,
    RIDGE,
    SEGMENTER,
    SHIFTED,
    SOURCES,
    RewardExample,
    damage,
    true_dice,
)
from rl_reward_network.rewards.learned import ImageScorer

SMALL = RewardNetworkConfig(channels=(8,), packing=2, members=2, caution=3.0)
GROUPS = ["p0", "p1", "p2"]  # patients of `examples`


class BrightnessNetwork(RewardNetwork):
    """A network that finds the bright object with low confidence; its two members differ a little."""

    def foreground_probs(self, image):
        bright = (image.mean(dim=1, keepdim=True) > 0.5).float()
        return torch.stack([0.1 + 0.8 * bright, 0.1 + 0.7 * bright])


@pytest.fixture
def network(monkeypatch):
    monkeypatch.setattr(calibration, "RewardNetwork", BrightnessNetwork)
    return BrightnessNetwork(SMALL)


@pytest.fixture
def examples():
    rng, examples = np.random.default_rng(0), []
    for n in range(3):
        truth = np.zeros((40, 48), dtype=bool)
        truth[8 + n : 20 + n, 5:40] = True
        image = np.repeat((40 + 180 * truth[..., None]).astype(np.uint8), 3, axis=2)
        examples.append(RewardExample(image, truth, np.stack([damage(truth, rng) for _ in range(3)])))
    return examples


def test_k_is_chosen_for_the_weights_of_the_score_at_the_calibrated_level(network, examples, monkeypatch):
    calls = []
    monkeypatch.setattr(calibration, "choose_k", lambda *args: calls.append(args) or 1.0)
    config = replace(SMALL, score_weights=(0.0, 0.0, 0.0, 1.0))
    result = calibrated(reconfigured(network, config), examples, GROUPS, 2, [0])
    scores, true, _ = calls[0]
    table = measure(result, examples, 2, [0])[0]
    table = table.where(table.sources != OWN)
    np.testing.assert_allclose(scores, table.predicted[..., 3], atol=1e-5)
    np.testing.assert_allclose(true, table.true[:, 3])


def test_k_is_the_largest_with_the_lowest_regret():
    true, images = np.array([0.9, 0.5, 0.8, 0.4]), np.array([0, 0, 1, 1])
    sure = np.array([[0.7, 0.7], [0.6, 0.6], [0.7, 0.7], [0.6, 0.6]])
    assert choose_k(sure, true, images) == max(KS)
    # the better mask has the higher mean but a large spread: a large k prefers the worse one
    doubt = np.array([[0.6, 0.9], [0.6, 0.6], [0.6, 0.9], [0.6, 0.6]])
    assert choose_k(doubt, true, images) == 0.5
    # the worse mask has the higher mean but a large spread: only a large k prefers the better one
    fooled = np.array([[0.6, 0.6], [0.55, 0.95], [0.6, 0.6], [0.55, 0.95]])
    assert choose_k(fooled, true, images) >= 1


def true_and_predicted(count, rng, masks=20):
    """Numbers of masks whose level is much too low, as on real images: members agree on half of the Dice."""
    true = rng.uniform(0, 1, (count * masks, 4))
    member = np.clip(0.55 * true**1.3 + rng.normal(0, 0.02, true.shape), 0, 1)
    predicted = np.clip(member[:, None] + rng.normal(0, 0.01, (len(true), 3, 4)), 0, 1)
    sources = np.where(rng.random(len(true)) < 0.2, SEGMENTER, DAMAGED)
    return QualityTable(predicted, true, np.repeat(np.arange(count), masks), sources)


def errors(table):
    return np.abs(table.predicted.mean(axis=1) - table.true).mean(axis=0)


@pytest.mark.parametrize("images", [4, 12, 48])
def test_the_level_fitted_on_few_images_holds_on_others_and_keeps_the_order(images):
    rng = np.random.default_rng(images)
    val, test = true_and_predicted(images, rng), true_and_predicted(200, rng)
    level = fit_levels(val)
    corrected = test._replace(predicted=levelled(level, test.predicted))
    mean = np.abs(test.true - test.true.mean(axis=0)).mean(axis=0)
    assert (errors(test) > mean).all(), "worse than a constant before"
    assert (errors(corrected) < 0.06).all(), "noise of 0.02 on half of the range leaves about 0.04"
    order = np.argsort(test.predicted[:, 0, 0])
    assert (np.diff(corrected.predicted[order, 0, 0]) >= 0).all()


def test_a_network_at_the_right_level_stays_there():
    rng = np.random.default_rng(0)
    table = true_and_predicted(40, rng)
    table = table._replace(predicted=np.clip(table.true[:, None] + rng.normal(0, 0.01, (len(table.true), 3, 4)), 0, 1))
    after = table._replace(predicted=levelled(fit_levels(table), table.predicted))
    np.testing.assert_allclose(after.predicted, table.predicted, atol=0.01)


def test_the_level_is_fitted_to_the_mean_that_is_used_also_where_members_disagree():
    """The mean of the curve at two numbers is not the curve at their mean."""
    rng = np.random.default_rng(0)
    true = rng.uniform(0, 1, 400)
    apart = rng.choice([-0.3, 0.3], 400)
    predicted = np.clip(true[:, None] ** 2 + np.stack([apart, -apart], axis=1), 0, 1)[..., None].repeat(4, axis=2)
    table = QualityTable(predicted, true[:, None].repeat(4, axis=1), np.arange(400), np.full(400, SEGMENTER))

    def error(level):
        return float(np.abs(levelled([level] * 4, predicted)[..., 0].mean(axis=1) - true).mean())

    grid = [LevelCurve(steepness, midpoint) for steepness in (0.05, 1, 2, 4, 8) for midpoint in (0, 0.25, 0.5, 0.75, 1)]
    assert error(fit_levels(table)[0]) <= min(map(error, grid)) + 1e-4


def test_a_source_of_few_masks_weighs_as_much_as_one_of_many():
    predicted, true = np.full((100, 1, 4), 0.5), np.full((100, 4), 0.7)
    predicted[:10], true[:10] = 0.25, 0.1
    sources = np.array([SEGMENTER] * 10 + [DAMAGED] * 90)
    table = QualityTable(predicted, true, np.arange(100), sources)
    after = levelled(fit_levels(table), predicted)
    np.testing.assert_allclose(after[[0, -1], 0, 0], [0.1, 0.7], atol=0.01)


@pytest.mark.parametrize("noise", [0.01, 0.03])
def test_the_intervals_of_each_source_hold_90_percent_of_other_images(noise):
    rng = np.random.default_rng(1)

    def table(count):
        dice = rng.uniform(0.2, 0.8, (count, 1)) + rng.normal(0, 0.01, (count, 3))
        sources = np.repeat(SOURCES, count // 5)
        wide = np.where(sources == DAMAGED, 2, 1)  # twice the error, and masks are better than predicted
        true = dice.mean(axis=1) + wide * (noise * rng.standard_exponential(count))
        return QualityTable(np.repeat(dice[..., None], 4, axis=2), np.tile(true[:, None], 4), np.arange(count), sources)

    intervals, test = fit_intervals(table(5000), [f"p{index}" for index in range(5000)]), table(10000)
    assert set(intervals) == set(SOURCES)
    for source, interval in intervals.items():
        part = test.where(test.sources == source)
        low, high = interval.around(part.predicted[..., 0]).T
        inside = (low <= part.true[:, 0]) & (part.true[:, 0] <= high)
        assert inside.mean() == pytest.approx(0.9, abs=0.02)
        assert interval.half_width == pytest.approx(np.median(high - low) / 2, rel=0.05)
        assert interval.refusal is None
    assert intervals[DAMAGED].half_width > 1.5 * intervals[SHIFTED].half_width


def test_a_network_that_knows_nothing_gives_no_interval():
    rng = np.random.default_rng(2)
    dice, true = rng.uniform(0.3, 0.7, (2000, 3)), rng.random(2000)
    patients = np.arange(2000) % 48
    interval = fit_interval(dice, true, patients)
    assert "half width" in interval.refusal
    near = dice.mean(axis=1) + rng.normal(0, 0.01, 2000)
    assert fit_interval(dice, near, patients).refusal is None


def test_a_mask_that_agrees_with_the_networks_own_gets_the_wider_interval_of_both(network, examples):
    scorer, truth = ImageScorer(network, examples[0].image), examples[0].truth
    far, own = np.roll(truth, 20, axis=1), scorer.own_mask
    good, poor = DiceInterval(-1.0, 1.0, 0.03, 40), DiceInterval(-3.0, 0.5, 0.05, 40)

    def given(mask, **intervals):
        return given_interval(replace(SMALL, intervals=intervals), scorer, mask)

    both = {SEGMENTER: good, OWN: poor}
    of_own, of_far = (scorer.quality(mask[None].astype(np.float32))["members"][..., 0] for mask in (own, far))
    assert given(far, **both) == pytest.approx(good.around(of_far)[0])
    assert given(own, **both) == pytest.approx((poor.around(of_own)[0, 0], good.around(of_own)[0, 1]))
    assert "none was fitted" in given(own, **{SEGMENTER: good}), "of networks before 1.0"
    assert "none was fitted" in given(far, **{OWN: good})
    assert "shares its errors: the half width would be" in given(own, **{SEGMENTER: good, OWN: replace(poor, low=-9.0)})
    assert "got 3" in given(far, **{SEGMENTER: replace(good, patients=3)})


def test_every_mask_of_every_image_is_measured_and_each_image_once(network, examples, monkeypatch):
    passes = []
    forward = BrightnessNetwork.foreground_probs
    monkeypatch.setattr(BrightnessNetwork, "foreground_probs", lambda *args: passes.append(1) or forward(*args))
    table, climbs, seen = measure(network, examples, 4, [0])
    assert (table.predicted.shape, table.true.shape) == ((54, 2, 4), (54, 4))
    assert np.array_equal(table.image_ids, np.repeat([0, 1, 2], 18))
    assert table.sources.tolist() == ([SEGMENTER] * 3 + [DAMAGED] * 4 + [SHIFTED] * 4 + [RIDGE] * 6 + [OWN]) * 3
    np.testing.assert_allclose(table.true[:3, 0], true_dice(examples[0].masks, examples[0].truth))
    assert [len(masks) for *_, masks in climbs] == [CLIMBERS] * 3
    assert [image is one.image for (image, _), one in zip(seen, examples, strict=True)] == [True] * 3
    assert len(passes) == 3
    passes.clear()
    calibrated(network, examples, GROUPS, 4, [0])
    assert len(passes) == 3 + 2, "all that is fitted shares the maps; one negative turns the rule off"


def test_the_step_size_that_improves_most_masks_and_then_gains_most_is_chosen(network, examples, monkeypatch):
    _, climbs, _ = measure(network, examples, 3, [0])
    assert choose_ascent_step(network, climbs) == 0.4
    mask = np.zeros((1, 40, 48), dtype=bool)
    mask[0, 5:15, 10:30] = True
    scorer = ImageScorer(network, examples[0].image)
    assert dice_after_ascent(scorer, examples[0].truth, mask, 0.4)[0] > 0.95
    gains = {0.05: [1, 1, -9], 0.1: [3, 3, 3], 0.2: [2, 2, 2], 0.4: [9, 9, -1]}
    assert set(gains) == set(STEP_SIZES)
    after = lambda _, truth, masks, size: true_dice(masks, truth) + np.array(gains[size])  # noqa: E731
    monkeypatch.setattr(calibration, "dice_after_ascent", after)
    assert choose_ascent_step(network, climbs) == 0.1


def test_calibrated_ignores_earlier_values_and_keeps_the_weights(network, examples):
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    first = calibrated(network, examples, GROUPS, 4, [0])
    again = calibrated(reconfigured(network, replace(first.config, caution=0.0)), examples, GROUPS, 4, [0])
    assert first.config == again.config
    assert first.config.caution == max(KS), "members agree on the order, so every k has the same regret"
    assert all(torch.equal(before[name], tensor) for name, tensor in first.state_dict().items())
    assert tuple(first.config.intervals) == SOURCES
    of_two = calibrated(network, examples, ["a", "b", "a"], 2, [0]).config.intervals
    assert all("got 2" in interval.refusal for interval in of_two.values()), "patients, not images"


def test_the_calibrated_network_predicts_the_dice_of_other_masks(network, examples):
    result = calibrated(network, examples[:2], GROUPS[:2], 8, [0])
    other, truth = examples[2], examples[2].truth
    masks = np.stack([damage(truth, np.random.default_rng([9, n])) for n in range(20)])
    true, mean = true_dice(masks, truth), 0.5
    raw, level = (
        np.abs(ImageScorer(n, other.image).quality(masks.astype(np.float32))["dice"] - true).mean()
        for n in (network, result)
    )
    assert level < 0.75 * raw
    assert level < np.abs(mean - true).mean()


@pytest.mark.parametrize("count", [9, 12, 24, 60])
def test_a_mask_of_a_new_patient_lies_inside_in_90_of_100_cases(count):
    """Masks of a patient are alike, and some patients have many: a quantile over masks covers far fewer."""
    rng, inside, naive = np.random.default_rng(count), [], []
    for _ in range(400):
        patients = np.repeat(np.arange(count + 1), rng.integers(1, 30, count + 1))
        noise = 0.05 * rng.standard_normal(count + 1)[patients] + 0.01 * rng.standard_normal(len(patients))
        dice = np.full((len(patients), 2), 0.5)
        true, known = 0.5 + noise, patients < count
        interval = fit_interval(dice[known], true[known], patients[known])
        assert interval.refusal is None or "half width" in interval.refusal
        low, high = interval.around(dice[~known][:1])[0]
        inside.append(low <= true[~known][0] <= high)
        naive.append(np.subtract(*np.quantile(true[known], (0.95, 0.05))) >= 2 * abs(true[~known][0] - 0.5))
    assert 0.86 <= np.mean(inside) <= 0.97
    if count < 20:
        assert np.mean(naive) < np.mean(inside)
