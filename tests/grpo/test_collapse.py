"""The watch of a mean teacher: its numbers, what it stops, what is kept then, and that a resumed run decides alike."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_reward_network.atomic_io import read_json
from rl_reward_network.curves import load_checkpoint
from rl_reward_network.grpo import collapse, validation
from rl_reward_network.grpo.checkpoint import STATE
from rl_reward_network.grpo.collapse import IMAGES, difference, shape_of
from rl_reward_network.grpo.inputs import GRPOInputs
from rl_reward_network.grpo.settings import GRPOPlan
from rl_reward_network.grpo.trainer import Sa2VAGRPOTrainer
from rl_reward_network.models.ema import EMA
from rl_reward_network.models.lora import read_trainable
from tests.grpo.nano import annotated, train
from tests.grpo.test_mean_teacher import PLAN

STEPS = 5
LONG = replace(PLAN, eval_steps=0, settings=replace(PLAN.settings, max_steps=STEPS))
HEAD = "side_network.head.bias"
Start = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> GRPOInputs:
    return annotated(tmp_path_factory.mktemp("project"))


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """The weights of each run in this test before its first step; a look is taken every second step."""
    monkeypatch.setattr(collapse, "WATCHED", 2)
    found: Start = {}
    real = Sa2VAGRPOTrainer.train

    def noted(trainer: Sa2VAGRPOTrainer, **how: Any) -> Any:
        found.update({name: p.detach().clone() for name, p in trainer.sa2va.named_parameters() if p.requires_grad})
        return real(trainer, **how)

    monkeypatch.setattr(Sa2VAGRPOTrainer, "train", noted)
    return found


def planted(monkeypatch: pytest.MonkeyPatch, after: int, logit: float) -> None:
    """Give the average a head that adds a large logit everywhere from a step on; the gate stays as it is."""
    real = EMA.update

    def broken(self: EMA, model: Any) -> None:
        real(self, model)
        if self.steps >= after:
            self.weights[HEAD][: -(model.side_network.config.packing**2)] = logit

    monkeypatch.setattr(EMA, "update", broken)


def steps_of(run: Path) -> int:
    return max(int(folder.name.split("-")[1]) for folder in run.glob("checkpoint-*"))


def assert_kept(run: Path, start: Start) -> dict[str, Any]:
    """That final_model holds the weights of the start; its config.json."""
    kept = read_trainable(run / "final_model" / "trainable")
    assert kept.keys() == start.keys()
    assert all(torch.equal(tensor, start[name]) for name, tensor in kept.items())
    return read_json(run / "final_model" / "config.json")


def test_the_shape_of_a_mask_is_its_area_and_the_number_of_parts_that_are_no_specks() -> None:
    mask = np.zeros((10, 20), dtype=bool)
    mask[1:4, 1:4] = mask[6:9, 12:15] = True
    mask[0, 19] = True
    assert shape_of(mask) == (19 / 200, 2)
    mask[4, 4] = mask[5, 5] = True
    assert shape_of(mask) == (21 / 200, 2), "corners connect"
    assert shape_of(np.zeros((4, 4), dtype=bool)) == (0, 0)
    assert shape_of(None) is None


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ([(0.04, 2)] * 4, ""),
        ([(0.17, 2)] * 4, "the median area of the masks of 4 images without masks went from 4.00% to 17.00%"),
        ([(0.16, 16)] * 4, ""),
        ([(0.0, 0)] * 4, "went from 4.00% to 0.00% of the image"),
        ([(0.009, 2)] * 4, "went from 4.00% to 0.90% of the image"),
        ([(0.04, 17)] * 4, "the median number of parts of the masks of 4 images without masks went from 2 to 17"),
        ([(0.04, 2), (0.04, 2), (0.9, 1), (0.04, 30)], ""),
        ([None, None, (0.04, 2), (0.04, 2)], ""),
        ([None, None, None, (0.04, 2)], "3 of 4 images without masks had an answer with [SEG], and have none"),
    ],
)
def test_what_is_no_longer_like_the_start_is_said(now: Any, said: str) -> None:
    found = difference([(0.04, 2)] * 4, now, [(0.04, 2)] * 3)
    assert said in found
    assert bool(found) == bool(said)


def test_a_start_without_masks_cannot_lose_them_and_masks_like_the_true_ones_are_no_collapse() -> None:
    true = [(0.05, 1)]
    assert difference([None] * 3, [None, (0.9, 50), None], true) == ""
    empty = [(0.0, 0)] * 3
    assert difference(empty, [(0.1, 8)] * 3, true) == "", "it learned from the true masks"
    assert "from 0.00% to 21.00%" in difference(empty, [(0.21, 1)] * 3, true)
    assert "from 0 to 9" in difference(empty, [(0.1, 9)] * 3, true)
    assert difference(empty, [(0.5, 1)] * 3, [(0.0, 0)]) == "", "nothing to compare with"
    assert difference([(0.9, 1)], [(0.05, 1)], true) == ""


def test_a_healthy_run_is_not_stopped(images: GRPOInputs, tmp_path: Path, start: Start) -> None:
    run = train(images, LONG, tmp_path / "run")
    assert steps_of(run) == STEPS
    assert read_json(run / "final_model" / "config.json")["collapse"] is None
    watch = load_checkpoint(run / f"checkpoint-{STEPS}" / STATE)["watch"]
    assert 0 < len(watch["start"]) <= IMAGES
    assert watch["true"][0][0] > 0


@pytest.mark.parametrize(("logit", "seen"), [(-1e4, "to 100.00% of the image"), (1e4, "to 0.00% of the image")])
def test_a_collapse_ends_the_run_with_a_sentence_and_the_initial_weights(
    images: GRPOInputs,
    tmp_path: Path,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    logit: float,
    seen: str,
) -> None:
    planted(monkeypatch, 3, logit)
    run = train(images, LONG, tmp_path / "run")
    config = assert_kept(run, start)
    assert (steps_of(run), config["steps"]) == (4, 4)
    said = config["collapse"]
    assert said.startswith("step 4: the mean teacher has collapsed: ")
    assert seen in said
    assert "the initial ones; lower side_learning_rate" in said
    assert capsys.readouterr().out.count(said) == 1
    card = (run / "final_model" / "README.md").read_text()
    assert said in card
    assert "those before training: the mean teacher has collapsed" in card
    assert "the moving average, those" not in card


@pytest.mark.parametrize(("last", "interrupted"), [(3, True), (4, False)])
def test_a_resumed_run_decides_as_a_whole_one(
    images: GRPOInputs, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, last: int, interrupted: bool
) -> None:
    planted(monkeypatch, last, 1e4)
    whole, again = train(images, LONG, tmp_path / "whole"), tmp_path / "again"
    assert steps_of(whole) == 4
    lost = ["final_model", "done.json", *["checkpoint-4"] * interrupted]  # else it only has to end
    shutil.copytree(whole, again, ignore=shutil.ignore_patterns(*lost))
    train(images, LONG, again)
    assert steps_of(again) == 4
    assert assert_kept(again, start)["collapse"] == assert_kept(whole, start)["collapse"]
    assert (whole / "metrics.jsonl").read_bytes() == (again / "metrics.jsonl").read_bytes()


def test_with_validation_its_best_weights_are_kept(
    images: GRPOInputs, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = iter([0.1, 0.3, 0.2, 0.2, 0.2])  # at step 0; then model and teacher
    points = lambda self: {"val/gt_dice": next(values), validation.EMPTY: 0.0, validation.SILENT: 0.0}  # noqa: E731
    monkeypatch.setattr(validation.ValidationCallback, "_points", points)
    planted(monkeypatch, 2, 1e4)
    plan: GRPOPlan = replace(LONG, eval_steps=1)
    config = read_json(train(images, plan, tmp_path / "run") / "final_model" / "config.json")
    assert "those that validation found best" in config["collapse"]
    assert (config["validation"]["kept_step"], config["validation"]["last_step"]) == (1, 2)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum("val/teacher_gt_dice" in line for line in lines) == 2, "validated once more at the end"
