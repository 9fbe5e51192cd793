"""The masks of a method on validation and test images, measured."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from rl_reward_network.atomic_io import read_json, write_json
from rl_reward_network.data.items import Sample
from rl_reward_network.methods.methods import Method
from rl_reward_network.methods.view import BASE, ImageView, Trained
from rl_reward_network.report.cost import Cost
from rl_reward_network.report.statistics import group_means
from rl_reward_network.report.table import ECE
from rl_reward_network.rewards.metrics import METRICS, calibration_error, dice, mask_metrics

NO_COST = Cost()
MakeView = Callable[[np.ndarray], ImageView]


@dataclass(frozen=True)
class MethodResult:
    """A method, measured.

    Args:
        method: its name.
        seed: of what was trained for it.
        weights: of Sa2VA that the method used.
        parameter: from the method's grid, chosen on validation images; None without one.
        val: Dice of each validation image.
        test: metric of `METRICS`, `ECE`, and `score` with a reward network -> value of each test image.
        answers: of Sa2VA that one image needs, mean over test images.
        cost: of training; not part of the file, since each run has its own.
        chosen_on_validation: what a trained policy deploys, in words; empty without one.
    """

    method: str
    seed: int
    weights: str
    parameter: float | None
    val: tuple[float, ...]
    test: dict[str, tuple[float, ...]]
    answers: float
    cost: Cost = NO_COST
    chosen_on_validation: str = ""


def measure_method(
    method: Method,
    trained: Trained,
    samples: dict[str, list[Sample]],
    make_view: MakeView,
    seed: int = 0,
    weights: str = BASE,
    chosen_on_validation: str = "",
) -> MethodResult:
    """Choose the parameter of a method on validation images, then measure its masks on the test images.

    Args:
        method: what to measure.
        trained: the runs that it uses.
        samples: labelled samples of `val` and `test`.
        make_view: from an image to its view.
        seed, weights, chosen_on_validation: as in `MethodResult`.
    """
    val = _val_dice(method, trained, samples["val"], make_view)
    groups = [sample.group_id for sample in samples["val"]]
    best = int(np.argmax([group_means(column, groups).mean() for column in val.T]))
    parameter = method.grid[best] if method.grid else None
    columns: dict[str, list[float]] = {}
    answers = []
    for sample in tqdm(samples["test"], f"{method.name}: test", unit="image", leave=False):
        view = make_view(sample.load_image())
        soft = method.predict(view, trained, parameter)
        mask = soft > 0.5
        answers.append(len(view.answers))
        measured = mask_metrics(mask, _truth(sample)) | {ECE: calibration(soft, _truth(sample))} | _score(view, mask)
        for name, value in measured.items():
            columns.setdefault(name, []).append(value)
    test = {name: tuple(values) for name, values in columns.items()}
    found = tuple(val[:, best].tolist()), test, float(np.mean(answers))
    return MethodResult(method.name, seed, weights, parameter, *found, chosen_on_validation=chosen_on_validation)


def _val_dice(method: Method, trained: Trained, samples: Sequence[Sample], make_view: MakeView) -> np.ndarray:
    """float64 (N, G): Dice of each validation image for each parameter of the grid, or for the only mask."""
    rows = []
    for sample in tqdm(samples, f"{method.name}: val", unit="image", leave=False):
        view, truth = make_view(sample.load_image()), _truth(sample)
        masks = np.stack([method.predict(view, trained, value) > 0.5 for value in method.grid or (None,)])
        rows.append(dice(masks, np.broadcast_to(truth, masks.shape)))
    return np.stack(rows)


def _score(view: ImageView, mask: np.ndarray) -> dict[str, float]:
    """The reward network's score of a mask, if there is a network; NaN outside its domain."""
    if not view.has_scorer:
        return {}
    return {"score": float(view.scorer.quality(mask[None].astype(np.float32))["score"][0])}


def calibration(soft: np.ndarray, truth: np.ndarray) -> float:
    """`calibration_error` of a soft mask float (H, W), for a true one bool (H, W)."""
    return float(calibration_error(soft[None].astype(float), truth[None])[0])


def _truth(sample: Sample) -> np.ndarray:
    truth = sample.load_mask()
    assert truth is not None
    return truth


def save_result(path: Path, result: MethodResult) -> None:
    """Write a result as JSON, whole or not at all."""
    test = {name: [None if np.isnan(value) else value for value in values] for name, values in result.test.items()}
    write_json(path, {name: value for name, value in asdict(result).items() if name != "cost"} | {"test": test})


def load_result(path: Path) -> MethodResult:
    """Read what `save_result` wrote.

    Raises:
        ValueError: the file is not of this form; names the remedy.
    """
    try:
        value: dict[str, Any] = dict(read_json(path))
        test = {name: tuple(np.array(numbers, dtype=float).tolist()) for name, numbers in value["test"].items()}
        assert {*METRICS, ECE} <= test.keys()
        return MethodResult(**value | {"val": tuple(value["val"]), "test": test})
    except (KeyError, TypeError, AssertionError) as error:
        remedy = "delete it, and --resume measures it"
        raise ValueError(f"{path}: not the result of a method ({error!r}); {remedy}") from None
