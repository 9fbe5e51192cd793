"""Labelled samples with the masks of every prompt."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rl_reward_network.reward_training.examples import RewardExamples


def sample(truth: np.ndarray | None) -> Any:
    image = np.zeros((4, 5, 3), np.uint8)
    return SimpleNamespace(sample_id="a", group_id="g", load_image=lambda: image, load_mask=lambda: truth)


def test_examples_can_be_iterated_again() -> None:
    truth, probabilities = np.ones((4, 5), bool), np.stack([np.full((4, 5), 0.4), np.full((4, 5), 0.6)])
    inputs: Any = SimpleNamespace(probabilities=lambda image: probabilities)
    examples = RewardExamples(inputs, [sample(truth)], "examples")
    for _ in range(2):
        (example,) = examples
        assert example.masks.tolist() == (probabilities > 0.5).tolist()
        assert (example.group_id, example.truth.all()) == ("g", True)


def test_a_sample_without_a_mask_is_refused() -> None:
    inputs: Any = SimpleNamespace()
    with pytest.raises(ValueError, match="sample a has no mask"):
        list(RewardExamples(inputs, [sample(None)], "examples"))
