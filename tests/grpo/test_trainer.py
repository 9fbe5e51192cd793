"""The trainer: what moves and what does not, the reference, reused rollouts, resuming, refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_reward_network.grpo.image_context import open_batch
from rl_reward_network.grpo.losses import BOUNDS, answer_loss
from rl_reward_network.grpo.measure import measure
from rl_reward_network.grpo.policy import check_movement, digests
from rl_reward_network.grpo.rewards import Reward
from rl_reward_network.grpo.trainer import (
    Place,
    Sa2VAGRPOTrainer,
    fail_not_finite,
    fit_batch,
    hint_out_of_memory,
)
from rl_reward_network.models.sa2va.side_network import SideNetworkConfig
from rl_reward_network.rewards.table import iou_reward
from tests.grpo.nano import config, make_trainer, nano, regions, rewards

SMALL = {"per_device_train_batch_size": 4}  # one prompt a step


def weights(trainer: Sa2VAGRPOTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.sa2va.named_parameters() if p.requires_grad}


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], tolerance: float = 0) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], atol=tolerance, rtol=0, msg=name)


def test_a_run_moves_what_trains_and_keeps_its_reference(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, caption=1.0, loop2_iou=1.0)
    still = "grounding_encoder.prompt_encoder.point_embed.weight"  # no point is ever clicked
    trainer.sa2va.get_parameter(still).requires_grad_(True)
    trainer.reset_reference()
    before, start = digests(trainer.sa2va), weights(trainer)
    rollouts = trainer.rollout_generator.generate(regions()[:2], (0, 0, 0))
    with torch.no_grad():
        first = trainer.policy(rollouts)[0].stored()
    trainer.train()
    assert len(start) > 20
    assert check_movement(before, digests(trainer.sa2va), start) == [still]
    assert trainer.tensors_with_gradient == start.keys() - {still}
    assert trainer.ema.steps == 2
    path = sum(float((t - start[n]).norm()) for n, t in weights(trainer).items())
    assert 0 < trainer.ema.distance(trainer.sa2va) < path
    with torch.no_grad():
        now = trainer.policy(rollouts)[0].stored()
        with trainer.reference_weights():
            reference = trainer.policy(rollouts)[0].stored()
    for name in ("log_probs", "parameters"):
        for old, same, after in zip(*(getattr(stored, name) for stored in (first, reference, now)), strict=True):
            torch.testing.assert_close(old, same, atol=1e-6, rtol=0)
            assert not torch.equal(old, after)


@pytest.mark.parametrize("candidate", [None, 1])
def test_heads_of_candidates_that_no_mask_comes_from_are_frozen(tmp_path: Path, candidate: int | None) -> None:
    trainer = make_trainer(tmp_path, objective="supervised", per_device_train_batch_size=4)
    trainer.sa2va.add_side_network(SideNetworkConfig(pixels=128, candidate=candidate))
    frozen = trainer.freeze_unreached(regions()[:2])
    heads = [any(f"output_hypernetworks_mlps.{head}." in name for name in frozen) for head in range(4)]
    assert heads == [True, False, candidate == 1, candidate == 1], "0 is the mask that Sa2VA never uses"


def test_names_are_learned_on_half_the_resolution_first(tmp_path: Path) -> None:
    named = [replace(prompt, caption="", name="circle") for prompt in regions()]
    settings = {"objective": "supervised", "max_steps": 5, "warmup_steps": 0, "per_device_train_batch_size": 4}
    trainer = make_trainer(tmp_path, named, **settings)
    assert trainer.coarse_steps == 0, "without a side network"
    trainer.sa2va.add_side_network(SideNetworkConfig(pixels=128))
    assert trainer.coarse_steps == trainer.settling_steps == 3
    widths: list[int] = []
    trainer.sa2va.side_network.register_forward_hook(lambda side, inputs, x: widths.append(x.shape[-1]))
    trainer.train()
    images = len(widths) // 5
    steps = [width for width in (32, 16, 16, 32, 32) for _ in range(images)]
    assert widths == steps, "a quarter of 64 pixels, then of 128; the first step is whole"
    one_question = make_trainer(tmp_path, [replace(prompt, name="") for prompt in named], **settings)
    one_question.sa2va.add_side_network(SideNetworkConfig(pixels=128))
    assert one_question.coarse_steps == 0
    trainer.sa2va.side_network.config = SideNetworkConfig(pixels=192)
    assert trainer.coarse_steps == 0, "half of it does not fit the levels"


def test_rollouts_are_used_num_iterations_times(tmp_path: Path) -> None:
    """Those of the step before are dropped first: they hold image features, and the Trainer's loop holds their list."""
    trainer = make_trainer(tmp_path, num_iterations=2, max_steps=4, epsilon=1e-6, per_device_train_batch_size=4)
    generate, held = trainer._generate_step, []

    def noted() -> Any:
        assert not any(held)
        held.append(generate())
        return held[-1]

    trainer._generate_step = noted  # type: ignore[method-assign]
    trainer.train()
    assert len(held) == 2
    tag = "loop1/clip_fraction"
    clipped = {log["step"]: log[tag] for log in trainer.state.log_history if tag in log}
    assert set(clipped) == {2, 4}, "the ratio is exactly 1 on fresh rollouts"
    assert clipped[2] > 0.1, "and is not once the weights moved"


