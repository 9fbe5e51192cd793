"""Validation: curves, best weights, the alarm for empty masks, the stop rule, and that validation changes nothing."""

import warnings
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rl_reward_network.curves import load_checkpoint
from rl_reward_network.data.masks import to_rle
from rl_reward_network.grpo import validation as validation_file
from rl_reward_network.grpo.checkpoint import STATE
from rl_reward_network.grpo.image_context import ImageContext
from rl_reward_network.grpo.measure import Measured
from rl_reward_network.grpo.validation import (
    EMPTY,
    EXACT,
    PROXY,
    SILENT,
    TAGS,
    ValidationCallback,
    empty_share,
    kept_weights,
    notice,
    outcome_of,
    scores,
)
from rl_reward_network.models.ema import copied
from rl_reward_network.rewards.learned import ForegroundMaps
from tests.grpo.nano import make_trainer, regions


class Likes:
    """A reward network that likes large masks."""

    def foreground_probs(self, image: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1, 1, 1, *image.shape[2:])

    def mask_quality(self, mask: torch.Tensor, maps: torch.Tensor) -> Any:
        share = mask.mean(dim=(1, 2, 3))
        members = {"members": share[None, None].expand(1, 4, -1), "member_scores": share[None]}
        return SimpleNamespace(score=share, dice=share, std=share, **members)


def test_validation_logs_curves_and_changes_nothing(tmp_path: Path) -> None:
    plain, validated = (make_trainer(tmp_path / name, per_device_train_batch_size=4) for name in ("plain", "validated"))
    validated.validation = ValidationCallback(validated, regions()[:2], 2)
    validated.add_callback(validated.validation)
    for trainer in (plain, validated):
        trainer.train()
    logs = {name for line in validated.state.log_history for name in line}
    assert {"val/gt_dice", "val/iou", "val/cycle_iou", "val/meteor", "val/cycle_meteor"} <= logs
    assert PROXY not in logs, "no reward network, no proxy"
    assert validated.validation.criterion == TAGS["cycle_iou"], "captions close the loop"
    for name, parameter in plain.sa2va.named_parameters():
        assert torch.equal(parameter, validated.sa2va.get_parameter(name)), name


def curve(monkeypatch: pytest.MonkeyPatch, gold: list[float], proxy: list[float] | None = None) -> None:
    """Validation gets these values, one after the other."""
    points, scored = iter(gold), iter(proxy or [])

    def measured(*_: Any, **__: Any) -> Measured:
        return Measured({"dice": np.array([next(points)])}, [""], [None], [None], np.zeros((1, 2), dtype=np.int64))

    monkeypatch.setattr(validation_file, "measure", measured)
    monkeypatch.setattr(validation_file, "scores", lambda *_: np.array([next(scored)]))


def watched(folder: Path, network: Any = None, **settings: Any) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """A trainer with supervised training, whose steps are fast, validated at each step; and its weights at each."""
    trainer: Any = make_trainer(folder, objective="supervised", **settings)
    maps = None if network is None else ForegroundMaps(network)
    trainer.validation = ValidationCallback(trainer, regions()[:1], 1, maps)
    weights: list[dict[str, torch.Tensor]] = []
    validate = trainer.validation._validate

    def noted(step: int) -> None:
        weights.append(copied(trainer.sa2va))
        validate(step)

    trainer.validation._validate = noted
    trainer.add_callback(trainer.validation)
    return trainer, weights


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def test_a_rising_score_and_a_fallen_dice_stop_and_go_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    curve(monkeypatch, [0.5, 0.6, 0.57, 0.57, 0.57, 0.5], [0.5, 0.6, 0.7, 0.8, 0.9, 0.95])
    trainer, weights = watched(tmp_path, Likes(), max_steps=8)
    trainer.train()
    assert trainer.state.global_step == 4, "validated before and after each of four steps"
    assert trainer.validation.over_optimised
    outcome = trainer.validation.finish()
    assert (outcome.kept_step, outcome.metric, outcome.best) == (1, "val/gt_dice", 0.6)
    assert same(copied(trainer.sa2va), weights[1]), "the weights with the best Dice"
    assert not same(weights[1], weights[3])


