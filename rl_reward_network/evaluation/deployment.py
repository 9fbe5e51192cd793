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
        fixed_by: what chose that prompt, in words.
        criterion: what decided, "dice", or "score" when validation is unlabelled.
        difference: policy less best fixed prompt on validation patients.
        reason: the same in words.
    """

    policy: bool
    best_fixed: int
    fixed_by: str
    criterion: str
    difference: Estimate
    reason: str


def best_fixed_prompt(tables: Sequence[SampleTable]) -> tuple[int, str]:
    """The prompt with the highest mean over patients, and by what it was chosen.

    By Dice on labelled images; where they are of fewer than `MIN_PATIENTS` patients and others are unlabelled, by the
    score on all images, which is what the policy learns from.
    """
    kept, column = tables, "score"
    places, criterion = comparable(tables)
    if criterion == "dice":
        labelled = [tables[place] for place in places]
        if len(labelled) == len(tables) or len({table.group_id for table in labelled}) >= MIN_PATIENTS:
            kept, column = labelled, "dice"
    groups = [table.group_id for table in kept]
    best = int(np.argmax([group_means(values, groups).mean() for values in stack(kept, column).T]))
    return best, f"{'Dice' if column == 'dice' else 'the reward net'} on {len(set(groups))} training patients"


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
    best, fixed_by = best_fixed_prompt(train)
    places, criterion = comparable(val)
    values, groups = stack([val[place] for place in places], criterion), [val[place].group_id for place in places]
    gain = group_bootstrap(values[np.arange(len(places)), chosen[places]] - values[:, best], groups, seed)
    gap = oracle_gap(val, best, seed)
    reason = f"on {gain.groups} validation patients PPO minus best fixed prompt is {gain} {criterion.capitalize()}"
    if criterion == "score":
        reason += " (judged by the reward net, not by the truth: no validation image is labelled)"
    if gain.low is None or gain.groups < MIN_PATIENTS:
        return Deployment(False, best, fixed_by, criterion, gain, f"{reason}, too few patients to prove anything")
    if is_no_gap(gap):
        return Deployment(False, best, fixed_by, criterion, gain, f"{reason}, and there is no gap to close ({gap})")
    return Deployment(gain.low > 0, best, fixed_by, criterion, gain, reason)


def oracle_gap(tables: Sequence[SampleTable], best_fixed: int, seed: int) -> Estimate | None:
    """Dice of the oracle less Dice of the best fixed prompt on labelled images; None without any."""
    places, column = comparable(tables)
    if column == "score":
        return None
    dice = stack([tables[place] for place in places], "dice")
    return group_bootstrap(dice.max(axis=1) - dice[:, best_fixed], [tables[place].group_id for place in places], seed)


def comparable(tables: Sequence[SampleTable]) -> tuple[list[int], str]:
    """Places of the labelled images and "dice"; where there are none, of all images and "score"."""
    labelled = [place for place, table in enumerate(tables) if table.metrics is not None]
    return (labelled, "dice") if labelled else (list(range(len(tables))), "score")


def stack(tables: Sequence[SampleTable], column: str) -> np.ndarray:
    """float64 (N, P): a column of N images."""
    return np.stack([table.column(column) for table in tables])