def test_accumulated_batches_are_one_large_batch(tmp_path: Path) -> None:
    """Supervised, where nothing is sampled: the loss must be that of all prompts together, for every loss type."""
    for loss_type in ("dapo", "grpo"):
        settings = {"objective": "supervised", "loss_type": loss_type, "max_steps": 1, "optim": "sgd"}
        found = []
        for batch, passes in ((16, 1), (8, 2)):
            settings |= {"per_device_train_batch_size": batch, "gradient_accumulation_steps": passes}
            trainer = make_trainer(tmp_path / f"{loss_type}{passes}", **settings)
            trainer.train()
            found.append(weights(trainer))
        assert_equal(*found, 2e-6)


def test_a_resumed_run_ends_as_the_whole_one(tmp_path: Path) -> None:
    more = {"num_iterations": 2, "curriculum": True, "adaptive_loop_weights": True}
    settings = {**more, **SMALL, "max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    whole = make_trainer(tmp_path / "whole", **settings)
    whole.train()
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == ["checkpoint-2", "checkpoint-3"]
    again = make_trainer(tmp_path / "again", **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_equal(weights(whole), weights(again))
    assert_equal(whole.ema.weights, again.ema.weights)
    assert whole.rollout_generator.sigma_controller.sigma == again.rollout_generator.sigma_controller.sigma
    assert whole.ema.steps == again.ema.steps == 3


@pytest.mark.parametrize(("part", "problem"), [("forward", "loss is nan"), ("backward", "gradient is not finite")])
def test_what_is_not_finite_never_reaches_the_weights(tmp_path: Path, part: str, problem: str) -> None:
    trainer = make_trainer(tmp_path, **SMALL, max_steps=4, save_strategy="steps", save_steps=1)
    fcs = trainer.sa2va.text_hidden_fcs

    def broken(value: torch.Tensor) -> torch.Tensor:
        return value * float("nan" if trainer.state.global_step == 1 else 1)

    if part == "forward":
        fcs.register_forward_hook(lambda module, given, result: broken(result))
    else:
        next(fcs.parameters()).register_hook(broken)
    with pytest.raises(ValueError, match=rf"step 2: .*{problem};.*checkpoint-1; lower learning_rate"):
        trainer.train()
    assert all(tensor.isfinite().all() for tensor in weights(trainer).values())


def test_a_judge_that_goes_away_names_the_step_and_the_way_back(tmp_path: Path) -> None:
    asked: list[int] = []

    def judge(**columns: Any) -> list[float | None]:
        asked.append(1)
        if len(asked) > 1:
            raise ValueError("LLM judge http://there: 50 failures in a row; is the server up?")
        return [None] * len(columns["prompts"])

    model, processor = nano()
    settings = config(tmp_path, **SMALL, max_steps=4, save_strategy="steps", save_steps=1)
    paid = {"loop1": {"iou": Reward(iou_reward, 1.0), "judge": Reward(judge, 1.0)}, "loop2": rewards()["loop2"]}
    trainer = Sa2VAGRPOTrainer(model, processor, settings, regions(), paid)
    trainer.freeze_unreached(regions()[:2])
    trainer.reset_reference()
    with pytest.raises(ValueError, match=r"^step 2: LLM judge http://there: 50 failures .*; --resume .*checkpoint-1$"):
        trainer.train()
    first = trainer.state.log_history[0]
    assert first["loop1/missing/judge"] == 1
    assert "loop1/reward_mean" not in first, "an unknown sum is no number"
    assert first["grad_norm"] > 0, "IoU is still learned from"


def test_minutes_count_what_was_spent_before_an_interruption(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **SMALL, max_steps=1, save_strategy="steps", save_steps=1)
    trainer.train()
    again = make_trainer(tmp_path, **SMALL, max_steps=100, max_minutes=10.0)
    trainer.earlier_seconds = 600.0
    trainer.save_checkpoint()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert again.state.global_step == 2, "the time was up"
    assert again.seconds > 600


def test_the_warm_up_begins_above_0_and_the_end_is_transformers(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, lr_scheduler_type="linear", warmup_steps=3, max_steps=6, learning_rate=0.4)
    trainer.create_optimizer()
    schedule = trainer.create_scheduler(6)
    rates = []
    for _ in range(6):
        rates.append(schedule.get_last_lr()[0])
        trainer.optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4 * 2 / 3, 0.4 / 3])
    assert set(schedule.get_last_lr()) == {0.0}


