"""Reward functions in TRL's protocol: what each column does, and that a missing reward is never a 0."""

from collections import Counter

import numpy as np
import pytest
import torch

from rl_reward_network.rewards.functions import (
    confidence_reward,
    iou_reward,
    judge_reward,
    judged_caption_reward,
    learned_reward,
    mask_reward,
    meteor_reward,
)
from rl_reward_network.rewards.learned import ForegroundMaps

HALF = np.array([[True, True], [False, False]])
CORNER = np.array([[True, False], [False, False]])


def test_overlap_rewards():
    columns = {"predicted_masks": [CORNER, None, CORNER], "masks": [HALF, HALF, None], "unknown": [1, 2, 3]}
    assert iou_reward(**columns) == [0.5, 0.0, None]
    assert mask_reward("dice")(**columns) == [pytest.approx(2 / 3), 0.0, None]


class Judge:
    """A judge with given scores and a counter of notes."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.last_failure = ""

    def scores(self, predictions, references):
        return [{"a red circle": 0.8}.get(text) for text in predictions]

    def note(self, **counts):
        self.counts.update(counts)

    def failing(self):
        return None


def test_caption_rewards_and_a_judge_that_is_away():
    columns = {"completions": ["a red circle", "a circle"], "captions": ["a red circle", "a circle"], "unknown": [1, 2]}
    assert meteor_reward(**columns) == [1.0, 1.0]
    assert judge_reward(Judge())(**columns) == [0.8, None], "missing, and no 0"


def test_what_a_judge_leaves_open_is_filled_and_counted():
    judge = Judge()
    reward = judged_caption_reward(judge)
    scored = np.array([[0.8, 0.4], [0.1, 0.2]])
    np.testing.assert_allclose(reward(np.ones((2, 2)), scored), 0.25 + 0.75 * scored)
    assert judge.counts == {"imputed": 0, "groups_paid_by_meteor": 0}, "so that its curves are there from the start"
    gone = np.array([[0.8, np.nan, np.nan], [np.nan] * 3])
    reward(np.ones((2, 3)), gone)
    reward(np.ones((1, 3)), gone[:1])
    assert judge.counts == {"imputed": 4, "groups_paid_by_meteor": 1}


def test_the_learned_reward_looks_at_each_image_once():
    looked = []

    class Network:
        def foreground_probs(self, image):
            looked.append(image.shape)
            return torch.zeros(1, 1, 1, *image.shape[2:])

        def mask_quality(self, mask, maps):
            from types import SimpleNamespace

            share = mask.mean(dim=(1, 2, 3))
            members = {"members": share[None, None].expand(1, 4, -1), "member_scores": share[None]}
            return SimpleNamespace(score=share, dice=share, std=share, **members)

    one, two = np.zeros((2, 2, 3), np.uint8), np.ones((2, 2, 3), np.uint8)
    scores = learned_reward(ForegroundMaps(Network()))(images=[one, one, two], predicted_masks=[HALF, None, CORNER])
    assert scores.values == [0.5, 0.0, 0.25]
    assert scores.members.tolist() == [[0.5], [0.0], [0.25]]
    assert len(looked) == 2


def test_confidence_is_that_inside_the_mask():
    probability = np.array([[0.9, 0.7], [0.1, 0.4]], dtype=np.float32)
    values = confidence_reward(mask_probabilities=[probability, None, probability * 0.1])
    assert values == [pytest.approx(0.6), 0.0, 0.0]