def test_of_equal_shares_of_exact_names_the_better_meteor_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that has no exact name yet must not lose what it has learned."""
    trainer, weights = watched(tmp_path, max_steps=4)
    looks = iter([(0.0, 0.1), (0.0, 0.3), (0.02, 0.0), (0.02, 0.5), (0.0, 0.9)])
    measured = lambda: dict(zip((EXACT, "val/meteor"), next(looks), strict=True)) | {EMPTY: 0.0, SILENT: 0.0}  # noqa: E731
    monkeypatch.setattr(trainer.validation, "_points", measured)
    trainer.train()
    outcome = trainer.validation.finish()
    assert (outcome.kept_step, outcome.metric) == (3, EXACT)
    assert outcome.best == pytest.approx(0.02, abs=1e-5)
    assert same(copied(trainer.sa2va), weights[3])


@pytest.mark.parametrize(("gold", "kept"), [([0.5, 0.6, 0.7], 2), ([0.5, 0.7, 0.6], 1), ([0.5, 0.4, 0.3], 0)])
def test_the_best_weights_are_kept_bit_by_bit_without_a_reward_network(
    gold: list[float], kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curve(monkeypatch, gold)
    trainer, weights = watched(tmp_path)
    trainer.train()
    assert not same(weights[0], weights[1])
    outcome = trainer.validation.finish()
    assert (outcome.kept_step, outcome.last_step) == (kept, 2)
    assert same(copied(trainer.sa2va), weights[kept])
    assert (trainer.validation.proxy, trainer.validation.gold) == ([], gold)
    assert (outcome.items, outcome.labelled) == (1, 1)


def test_two_validations_between_two_lines_are_not_averaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    curve(monkeypatch, [0.5, 0.7, 0.2, 0.4])
    trainer, _ = watched(tmp_path, max_steps=3, logging_steps=3)
    trainer.train()
    points = [(line["step"], line["val/gt_dice"]) for line in trainer.state.log_history if "val/gt_dice" in line]
    assert points == [(0, 0.5), (1, 0.7), (2, 0.2), (3, 0.4)]


def test_best_weights_that_a_checkpoint_holds_anyway_are_not_stored_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curve(monkeypatch, [0.5, 0.9, 0.6])
    trainer, weights = watched(tmp_path, save_strategy="steps", save_steps=1)
    trainer.train()
    peaks = [load_checkpoint(tmp_path / f"checkpoint-{step}" / STATE)["validation"]["peak"] for step in (1, 2)]
    assert peaks[0] == {}
    assert same(peaks[1], weights[1]), "of another step than the checkpoint"
    again, _ = watched(tmp_path / "again", max_steps=1)
    again.load_checkpoint(tmp_path / "checkpoint-1")
    assert same(again.validation.best_weights, weights[1])


def test_the_last_step_is_validated_whatever_the_interval(tmp_path: Path) -> None:
    trainer, _ = watched(tmp_path, max_steps=3, logging_steps=2)
    trainer.validation.every = 2
    trainer.train()
    assert trainer.validation.steps == [0, 2, 3]
    validations = [line for line in trainer.state.log_history if "val/gt_dice" in line]
    assert [line["step"] for line in validations] == [0, 2, 3], "each is a line of its own step"
    assert [line["step"] for line in trainer.state.log_history if "total_loss" in line] == [2, 3]


def test_a_stop_that_waits_for_used_up_rollouts_is_validated() -> None:
    trainer = SimpleNamespace(ended=False)
    callback = ValidationCallback(trainer, [], 3, ForegroundMaps(Likes()))
    validated: list[int] = []
    callback.gold, callback.proxy = [0.6, 0.5, 0.5, 0.5], [0.1, 0.2, 0.3, 0.4]
    callback._validate = validated.append  # type: ignore[method-assign]
    for step in (3, 4):
        state = SimpleNamespace(global_step=step, max_steps=9)
        args = SimpleNamespace(num_iterations=2, early_stopping_patience=None)
        callback.on_step_end(args, state, SimpleNamespace(should_log=False))
    assert (validated, trainer.ended) == ([3, 4], True)


def test_a_collapse_to_empty_masks_is_an_alarm_once(tmp_path: Path) -> None:
    """A model whose mask logits are all negative, from the first step on."""
    trainer, _ = watched(tmp_path, max_steps=3)
    decode, steps = trainer.sa2va.decode_masks, trainer.training_step

    def nothing(*args: Any, **kwargs: Any) -> Any:
        decoded = decode(*args, **kwargs)
        return replace(decoded, mask_logits=-decoded.mask_logits.abs() - 1)

    def collapsed(*args: Any, **kwargs: Any) -> Any:
        trainer.sa2va.decode_masks = nothing
        return steps(*args, **kwargs)

    trainer.training_step = collapsed
    with pytest.warns(UserWarning, match=r"step 1: the masks of 100% of 1 .*learning_rate or bce_weight") as caught:
        trainer.train()
    assert sum("val/empty_share" in str(warning.message) for warning in caught) == 1
    shares = [line[EMPTY] for line in trainer.state.log_history if EMPTY in line]
    assert shares == [0.0, 1.0, 1.0, 1.0], "the first point is that before training"


def test_an_alarm_before_training_does_not_silence_the_one_during_training() -> None:
    trainer = SimpleNamespace(args=SimpleNamespace(objective="supervised", should_log=True))
    callback = ValidationCallback(trainer, [], 1)
    for step in (0, 1):
        with pytest.warns(UserWarning, match=f"step {step}: .*val/empty_share"):
            callback._alarm(step, {EMPTY: 1.0, SILENT: 0.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callback._alarm(2, {EMPTY: 1.0, SILENT: 0.0})


def test_answers_without_seg_have_a_remedy_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = watched(tmp_path, max_steps=1)
    with monkeypatch.context() as patch:
        patch.setattr(ImageContext, "segment", lambda self, questions: [([], None) for _ in questions])
        points = trainer.validation._points()
    assert (points[SILENT], points[EMPTY]) == (1.0, 1.0)
    with pytest.warns(UserWarning, match=r"step 5: .*no \[SEG\].*seg_text_weight"):
        trainer.validation._alarm(5, points)
    assert trainer.validation._points()[SILENT] == 0.0


def test_an_empty_mask_of_an_empty_truth_is_no_alarm() -> None:
    full = to_rle(np.ones((4, 4), dtype=bool))
    dice, overlap = np.array([1.0, 0.0, 1.0, np.nan]), np.array([[0, 0], [0, 9], [16, 16], [0, 0]])
    assert empty_share(Measured({"dice": dice}, [], [None, None, full, None], [], overlap)) == 2 / 4


def test_the_score_is_the_mean_over_items_and_0_without_a_mask() -> None:
    item = regions()[0]
    half = np.zeros((256, 256), dtype=bool)
    half[:128] = True
    measured = Measured({}, [""] * 2, [to_rle(half), None], [None, None], np.zeros((2, 2), dtype=np.int64))
    assert scores(ForegroundMaps(Likes()), [item, item], measured).tolist() == pytest.approx([0.5, 0])


def test_the_curves_and_the_peak_survive_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    curve(monkeypatch, [0.5, 0.9, 0.6, 0.6], [0.1, 0.2, 0.3, 0.3])
    whole, weights = watched(tmp_path / "whole", Likes(), **settings)
    whole.train()
    again, _ = watched(tmp_path / "again", Likes(), **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    assert whole.validation.finish() == again.validation.finish()
    assert again.validation.steps == [0, 1, 2]
    assert (again.validation.gold, again.validation.proxy) == ([0.5, 0.9, 0.6], [0.1, 0.2, 0.3])
    assert same(copied(again.sa2va), weights[1]), "the best weights of before the break"


def config_of(values: list[float], metric: str | None = "val/gt_dice") -> dict[str, Any]:
    """config.json of a run validated at steps 0, 10, ..., on 5 items, 4 of them labelled."""
    return {"validation": asdict(outcome_of([10 * n for n in range(max(1, len(values)))], values, metric, 5, 4))}


@pytest.mark.parametrize(
    ("values", "kept", "said"),
    [
        ([0.3, 0.4, 0.35], 10, ""),
        ([0.3, 0.4, 0.4], 10, ""),
        ([0.3, 0.4, 0.2], 10, "Worse at the end than the initial model: on 5 validation items Dice was 0.300 before"),
        ([0.3, 0.1, 0.2], 0, "Worse than the initial model: on 5 validation items Dice was 0.300 before, 0.200 at"),
        ([0.3, 0.1, 0.3], 0, "Not better than the initial model"),
    ],
)
def test_the_best_weights_are_kept_and_a_worse_end_is_said_first(values: list[float], kept: int, said: str) -> None:
    config = config_of(values)
    ends = {"before": values[0], "last": values[-1], "best": max(values), "kept_step": kept, "last_step": 20}
    assert config["validation"].items() >= ends.items()
    assert notice(config).startswith(said)
    assert bool(notice(config)) == bool(said)
    assert notice(config).endswith("final_model is the initial model.") == (kept == 0)


def test_a_card_names_the_weights_and_the_labels_that_chose_them() -> None:
    text = kept_weights(config_of([0.3, 0.4, 0.35]))
    assert "step 10 of 20" in text
    assert "Dice (0.400; 0.300 before) on 5 validation items, 4 of them labelled" in text


def test_without_labels_the_last_weights_are_kept() -> None:
    config = config_of([], None)
    assert (notice(config), kept_weights(config)) == ("", "of the last step; none of 5 validation items has a label")
    never = {"validation": None}
    assert (notice(never), kept_weights(never)) == ("", "of the last step; the run was not validated")
    assert (notice({}), kept_weights({})) == ("", "not recorded"), "a checkpoint, or a run of 0.8"