def test_a_warning_names_the_limit_that_truncates_all_captions(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **SMALL, max_completion_length=1, max_steps=1)
    with pytest.warns(UserWarning, match="max_completion_length 1"):
        trainer.train()
    assert trainer.state.log_history[0]["loop1/frac_truncated"] == 1


def test_supervised_training_weighs_its_masks_and_samples_nothing(tmp_path: Path) -> None:
    first = []
    for more in ({}, {"temperature": 3.0, "caption_to_mask_weight": 0.5}):
        trainer = make_trainer(tmp_path / str(len(more)), objective="supervised", max_steps=1, **more)
        trainer.train()
        first.append(trainer.state.log_history[0])
    plain, other = first
    parts = ("loop1/loss", "loss/mask", "loss/answer")
    assert [other[part] for part in parts] == pytest.approx([plain[part] for part in parts])
    half = plain["total_loss"] - other["total_loss"]
    assert half == pytest.approx(0.5 * plain["loss/mask"], rel=1e-4)


@pytest.mark.parametrize(
    ("prompts", "batch", "passes", "fitted"),
    [(3, 8, 4, (4, 3)), (6, 8, 4, (8, 3)), (12, 64, 1, (48, 1)), (12, 8, 4, (8, 4))],
)
def test_a_batch_fits_the_prompts_in_passes_too(
    tmp_path: Path, prompts: int, batch: int, passes: int, fitted: tuple[int, int]
) -> None:
    args = config(tmp_path, per_device_train_batch_size=batch, gradient_accumulation_steps=passes)
    fit_batch(regions()[:1] * prompts, args)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == fitted


def test_a_model_that_lost_seg_gets_it_back(tmp_path: Path) -> None:
    """Its groups are rewarded by 0, and without the reference answer nothing would be learned from them."""
    settings = {"mask_to_caption_weight": 0.0, "beta": 0.0, "mask_beta": 0.0, "ema_decay": 0.0}
    trainer = make_trainer(tmp_path, max_steps=12, learning_rate=3e-3, **settings)
    prompts = regions()[:8]
    without_seg = trainer.rollout_generator.processor.answer_ids("It is not here.")
    rollouts = trainer.rollout_generator.references(prompts).rollouts
    rollouts = replace(rollouts, answers=[replace(answer, answer_ids=without_seg) for answer in rollouts.answers])
    optimizer = torch.optim.AdamW([p for p in trainer.sa2va.parameters() if p.requires_grad], 3e-3)
    for _ in range(12):
        answer_loss(trainer.policy(rollouts)[0].answer_log_probs, 8.0).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert lost_masks(trainer, prompts) == len(prompts)
    trainer.train()
    assert lost_masks(trainer, prompts) == 0
    rewards = [log["loop2/reward_mean"] for log in trainer.state.log_history[:-1]]
    assert rewards[0] == 0 < rewards[-1]


def lost_masks(trainer: Sa2VAGRPOTrainer, prompts: Any) -> int:
    """Number of prompts whose answer has no `[SEG]`."""
    batch = open_batch(prompts, trainer.rollout_generator.cache)
    questions = [batch.question(row, prompt.question) for row, prompt in enumerate(prompts)]
    return sum(embedding is None for _, embedding in batch.context(trainer.sa2va).segment(questions))


