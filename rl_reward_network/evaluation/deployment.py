"""What a user should run: the policy where validation patients prove it better, else one prompt for all images."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl_reward_network.evaluation.bootstrap import MIN_PATIENTS, Estimate, group_bootstrap, group_means, is_no_gap
from rl_reward_network.evaluation.metrics import SampleTable


@dataclass(frozen=True)
class Deployment:
    """The choice, made on validation patients before anybody looked at test patients.

    Args:
        policy: True when the policy is deployed, False when the best fixed prompt is.
        best_fixed: index of the prompt that is best on the training images.
        criterion: what decided, "dice", or "score" when validation is unlabelled.
        difference: policy less best fixed prompt on validation patients; None without any.
        reason: the same in words.
    """

    policy: bool
    best_fixed: int
    criterion: str
    difference: Estimate | None
    reason: str


def best_fixed_prompt(tables: Sequence[SampleTable]) -> int:
    """The prompt with the highest mean over patients: of Dice on labelled images, of the score if there are none."""
    kept, column = labelled_or_all(tables)
    groups = [table.group_id for table in kept]
    return int(np.argmax([group_means(values, groups).mean() for values in stack(kept, column).T]))


def decide(train: Sequence[SampleTable], val: Sequence[SampleTable], chosen: np.ndarray, seed: int) -> Deployment:
    """Policy or best fixed prompt.

    The policy is deployed when there is a gap to close and the lower 95 % bound of its gain over the best fixed prompt
    is above 0, on at least `MIN_PATIENTS` validation patients.

    Args:
        train: images the best fixed prompt is chosen on.
        val: images that decide; unlabelled ones are left out if others are labelled.
        chosen: int (N,), the policy's prompt on each of `val`.
        seed: of the bootstrap.
    """
    best = best_fixed_prompt(train)
    if not val:
        return Deployment(False, best, "score", None, "there are no validation images")
    kept, criterion = labelled_or_all(val)
    picks = chosen[[place for place, table in enumerate(val) if criterion == "score" or table.metrics is not None]]
    values, groups = stack(kept, criterion), [table.group_id for table in kept]
    gain = group_bootstrap(values[np.arange(len(kept)), picks] - values[:, best], groups, seed)
    gap = group_bootstrap(values.max(axis=1) - values[:, best], groups, seed)
    measured = f"on {gain.groups} validation patients PPO minus best fixed prompt is {gain} {criterion}"
    if gain.low is None or gain.groups < MIN_PATIENTS:
        return Deployment(False, best, criterion, gain, f"{measured}, too few patients to prove anything")
    if criterion == "dice" and is_no_gap(gap):
        return Deployment(False, best, criterion, gain, f"{measured}, and there is no gap to close ({gap})")
    return Deployment(gain.low > 0, best, criterion, gain, measured)


def labelled_or_all(tables: Sequence[SampleTable]) -> tuple[list[SampleTable], str]:
    """The labelled images and "dice"; where there are none, all images and "score"."""
    labelled = [table for table in tables if table.metrics is not None]
    return (labelled, "dice") if labelled else (list(tables), "score")


def stack(tables: Sequence[SampleTable], column: str) -> np.ndarray:
    """float64 (N, P): a column of N images."""
    return np.stack([table.column(column) for table in tables])
