"""The table of methods is consistent, and each number of their masks has a closed form."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.special import expit, logit

from rl_reward_network.env.mask_bank import FrozenAnswer
from rl_reward_network.methods import GROUPS
from rl_reward_network.methods.augmentation import flips_and_scales, quarters
from rl_reward_network.methods.fusion import FUSION_WEIGHTS, fusion
from rl_reward_network.methods.measure import calibration
from rl_reward_network.methods.methods import (
    AFTER,
    FINE_TUNED,
    METHODS,
    POST,
    SUPERVISED,
    TRAINED,
    WEIGHTS,
    Method,
    methods_of,
    runs_of,
)
from rl_reward_network.methods.training import REWARD_NET
from rl_reward_network.methods.view import BASE, FrozenModel, ImageView, Trained

PROMPTS = ("a", "b", "c")
SIZE = (16, 24)
IMAGE = np.random.default_rng(0).integers(0, 256, (*SIZE, 3), dtype=np.uint8)
RED = IMAGE[..., 0].astype(np.float32) / 255


def test_names_are_unique_and_what_is_needed_is_made() -> None:
    names = [method.name for method in METHODS]
    assert len(set(names)) == len(names)
    assert {method.weights for method in METHODS} <= {BASE, FINE_TUNED, *WEIGHTS}
    assert {run for method in METHODS for run in method.needs} - {FINE_TUNED} == set(TRAINED)
    assert {method.group for method in METHODS} == {None, *GROUPS}


def test_runs_come_after_those_they_need() -> None:
    runs = runs_of(METHODS)
    assert runs[0] == REWARD_NET
    assert runs.index(SUPERVISED) < runs.index(AFTER)
    assert set(WEIGHTS) <= set(runs)


def test_groups_leave_out_what_they_do_not_need() -> None:
    methods = methods_of(("post",))
    assert [method.name for method in methods] == [BASE, "threshold", "sequence", POST]
    assert runs_of(methods) == (POST,)
    assert runs_of(methods_of(("prompts",))) == (REWARD_NET, "experiment1", "experiment3")
    assert methods_of(GROUPS) == METHODS
    with pytest.raises(ValueError, match="give weights as well"):
        methods_of(("fusion", "combined"))


def brightness_model() -> FrozenModel:
    """The soft mask of a prompt is the red channel to a power, so that it flips and is cut as the image is."""
    powers = {"a": 1.0, "b": 2.0, "c": 0.5}

    def answer(image: np.ndarray, prompts: list[str]) -> FrozenAnswer:
        red = image[..., 0].astype(np.float32) / 255
        return FrozenAnswer(np.stack([red ** powers[prompt] for prompt in prompts]), np.zeros(4, np.float32))

    return FrozenModel(answer, lambda masks, size: masks)


def view_of(own: np.ndarray | None = None, *scores: float) -> ImageView:
    """The image; the reward network, if any, segments it as `own` and scores the n-th mask of a stack by `scores`."""
    network: Any = SimpleNamespace(
        foreground_prob=own, quality=lambda masks: {"score": np.array(scores[: len(masks)], np.float32)}
    )
    return ImageView(IMAGE, brightness_model(), None if own is None else lambda pixels: network)


def method(name: str) -> Method:
    return next(method for method in METHODS if method.name == name)


def mask(name: str, view: ImageView, parameter: float | None = None) -> np.ndarray:
    return np.asarray(method(name).predict(view, Trained(PROMPTS, {}), parameter) > 0.5)


@pytest.mark.parametrize("best", [0.01, 0.5, 0.6, 0.99])
def test_a_best_threshold_gives_its_mask_and_a_soft_mask_in_0_1(best: float) -> None:
    """A threshold of 0.6 gave values below 0, and ECE of them ended the comparison."""
    policy = SimpleNamespace(sequence=lambda index: ((), (f"threshold at {best}",))[index])
    trained = SimpleNamespace(load=lambda run, loader: policy, prompts=PROMPTS[:1])
    view = view_of()
    soft = method("threshold").predict(view, trained, None)  # type: ignore[arg-type]
    own = view.soft(PROMPTS[:1])[0]
    np.testing.assert_array_equal(soft > 0.5, own > best)
    assert soft.min() >= 0
    assert soft.max() <= 1
    assert calibration(soft, own > 0.5) >= 0


def test_the_base_is_the_first_prompt_alone() -> None:
    view = view_of()
    assert (mask(BASE, view) == (RED > 0.5)).all()
    assert view.answers.keys() == {("a", "whole")}


def test_mean_and_weighted_mean_over_prompts() -> None:
    powers = np.stack([RED, RED**2, RED**0.5]).astype(np.float64)
    view = view_of(RED, 0.2, 0.6, 0.0)
    assert (mask("mean_of_prompts", view) == (powers.mean(0) > 0.5)).all()
    expected = (0.2 * powers[0] + 0.6 * powers[1]) / 0.8
    assert (mask("weighted_mean", view) == (expected > 0.5)).mean() > 0.99  # a score of 0 keeps a weight of 1e-4
    assert (mask("best_of_prompts", view) == (powers[1] > 0.5)).all()
    assert len(view.answers) == 3, "each answer is computed once"


def test_fusion_is_the_mean_of_logits_and_its_ends_are_its_parts() -> None:
    soft, own = np.array([[0.2, 0.9]]), np.array([[0.8, 0.4]])
    assert fusion(soft, own, 0.0) == pytest.approx(soft)
    assert fusion(soft, own, 1.0) == pytest.approx(own)
    assert fusion(soft, own, 0.25) == pytest.approx(expit(0.75 * logit(soft) + 0.25 * logit(own)))
    assert np.isfinite(fusion(np.zeros((1, 1)), np.ones((1, 1)), 0.5)).all()
    own = np.random.default_rng(1).random(SIZE).astype(np.float32)
    assert (mask("fusion", view_of(own), FUSION_WEIGHTS[0]) == (RED > 0.5)).all()
    assert (mask("fusion", view_of(own), FUSION_WEIGHTS[-1]) == (own > 0.5)).all()
    assert (mask("reward_net_segmentation", view_of(own)) == (own > 0.5)).all()


def test_flips_and_scales_of_a_model_that_moves_with_the_image_change_nothing() -> None:
    view = view_of()
    assert flips_and_scales(view, Trained(PROMPTS, {}), None) == pytest.approx(RED, abs=1e-6)
    assert len(view.answers) == 8


@pytest.mark.parametrize("size", [(16, 24), (17, 31), (1, 5)])
def test_quarters_cover_the_image(size: tuple[int, int]) -> None:
    count = np.zeros(size, int)
    for rows, cols in quarters(size):
        count[rows, cols] += 1
    assert count.min() >= 1


def test_a_method_that_needs_a_network_says_so() -> None:
    with pytest.raises(ValueError, match="--reward_net"):
        mask("reward_net_segmentation", view_of())


def test_a_view_computes_each_answer_once() -> None:
    calls: list[list[str]] = []

    def answer(image: np.ndarray, prompts: list[str]) -> FrozenAnswer:
        calls.append(prompts)
        return FrozenAnswer(np.zeros((len(prompts), 2, 2), np.float32), np.arange(3, dtype=np.float32))

    model = FrozenModel(answer, lambda logits, size: np.full((len(logits), *size), 0.5, np.float32))
    view = ImageView(IMAGE, model)
    assert view.soft(["a", "b"]).shape == (2, *SIZE)
    view.soft(["c", "a"])
    assert view.features("a").tolist() == [0, 1, 2]
    view.soft_of(IMAGE[:4], ["a"], "upper part")
    assert calls == [["a", "b"], ["c"], ["a"]]
    assert view.answers.keys() == {*((name, "whole") for name in "abc"), ("a", "upper part")}


def test_what_runs_hold_is_loaded_once(tmp_path: Any) -> None:
    loaded: list[Any] = []
    trained = Trained(PROMPTS, {"experiment1": tmp_path})
    for _ in range(2):
        trained.load("experiment1", loaded.append)
    assert loaded == [tmp_path]
