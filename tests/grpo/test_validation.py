"""Validation during GRPO: curves, the stop rule against over-optimisation, and that validation changes nothing."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rl_reward_network.data.masks import to_rle
from rl_reward_network.grpo import validation as validation_file
from rl_reward_network.grpo.measure import Measured
from rl_reward_network.grpo.validation import GOLD, PROXY, ValidationCallback, scores
from rl_reward_network.rewards.foreground_maps import ForegroundMaps
from tests.grpo.nano import make_trainer, regions


class Likes:
    """A reward network that likes large masks."""

    def foreground_probs(self, image: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1, 1, 1, *image.shape[2:])

    def mask_quality(self, mask: torch.Tensor, maps: torch.Tensor) -> Any:
        share = mask.mean(dim=(1, 2, 3))
        return SimpleNamespace(score=share, dice=share, spread=share, members=share[None, None].expand(1, 4, -1))


def test_validation_logs_curves_and_changes_nothing(tmp_path: Path) -> None:
    plain, validated = make_trainer(tmp_path / "plain"), make_trainer(tmp_path / "validated")
    validated.validation = ValidationCallback(validated, regions()[:3], 2)
    validated.add_callback(validated.validation)
    for trainer in (plain, validated):
        trainer.train()
    logs = {name for line in validated.state.log_history for name in line}
    assert {"val/gt_dice", "val/iou", "val/iou_of_drawn", "val/meteor", "val/cycle_meteor"} <= logs
    assert PROXY not in logs, "no reward network, no proxy"
    for name, parameter in plain.sa2va.named_parameters():
        assert torch.equal(parameter, validated.sa2va.get_parameter(name)), name


def curve(monkeypatch: pytest.MonkeyPatch, proxy: list[float], gold: list[float]) -> None:
    """Validation gets these values, one pair after the other."""
    points = iter(zip(proxy, gold, strict=True))
    now: dict[str, float] = {}

    def measured(*_: Any, **__: Any) -> Measured:
        now["proxy"], now["gold"] = next(points)
        return Measured({"dice": np.array([now["gold"]])}, [""], [None], [None], np.zeros((1, 2), dtype=np.int64))

    monkeypatch.setattr(validation_file, "measure", measured)
    monkeypatch.setattr(validation_file, "scores", lambda *_: np.array([now["proxy"]]))


def test_a_rising_score_and_a_fallen_dice_stop_and_go_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    curve(monkeypatch, [0.5, 0.6, 0.7, 0.8, 0.9, 0.95], [0.5, 0.6, 0.57, 0.57, 0.57, 0.5])
    trainer = make_trainer(tmp_path, max_steps=8, objective="supervised")  # the faster steps
    trainer.validation = ValidationCallback(trainer, regions()[:1], 1, ForegroundMaps(Likes()))
    trainer.add_callback(trainer.validation)
    kept: dict[int, torch.Tensor] = {}
    name = next(name for name, p in trainer.sa2va.named_parameters() if p.requires_grad and "text_hidden" in name)
    step = trainer.training_step

    def noted(*args: Any, **kwargs: Any) -> Any:
        kept[trainer.state.global_step] = trainer.sa2va.get_parameter(name).detach().clone()
        return step(*args, **kwargs)

    trainer.training_step = noted  # type: ignore[method-assign]
    trainer.train()
    assert trainer.state.global_step == 4, "validated before and after each of four steps"
    assert trainer.validation.finish(trainer.state)
    assert torch.equal(trainer.sa2va.get_parameter(name), kept[1]), "the weights with the best Dice"
    assert not torch.equal(kept[1], kept[3])


def test_a_run_that_only_gets_better_keeps_its_last_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    curve(monkeypatch, [0.5, 0.6, 0.7], [0.5, 0.6, 0.7])
    trainer = make_trainer(tmp_path, objective="supervised")
    trainer.validation = ValidationCallback(trainer, regions()[:1], 1, ForegroundMaps(Likes()))
    trainer.add_callback(trainer.validation)
    trainer.train()
    end = {n: p.detach().clone() for n, p in trainer.sa2va.named_parameters() if p.requires_grad}
    assert not trainer.validation.finish(trainer.state)
    assert all(torch.equal(trainer.sa2va.get_parameter(n), tensor) for n, tensor in end.items())
    assert (trainer.validation.proxy, trainer.validation.gold) == ([0.5, 0.6, 0.7], [0.5, 0.6, 0.7])


def test_the_score_is_the_mean_over_items_and_0_without_a_mask() -> None:
    item = regions()[0]
    half = np.zeros((256, 256), dtype=bool)
    half[:128] = True
    measured = Measured({}, [""] * 2, [to_rle(half), None], [None, None], np.zeros((2, 2), dtype=np.int64))
    assert scores(ForegroundMaps(Likes()), [item, item], measured).tolist() == pytest.approx([0.5, 0])


def test_the_curves_and_the_peak_survive_a_resume(tmp_path: Path) -> None:
    settings = {"objective": "supervised", "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    whole, again = make_trainer(tmp_path / "whole", **settings), make_trainer(tmp_path / "again", **settings)
    for trainer in (whole, again):
        trainer.validation = ValidationCallback(trainer, regions()[:1], 1, ForegroundMaps(Likes()))
        trainer.add_callback(trainer.validation)
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    assert whole.validation.gold == again.validation.gold
    assert whole.validation.proxy == again.validation.proxy
    assert len(whole.validation.gold) == 3
    assert all(
        torch.equal(tensor, again.validation.best_weights[name])
        for name, tensor in whole.validation.best_weights.items()
    )
    assert GOLD in {name for line in whole.state.log_history for name in line}
