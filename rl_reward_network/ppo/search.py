"""What stands beside the policy: the best threshold, the best fixed sequence, greedy choices, ridge regression."""

from collections.abc import Callable, Sequence

import numpy as np

from rl_reward_network.env.operations import OPERATIONS, EditedImage, Operations
from rl_reward_network.ppo.baselines import ridge_per_prompt
from rl_reward_network.report.statistics import group_means

THRESHOLDS = (0.01, 0.02, *(round(0.05 * step, 2) for step in range(1, 20)), 0.98, 0.99)
BEAM = 3  # sequences kept at each length
LEAST_GAIN = 1e-4  # of the mean reward: an operation must gain more
RIDGE_SEQUENCES = 12  # that ridge regression chooses from


def best_threshold(images: Sequence[EditedImage]) -> float:
    """The threshold of `THRESHOLDS` with the highest mean reward over patients; 0.5 where several are equal.

    By the reward of the images, which is that of the policy.
    """
    groups = [image.group_id for image in images]
    values = {
        threshold: group_means(np.array([_thresholded(image, threshold) for image in images]), groups).mean()
        for threshold in sorted(THRESHOLDS, key=lambda threshold: abs(threshold - 0.5))
    }
    return max(values, key=lambda threshold: float(values[threshold]))


def _thresholded(image: EditedImage, threshold: float) -> float:
    return image.reward_of(image.soft > threshold)


def best_sequences(images: Sequence[EditedImage], max_steps: int) -> dict[Operations, float]:
    """Mean reward over patients of every fixed sequence that a beam search visits, the best first.

    Args:
        images: training images.
        max_steps: longest sequence.
    """
    groups = [image.group_id for image in images]

    def value(operations: Operations) -> float:
        return float(group_means(np.array([image.worth(operations) for image in images]), groups).mean())

    visited: dict[Operations, float] = {(): value(())}
    beam: list[Operations] = [()]
    for _ in range(max_steps):
        new = [(*old, action) for old in beam for action in range(len(OPERATIONS) - 1)]
        visited |= {operations: value(operations) for operations in new}
        beam = sorted(new, key=lambda operations: -visited[operations])[:BEAM]
    return dict(sorted(visited.items(), key=lambda item: (LEAST_GAIN * len(item[0]) - item[1], item[0])))


def greedy(worth: Callable[[Operations], float], max_steps: int) -> Operations:
    """The sequence of operations each of which is worth most, until none is worth more than stopping."""
    operations: Operations = ()
    best = worth(operations)
    for _ in range(max_steps):
        options = [(*operations, action) for action in range(len(OPERATIONS) - 1)]
        values = [worth(option) for option in options]
        place = int(np.argmax(values))
        if values[place] <= best:
            break
        operations, best = options[place], values[place]
    return operations


def ridge_sequences(
    train: Sequence[EditedImage], new: Sequence[EditedImage], sequences: Sequence[Operations]
) -> list[Operations]:
    """For each new image the sequence with the highest reward as predicted by ridge regression; see `ridge_per_prompt`.

    Args:
        train: images whose rewards are known.
        new: images.
        sequences: to choose from.
    """
    features, new_features = (
        np.stack([np.concatenate([image.features, image.statistics(())]) for image in part]) for part in (train, new)
    )
    rewards = np.array([[image.worth(operations) for operations in sequences] for image in train])
    return [sequences[index] for index in ridge_per_prompt(features, rewards, new_features)]


def sequences_for_ridge(images: Sequence[EditedImage], fixed: Operations, max_steps: int) -> list[Operations]:
    """The sequences that ridge regression chooses from, the empty and the fixed one first.

    Candidates are each training image's greedy sequence and its beginnings. They are added one by one, the next being
    the one that raises the mean reward of the best sequence of each image most.
    """
    found = [greedy(image.worth, max_steps) for image in images]
    candidates = sorted({one[:end] for one in found for end in range(1, len(one) + 1)} - {fixed})
    chosen = list(dict.fromkeys([(), fixed]))
    table = np.array([[image.worth(one) for one in candidates] for image in images]).reshape(len(images), -1)
    best = np.array([[image.worth(one) for one in chosen] for image in images]).max(axis=1)
    while candidates and len(chosen) < RIDGE_SEQUENCES:
        gains = np.maximum(table - best[:, None], 0).mean(axis=0)
        place = int(gains.argmax())
        if gains[place] == 0:
            break
        chosen.append(candidates[place])
        best = np.maximum(best, table[:, place])
    return chosen


def words(operations: Operations) -> str:
    """A sequence in words."""
    return ", ".join(OPERATIONS[action] for action in operations) or "none"
