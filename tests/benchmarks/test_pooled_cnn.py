"""The pooled CNN: its size, what it can learn, and how masks are shrunk."""

import numpy as np
import pytest
import torch

from benchmarks.pooled_cnn import PooledCNN, _stack, train_pooled_cnn
from rl_reward_network.reward_training.masks import RewardExample


def bars(width, seed):
    """A bright bar whose mask is right over `width` of its 40 columns: Dice 2 w / (w + 40)."""
    truth = np.zeros((64, 64), dtype=bool)
    truth[20:30, 10:50] = True
    mask = truth.copy()
    mask[:, 10 + width :] = False
    noise = np.random.default_rng(seed).integers(0, 30, (64, 64, 3))
    return RewardExample((noise + 150 * truth[..., None]).astype(np.uint8), truth, mask[None])


def test_size_is_that_of_the_predecessor():
    assert 130_000 < sum(parameter.numel() for parameter in PooledCNN().parameters()) < 150_000


def test_it_learns_what_one_mask_per_image_can_teach(monkeypatch):
    monkeypatch.setattr("benchmarks.pooled_cnn.SIDE", 64)
    examples = [bars(width, seed) for seed, width in enumerate([2, 5, 10, 15, 20, 30, 35, 40] * 2)]
    predict = train_pooled_cnn(examples, 0)
    again = train_pooled_cnn(examples, 0)
    result = np.array([predict(e.image, e.masks)[0] for e in examples])
    true = np.array([2 * w / (w + 40) for w in [2, 5, 10, 15, 20, 30, 35, 40] * 2])
    assert np.corrcoef(result, true)[0, 1] > 0.9
    assert np.array_equal(result, [again(e.image, e.masks)[0] for e in examples])


def test_images_of_any_size_and_many_masks():
    example = bars(10, 0)
    stack = _stack(example.image[:50], np.repeat(example.masks[:, :50], 3, axis=0))
    assert (stack.dtype, tuple(stack.shape)) == (torch.uint8, (3, 4, 256, 256))
    assert stack[:, 3].min() == 0
    assert stack[:, 3].max() == 255


def test_a_shrunk_mask_keeps_its_area():
    thin = np.zeros((1, 1024, 1024), dtype=bool)
    thin[:, :, 513] = True  # a column that `nearest` would miss
    stack = _stack(np.zeros((1024, 1024, 3), np.uint8), thin)
    assert stack[0, 3].float().sum() / 255 == pytest.approx(1024 / 16, rel=0.01)
