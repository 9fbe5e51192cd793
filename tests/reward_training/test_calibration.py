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
    judge_examples,
    reconfigured,
)
from rl_reward_network.reward_training.damage import damage
from rl_reward_network.reward_training.masks import RewardExample, true_dice

SMALL = RewardNetworkConfig(channels=(8,), members=2, caution=3.0)


class SeesBrightness(RewardNetwork):
    """A network that is right but half-hearted: members differ a little, and neither is sure."""

    def truth_maps(self, image):
        bright = (image.mean(dim=1, keepdim=True) > 0.5).float()
        return torch.stack([0.1 + 0.8 * bright, 0.1 + 0.7 * bright])


@pytest.fixture
def network(monkeypatch):
    monkeypatch.setattr("rl_reward_network.reward_training.calibration.RewardNetwork", SeesBrightness)
    return SeesBrightness(SMALL)


@pytest.fixture
def examples():
    rng, found = np.random.default_rng(0), []
    for n in range(3):
        truth = np.zeros((40, 48), dtype=bool)
        truth[8 + n : 20 + n, 5:40] = True
        image = np.repeat((40 + 180 * truth[..., None]).astype(np.uint8), 3, axis=2)
        found.append(RewardExample(image, truth, np.stack([damage(truth, rng) for _ in range(3)]), f"p{n}"))
    return found


def test_other_weights_of_the_score_choose_its_caution(network, examples, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "rl_reward_network.reward_training.calibration.choose_caution", lambda *args: seen.append(args) or 1.0
    )
    config = replace(SMALL, score_weights=(0.0, 0.0, 0.0, 1.0))
    found = calibrated(reconfigured(network, config), examples, examples[:1], 2, [0])
    scores, true, _ = seen[0]
    judged_again = judge_examples(reconfigured(found, replace(found.config, caution=0.0)), examples, 2, [0])
    np.testing.assert_allclose(scores, judged_again.predicted[..., 3], atol=1e-5)
    np.testing.assert_allclose(true, judged_again.true[:, 3])


def test_caution_is_the_largest_of_those_that_choose_best():
    true, images = np.array([0.9, 0.5, 0.8, 0.4]), np.array([0, 0, 1, 1])
    sure = np.array([[0.7, 0.7], [0.6, 0.6], [0.7, 0.7], [0.6, 0.6]])
    assert choose_caution(sure, true, images) == max(CAUTIONS)
    # the better mask is liked more but with doubt: much caution loses it
    doubt = np.array([[0.6, 0.9], [0.6, 0.6], [0.6, 0.9], [0.6, 0.6]])
    assert choose_caution(doubt, true, images) == 0.5
    # the worse mask is liked more but with doubt: only caution finds the better one
    fooled = np.array([[0.6, 0.6], [0.55, 0.95], [0.6, 0.6], [0.55, 0.95]])
    assert choose_caution(fooled, true, images) >= 1


def test_the_interval_holds_nine_of_ten():
    rng = np.random.default_rng(1)
    dice = rng.uniform(0.2, 0.9, (2000, 1)) + rng.normal(0, 0.02, (2000, 3))
    true = dice.mean(1) + rng.normal(0, 0.05, 2000)
    interval = fit_interval(dice, true)
    held = np.abs(dice.mean(1) - true) <= half_width(dice, interval)
    assert held.mean() == pytest.approx(0.9, abs=0.002)
    agreed = np.full((5, 3), 0.4)
    np.testing.assert_allclose(half_width(agreed, 2.0), 0.004), "members that agree are not beyond doubt"


def test_true_and_predicted_numbers_of_every_mask_of_every_image(network, examples):
    found = judge_examples(network, examples, 4, [0])
    assert (found.predicted.shape, found.true.shape) == ((21, 2, 4), (21, 4))
    assert np.array_equal(found.image_ids, np.repeat([0, 1, 2], 7))
    np.testing.assert_allclose(found.true[:3, 0], true_dice(examples[0].masks, examples[0].truth))


def test_the_step_size_that_helps_most_is_taken(network, examples):
    assert choose_ascent_step(network, examples, [0]) == 0.4, "the surest way to what the network knows"
    mask = np.zeros((1, 40, 48), dtype=bool)
    mask[0, 5:15, 10:30] = True
    assert dice_after_ascent(network, examples[0], mask, 0.4)[0] > 0.95


def test_of_step_sizes_that_raise_as_many_masks_the_largest_gain_wins(network, examples, monkeypatch):
    gains = {0.05: [1, 1, -9], 0.1: [3, 3, 3], 0.2: [2, 2, 2], 0.4: [9, 9, -1]}

    def pretend(_network, example, masks, size):
        return true_dice(masks, example.truth) + np.array(gains[size])

    monkeypatch.setattr("rl_reward_network.reward_training.calibration.dice_after_ascent", pretend)
    assert set(gains) == set(STEP_SIZES)
    assert choose_ascent_step(network, examples, [0]) == 0.1


def test_calibrated_replaces_what_stood_there_and_touches_no_weight(network, examples):
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    first = calibrated(network, examples, examples[:1], 4, [0])
    again = calibrated(reconfigured(network, replace(SMALL, caution=0.0)), examples, examples[:1], 4, [0])
    assert first.config == again.config
    assert first.config.interval != SMALL.interval
    assert first.config.caution == max(CAUTIONS), "members that agree on the order leave nothing to lose"
    assert all(torch.equal(before[name], tensor) for name, tensor in first.state_dict().items())
