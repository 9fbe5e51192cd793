"""Masks of roads from known models: each number in closed form."""

from types import SimpleNamespace

import numpy as np
import pytest
from scipy.special import expit, logit

from rl_reward_network.env.mask_bank import FrozenAnswer
from rl_reward_network.methods.masks import (
    Tools,
    flips_and_scales,
    fusion,
    masks_of_grid,
    method_mask,
    quarters,
)
from rl_reward_network.methods.methods import BASE, METHODS, PROMPTS_NET, Method
from rl_reward_network.methods.views import FrozenModel, ImageView

PROMPTS = ("a", "b", "c")
SIZE = (16, 24)


def brightness_model(**shares: float) -> FrozenModel:
    """Prompt -> soft mask: the red channel to the power of its share, so that flips and crops move with the image."""

    def answer(image: np.ndarray, prompts: list[str]) -> FrozenAnswer:
        red = image[..., 0].astype(np.float32) / 255
        return FrozenAnswer(np.stack([red ** shares[prompt] for prompt in prompts]), np.zeros(4, np.float32))

    return FrozenModel(answer, lambda masks, size: masks)


def image() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (*SIZE, 3), dtype=np.uint8)


def scorer_of(own: np.ndarray, scores: dict[int, float] | None = None) -> SimpleNamespace:
    """A reward network that says `own`, and scores the n-th mask of a stack by `scores`."""
    listed = list((scores or {}).values())
    return SimpleNamespace(
        foreground_prob=own, quality=lambda masks: {"score": np.array(listed[: len(masks)], np.float32)}
    )


def view_of(scorer: SimpleNamespace | None = None) -> ImageView:
    model = brightness_model(a=1.0, b=2.0, c=0.5)
    return ImageView(image(), lambda weights: model, None if scorer is None else lambda pixels: scorer)


def method(name: str) -> Method:
    return next(method for method in METHODS if method.name == name)


def test_default_prompt_is_the_first_one() -> None:
    view = view_of()
    red = image()[..., 0].astype(np.float32) / 255
    assert (method_mask(method(BASE), view, Tools(PROMPTS), BASE, None) == (red > 0.5)).all()
    assert view.answers == {(BASE, "a", "whole")}


def test_policy_chooses_the_prompt_and_one_mask_is_asked() -> None:
    view, red = view_of(), image()[..., 0].astype(np.float32) / 255
    tools = Tools(PROMPTS, choosers={PROMPTS_NET: lambda view, weights: 1})
    assert (method_mask(method(PROMPTS_NET), view, tools, BASE, None) == (red**2 > 0.5)).all()
    assert len(view.answers) == 1


def test_mean_and_weighted_mean_over_prompts() -> None:
    red = image()[..., 0].astype(np.float64) / 255
    powers = np.stack([red, red**2, red**0.5])
    view = view_of(scorer_of(red, {0: 0.2, 1: 0.6, 2: 0.0}))
    assert (method_mask(method("mean_of_prompts"), view, Tools(PROMPTS), BASE, None) == (powers.mean(0) > 0.5)).all()
    expected = (0.2 * powers[0] + 0.6 * powers[1]) / 0.8
    found = method_mask(method("weighted_mean"), view, Tools(PROMPTS), BASE, None)
    assert (found == (expected > 0.5)).mean() > 0.99  # a score of 0 keeps a weight of 1e-4
    assert (method_mask(method("best_of_prompts"), view, Tools(PROMPTS), BASE, None) == (powers[1] > 0.5)).all()
    assert len(view.answers) == 3


def test_fusion_is_the_mean_of_logits_and_its_ends_are_its_parts() -> None:
    soft, own = np.array([[0.2, 0.9]]), np.array([[0.8, 0.4]])
    assert fusion(soft, own, 0.0) == pytest.approx(soft)
    assert fusion(soft, own, 1.0) == pytest.approx(own)
    assert fusion(soft, own, 0.25) == pytest.approx(expit(0.75 * logit(soft) + 0.25 * logit(own)))
    assert np.isfinite(fusion(np.zeros((1, 1)), np.ones((1, 1)), 0.5)).all()


def test_grid_holds_a_mask_for_each_weight() -> None:
    own = np.random.default_rng(1).random(SIZE).astype(np.float32)
    view = view_of(scorer_of(own))
    masks = masks_of_grid(method("fusion"), view, Tools(PROMPTS), BASE)
    red = image()[..., 0].astype(np.float32) / 255
    assert masks.shape == (11, *SIZE)
    assert (masks[0] == (red > 0.5)).all()
    assert (masks[-1] == (own > 0.5)).all()


def test_flips_and_scales_of_a_model_that_moves_with_the_image_change_nothing() -> None:
    view = view_of()
    assert flips_and_scales(view, BASE, "a") == pytest.approx(image()[..., 0] / 255, abs=1e-6)
    assert len(view.answers) == 8


@pytest.mark.parametrize("size", [(16, 24), (17, 31), (1, 5)])
def test_quarters_cover_the_image(size: tuple[int, int]) -> None:
    count = np.zeros(size, int)
    for rows, cols in quarters(size):
        count[rows, cols] += 1
    assert count.min() >= 1


def test_a_road_that_needs_a_network_says_so() -> None:
    with pytest.raises(ValueError, match="--reward_net"):
        method_mask(method("own"), view_of(), Tools(PROMPTS), BASE, None)


def test_threshold_moves_the_limit() -> None:
    red = image()[..., 0].astype(np.float32) / 255
    found = method_mask(method("threshold"), view_of(), Tools(PROMPTS, threshold=0.3), BASE, None)
    assert (found == (red > np.float32(0.3))).mean() > 0.99
