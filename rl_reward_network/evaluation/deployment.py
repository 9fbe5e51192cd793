"""What to deploy: the policy if it is significantly better on validation patients, else one prompt for all images."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl_reward_network.evaluation.bootstrap import MIN_PATIENTS, Estimate, group_bootstrap, group_means, is_no_gap
from rl_reward_network.evaluation.metrics import SampleTable


@dataclass(frozen=True)
class Deployment:
    """The choice between policy and best fixed prompt, made on validation patients alone.

    Args:
        policy: deploy the policy; else the best fixed prompt.
        best_fixed: index of the best prompt on the training images.
        fixed_by: metric and data that selected this prompt, in words.
        criterion: metric of the decision, "dice", or "score" if validation is unlabelled.
        difference: policy less best fixed prompt on validation patients.
        reason: of the decision, in words.
    """

    policy: bool
    best_fixed: int
    fixed_by: str
    criterion: str
    difference: Estimate
    reason: str


def best_fixed_prompt(tables: Sequence[SampleTable]) -> tuple[int, str]:
    """The prompt with the highest mean over patients, and the metric and data that selected it.

    The metric is Dice on labelled images. If these are of fewer than `MIN_PATIENTS` patients and other images are
    unlabelled, it is the score on all images, from which the policy learns, too.
    """
    compared, column = tables, "score"
    indices, criterion = comparable(tables)
    if criterion == "dice":
        labelled = [tables[index] for index in indices]
        if len(labelled) == len(tables) or len({table.group_id for table in labelled}) >= MIN_PATIENTS:
            compared, column = labelled, "dice"
    groups = [table.group_id for table in compared]
    best = int(np.argmax([group_means(values, groups).mean() for values in stack(compared, column).T]))
    return best, f"{'Dice' if column == 'dice' else 'the reward net'} on {len(set(groups))} training patients"


def decide(train: Sequence[SampleTable], val: Sequence[SampleTable], chosen: np.ndarray, seed: int) -> Deployment:
    """Policy or best fixed prompt.

    The policy is deployed if, on at least `MIN_PATIENTS` validation patients, the lower 95 % bound of its gain over the
    best fixed prompt is above 0, and the oracle's gain is not negligible (`is_no_gap`).

    Args:
        train: images that select the best fixed prompt.
        val: images of the decision; unlabelled ones are left out if others are labelled.
        chosen: int (N,), the policy's prompt on each of `val`.
        seed: of the bootstrap.
    """
    best, fixed_by = best_fixed_prompt(train)
    indices, criterion = comparable(val)
    values, groups = stack([val[index] for index in indices], criterion), [val[index].group_id for index in indices]
    gain = group_bootstrap(values[np.arange(len(indices)), chosen[indices]] - values[:, best], groups, seed)
    gap = oracle_gap(val, best, seed)
    reason = f"on {gain.groups} validation patients PPO minus best fixed prompt is {gain} {criterion.capitalize()}"
    if criterion == "score":
        reason += " (the reward net's score, not ground truth: no validation image is labelled)"
    if gain.groups < MIN_PATIENTS:
        reason += ", too few patients for a decision"
    elif is_no_gap(gap):
        reason += f", and the oracle's gain is negligible ({gap})"
    return Deployment(gain.sign > 0 and not is_no_gap(gap), best, fixed_by, criterion, gain, reason)


def oracle_gap(tables: Sequence[SampleTable], best_fixed: int, seed: int) -> Estimate | None:
    """Dice of the oracle less Dice of the best fixed prompt on labelled images; None without any."""
    indices, column = comparable(tables)
    if column == "score":
        return None
    dice = stack([tables[index] for index in indices], "dice")
    return group_bootstrap(dice.max(axis=1) - dice[:, best_fixed], [tables[index].group_id for index in indices], seed)


def comparable(tables: Sequence[SampleTable]) -> tuple[list[int], str]:
    """Indices of the labelled images and "dice"; without labels, of all images and "score"."""
    labelled = [index for index, table in enumerate(tables) if table.metrics is not None]
    return (labelled, "dice") if labelled else (list(range(len(tables))), "score")


def stack(tables: Sequence[SampleTable], column: str) -> np.ndarray:
    """float64 (N, P): a column of N images."""
    return np.stack([table.column(column) for table in tables])
