"""Weights of the two loops: by the size of their gradients, with the sum that was asked for."""

import pytest
import torch
from torch import nn

from rl_reward_network.grpo.losses import BOUNDS, EVERY, LoopWeights, gradient_norm


def weights(own: LoopWeights) -> list[float]:
    return [own["loop1"], own["loop2"]]


def test_fixed_weights_stay_as_they_were_asked_for() -> None:
    own = LoopWeights({"loop1": 1.0, "loop2": 0.5}, adaptive=False)
    assert not any(own.measures_at(step) for step in range(3 * EVERY))
    assert weights(own) == [1.0, 0.5]


def test_the_loop_with_the_larger_gradient_is_turned_down() -> None:
    own = LoopWeights({"loop1": 1.0, "loop2": 1.0}, adaptive=True)
    assert [step for step in range(2 * EVERY + 1) if own.measures_at(step)] == [0, EVERY, 2 * EVERY]
    own.update({"loop1": 3.0, "loop2": 1.0})
    assert weights(own) == pytest.approx([0.5, 1.5])
    own.update({"loop1": 1.0, "loop2": 1.0})
    assert weights(own) == pytest.approx([2 / 3, 4 / 3]), "norms are averaged: 2 and 1"


def test_what_was_asked_for_still_counts() -> None:
    own = LoopWeights({"loop1": 1.0, "loop2": 3.0}, adaptive=True)
    own.update({"loop1": 2.0, "loop2": 2.0})
    assert weights(own) == pytest.approx([1, 3])


@pytest.mark.parametrize("configured", [{"loop1": 1.0, "loop2": 1.0}, {"loop1": 0.01, "loop2": 1.0}])
@pytest.mark.parametrize("noise", [1e-30, 1e-10, 1e-3, 1e3, 1e10, 1e30])
def test_a_loop_whose_gradient_is_noise_does_not_silence_the_other(configured: dict[str, float], noise: float) -> None:
    own = LoopWeights(configured, adaptive=True)
    for _ in range(3):
        own.update({"loop1": noise, "loop2": 1.0})
    ratios = [own[loop] / weight for loop, weight in configured.items()]
    low, high = BOUNDS
    assert all(low <= ratio <= high for ratio in ratios)
    assert (ratios[0] > ratios[1]) == (noise < 1), "the smaller gradient still gets the larger weight"


def test_a_loop_without_a_gradient_says_nothing() -> None:
    own = LoopWeights({"loop1": 1.0, "loop2": 1.0}, adaptive=True)
    own.update({"loop1": 0.0, "loop2": 1.0})
    assert weights(own) == [1, 1]


def test_the_state_comes_back() -> None:
    own, again = (LoopWeights({"loop1": 1.0, "loop2": 1.0}, adaptive=True) for _ in range(2))
    own.update({"loop1": 3.0, "loop2": 1.0})
    again.load_state_dict(own.state_dict())
    assert weights(again) == weights(own)


def test_the_norm_is_of_the_gradient_and_leaves_none_behind() -> None:
    first, second, unused = (nn.Parameter(torch.ones(2)) for _ in range(3))
    loss = (3 * first).sum() + (4 * second).sum()
    assert gradient_norm(loss, [first, second, unused]).item() == pytest.approx((2 * 9 + 2 * 16) ** 0.5)
    assert first.grad is None
    assert gradient_norm(loss, [unused]).item() == 0
    loss.backward()
    assert first.grad is not None, "the graph is still there"
