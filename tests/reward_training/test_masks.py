import numpy as np
import pytest
from scipy import ndimage
from skimage.draw import line

from rl_reward_network.reward_training import masks as reward_masks
from rl_reward_network.reward_training.damage import DAMAGES
from rl_reward_network.reward_training.masks import (
    DAMAGED,
    OTHER_FAMILIES,
    RIDGE,
    SEGMENTER,
    SHIFTED,
    SOURCES,
    RewardExample,
    source_masks,
    true_dice,
)


def tree_of(size=(90, 120), seed=0, prompts=3):
    rng = np.random.default_rng(seed)
    truth = np.zeros(size, dtype=bool)
    for _ in range(4):
        rows, columns = rng.integers(0, size[0], 2), rng.integers(0, size[1], 2)
        truth[line(rows[0], columns[0], rows[1], columns[1])] = True
    truth = ndimage.binary_dilation(truth, np.ones((3, 3)))
    image = np.repeat((60 + 130 * truth[..., None]).astype(np.uint8), 3, axis=2)
    masks = (
        np.stack([np.roll(truth, 2 * n + 1, axis=1) for n in range(prompts)]) if prompts else np.zeros((0, *size), bool)
    )
    return RewardExample(image, truth, masks, f"patient{seed}")


def test_only_the_named_sources_are_made(monkeypatch):
    monkeypatch.setitem(DAMAGES, reward_masks.SHIFT, lambda *_: pytest.fail("not asked for"))
    monkeypatch.setattr(reward_masks, "ridge_masks", lambda *_: pytest.fail("not asked for"))
    assert tuple(source_masks(tree_of(), np.random.default_rng(0), 16, (SEGMENTER, DAMAGED))) == (SEGMENTER, DAMAGED)
    assert set(DAMAGES) - set(OTHER_FAMILIES) == {reward_masks.SHIFT}


def test_sources_of_a_test_image():
    example = tree_of(size=(96, 96))
    result = source_masks(example, np.random.default_rng(0), 4)
    assert tuple(result) == SOURCES == (SEGMENTER, DAMAGED, SHIFTED, RIDGE)
    assert {name: len(stack) for name, stack in result.items()} == {SEGMENTER: 3, DAMAGED: 4, SHIFTED: 4, RIDGE: 6}
    assert all(stack.dtype == bool and stack.shape[1:] == (96, 96) for stack in result.values())
    assert (true_dice(result[SHIFTED], example.truth) < 1).all()
    assert tuple(source_masks(example, np.random.default_rng(0), 4, (DAMAGED,))) == (DAMAGED,)
