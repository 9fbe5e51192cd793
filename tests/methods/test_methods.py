"""The table of methods is consistent, their masks have closed forms, and they are measured as their masks are."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.special import expit, logit

from rl_reward_network.env.mask_bank import FrozenAnswer
from rl_reward_network.methods import GROUPS
from rl_reward_network.methods.compare import BY_NAME, load_result, measure_method, save_result
from rl_reward_network.methods.methods import (
    AFTER,
    FINE_TUNED,
    FUSION_WEIGHTS,
    METHODS,
    POST,
    SUPERVISED,
    TRAINED,
    WEIGHTS,
    flips_and_scales,
    fusion,
    methods_of,
    quarters,
    runs_of,
)
from rl_reward_network.methods.table import MethodResult
from rl_reward_network.methods.training import REWARD_NET
from rl_reward_network.methods.view import BASE, FrozenModel, ImageView, Trained
from rl_reward_network.rewards.metrics import calibration_error, dice

POWERS = {"a": 1.0, "b": 2.0, "c": 0.5}
TRAINED_RUNS = Trained(tuple(POWERS), {})
SIZE = (16, 24)
IMAGE = np.random.default_rng(0).integers(0, 256, (*SIZE, 3), dtype=np.uint8)
RED = IMAGE[..., 0].astype(np.float32) / 255


def test_names_are_unique_and_what_is_needed_is_made_before() -> None:
    assert len(BY_NAME) == len(METHODS)
    assert {method.weights for method in METHODS} <= {BASE, FINE_TUNED, *WEIGHTS}
    assert {run for method in METHODS for run in method.needs} - {FINE_TUNED} == set(TRAINED)
    assert {method.group for method in METHODS} == {None, *GROUPS}
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


def answer(image: np.ndarray, prompts: list[str]) -> FrozenAnswer:
    """The soft mask of a prompt is the red channel to a power, so that it flips and is cut as the image is."""
    red = image[..., 0].astype(np.float32) / 255
    return FrozenAnswer(np.stack([red ** POWERS[prompt] for prompt in prompts]), np.zeros(4, np.float32))


MODEL = FrozenModel(answer, lambda masks, size: masks)


def view_of(own: np.ndarray | None = None, *scores: float) -> ImageView:
    """The image; the reward network, if any, segments it as `own` and scores the n-th mask of a stack by `scores`."""
    network: Any = SimpleNamespace(
        foreground_prob=own, quality=lambda masks: {"score": np.array(scores[: len(masks)], np.float32)}
    )
    return ImageView(IMAGE, MODEL, None if own is None else lambda pixels: network)


def mask(name: str, view: ImageView, parameter: float | None = None) -> np.ndarray:
    return np.asarray(BY_NAME[name].predict(view, TRAINED_RUNS, parameter) > 0.5)


@pytest.mark.parametrize("best", [0.01, 0.5, 0.6, 0.99])
def test_a_best_threshold_gives_its_mask_and_a_soft_mask_in_0_1(best: float) -> None:
    """A threshold of 0.6 gave values below 0, and ECE of them ended the comparison."""
    policy = SimpleNamespace(sequence=lambda index: ((), (f"threshold at {best}",))[index])
    trained: Any = SimpleNamespace(load=lambda run, loader: policy, prompts=("a",))
    view = view_of()
    soft, own = BY_NAME["threshold"].predict(view, trained, None), view.soft(("a",))[0]
    np.testing.assert_array_equal(soft > 0.5, own > best)
    assert soft.min() >= 0
    assert soft.max() <= 1
    assert calibration_error(soft[None].astype(float), own[None] > 0.5)[0] >= 0


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
    assert flips_and_scales(view, TRAINED_RUNS, None) == pytest.approx(RED, abs=1e-6)
    assert len(view.answers) == 8
    for size in ((16, 24), (17, 31), (1, 5)):
        count = np.zeros(size, int)
        for rows, cols in quarters(size):
            count[rows, cols] += 1
        assert count.min() >= 1, "quarters cover the image"


def test_a_method_that_needs_a_network_says_so() -> None:
    with pytest.raises(ValueError, match="--reward_net"):
        mask("reward_net_segmentation", view_of())


def test_a_view_computes_each_answer_once_and_runs_are_loaded_once(tmp_path: Path) -> None:
    calls: list[list[str]] = []

    def counted(image: np.ndarray, prompts: list[str]) -> FrozenAnswer:
        calls.append(prompts)
        return FrozenAnswer(np.zeros((len(prompts), 2, 2), np.float32), np.arange(3, dtype=np.float32))

    model = FrozenModel(counted, lambda logits, size: np.full((len(logits), *size), 0.5, np.float32))
    view = ImageView(IMAGE, model)
    assert view.soft(["a", "b"]).shape == (2, *SIZE)
    view.soft(["c", "a"])
    assert view.features("a").tolist() == [0, 1, 2]
    view.soft_of(IMAGE[:4], ["a"], "upper part")
    assert calls == [["a", "b"], ["c"], ["a"]]
    assert view.answers.keys() == {*((name, "whole") for name in "abc"), ("a", "upper part")}
    loaded: list[Any] = []
    trained = Trained((), {"experiment1": tmp_path})
    for _ in range(2):
        trained.load("experiment1", loaded.append)
    assert loaded == [tmp_path]


def sample(number: int, empty: bool = False) -> Any:
    """An image whose red channel is a soft mask, and whose green channel is the truth."""
    rng = np.random.default_rng(number)
    pixels, truth = rng.integers(0, 256, (24, 24, 3), dtype=np.uint8), rng.random((24, 24)) > 0.5
    pixels[..., 1] = truth * 255
    names = {"sample_id": f"i{number}", "group_id": f"p{number}"}
    return SimpleNamespace(load_image=lambda: pixels * (not empty), load_mask=lambda: truth & (not empty), **names)


def knowing(image: np.ndarray) -> ImageView:
    """Sa2VA says the red channel; the reward network knows the truth."""
    truth = image[..., 1] > 0
    scorer: Any = SimpleNamespace(
        foreground_prob=np.where(truth, 0.999, 0.001).astype(np.float32),
        quality=lambda masks: {"score": dice(masks > 0.5, np.broadcast_to(truth, masks.shape)).astype(np.float32)},
    )
    return ImageView(image, MODEL, lambda pixels: scorer)


@pytest.fixture
def measured() -> Callable[[str], MethodResult]:
    samples = {"val": [sample(0), sample(1)], "test": [sample(2), sample(3), sample(4)]}
    return lambda name: measure_method(BY_NAME[name], TRAINED_RUNS, samples, knowing, 3)


def test_dice_of_the_base_is_that_of_its_masks(measured: Callable[[str], MethodResult]) -> None:
    result, test = measured(BASE), [sample(number) for number in (2, 3, 4)]
    expected = [dice((one.load_image()[..., 0] > 127)[None], one.load_mask()[None])[0] for one in test]
    assert result.test["dice"] == pytest.approx(expected)
    assert result.test["reward_net_score"] == pytest.approx(expected)
    assert (result.parameter, result.answers, result.seed) == (None, 1.0, 3)


def test_fusion_takes_the_weight_that_is_best_on_validation_images(measured: Callable[[str], MethodResult]) -> None:
    """A network that knows the truth and is sure gets nearly all the weight."""
    result = measured("fusion")
    assert result.parameter is not None
    assert result.parameter >= 0.4
    assert min(result.val) > 0.99
    assert min(result.test["dice"]) > max(measured(BASE).test["dice"])


def test_a_result_is_read_as_it_was_written_and_a_damaged_one_names_its_file(
    measured: Callable[[str], MethodResult], tmp_path: Path
) -> None:
    result = measured("reward_net_segmentation")
    save_result(tmp_path / "own.json", result)
    assert load_result(tmp_path / "own.json") == result
    assert result.answers == 0
    save_result(tmp_path / "own.json", replace(result, test={"dice": (0.5,)}))
    with pytest.raises(ValueError, match=r"own\.json.*delete it"):
        load_result(tmp_path / "own.json")


@pytest.mark.parametrize("name", [BASE, "fusion", "reward_net_segmentation"])
def test_empty_masks_everywhere_are_measured(name: str) -> None:
    """Sa2VA finds nothing, and there is nothing."""
    samples = {"val": [sample(0, empty=True)], "test": [sample(1, empty=True)]}
    result = measure_method(BY_NAME[name], TRAINED_RUNS, samples, knowing)
    assert (result.test["dice"], result.test["hd95"], result.test["betti0"]) == ((1.0,), (0.0,), (0.0,))