def test_bfloat16_weights_train_in_float32_under_autocast(tmp_path: Path) -> None:
    """As on a GPU: what is frozen is bfloat16, what trains float32."""
    model, processor = nano(dtype=torch.bfloat16)
    trainer = Sa2VAGRPOTrainer(model, processor, config(tmp_path, bf16=True, **SMALL), regions(), rewards(caption=1.0))
    trainer.freeze_unreached(regions()[:2])
    trainer.reset_reference()
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    start = weights(trainer)
    trainer.train()
    moved = [name for name, tensor in weights(trainer).items() if not torch.equal(tensor, start[name])]
    assert len(moved) == len(start)
    with torch.no_grad(), trainer.accelerator.autocast():
        measured = measure(model, regions()[:1], trainer.rollout_generator.cache, 16, expected=False)
    assert np.isfinite(measured.values["iou"]).all()


# ---- around each step -----------------------------------------------------------------------------------------------


def test_loops_are_weighed_by_gradients_that_change_nothing_else(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **SMALL, caption=1.0, loop2_iou=1.0, adaptive_loop_weights=True, max_steps=2)
    plain = make_trainer(tmp_path, **SMALL, caption=1.0, loop2_iou=1.0, max_steps=1)
    trainer.train()
    plain.train()
    first, second = trainer.state.log_history[:2]
    assert "loop1/gradient_norm" not in plain.state.log_history[0]
    assert first["loop1/gradient_norm"] > 0
    ratio = first["loop1/gradient_norm"] / first["loop2/gradient_norm"]
    assert first["loop1/weight"] == pytest.approx(max(BOUNDS[0], 2 / (1 + ratio)), rel=1e-6)
    assert first["loop2/weight"] == pytest.approx(max(BOUNDS[0], 2 * ratio / (1 + ratio)), rel=1e-6)
    assert "loop1/gradient_norm" not in second, "every tenth step"
    assert first["grad_norm"] == pytest.approx(plain.state.log_history[0]["grad_norm"], rel=1e-6)
    loops = ("loop1", "loop2")
    parts = [
        second[f"{loop}/policy_loss"] * first[f"{loop}/weight"] + 0.04 * second[f"{loop}/kl_div"] for loop in loops
    ]
    assert second["total_loss"] == pytest.approx(sum(parts) + second["loss/answer"], abs=1e-6)


# ---- errors that end a run ------------------------------------------------------------------------------------------


def test_errors_of_values_name_the_newest_checkpoint_if_there_is_one(tmp_path: Path) -> None:
    place = Place(2, str(tmp_path))
    assert "no checkpoint" in place.resume_hint
    with pytest.raises(ValueError, match=r"step 2: the loss is nan;.*no checkpoint.*learning_rate, or raise kl_coef"):
        fail_not_finite(place, "the loss is nan")
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
    assert place.resume_hint == f"--resume goes on from {tmp_path / 'checkpoint-10'}"
    with pytest.raises(ValueError, match=r"step 2: the loss is nan;.*checkpoint-10;.*learning_rate"):
        fail_not_finite(place, "the loss is nan")
    with (
        pytest.raises(ValueError, match=r"^step 2: server down; .*checkpoint-10"),
        hint_out_of_memory(lambda: place, "", "", True),
    ):
        raise ValueError("server down")
    with pytest.raises(RuntimeError, match=r"^bug$"), hint_out_of_memory(lambda: place, "", "", True):
        raise RuntimeError("bug")


@pytest.mark.parametrize(("qwen_vl", "remedy"), [(False, "max_dynamic_patch"), (True, "the size of the images")])
def test_out_of_memory_names_phase_and_remedy(qwen_vl: bool, remedy: str) -> None:
    """A model without tiles needs smaller images."""
    message = f"^step 1: .*memory in rollouts; lower batch_size or {remedy}, .*gradient_checkpointing"
    hint = hint_out_of_memory(lambda: Place(1, "", qwen_vl), "rollouts", "batch_size or max_dynamic_patch")
    with pytest.raises(ValueError, match=message), hint:
        raise torch.OutOfMemoryError("CUDA out of memory")
