"""Statistics of the rollouts of one micro-batch, for the curves; every tag is explained in docs/metrics.md."""

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from rl_reward_network.grpo.rollout_group import RolloutGroup
from rl_reward_network.grpo.rollouts.rewards import LoopRollouts
from rl_reward_network.rewards.combine import whole_groups
from rl_reward_network.rewards.metrics import iou

MASK_IOU, ZERO_STD = "loop2/mask_iou_in_group", "loop2/frac_zero_std"  # inputs of the spread controller


def rollout_statistics(groups: Sequence[RolloutGroup], rollouts: Mapping[str, LoopRollouts]) -> dict[str, float]:
    """Terms, lengths, the similarity of the masks of a group, and the share of answers without `[SEG]`.

    Args:
        groups: P of them.
        rollouts: loop -> its rollouts, with terms.
    """
    values: dict[str, float] = {}
    for loop, loop_rollouts in rollouts.items():
        values |= {f"{loop}/{name}": value for name, value in _terms(loop_rollouts).items()}
    if "loop1" in rollouts:
        values |= {f"loop1/{name}": value for name, value in _lengths(groups).items()}
    if "loop2" in rollouts:
        masks = rollouts["loop2"].columns["predicted_masks"]
        values[MASK_IOU] = median_pair_iou(masks, len(groups))
        values["loop2/no_seg_share"] = float(np.mean([mask is None for mask in masks]))
    return values


def advantage_statistics(rollouts: Mapping[str, LoopRollouts]) -> dict[str, float]:
    """Mean and spread of the rewards of each loop, with advantages."""
    values = {}
    for loop, loop_rollouts in rollouts.items():
        advantages = loop_rollouts.advantages
        assert advantages is not None
        rewards = advantages.rewards[whole_groups(advantages.rewards)]
        if len(rewards):
            values[f"{loop}/reward_mean"] = float(rewards.mean())
            values[f"{loop}/reward_std"] = float(rewards.std(axis=1, ddof=1).mean())
        values[f"{loop}/frac_zero_std"] = float(1 - advantages.spread.mean())
        if advantages.below_noise is not None:
            values[f"{loop}/frac_below_noise"] = float(advantages.below_noise.mean())
    return values


def _terms(rollouts: LoopRollouts) -> dict[str, float]:
    """Means over the generations whose reward is known."""
    values = {}
    for name, terms in rollouts.terms.items():
        present = terms[~np.isnan(terms)]
        if len(present):  # a reward that is missing everywhere has no mean
            values[f"reward/{name}"] = float(present.mean())
        values[f"missing/{name}"] = float(np.isnan(terms).mean())
    return values


def _lengths(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Tokens of a caption, and the share of truncated captions."""
    lengths = [len(ids) for group in groups for ids in group.completion_ids]
    truncated = [not counted for group in groups if group.counted is not None for counted in group.counted.tolist()]
    return {
        "completion_length": float(np.mean(lengths)),
        "frac_truncated": float(np.mean(truncated)) if truncated else 0.0,
    }


def median_pair_iou(masks: Sequence[np.ndarray | None], prompts: int) -> float:
    """Median over groups of the mean IoU of all pairs of masks in a group; 1 if no group has a pair.

    Args:
        masks: bool (H, W) or None, the groups one after another.
        prompts: number of groups.
    """
    count = len(masks) // prompts
    means = []
    for start in range(0, len(masks), count):
        group_masks = [mask for mask in masks[start : start + count] if mask is not None]
        pairs = list(combinations(group_masks, 2))
        if pairs:
            left, right = (np.stack([pair[side] for pair in pairs]) for side in (0, 1))
            means.append(float(iou(left, right).mean()))
    return float(np.median(means)) if means else 1.0
