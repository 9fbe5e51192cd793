"""Searches find what is best by construction."""

import numpy as np

from rl_reward_network.ppo.search import (
    best_sequences,
    best_threshold,
    greedy,
    ridge_sequences,
    sequences_for_ridge,
    words,
)
from tests.env.edited_images import DILATE, ERODE, known_image, known_images


def test_the_best_fixed_sequence_is_the_one_with_the_highest_mean() -> None:
    bright = [known_image(number) for number in range(0, 12, 2)]
    sequences = best_sequences(bright, 2)
    best = next(iter(sequences))
    assert best[0] == DILATE
    means = {operations: np.mean([image.worth(operations) for image in bright]) for operations in sequences}
    assert sequences == {operations: float(mean) for operations, mean in means.items()}
    assert () in sequences
    assert sequences[best] >= max(sequences.values()) - 2e-4  # a longer one must gain


def test_the_threshold_with_the_highest_reward_is_found() -> None:
    images = known_images(4)
    for image in images:
        image.soft = np.where(image.truth, np.float32(0.3), np.float32(0.1))
    assert best_threshold(images) in (0.1, 0.15, 0.2, 0.25)
    for image in images:
        image.soft = image.truth.astype(np.float32)
    assert best_threshold(images) == 0.5  # all are equal


def test_greedy_stops_where_nothing_is_better() -> None:
    image = known_image(0)
    found = greedy(image.dice, 5)
    assert image.dice(found) >= image.dice((DILATE,))
    assert greedy(lambda operations: -len(operations), 5) == ()
    assert greedy(lambda operations: float(sum(action == 3 for action in operations)), 3) == (3, 3, 3)


def test_ridge_tells_the_two_kinds_apart() -> None:
    chosen = ridge_sequences(known_images(16), known_images(4, first=16), [(), (DILATE,), (ERODE,)])
    assert chosen == [(DILATE,), (ERODE,), (DILATE,), (ERODE,)]


def test_ridge_chooses_from_what_is_greedy_on_training_images() -> None:
    images = known_images(8)
    chosen = sequences_for_ridge(images, (DILATE,), 1)
    assert chosen[:2] == [(), (DILATE,)]
    assert (ERODE,) in chosen


def test_sequences_in_words() -> None:
    assert words(()) == "none"
    assert words((DILATE, ERODE)) == "dilate, erode"
