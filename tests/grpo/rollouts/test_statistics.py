"""Statistics of a step's rollouts, compared with values computed by hand."""

from typing import Any

import numpy as np
import pytest
import torch

from rl_reward_network.grpo.image_context import ImageFeatures
from rl_reward_network.grpo.rewards import (
    MASK_IOU,
    ZERO_STD,
    LoopRollouts,
    advantage_statistics,
    median_pair_iou,
    rollout_statistics,
)
from rl_reward_network.grpo.rollouts import RolloutGroup
from rl_reward_network.models.sa2va.grounding_sa2va import Sam2Features
from rl_reward_network.rewards.combine import Advantages

NOTHING = ImageFeatures(torch.zeros(1, 1, 1), Sam2Features((torch.zeros(1),) * 3))
LEFT, TOP, ALL = (np.zeros((2, 2), dtype=bool) for _ in range(3))
LEFT[:, 0], TOP[0], ALL[:] = True, True, True


def loop_rollouts(terms: dict[str, Any], spread: list[bool], columns: Any = None) -> LoopRollouts:
    """Rollouts whose reward is the first term."""
    rewards = np.array(next(iter(terms.values())), dtype=float)
    advantages = Advantages(np.zeros_like(rewards), rewards, np.array(spread))
    return LoopRollouts(columns or {}, {name: np.array(term, dtype=float) for name, term in terms.items()}, advantages)


def group(lengths: list[int], counted: list[bool] | None = None) -> RolloutGroup:
    flags = None if counted is None else torch.tensor(counted)
    return RolloutGroup("i", NOTHING, [1], completion_ids=[[7] * length for length in lengths], counted=flags)


def test_rewards_by_loop_and_term() -> None:
    terms = {"iou": [[1, 3], [4, 4]], "judge": [[0.5, np.nan], [np.nan, 0.1]]}
    rollouts = {"loop1": loop_rollouts(terms, [True, False])}
    values = rollout_statistics([group([2, 4]), group([5, 5])], rollouts) | advantage_statistics(rollouts)
    assert values["loop1/reward_mean"] == 3
    assert values["loop1/reward_std"] == pytest.approx((2**0.5 + 0) / 2), "inside each group, then the mean"
    assert values["loop1/frac_zero_std"] == 0.5
    assert values["loop1/reward/iou"] == 3
    assert (values["loop1/missing/iou"], values["loop1/missing/judge"]) == (0, 0.5)
    assert values["loop1/reward/judge"] == pytest.approx(0.3), "the mean of the known values"
    assert not any(name.startswith("loop2") for name in values)


def test_lengths_and_truncated_captions() -> None:
    rollouts = {"loop1": loop_rollouts({"iou": [[1, 3], [4, 4]]}, [True, True])}
    values = rollout_statistics([group([2, 4], [True, False]), group([5, 5], [True, True])], rollouts)
    assert values["loop1/completion_length"] == 4
    assert values["loop1/frac_truncated"] == 0.25
    assert advantage_statistics(rollouts)["loop1/frac_zero_std"] == 0
    assert rollout_statistics([group([2, 4]), group([5, 5])], rollouts)["loop1/frac_truncated"] == 0


def test_similarity_of_the_masks_of_a_group() -> None:
    columns = {"predicted_masks": [LEFT, TOP, ALL, ALL]}
    rollouts = {"loop2": loop_rollouts({"meteor": [[0, 1], [0, 0]]}, [True, False], columns)}
    values = rollout_statistics([group([]), group([])], rollouts)
    assert values[MASK_IOU] == pytest.approx((1 / 3 + 1) / 2)
    assert advantage_statistics(rollouts)[ZERO_STD] == 0.5
    assert values["loop2/no_seg_share"] == 0
    rollouts["loop2"].columns["predicted_masks"] = [None, None, ALL, ALL]
    assert rollout_statistics([group([]), group([])], rollouts)["loop2/no_seg_share"] == 0.5
    assert "loop1/completion_length" not in values


@pytest.mark.parametrize(
    ("masks", "prompts", "expected"),
    [
        ([LEFT, TOP], 1, 1 / 3),
        ([LEFT, TOP, ALL], 1, (1 / 3 + 1 / 2 + 1 / 2) / 3),
        ([LEFT, None, TOP], 1, 1 / 3),  # answers without a mask are left out
        ([LEFT, TOP, LEFT, ALL, ALL, ALL], 3, 1 / 2),  # the median of 1/3, 1/2 and 1
        ([LEFT, ~LEFT, LEFT, TOP], 2, (0 + 1 / 3) / 2),
        ([LEFT, None, LEFT, TOP], 2, 1 / 3),  # a group with one mask has no pair
        ([LEFT, None, None, None], 2, 1.0),  # no group has a pair
        ([~ALL, ~ALL], 1, 1.0),
    ],
)
def test_median_over_groups_of_the_mean_iou_of_pairs(masks: list[Any], prompts: int, expected: float) -> None:
    assert median_pair_iou(masks, prompts) == pytest.approx(expected)
