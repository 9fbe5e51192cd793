"""The masks of a road on validation and test images, measured."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from rl_reward_network.artefacts import read_json, write_json
from rl_reward_network.data.items import Sample
from rl_reward_network.methods.masks import Tools, masks_of_grid, method_mask
from rl_reward_network.methods.methods import Method
from rl_reward_network.methods.views import ImageView
from rl_reward_network.report.bootstrap import group_means
from rl_reward_network.report.cost import Cost, cost_from_json, cost_json
from rl_reward_network.rewards.metrics import METRICS, dice, mask_metrics

MakeView = Callable[[np.ndarray], ImageView]


@dataclass(frozen=True)
class MethodResult:
    """A road, measured.

    Args:
        road: its name.
        seed: of what was trained for it.
        weights: of Sa2VA that the road used.
        parameter: of its refinement, chosen on validation images; None without one.
        val: Dice of each validation image.
        test: metric of `METRICS`, and `score` with a reward network -> value of each test image.
        answers: of Sa2VA that one image needs, mean over test images.
        cost: of training.
        deploys: what a trained policy deploys, in words; empty without one.
    """

    method: str
    seed: int
    weights: str
    parameter: float | None
    val: tuple[float, ...]
    test: dict[str, tuple[float, ...]]
    answers: float
    cost: Cost
    deploys: str = ""


def measure_method(
    method: Method,
    tools: Tools,
    weights: str,
    samples: dict[str, list[Sample]],
    make_view: MakeView,
    cost: Cost,
    seed: int,
    deploys: str = "",
) -> MethodResult:
    """Choose the road's parameter on validation images, then measure its masks on the test images.

    Args:
        road: what to measure.
        tools: trained parts.
        weights: of Sa2VA, by name.
        samples: labelled samples of `val` and `test`.
        make_view: from an image to its view.
        cost: of training.
        seed: of what was trained.
        deploys: what a trained policy deploys.
    """
    val = _val_dice(method, tools, weights, samples["val"], make_view)
    groups = [sample.group_id for sample in samples["val"]]
    best = int(np.argmax([group_means(column, groups).mean() for column in val.T]))
    parameter = method.grid[best] if method.grid else None
    columns: dict[str, list[float]] = {}
    asked = []
    for sample in tqdm(samples["test"], f"{method.name}: test", unit="image", leave=False):
        view, truth = make_view(sample.load_image()), _truth(sample)
        mask = method_mask(method, view, tools, weights, parameter)
        asked.append(len(view.answers))
        for name, value in (mask_metrics(mask, truth) | _score(view, mask)).items():
            columns.setdefault(name, []).append(value)
    test = {name: tuple(values) for name, values in columns.items()}
    return MethodResult(
        method.name, seed, weights, parameter, tuple(val[:, best].tolist()), test, float(np.mean(asked)), cost, deploys
    )


def _val_dice(method: Method, tools: Tools, weights: str, samples: Sequence[Sample], make_view: MakeView) -> np.ndarray:
    """float64 (N, G): Dice of each validation image for each parameter of the road's grid, or for its only mask."""
    rows = []
    for sample in tqdm(samples, f"{method.name}: val", unit="image", leave=False):
        view, truth = make_view(sample.load_image()), _truth(sample)
        if method.grid:
            masks = masks_of_grid(method, view, tools, weights)
        else:
            masks = method_mask(method, view, tools, weights, None)[None]
        rows.append(dice(masks, np.broadcast_to(truth, masks.shape)))
    return np.stack(rows)


def _score(view: ImageView, mask: np.ndarray) -> dict[str, float]:
    """The reward network's score of a mask, if there is a network."""
    if not view.has_scorer:
        return {}
    return {"score": float(view.scorer.quality(mask[None].astype(np.float32))["score"][0])}


def _truth(sample: Sample) -> np.ndarray:
    truth = sample.load_mask()
    assert truth is not None
    return truth


def save_result(path: Path, result: MethodResult) -> None:
    """Write a result as JSON, whole or not at all."""
    write_json(path, asdict(result) | {"cost": cost_json(result.cost)})


def load_result(path: Path) -> MethodResult:
    """Read what `save_result` wrote.

    Raises:
        ValueError: the file is not of this form; names the remedy.
    """
    try:
        value: dict[str, Any] = dict(read_json(path))
        test = {name: tuple(numbers) for name, numbers in value["test"].items()}
        assert METRICS.keys() <= test.keys()
        return MethodResult(
            **{**value, "val": tuple(value["val"]), "test": test, "cost": cost_from_json(value["cost"])}
        )
    except (KeyError, TypeError, AssertionError) as error:
        raise ValueError(f"{path}: not the result of a road ({error!r}); delete it, and --resume measures it") from None
