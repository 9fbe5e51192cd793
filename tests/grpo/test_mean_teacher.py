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
from scipy.special import expit, logit

from rl_reward_network.atomic_io import read_json
from rl_reward_network.grpo import rollouts, validation
from rl_reward_network.grpo.image_context import open_batch
from rl_reward_network.grpo.inputs import GRPOInputs
from rl_reward_network.grpo.losses import consistency_loss
from rl_reward_network.grpo.plan import RewardArgs
from rl_reward_network.grpo.prompts import MixedOrder, without_masks
from rl_reward_network.grpo.rollouts import RolloutGenerator
from rl_reward_network.grpo.settings import GRPOPlan, GRPOSettings, RewardWeights
from rl_reward_network.models.ema import EMA, copied, fade_in
from rl_reward_network.models.lora import WEIGHTS, read_trainable
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.rewards.learned import ForegroundMaps, SecondTeacher
from tests.grpo.nano import SETTINGS, annotated, assert_resumes, config, nano, planned, shake, train
from tests.models.test_reward_network import network_of

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


# ---- a second teacher -----------------------------------------------------------------------------------------------

IMAGE = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
SOFT = np.random.default_rng(1).uniform(0.01, 0.99, (24, 32)).astype(np.float32)


class Planted(torch.nn.Module):
    """Two members whose mean is known, by the brightness of an image; dark images are outside its domain."""

    fingerprint = "planted"

    def foreground_probs(self, image: torch.Tensor) -> torch.Tensor:
        bright = 0.1 + 0.8 * image.mean(dim=1, keepdim=True)
        return torch.stack([bright, bright / 2])

    def mask_quality(self, mask: torch.Tensor, foreground_probs: torch.Tensor) -> Any:
        raise AssertionError("a teacher does not judge")

    def outside(self, image: np.ndarray, foreground_probs: torch.Tensor) -> str | None:
        return None if image.any() else "it is dark"


class Dark(RewardNetwork):
    """A network that knows no image."""

    def outside(self, image: np.ndarray, foreground_probs: torch.Tensor) -> str | None:
        return "it is dark"


def of_network(image: np.ndarray) -> np.ndarray:
    """The planted map, without float16 rounding."""
    return np.asarray(0.75 * (0.1 + 0.8 * image.mean(axis=2) / 255))


@pytest.fixture(scope="module")
def network() -> RewardNetwork:
    return network_of()


def with_second(network: RewardNetwork, **settings: Any) -> GRPOPlan:
    return replace(PLAN, reward_net=network.fingerprint, settings=replace(PLAN.settings, **settings))


@pytest.fixture(scope="module")
def second_run(images: GRPOInputs, network: RewardNetwork) -> Path:
    return train(images, with_second(network), images.config.output_dir / "two" / "sa2va_grpo_1", network=network)


def test_the_target_is_the_mean_of_both_teachers_in_logits() -> None:
    maps = ForegroundMaps(Planted())
    first, second, both, most = (SecondTeacher(maps, weight).target(SOFT, IMAGE) for weight in (0.0, 1.0, 0.5, 0.75))
    assert np.array_equal(first, SOFT)
    np.testing.assert_allclose(second, of_network(IMAGE), atol=5e-4)
    np.testing.assert_allclose(both, expit((logit(SOFT) + logit(of_network(IMAGE))) / 2), atol=5e-4)
    np.testing.assert_allclose(most, expit(0.25 * logit(SOFT) + 0.75 * logit(of_network(IMAGE))), atol=5e-4)
    assert first.dtype == second.dtype == both.dtype == np.float32
    assert maps.computed == 1
    assert np.array_equal(SecondTeacher(maps, 0.5).target(SOFT, np.zeros_like(IMAGE)), SOFT), "outside its domain"


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_the_map_of_the_image_as_it_is_turns_with_the_view(
    images: GRPOInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weight: float
) -> None:
    generator = RolloutGenerator(*nano(), config(tmp_path, objective="mean_teacher", mask_to_caption_weight=0.0))
    prompt = without_masks(images.prompts[:1])[0]
    image = prompt.load()[0]
    soft: Any = generator.teacher_masks(open_batch([prompt], generator.cache))[0]
    carried: list[np.ndarray] = []

    def seen(image: np.ndarray, masks: np.ndarray, *rest: Any) -> tuple[np.ndarray, np.ndarray]:
        carried.append(masks[0])
        return image[::-1].copy(), masks[:, ::-1].copy()

    monkeypatch.setattr(rollouts, "strongly_augmented", seen)
    generator.second = SecondTeacher(ForegroundMaps(Planted()), weight)
    batch = generator.taught([prompt], np.random.default_rng(0), 1.0)
    taught: Any = batch.rollouts.answers[0].image.taught
    sure = np.clip(soft.astype(float), 1e-4, 1 - 1e-4)
    wanted = expit((1 - weight) * logit(sure) + weight * logit(of_network(image)))
    np.testing.assert_allclose(carried[0], wanted, atol=1e-3)
    assert weight or np.array_equal(carried[0], soft)
    assert np.array_equal(taught, carried[0][::-1])


