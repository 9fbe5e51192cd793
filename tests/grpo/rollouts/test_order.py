"""Which prompts a step takes: every epoch each once, by seed and step alone."""

import pytest

from rl_reward_network.grpo.rollouts.order import PromptOrder


def test_an_epoch_takes_each_prompt_once_but_for_the_incomplete_chunk() -> None:
    order = PromptOrder(7, 3, seed=0)
    assert order.rollouts_per_epoch == 2
    first = order.indices(0) + order.indices(1)
    assert len(set(first)) == 6
    assert set(first) < set(range(7))
    second = order.indices(2) + order.indices(3)
    assert len(set(second)) == 6
    assert second != first, "another order for each epoch"


def test_the_order_follows_from_seed_and_rollout_alone() -> None:
    order, again = PromptOrder(7, 3, seed=0), PromptOrder(7, 3, seed=0)
    expected = [order.indices(rollout) for rollout in range(6)]
    assert [again.indices(rollout) for rollout in reversed(range(6))] == expected[::-1]
    assert [PromptOrder(7, 3, seed=1).indices(rollout) for rollout in range(6)] != expected


def test_too_few_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="2 training prompts, but one optimisation step takes 3; lower batch_size"):
        PromptOrder(2, 3, 0)
