"""The rewards of a mask by name: one table for PPO (`--reward`), GRPO (`--mask_rewards`) and the evaluation.

Those that need the true mask are the metrics in [0, 1] of which higher is better, and `betti`, the two Betti errors as
one number; `rewards/metrics.py` says how to add one. A reward that needs the image alone, or the mask alone as `tree`,
is a function and an entry of `IMAGE_REWARDS`: PPO and GRPO then take its name, on unlabelled images too. The functions
of a file that the variable `SA2VA_RL_REWARDS` names are such entries, so a reward of one's own changes no file here.
"""

import inspect
import os
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from runpy import run_path
from typing import TYPE_CHECKING, Literal

import numpy as np

from rl_reward_network.rewards.metrics import METRICS, betti_match, one_tree

MASK_REWARDS = {name: metric.function for name, metric in METRICS.items() if metric.is_reward} | {"betti": betti_match}

ImageReward = Callable[[np.ndarray, np.ndarray], np.ndarray]
OWN_REWARDS = "SA2VA_RL_REWARDS"  # environment variable: a Python file with rewards of the user


def own_rewards(file: str | None) -> dict[str, ImageReward]:
    """Name -> reward, for each public function that a Python file defines; the file is run.

    Args:
        file: its path; None or "": no rewards.

    Raises:
        ValueError: the file is missing or defines no function, a function has not the arguments (masks, image), or its
            name is one of a reward here. A function raises it, too, where its values are not float (N,) in [0, 1].
    """
    if not file:
        return {}
    if not Path(file).is_file() or not file.endswith(".py"):
        raise ValueError(f"{OWN_REWARDS} is {file}, expected a Python file (.py) with your rewards; correct the path")
    found = {
        name: _checked(value, file)
        for name, value in run_path(file, run_name=OWN_REWARDS).items()
        if inspect.isfunction(value) and value.__module__ == OWN_REWARDS and not name.startswith("_")
    }
    if not found:
        raise ValueError(f"{file}: defines no function; define one of (masks, image) for each reward")
    if taken := sorted(found.keys() & {*MASK_REWARDS, "tree", "net", "mix"}):
        raise ValueError(f"{file}: {taken[0]} is the name of a reward of this project; rename your function")
    return found


def _checked(function: ImageReward, file: str) -> ImageReward:
    """The function, whose values are checked at each call: a wrong one would train without an error."""
    if len(inspect.signature(function).parameters) != 2:
        raise ValueError(
            f"{file}: {function.__name__}{inspect.signature(function)}: expected the arguments (masks, image)"
        )

    @wraps(function)
    def checked(masks: np.ndarray, image: np.ndarray) -> np.ndarray:
        values = np.asarray(function(masks, image), dtype=np.float64)
        if values.shape != (len(masks),):
            raise ValueError(f"{file}: {function.__name__}: got shape {values.shape}, expected ({len(masks)},)")
        if not ((values >= 0) & (values <= 1)).all():
            worst = values[np.argmax(~((values >= 0) & (values <= 1)))]
            raise ValueError(f"{file}: {function.__name__}: got {worst}, expected a number in [0, 1]; scale it")
        return values

    return checked


IMAGE_REWARDS: dict[str, ImageReward] = {
    "tree": lambda masks, image: one_tree(masks),
    **own_rewards(os.environ.get(OWN_REWARDS)),
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
        known = ", ".join(PROMPT_REWARDS)
        raise ValueError(f"reward: got {name!r}; expected one of {known}, or name the file of yours by {OWN_REWARDS}")
    columns = {"score": scores, **metrics}
    if missing := weights.keys() - columns.keys():
        names = ", ".join(sorted(missing))
        raise ValueError(f"reward {name!r} needs labelled images: {names} is missing; use net, or label them")
    return np.sum([weight * columns[column] for column, weight in weights.items()], axis=0).astype(np.float32)
