"""Prompts, and their order: a function of seed and step, and of rewards with a curriculum."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_reward_network.data.annotations import read_annotations
from rl_reward_network.data.items import make_region
from rl_reward_network.data.masks import to_rle
from rl_reward_network.grpo.prompts import (
    LOW_WEIGHT,
    CurriculumOrder,
    PromptOrder,
    image_prompt,
    region_prompt,
    segment_question,
)
from tests.conftest import tube_image, write_tiny_data


@pytest.mark.parametrize(
    ("caption", "question"),
    [
        ("a red circle.", "Please segment the red circle."),
        ("A red circle", "Please segment the red circle."),
        ("An orange cross at the top.", "Please segment the orange cross at the top."),
        ("the left vessel.", "Please segment the left vessel."),
        ("apples and an orange", "Please segment apples and an orange."),
        ("Two dogs. One barks.", "Please segment Two dogs. One barks."),
        ("a  small\n red\tcircle ...", "Please segment the small red circle."),
        ("A .", "Please segment A."),
        ("cross", "Please segment cross."),
        ("a <image> red <p>circle</p> [SEG].", "Please segment the red circle."),
        ("smaller than 3 < 4 > 2", "Please segment smaller than 3 < 4 > 2."),
    ],
)
def test_a_caption_becomes_a_question(caption: str, question: str) -> None:
    """An article alone is no phrase, and only the first word can be the article."""
    assert segment_question(caption) == question


def test_a_region_takes_part_in_both_loops() -> None:
    image, mask = tube_image(64, 0)
    region = make_region(" A bright tube. ", to_rle(mask), "0" * 12, "here", lambda: image, group_id="1" * 12)
    item = region_prompt(region)
    assert (item.caption, item.question, item.labelled) == ("A bright tube.", "Please segment the bright tube.", True)
    assert (item.group_id, item.series_id) == ("1" * 12, "1" * 12)
    assert item.sample_id == region.sample_id
    loaded, truth = item.load()
    assert loaded is image
    np.testing.assert_array_equal(truth, mask)


def test_an_annotated_image_is_asked_the_question_of_all_and_decoded_late(tmp_path: Path) -> None:
    (sample, *_) = read_annotations(write_tiny_data(tmp_path, images=4, size=64))
    item = image_prompt(sample, "Please segment the vessel.")
    assert (item.caption, item.question, item.labelled) == ("", "Please segment the vessel.", True)
    assert (item.group_id, item.series_id, item.sample_id) == (sample.group_id, sample.series_id, sample.sample_id)
    image, truth = item.load()
    np.testing.assert_array_equal(image, sample.load_image())
    np.testing.assert_array_equal(truth, sample.load_mask())
    sample.image_path.unlink()
    assert image_prompt(sample, "?").question == "?", "nothing is read before it is asked for"
    with pytest.raises(ValueError, match=sample.image_path.name.split("(")[0]):
        item.load()


def test_an_epoch_takes_each_prompt_once_but_for_the_incomplete_chunk() -> None:
    order, again = PromptOrder(7, 3, seed=0), PromptOrder(7, 3, seed=0)
    assert order.rollouts_per_epoch == 2
    first, second = (order.indices(start) + order.indices(start + 1) for start in (0, 2))
    assert len(set(first)) == len(set(second)) == 6
    assert set(first) < set(range(7))
    assert second != first, "another order for each epoch"
    expected = [order.indices(rollout) for rollout in range(6)]
    assert [again.indices(rollout) for rollout in reversed(range(6))] == expected[::-1], "by seed and rollout alone"
    assert [PromptOrder(7, 3, seed=1).indices(rollout) for rollout in range(6)] != expected
    with pytest.raises(ValueError, match=r"^2 training prompts.* 3; lower batch_size"):
        PromptOrder(2, 3, 0)


def test_before_anything_is_known_all_prompts_are_alike_and_none_comes_twice() -> None:
    order = CurriculumOrder(10, 4, seed=0, rollouts=100)
    assert order.weights(0).tolist() == [1] * 10
    drawn = Counter(index for rollout in range(100) for index in order.indices(rollout))
    assert all(len(set(order.indices(rollout))) == 4 for rollout in range(100))
    assert min(drawn.values()) > 20


def test_prompts_without_spread_are_drawn_less() -> None:
    order = CurriculumOrder(4, 1, seed=0, rollouts=10)
    for _ in range(9):
        order.update([(index, 0.5, index > 0) for index in range(4)])
    assert order.weights(10).tolist() == pytest.approx([LOW_WEIGHT, 1, 1, 1])


def test_easy_prompts_come_before_hard_ones_and_unknown_ones_at_once() -> None:
    order = CurriculumOrder(7, 1, seed=0, rollouts=10)
    order.update([(index, index / 6, True) for index in range(6)])
    assert order.weights(0).tolist() == pytest.approx([LOW_WEIGHT] * 4 + [1] * 3), "the best third, and the unknown"
    assert order.weights(10).tolist() == [1] * 7, "in the end all are open"
    opened = [int((order.weights(rollout) == 1).sum()) for rollout in range(11)]
    assert opened == sorted(opened)


def test_what_is_known_is_averaged_and_a_missing_reward_changes_nothing() -> None:
    order = CurriculumOrder(2, 1, seed=0, rollouts=10)
    order.update([(0, 1.0, True)])
    order.update([(0, 0.0, False), (1, float("nan"), True)])
    assert order.reward[0] == 0.5
    assert order.differing.tolist() == [0.5, 1]
    assert order.reward[1].isnan()


def test_the_state_comes_back() -> None:
    order, again = (CurriculumOrder(9, 3, seed=1, rollouts=10) for _ in range(2))
    order.update([(index, index / 9, index % 2 == 0) for index in range(9)])
    assert [again.indices(n) for n in range(10)] != [order.indices(n) for n in range(10)]
    again.load_state_dict(order.state_dict())
    assert [again.indices(n) for n in range(10)] == [order.indices(n) for n in range(10)]
    assert torch.equal(again.weights(5), order.weights(5))
