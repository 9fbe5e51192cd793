"""A view asks models for what is needed, and counts it."""

import numpy as np
import pytest

from rl_reward_network.env.mask_bank import FrozenAnswer
from rl_reward_network.methods.views import FrozenModel, ImageView


def view_with(calls: list[list[str]]) -> ImageView:
    def answer(image: np.ndarray, prompts: list[str]) -> FrozenAnswer:
        calls.append(prompts)
        return FrozenAnswer(np.zeros((len(prompts), 2, 2), np.float32), np.arange(3, dtype=np.float32))

    def upsample(logits: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        return np.full((len(logits), *size), 0.5, np.float32)

    return ImageView(np.zeros((8, 10, 3), np.uint8), lambda weights: FrozenModel(answer, upsample))


def test_masks_have_the_size_of_the_image_and_are_counted_once() -> None:
    calls: list[list[str]] = []
    view = view_with(calls)
    assert view.soft("base", ["a", "b"]).shape == (2, 8, 10)
    view.soft("base", ["c", "a"])
    view.soft("base", ["a"])
    assert calls == [["a", "b"], ["c"]], "each answer is computed once"
    assert view.answers == {("base", name, "whole") for name in "abc"}


def test_features_come_with_an_answer() -> None:
    calls: list[list[str]] = []
    view = view_with(calls)
    assert view.features("base", "a").tolist() == [0, 1, 2]
    view.soft("base", ["a"])
    assert calls == [["a"]]
    assert view.answers == {("base", "a", "whole")}


def test_weights_and_copies_have_answers_of_their_own() -> None:
    calls: list[list[str]] = []
    view = view_with(calls)
    view.soft("base", ["a"])
    view.soft("trained", ["a"])
    view.soft_of(view.image[:4], "base", ["a"], "upper half")
    assert len(calls) == len(view.answers) == 3


def test_without_a_network_there_is_no_scorer() -> None:
    view = view_with([])
    assert not view.has_scorer
    with pytest.raises(ValueError, match="needs a reward network"):
        _ = view.scorer
