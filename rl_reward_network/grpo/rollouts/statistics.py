"""What a step's rollouts looked like, as numbers for the curves; every tag is explained in docs/metrics.md."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np

from rl_reward_network.grpo.loss.policy import Group
from rl_reward_network.rewards.combine import whole_groups
from rl_reward_network.rewards.masks import iou

ALIKE, EQUAL = "loop2/mask_iou_in_group", "loop2/frac_zero_std"  # what the controller of the spread goes by


def rollout_statistics(groups: Sequence[Group], samples: dict[str, Any], maker: Any) -> dict[str, float]:
    """Rewards by term, spread, lengths, and how different the masks of a group are."""
    found: dict[str, float] = {}
    for loop, own in samples.items():
        rewards, spread = own.advantages.rewards, own.advantages.spread
        whole = rewards[whole_groups(rewards)]
        if len(whole):
            found[f"{loop}/reward_mean"] = float(whole.mean())
            found[f"{loop}/reward_std"] = float(whole.std(axis=1, ddof=1).mean())
        found[f"{loop}/frac_zero_std"] = float(1 - spread.mean())
        for name, values in own.terms.items():
            present = values[~np.isnan(values)]
            if len(present):  # a reward that nobody could be given is not 0
                found[f"{loop}/reward/{name}"] = float(present.mean())
            found[f"{loop}/missing/{name}"] = float(np.isnan(values).mean())
    if "loop1" in samples:
        lengths = [len(one) for group in groups for one in group.completions]
        found["loop1/completion_length"] = float(np.mean(lengths))
        cut = [not kept for group in groups if group.counts is not None for kept in group.counts.tolist()]
        found["loop1/frac_truncated"] = float(np.mean(cut)) if cut else 0.0
    if "loop2" in samples:
        found[ALIKE] = median_pair_iou(samples["loop2"].columns["predicted_masks"], len(groups))
        found["loop2/sigma"] = maker.controller.spread
    cache = maker.cache
    found["feature_cache_hits"] = cache.hits / max(1, cache.hits + cache.misses)
    return found


def median_pair_iou(masks: Sequence[np.ndarray | None], prompts: int) -> float:
    """Median over groups of the mean IoU between two masks of a group; 1 is no exploration at all."""
    count = len(masks) // prompts
    means = []
    for start in range(0, len(masks), count):
        own = [mask for mask in masks[start : start + count] if mask is not None]
        pairs = list(combinations(own, 2))
        if pairs:
            left, right = (np.stack([pair[side] for pair in pairs]) for side in (0, 1))
            means.append(float(iou(left, right).mean()))
    return float(np.median(means)) if means else 1.0
