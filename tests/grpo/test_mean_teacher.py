"""Mean teacher: order, fading, the loss in numbers, whose mask is learned, which weights are kept, resume, refusals."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rl_reward_network.atomic_io import read_json
from rl_reward_network.grpo import validation
from rl_reward_network.grpo.image_context import open_batch
from rl_reward_network.grpo.inputs import GRPOInputs
from rl_reward_network.grpo.losses import consistency_loss
from rl_reward_network.grpo.prompts import MixedOrder, without_masks
from rl_reward_network.grpo.rollouts import RolloutGenerator
from rl_reward_network.grpo.settings import GRPOPlan, GRPOSettings, RewardWeights
from rl_reward_network.models.ema import EMA, copied, fade_in
from rl_reward_network.models.lora import read_trainable
from tests.grpo.nano import SETTINGS, annotated, assert_resumes, config, nano, planned, shake, train

SETTINGS_OF_TEACHER = SETTINGS | {
    "objective": "mean_teacher",
    "mask_to_caption_weight": 0.0,
    "learning_rate": 1e-3,
    "side_learning_rate": 3e-3,
    "ema_decay": 0.5,
}
PLAN = GRPOPlan(
    "quick",
    RewardWeights(0.0, 0.0, 0.0, 1.0),
    lora_r=4,
    lora_alpha=8,
    settings=GRPOSettings(**SETTINGS_OF_TEACHER),
    side_network={"pixels": 128},
    eval_steps=1,
    max_labelled=1,
)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> GRPOInputs:
    return annotated(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def run(images: GRPOInputs) -> Path:
    return train(images, PLAN, images.config.output_dir / "sa2va_grpo_1")


def test_the_loss_fades_in_as_in_the_paper() -> None:
    assert fade_in(0, 100) == pytest.approx(math.exp(-5))
    assert fade_in(15, 100) == pytest.approx(math.exp(-5 * 0.25)), "half of the first 30 steps"
    assert fade_in(30, 100) == fade_in(99, 100) == 1


def test_labelled_and_unlabelled_prompts_alternate_and_each_kind_is_used_up_before_it_begins_anew() -> None:
    order = MixedOrder([0, 1, 2], range(3, 13), 4, seed=0)
    assert order.rollouts_per_epoch == 5
    drawn = [index for rollout in range(15) for index in order.indices(rollout)]
    labelled, others = drawn[::2], drawn[1::2]
    assert set(labelled) == {0, 1, 2}
    assert set(others) == set(range(3, 13))
    assert all(sorted(labelled[start : start + 3]) == [0, 1, 2] for start in range(0, 30, 3))
    assert all(sorted(others[start : start + 10]) == list(range(3, 13)) for start in range(0, 30, 10))
    assert others[:10] != others[10:20], "another order in each pass"
    assert order.indices(7) == MixedOrder([0, 1, 2], range(3, 13), 4, seed=0).indices(7)
    with pytest.raises(ValueError, match="mean_teacher got 3 images with and 0 without masks"):
        MixedOrder([0, 1, 2], [], 4, 0)
    with pytest.raises(ValueError, match="but a step has 3; give an even number"):
        MixedOrder([0], [1], 3, 0)


def test_the_loss_weighs_each_pixel_by_the_teachers_confidence() -> None:
    logits: Any = torch.tensor([[2.0, -1.0]], requires_grad=True)
    taught = torch.tensor([[0.9, 0.4]])  # targets 1 and 0, weights 0.8 and 0.2
    p, q = (1 / (1 + math.exp(-x)) for x in (2.0, -1.0))
    cross_entropy = (0.8 * -math.log(p) + 0.2 * -math.log(1 - q)) / 1
    dice = (2 * 0.8 * p + 1) / (0.8 * p + 0.2 * q + 0.8 + 1)
    loss = consistency_loss(logits, taught, GRPOSettings(bce_weight=2.0, dice_weight=0.5))
    assert loss.item() == pytest.approx(2 * cross_entropy + 0.5 * (1 - dice), rel=1e-6)
    loss.backward()
    assert logits.grad[0, 0] < 0 < logits.grad[0, 1]
    unsure = torch.full((1, 2), 0.5)
    settings = GRPOSettings(bce_weight=1.0, dice_weight=1.0)
    assert consistency_loss(logits, unsure, settings).item() == 0, "a teacher that knows nothing teaches nothing"


def test_images_without_masks_get_the_teachers_mask_turned_with_their_view(images: GRPOInputs, tmp_path: Path) -> None:
    generator = RolloutGenerator(*nano(), config(tmp_path, objective="mean_teacher", mask_to_caption_weight=0.0))
    generator.ema = EMA(generator.model)
    shake(generator.model, 0.05)
    prompts = [images.prompts[0], *without_masks(images.prompts[1:2])]
    assert [prompt.load()[1] is None for prompt in prompts] == [False, True]
    plain = open_batch(prompts[1:], generator.cache)
    found: Any = generator.teacher_masks(plain)[0]
    own: Any = plain.masks(plain.context(generator.model), [0], [prompts[1].question])[0]
    assert np.abs(found - own).max() > 0.01, "the teacher's weights, not the model's"
    batch, again = (generator.taught(prompts, np.random.default_rng(0), 0.5) for _ in range(2))
    labelled: Any = batch.rollouts.answers[0].image
    unlabelled: Any = batch.rollouts.answers[1].image
    assert batch.consistency_weight == 0.5
    assert labelled.taught is unlabelled.truth is None
    assert labelled.truth.shape == prompts[0].load()[0].shape[:2]
    assert unlabelled.taught.max() <= found.max() + 1e-5
    assert not np.array_equal(unlabelled.taught, found)
    assert not np.array_equal(unlabelled.image, prompts[1].load()[0]), "the student sees another view"
    assert np.array_equal(unlabelled.image, again.rollouts.answers[1].image.image)


def test_a_run_learns_from_both_kinds_and_counts_one_label(run: Path) -> None:
    lines = [line for line in (run / "metrics.jsonl").read_text().splitlines() if "loss/taught" in line]
    assert len(lines) == 2
    assert all("loss/mask" in line for line in lines)
    assert "val/teacher_gt_dice" in (run / "metrics.jsonl").read_text()
    saved = read_json(run / "final_model" / "config.json")
    assert saved["labels"] == 1
    assert saved["settings"]["training"]["objective"] == "mean_teacher"
    card = (run / "final_model" / "README.md").read_text()
    assert "on true masks and a mean teacher's" in card
    assert "those of a moving average of the model" in card


def test_masks_that_the_teacher_has_lost_are_counted_and_said(
    images: GRPOInputs, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_json(run / "final_model" / "config.json")["taught"] == {"images": 2, "no_seg": 0}
    real, asked = RolloutGenerator.teacher_masks, []

    def forgetful(self: RolloutGenerator, batch: Any) -> list[Any]:
        asked.append(batch)
        return [None] * len(batch.prompts) if len(asked) == 2 else real(self, batch)

    monkeypatch.setattr(RolloutGenerator, "teacher_masks", forgetful)
    plan = replace(PLAN, eval_steps=0, settings=replace(PLAN.settings, max_steps=3))
    lost = train(images, plan, tmp_path / "lost")
    lines = [json.loads(line) for line in (lost / "metrics.jsonl").read_text().splitlines()]
    shares = [line["teacher/no_seg_share"] for line in lines if "teacher/no_seg_share" in line]
    assert shares == [0, 1, 0]
    assert read_json(lost / "final_model" / "config.json")["taught"] == {"images": 3, "no_seg": 1}
    assert "the teacher gave no mask ([SEG]) for 1 of 3 views" in capsys.readouterr().out
    shutil.copytree(lost, tmp_path / "again", ignore=shutil.ignore_patterns("checkpoint-3", "final_model", "done.json"))
    again = train(images, plan, tmp_path / "again")
    assert read_json(again / "final_model" / "config.json")["taught"] == {"images": 3, "no_seg": 1}, "of both processes"


def test_a_resumed_run_ends_in_the_same_weights(images: GRPOInputs, run: Path) -> None:
    assert_resumes(images, PLAN, run)


def test_the_teachers_weights_are_kept_where_validation_prefers_them(
    images: GRPOInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = iter([0.1, 0.3, 0.5, 0.2, 0.4])  # at step 0; then model and teacher after each step
    seen: list[dict[str, torch.Tensor]] = []

    def points(callback: Any) -> dict[str, float]:
        seen.append(copied(callback.trainer.sa2va))
        return {"val/gt_dice": next(values), validation.EMPTY: 0.0, validation.SILENT: 0.0}

    monkeypatch.setattr(validation.ValidationCallback, "_points", points)
    folder = train(images, PLAN, tmp_path / "run")
    outcome = read_json(folder / "final_model" / "config.json")["validation"]
    assert (outcome["best"], outcome["kept_step"], outcome["kept_teacher"], outcome["last"]) == (0.5, 1, True, 0.4)
    assert "the moving average, of step 1 of 2" in (folder / "final_model" / "README.md").read_text()
    kept = read_trainable(folder / "final_model" / "trainable")
    head = "side_network.head.weight"
    assert torch.equal(kept[head], seen[2][head])
    assert not torch.equal(kept[head], seen[1][head])


def test_without_validation_the_teacher_is_what_is_left(images: GRPOInputs, tmp_path: Path) -> None:
    folder = train(images, replace(PLAN, eval_steps=0), tmp_path / "run")
    teacher = load_file(folder / "checkpoint-2" / "ema.safetensors")
    kept = read_trainable(folder / "final_model" / "trainable")
    student = read_trainable(folder / "checkpoint-2" / "trainable")
    head = "side_network.head.weight"
    assert torch.equal(kept[head], teacher[head])
    assert not torch.equal(kept[head], student[head])
    card = (folder / "final_model" / "README.md").read_text()
    assert "the moving average, of the last step; the run was not validated" in card


def test_training_stops_when_it_has_not_become_better_for_too_long(
    images: GRPOInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # At step 0; then model and teacher after each step. The loss on the teacher's masks fades in until step 3.
    values = iter([0.5, 0.6, 0.6, 0.55, 0.6, 0.4, 0.3, 0.3, 0.3, 0.3, 0.3])
    monkeypatch.setattr(
        validation.ValidationCallback,
        "_points",
        lambda self: {"val/gt_dice": next(values), validation.EMPTY: 0.0, validation.SILENT: 0.0},
    )
    settings = replace(PLAN.settings, max_steps=9, early_stopping_patience=2, lr_scheduler_type="constant")
    folder = train(images, replace(PLAN, settings=settings), tmp_path / "run")
    outcome = read_json(folder / "final_model" / "config.json")["validation"]
    assert (outcome["kept_step"], outcome["last_step"], outcome["best"]) == (1, 5, 0.6)


def test_the_preset_has_views_and_the_losses_of_thin_objects(images: GRPOInputs) -> None:
    settings = planned("mean_teacher", images).settings
    assert (settings.bce_weight, settings.dice_weight, settings.warmup_steps) == (1.0, 0.5, 0.15)
    assert settings.per_device_train_batch_size == 32
    assert settings.ema_decay == 0.999


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"augment": False}, "augment is False, but a mean teacher needs different views"),
        ({"ema_decay": 0.0}, "ema_decay is 0, but the teacher is a moving average"),
        ({"temperature": 0.5}, "--temperature 0.5 does nothing in this run"),
        ({"num_iterations": 2}, "expected 1 with mean_teacher training"),
        ({"caption_to_mask_weight": 0.0}, "--caption_to_mask_weight 0.0 does nothing in this run"),
        ({"consistency_weight": -1.0}, "consistency_weight is -1.0, expected 0 or more"),
    ],
)
def test_what_does_nothing_or_harms_is_refused(images: GRPOInputs, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned("mean_teacher", images, **flags)


def test_it_is_refused_on_captioned_regions_and_without_images_without_masks(
    images: GRPOInputs, grpo_inputs: GRPOInputs, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="mean_teacher is for annotated images with one question"):
        planned("mean_teacher", grpo_inputs)
    plan = replace(PLAN, max_labelled=None, eval_steps=0)
    with pytest.raises(ValueError, match="without masks, and needs both"):
        train(images, plan, tmp_path / "run")
