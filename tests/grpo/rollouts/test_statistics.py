"""What a step's rollouts are summed up to, by hand."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rl_reward_network.grpo.loss.policy import Group
from rl_reward_network.grpo.rollouts.features import ImageFeatures
from rl_reward_network.grpo.rollouts.rewards import Samples
from rl_reward_network.grpo.rollouts.statistics import ALIKE, EQUAL, median_pair_iou, rollout_statistics
from rl_reward_network.models.sa2va.grounding_sa2va import Sam2Features
from rl_reward_network.rewards.combine import Advantages

NOTHING = ImageFeatures(torch.zeros(1, 1, 1), Sam2Features((torch.zeros(1),) * 3))
MAKER = SimpleNamespace(controller=SimpleNamespace(spread=0.3), cache=SimpleNamespace(hits=3, misses=1))
LEFT, TOP, ALL = (np.zeros((2, 2), dtype=bool) for _ in range(3))
LEFT[:, 0], TOP[0], ALL[:] = True, True, True


def samples(terms: dict[str, Any], spread: list[bool], columns: Any = None) -> Samples:
    """Samples that were paid the first term."""
    rewards = np.array(next(iter(terms.values())), dtype=float)
    advantages = Advantages(np.zeros_like(rewards), rewards, np.array(spread), {})
    return Samples(columns or {}, {name: np.array(own, dtype=float) for name, own in terms.items()}, advantages)


def group(lengths: list[int], counts: list[bool] | None = None) -> Group:
    kept = None if counts is None else torch.tensor(counts)
    return Group("i", NOTHING, [1], completions=[[7] * length for length in lengths], counts=kept)


def test_rewards_by_loop_and_term() -> None:
    terms = {"iou": [[1, 3], [4, 4]], "judge": [[0.5, np.nan], [np.nan, 0.1]]}
    found = rollout_statistics([group([2, 4]), group([5, 5])], {"loop1": samples(terms, [True, False])}, MAKER)
    assert found["loop1/reward_mean"] == 3
    assert found["loop1/reward_std"] == pytest.approx((2**0.5 + 0) / 2), "inside each group, then the mean"
    assert found["loop1/frac_zero_std"] == 0.5
    assert found["loop1/reward/iou"] == 3
    assert (found["loop1/missing/iou"], found["loop1/missing/judge"]) == (0, 0.5)
    assert found["loop1/reward/judge"] == pytest.approx(0.3), "the mean of those that are there"
    assert found["feature_cache_hits"] == 0.75
    assert not any(name.startswith("loop2") for name in found)


def test_lengths_and_captions_that_were_cut_off() -> None:
    own = {"loop1": samples({"iou": [[1, 3], [4, 4]]}, [True, True])}
    found = rollout_statistics([group([2, 4], [True, False]), group([5, 5], [True, True])], own, MAKER)
    assert found["loop1/completion_length"] == 4
    assert found["loop1/frac_truncated"] == 0.25
    assert found["loop1/frac_zero_std"] == 0
    assert rollout_statistics([group([2, 4]), group([5, 5])], own, MAKER)["loop1/frac_truncated"] == 0


def test_loop_2_says_how_alike_its_masks_are_and_how_wide_it_samples() -> None:
    columns = {"predicted_masks": [LEFT, TOP, ALL, ALL]}
    own = {"loop2": samples({"meteor": [[0, 1], [0, 0]]}, [True, False], columns)}
    found = rollout_statistics([group([]), group([])], own, MAKER)
    assert found[ALIKE] == pytest.approx((1 / 3 + 1) / 2)
    assert found[EQUAL] == 0.5
    assert found["loop2/sigma"] == 0.3
    assert "loop1/completion_length" not in found


def test_a_cache_that_was_never_asked_divides_by_no_0() -> None:
    unused = SimpleNamespace(controller=MAKER.controller, cache=SimpleNamespace(hits=0, misses=0))
    assert rollout_statistics([], {}, unused) == {"feature_cache_hits": 0.0}


@pytest.mark.parametrize(
    ("masks", "prompts", "expected"),
    [
        ([LEFT, TOP], 1, 1 / 3),
        ([LEFT, TOP, ALL], 1, (1 / 3 + 1 / 2 + 1 / 2) / 3),
        ([LEFT, None, TOP], 1, 1 / 3),  # what drew no mask is left out
        ([LEFT, TOP, LEFT, ALL, ALL, ALL], 3, 1 / 2),  # the median of 1/3, 1/2 and 1
        ([LEFT, ~LEFT, LEFT, TOP], 2, (0 + 1 / 3) / 2),
        ([LEFT, None, LEFT, TOP], 2, 1 / 3),  # a group with one mask has no pair
        ([LEFT, None, None, None], 2, 1.0),  # nobody explored
        ([~ALL, ~ALL], 1, 1.0),
    ],
)
def test_median_over_groups_of_the_mean_iou_of_pairs(masks: list[Any], prompts: int, expected: float) -> None:
    assert median_pair_iou(masks, prompts) == pytest.approx(expected)
