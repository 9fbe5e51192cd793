"""The rewards of a mask by name: one table for PPO (`--reward`), GRPO (`--mask_rewards`) and the evaluation.

Those that need the true mask are the metrics in [0, 1] of which higher is better, and `betti`, the two Betti errors as
one number; `rewards/metrics.py` says how to add one. A reward that needs the image alone, or the mask alone as `tree`,
is a function and an entry of `IMAGE_REWARDS`: PPO and GRPO then take its name, on unlabelled images too.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

import numpy as np

from rl_reward_network.rewards.metrics import METRICS, betti_match, one_tree

MASK_REWARDS = {name: metric.function for name, metric in METRICS.items() if metric.is_reward} | {"betti": betti_match}

IMAGE_REWARDS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "tree": lambda masks, image: one_tree(masks)
}
"""Name -> function of masks bool (N, H, W) and their image uint8 (H, W, 3), to float64 (N,) in [0, 1]."""

# PPO's rewards as weighted columns: `score` is the reward network's, the others are the mask rewards.
PROMPT_REWARDS: dict[str, dict[str, float]] = {
    "net": {"score": 1.0},
    **{name: {name: 1.0} for name in (*MASK_REWARDS, *IMAGE_REWARDS)},
    "mix": {"score": 0.5, "dice": 0.5},
    "dice+recall": {"dice": 0.5, "recall": 0.5},
}


def needs_truth(name: str) -> bool:
    """Whether a reward of `PROMPT_REWARDS`, or a mask reward, needs the true mask."""
    return any(column in MASK_REWARDS for column in PROMPT_REWARDS[name])


OF_LABELS = tuple(name for name, columns in PROMPT_REWARDS.items() if needs_truth(name) and "score" not in columns)

WITH_OWN_FLAG = "iou"  # --iou_weight and --loop2_iou_weight, from the original specification

if TYPE_CHECKING:
    RewardName = str
    WeightedName = str
else:  # the choices of `--reward`, and of `--mask_rewards` and `--loop2_mask_rewards`
    RewardName = Literal[tuple(PROMPT_REWARDS)]
    WeightedName = Literal[tuple(name for name in (*MASK_REWARDS, *IMAGE_REWARDS) if name != WITH_OWN_FLAG)]


def prompt_reward(name: RewardName, scores: np.ndarray, metrics: Mapping[str, np.ndarray]) -> np.ndarray:
    """float32 (P,) in [0, 1]: the reward of the masks of P prompts.

    Args:
        name: one of `PROMPT_REWARDS`.
        scores: float32 (P,), the reward network's scores.
        metrics: mask reward -> float64 (P,); those that need the ground truth are missing without it.

    Raises:
        ValueError: an unknown name, or a reward that needs the ground truth where there is none.
    """
    weights = PROMPT_REWARDS.get(name)
    if weights is None:
        raise ValueError(f"reward: got {name!r}; expected one of {', '.join(PROMPT_REWARDS)}")
    columns = {"score": scores, **metrics}
    if missing := weights.keys() - columns.keys():
        names = ", ".join(sorted(missing))
        raise ValueError(f"reward {name!r} needs labelled images: {names} is missing; use net, or label them")
    return np.sum([weight * columns[column] for column, weight in weights.items()], axis=0).astype(np.float32)