def test_a_run_with_two_teachers_uses_all_images_and_says_so(
    run: Path, second_run: Path, network: RewardNetwork
) -> None:
    saved, alone = (read_json(folder / "final_model" / "config.json") for folder in (second_run, run))
    unlabelled = saved["images"] - 1
    assert saved["images"] == alone["images"]
    assert saved["labels"] == 1
    assert saved["settings"]["training"]["second_teacher_weight"] == 0.5
    assert saved["settings"]["reward_net"] == network.fingerprint
    assert saved["domain"] == {"images": unlabelled, "outside": 0, "reason": None}
    assert "val/score" not in (second_run / "metrics.jsonl").read_text()
    card = (second_run / "final_model" / "README.md").read_text()
    assert "on true masks, a mean teacher's and the reward network's" in card
    assert "a moving average of the model with the reward network's map, weight 0.5 in logits" in card
    assert "reward network's map" not in (run / "final_model" / "README.md").read_text()
    kept, other = (read_trainable(folder / "checkpoint-2" / "trainable") for folder in (second_run, run))
    assert not torch.equal(kept["side_network.head.weight"], other["side_network.head.weight"])


def test_a_resumed_run_with_two_teachers_ends_in_the_same_weights(
    images: GRPOInputs, second_run: Path, network: RewardNetwork
) -> None:
    assert_resumes(images, with_second(network), second_run, network=network)


def test_weight_0_and_images_outside_the_domain_leave_the_moving_average_alone(
    images: GRPOInputs, run: Path, network: RewardNetwork, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dark = Dark(network.config).eval()
    unlabelled = read_json(run / "config.json")["images"] - 1
    for name, one, weight, line in (
        ("zero", network, 0.0, "--second_teacher_weight is 0: the reward network teaches nothing"),
        (
            "dark",
            dark,
            0.5,
            f"on 0 of {unlabelled} images without masks; the moving average alone teaches {unlabelled}",
        ),
    ):
        folder = train(images, with_second(one, second_teacher_weight=weight), tmp_path / name, network=one)
        assert line in capsys.readouterr().out
        trained = Path("final_model") / "trainable" / WEIGHTS
        assert (folder / trained).read_bytes() == (run / trained).read_bytes(), name


def test_a_second_teacher_is_planned_with_a_network_alone(images: GRPOInputs, network: RewardNetwork) -> None:
    named = RewardArgs(reward_net=Path("net"))
    plan = planned("mean_teacher", images, network, rewards=named, second_teacher_weight=0.25)
    assert (plan.reward_net, plan.settings.second_teacher_weight) == (network.fingerprint, 0.25)
    assert plan.weights == planned("mean_teacher", images).weights
    acts = r"--second_teacher_weight 0.25 does nothing in this run: it acts with --objective mean_teacher and --reward"
    for objective, one in (("mean_teacher", None), ("supervised", network), ("dpo", network), ("grpo", network)):
        with pytest.raises(ValueError, match=acts):
            planned(objective, images, one, second_teacher_weight=0.25)
    for weight, message in ((1.5, "is 1.5, expected 0 to 1"), (-0.5, "is -0.5, expected 0 or more")):
        with pytest.raises(ValueError, match=f"second_teacher_weight {message}"):
            planned("mean_teacher", images, network, second_teacher_weight=weight)
