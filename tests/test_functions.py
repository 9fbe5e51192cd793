"""Reward functions in TRL's protocol: what each column does, and that a missing reward is never a 0."""

import numpy as np
import pytest
import torch

from rl_reward_network.rewards.functions import (
    confidence_reward,
    dice_reward,
    iou_reward,
    judge_rewards,
    learned_reward,
    meteor_reward,
)

HALF = np.array([[True, True], [False, False]])
CORNER = np.array([[True, False], [False, False]])


def test_overlap_rewards() -> None:
    columns = {"predicted_masks": [CORNER, None, CORNER], "masks": [HALF, HALF, None], "unknown": [1, 2, 3]}
    assert iou_reward(**columns) == [0.5, 0.0, None]
    assert dice_reward(**columns) == [pytest.approx(2 / 3), 0.0, None]


def test_caption_rewards_and_a_judge_that_is_away() -> None:
    asked = []

    class Judge:
        def scores(self, predictions, references):
            asked.append(predictions)
            return [0.8, None]

    columns = {"completions": ["a red circle", "a red circle"], "captions": ["a red circle", "a red circle"]}
    assert meteor_reward(**columns) == [1.0, 1.0]
    judged, combined = judge_rewards(Judge())
    assert judged(**columns) == [0.8, None]
    assert combined(**columns) == [pytest.approx(0.25 + 0.75 * 0.8), None]
    assert len(asked) == 1, "a judge costs money"
    judged(completions=["a", "b"], captions=columns["captions"])
    assert len(asked) == 2


def test_the_learned_reward_looks_at_each_image_once() -> None:
    looked = []

    class Network:
        def truth_maps(self, image):
            looked.append(image.shape)
            return torch.zeros(1, 1, 1, *image.shape[2:])

        def judge(self, mask, maps):
            from types import SimpleNamespace

            share = mask.mean(dim=(1, 2, 3))
            return SimpleNamespace(score=share, dice=share, spread=share, members=share[None, None].expand(1, 4, -1))

    one, two = np.zeros((2, 2, 3), np.uint8), np.zeros((2, 2, 3), np.uint8)
    scores = learned_reward(Network())(images=[one, one, two], predicted_masks=[HALF, None, CORNER])
    assert scores == [0.5, 0.0, 0.25]
    assert len(looked) == 2


def test_confidence_is_that_inside_the_mask() -> None:
    probability = np.array([[0.9, 0.7], [0.1, 0.4]], dtype=np.float32)
    values = confidence_reward(mask_probabilities=[probability, None, probability * 0.1])
    assert values == [pytest.approx(0.6), 0.0, 0.0]
