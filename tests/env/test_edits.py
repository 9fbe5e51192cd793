"""Edited images: sequences are applied in order, and rewards are those of the masks."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rl_reward_network.env.edits import KEPT
from rl_reward_network.env.operations import OPERATIONS, apply_operation
from rl_reward_network.rewards.metrics import dice, recall
from tests.env.edited_images import DILATE, ERODE, LikesLarge, known_image


def test_a_sequence_is_applied_in_order() -> None:
    image = known_image(0)
    expected = image.soft
    for action in (DILATE, ERODE, DILATE):
        expected = apply_operation(OPERATIONS[action], image.guide, expected)
    assert image.edited((DILATE, ERODE, DILATE)) == pytest.approx(expected, abs=1e-3)  # kept as float16
    assert image.edited(()) is image.soft


def test_reward_and_dice_are_those_of_the_mask() -> None:
    for reward in ("dice", "dice+recall"):
        image = known_image(0, reward)
        mask = image.mask((ERODE,))
        one = float(dice(mask[None], image.truth[None])[0])
        both = (one + float(recall(mask[None], image.truth[None])[0])) / 2
        assert image.state((ERODE,)).reward == pytest.approx(one if reward == "dice" else both)
        assert image.state((ERODE,)).info == {"dice": pytest.approx(one)}


def test_the_right_operation_repairs_the_mask() -> None:
    assert known_image(0).dice((DILATE,)) > 0.97 > known_image(0).dice(())
    assert known_image(1).dice((ERODE,)) > 0.97 > known_image(1).dice(())


def test_masks_dropped_from_memory_are_computed_again() -> None:
    image = known_image(0)
    first = image.mask((DILATE,)).copy()
    for one in range(len(OPERATIONS) - 1):
        for other in range(4):
            image.mask((one, other))
    assert len(image._softs) <= KEPT
    assert (image.mask((DILATE,)) == first).all()


def test_in_the_control_another_truth_pays_and_the_dice_stays_its_own() -> None:
    image = known_image(0)
    paid = replace(image, paid_by=~image.truth, _states={}, _values={})
    assert paid.state(()).reward != image.state(()).reward
    assert paid.state(()).info == image.state(()).info


def test_an_unlabelled_image_has_statistics_but_no_dice() -> None:
    likes: Any = LikesLarge()
    image = replace(known_image(0), truth=None, reward="net", scorer=likes)
    assert image.state(()).info == {}
    assert np.isfinite(image.state(()).statistics).all()
