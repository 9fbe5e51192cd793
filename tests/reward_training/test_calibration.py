from dataclasses import replace

import numpy as np
import pytest
import torch

from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig
from rl_reward_network.reward_training.calibration import (
    CAUTIONS,
    STEP_SIZES,
    calibrated,
    choose_ascent_step,
    choose_caution,
    dice_after_ascent,
    fit_interval,
    half_width,
    quality_table,
    reconfigured,
)
from rl_reward_network.reward_training.damage import damage
from rl_reward_network.reward_training.masks import RewardExample, true_dice
from rl_reward_network.rewards.learned import ImageScorer

SMALL = RewardNetworkConfig(channels=(8,), packing=2, members=2, caution=3.0)


class BrightnessNetwork(RewardNetwork):
    """A network that finds the bright object with low confidence; its two members differ a little."""

    def foreground_probs(self, image):
        bright = (image.mean(dim=1, keepdim=True) > 0.5).float()
        return torch.stack([0.1 + 0.8 * bright, 0.1 + 0.7 * bright])


@pytest.fixture
def network(monkeypatch):
    monkeypatch.setattr("rl_reward_network.reward_training.calibration.RewardNetwork", BrightnessNetwork)
    return BrightnessNetwork(SMALL)


@pytest.fixture
def examples():
    rng, examples = np.random.default_rng(0), []
    for n in range(3):
        truth = np.zeros((40, 48), dtype=bool)
        truth[8 + n : 20 + n, 5:40] = True
        image = np.repeat((40 + 180 * truth[..., None]).astype(np.uint8), 3, axis=2)
        examples.append(RewardExample(image, truth, np.stack([damage(truth, rng) for _ in range(3)]), f"p{n}"))
    return examples


def test_the_caution_is_chosen_for_the_weights_of_the_score(network, examples, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "rl_reward_network.reward_training.calibration.choose_caution", lambda *args: calls.append(args) or 1.0
    )
    config = replace(SMALL, score_weights=(0.0, 0.0, 0.0, 1.0))
    result = calibrated(reconfigured(network, config), examples, examples[:1], 2, [0])
    scores, true, _ = calls[0]
    table = quality_table(reconfigured(result, replace(result.config, caution=0.0)), examples, 2, [0])
    np.testing.assert_allclose(scores, table.predicted[..., 3], atol=1e-5)
    np.testing.assert_allclose(true, table.true[:, 3])


def test_caution_is_the_largest_with_the_lowest_regret():
    true, images = np.array([0.9, 0.5, 0.8, 0.4]), np.array([0, 0, 1, 1])
    sure = np.array([[0.7, 0.7], [0.6, 0.6], [0.7, 0.7], [0.6, 0.6]])
    assert choose_caution(sure, true, images) == max(CAUTIONS)
    # the better mask has the higher mean but a large spread: a large k prefers the worse one
    doubt = np.array([[0.6, 0.9], [0.6, 0.6], [0.6, 0.9], [0.6, 0.6]])
    assert choose_caution(doubt, true, images) == 0.5
    # the worse mask has the higher mean but a large spread: only a large k prefers the better one
    fooled = np.array([[0.6, 0.6], [0.55, 0.95], [0.6, 0.6], [0.55, 0.95]])
    assert choose_caution(fooled, true, images) >= 1


def test_the_interval_covers_90_percent():
    rng = np.random.default_rng(1)
    dice = rng.uniform(0.2, 0.9, (2000, 1)) + rng.normal(0, 0.02, (2000, 3))
    true = dice.mean(1) + rng.normal(0, 0.05, 2000)
    interval = fit_interval(dice, true)
    held = np.abs(dice.mean(1) - true) <= half_width(dice, interval)
    assert held.mean() == pytest.approx(0.9, abs=0.002)
    agreed = np.full((5, 3), 0.4)
    np.testing.assert_allclose(half_width(agreed, 2.0), 0.004), "the spread has a lower bound"


def test_the_quality_table_has_every_mask_of_every_image(network, examples):
    table = quality_table(network, examples, 4, [0])
    assert (table.predicted.shape, table.true.shape) == ((21, 2, 4), (21, 4))
    assert np.array_equal(table.image_ids, np.repeat([0, 1, 2], 7))
    np.testing.assert_allclose(table.true[:3, 0], true_dice(examples[0].masks, examples[0].truth))


def test_the_step_size_that_improves_most_masks_is_chosen(network, examples):
    assert choose_ascent_step(network, examples, [0]) == 0.4, "the largest step reaches the predicted object"
    mask = np.zeros((1, 40, 48), dtype=bool)
    mask[0, 5:15, 10:30] = True
    scorer = ImageScorer(network, examples[0].image)
    assert dice_after_ascent(scorer, examples[0].truth, mask, 0.4)[0] > 0.95


def test_of_step_sizes_that_improve_as_many_masks_the_largest_gain_wins(network, examples, monkeypatch):
    gains = {0.05: [1, 1, -9], 0.1: [3, 3, 3], 0.2: [2, 2, 2], 0.4: [9, 9, -1]}

    def pretend(_scorer, truth, masks, size):
        return true_dice(masks, truth) + np.array(gains[size])

    monkeypatch.setattr("rl_reward_network.reward_training.calibration.dice_after_ascent", pretend)
    assert set(gains) == set(STEP_SIZES)
    assert choose_ascent_step(network, examples, [0]) == 0.1


def test_calibrated_ignores_earlier_values_and_keeps_the_weights(network, examples):
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    first = calibrated(network, examples, examples[:1], 4, [0])
    again = calibrated(reconfigured(network, replace(SMALL, caution=0.0)), examples, examples[:1], 4, [0])
    assert first.config == again.config
    assert first.config.interval != SMALL.interval
    assert first.config.caution == max(CAUTIONS), "members agree on the order, so every k has the same regret"
    assert all(torch.equal(before[name], tensor) for name, tensor in first.state_dict().items())
