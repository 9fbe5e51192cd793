"""Which unlabelled images a reward network is sure enough about."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig
from rl_reward_network.rewards.learned import ForegroundMaps
from rl_reward_network.rewards.out_of_distribution import in_distribution, own_segmentation, within

SIZE = 32


def image(shift: int) -> np.ndarray:
    picture = np.zeros((SIZE, SIZE, 3), np.uint8)
    picture[0, 0, 0] = shift
    return picture


def loads(*shifts: int) -> list[Any]:
    return [partial(image, shift) for shift in shifts]


class Unsure(RewardNetwork):
    """Two members see the left half; the second one's map is faint by the red value of the image's corner."""

    def __init__(self) -> None:
        super().__init__(RewardNetworkConfig(members=2, channels=(4, 4), caution=0.0))

    def foreground_probs(self, image: torch.Tensor) -> torch.Tensor:
        maps = torch.zeros(2, 1, 1, *image.shape[-2:])
        maps[..., : SIZE // 2] = 1
        maps[1] *= 1 - float(image[0, 0, 0, 0])
        return maps


def dice_of(factor: float) -> float:
    half = SIZE * SIZE // 2
    return (2 * factor * half + 1) / (half + factor * half + 1)


def by_hand(value: int) -> tuple[float, float]:
    """Score and spread: the members' Dice are 1 and `dice_of`."""
    other = dice_of(1 - value / 255)
    return (1 + other) / 2, (1 - other) / 2


def test_images_beyond_a_limit_are_left_out_and_counted():
    maps, values, known = ForegroundMaps(Unsure()), [10, 20, 30, 60, 100], [10, 20, 40]
    found = [own_segmentation(maps, image(value)) for value in values]
    np.testing.assert_allclose(found, [by_hand(value) for value in values], atol=3e-4)
    joins, facts = in_distribution(maps, loads(*known), loads(*values))
    scores, spreads = np.array([by_hand(value) for value in known]).T
    assert facts.smallest_score == pytest.approx(np.median(scores), abs=3e-4)
    assert facts.largest_spread == pytest.approx(2 * np.percentile(spreads, 95), abs=6e-4)
    assert joins.tolist() == [True, True, False, False, False]
    assert (facts.looked_at, facts.left_out, facts.validation_images) == (5, 3, 3)
    medians = facts.validation_score, facts.validation_spread, facts.unlabelled_score, facts.unlabelled_spread
    assert medians == pytest.approx([*by_hand(20), *by_hand(30)], abs=3e-4)
    assert facts.sentence.startswith("3 of 5 unlabelled images were left out of training. An image joins if")


def test_both_limits_count():
    scores, spreads = np.array([0.9, 0.8, 0.9, 0.85]), np.array([0.01, 0.01, 0.03, 0.02])
    assert within(scores, spreads, 0.85, 0.02).tolist() == [True, False, False, True]


def test_none_or_all_left_out_is_said():
    maps = ForegroundMaps(Unsure())
    _, none = in_distribution(maps, loads(50), loads(50, 50))
    assert none.sentence.startswith("None of 2 unlabelled images was left out of training. ")
    joins, every = in_distribution(maps, loads(0, 1), loads(90, 99))
    assert not joins.any()
    assert every.sentence.startswith("All 2 unlabelled images were left out of training, so no unlabelled image was")
    for known, new in (([], [0]), ([0], [])):
        with pytest.raises(ValueError, match="expected some of both"):
            in_distribution(maps, loads(*known), loads(*new))
