"""A road is measured as its masks are, and its parameter is the best on validation images."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rl_reward_network.env.mask_bank import FrozenAnswer
from rl_reward_network.methods.measure import load_result, measure_method, save_result
from rl_reward_network.methods.methods import METHODS
from rl_reward_network.methods.view import BASE, FrozenModel, ImageView, Trained
from rl_reward_network.rewards.metrics import dice

SIDE = 24


def sample(number: int) -> Any:
    """An image whose red channel is a soft mask, and whose green channel is the truth."""
    rng = np.random.default_rng(number)
    pixels = rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    truth = rng.random((SIDE, SIDE)) > 0.5
    pixels[..., 1] = truth * 255
    names = {"sample_id": f"i{number}", "group_id": f"p{number}"}
    return SimpleNamespace(load_image=lambda: pixels, load_mask=lambda: truth, **names)


def view(image: np.ndarray) -> ImageView:
    """Sa2VA says the red channel; the reward network knows the truth."""

    def answer(pixels: np.ndarray, prompts: list[str]) -> FrozenAnswer:
        soft = pixels[..., 0].astype(np.float32) / 255
        return FrozenAnswer(np.stack([soft] * len(prompts)), np.zeros(4, np.float32))

    truth = image[..., 1] > 0
    scorer = SimpleNamespace(
        foreground_prob=np.where(truth, 0.999, 0.001).astype(np.float32),
        quality=lambda masks: {"score": dice(masks > 0.5, np.broadcast_to(truth, masks.shape)).astype(np.float32)},
    )
    return ImageView(image, FrozenModel(answer, lambda masks, size: masks), lambda pixels: scorer)  # type: ignore[arg-type, return-value]


def measured(name: str) -> Any:
    method = next(method for method in METHODS if method.name == name)
    samples = {"val": [sample(0), sample(1)], "test": [sample(2), sample(3), sample(4)]}
    return measure_method(method, Trained(("a", "b"), {}), samples, view, 3), samples


def test_dice_of_the_base_is_that_of_its_masks() -> None:
    result, samples = measured(BASE)
    expected = [dice((one.load_image()[..., 0] > 127)[None], one.load_mask()[None])[0] for one in samples["test"]]
    assert result.test["dice"] == pytest.approx(expected)
    assert result.test["score"] == pytest.approx(expected)
    assert (result.parameter, result.answers, result.seed) == (None, 1.0, 3)


def test_fusion_takes_the_weight_that_is_best_on_validation_images() -> None:
    """A network that knows the truth and is sure gets nearly all the weight."""
    result, _ = measured("fusion")
    base, _ = measured(BASE)
    assert result.parameter is not None
    assert result.parameter >= 0.4
    assert min(result.val) > 0.99
    assert min(result.test["dice"]) > max(base.test["dice"])


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    result, _ = measured("reward_net_segmentation")
    save_result(tmp_path / "own.json", result)
    assert load_result(tmp_path / "own.json") == result
    assert result.answers == 0


def test_a_damaged_result_names_its_file(tmp_path: Path) -> None:
    result, _ = measured(BASE)
    save_result(tmp_path / "base.json", replace(result, test={"dice": (0.5,)}))
    with pytest.raises(ValueError, match=r"base\.json.*delete it"):
        load_result(tmp_path / "base.json")


def test_empty_masks_everywhere_are_measured() -> None:
    """Sa2VA finds nothing, and there is nothing."""
    samples = {"val": [sample(0)], "test": [sample(1)]}
    for one in (samples["val"][0], samples["test"][0]):
        empty = np.zeros((SIDE, SIDE, 3), np.uint8)
        one.load_image, one.load_mask = (lambda empty=empty: empty), (lambda: np.zeros((SIDE, SIDE), bool))
    for name in (BASE, "fusion", "reward_net_segmentation"):
        method = next(method for method in METHODS if method.name == name)
        result = measure_method(method, Trained(("a",), {}), samples, view)
        assert result.test["dice"] == (1.0,)
        assert result.test["hd95"] == (0.0,)
        assert result.test["betti0"] == (0.0,)
