"""What happens around each step: gradients are noted, loops weighed, and a run that is late stops."""

from pathlib import Path

import pytest
import torch

from rl_reward_network.grpo.losses import BOUNDS
from rl_reward_network.grpo.trainer import StepCallback
from rl_reward_network.models.ema import trainable_tensors
from tests.grpo.nano import make_trainer


def test_what_had_a_gradient_is_noted(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, caption=1.0, loop2_iou=1.0, max_steps=2)
    still = "grounding_encoder.prompt_encoder.point_embed.weight"
    trainer.sa2va.get_parameter(still).requires_grad_(True)
    trainer.reset_reference()
    trainer.train()
    trained = {name for name, p in trainer.sa2va.named_parameters() if p.requires_grad}
    assert trainer.tensors_with_gradient == trained - {still}, "no point is ever clicked"


def test_a_gradient_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    parameter = next(iter(trainable_tensors(trainer.sa2va).values()))
    parameter.grad = torch.full_like(parameter, float("nan"))
    with pytest.raises(ValueError, match=r"step 1: .*gradient.*not finite"):
        StepCallback(trainer).on_pre_optimizer_step()
    assert not trainer.tensors_with_gradient


def test_loops_are_weighed_by_gradients_that_change_nothing_else(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, caption=1.0, loop2_iou=1.0, adaptive_loop_weights=True, max_steps=2)
    plain = make_trainer(tmp_path, caption=1.0, loop2_iou=1.0, max_steps=1)
    trainer.train()
    plain.train()
    first, second = trainer.state.log_history[:2]
    assert first["loop1/gradient_norm"] > 0
    ratio = first["loop1/gradient_norm"] / first["loop2/gradient_norm"]
    assert first["loop1/weight"] == pytest.approx(max(BOUNDS[0], 2 / (1 + ratio)), rel=1e-6)
    assert first["loop2/weight"] == pytest.approx(max(BOUNDS[0], 2 * ratio / (1 + ratio)), rel=1e-6)
    assert "loop1/gradient_norm" not in second, "every tenth step"
    assert first["grad_norm"] == pytest.approx(plain.state.log_history[0]["grad_norm"], rel=1e-6)
    assert second["total_loss"] == pytest.approx(
        sum(
            second[f"{loop}/policy_loss"] * first[f"{loop}/weight"] + 0.04 * second[f"{loop}/kl_div"]
            for loop in ("loop1", "loop2")
        )
        + second["loss/answer"],
        abs=1e-6,
    )


def test_a_run_out_of_time_stops_whole(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=50, max_minutes=1e-9, num_iterations=2)
    trainer.train()
    assert trainer.state.global_step == 2, "never between two uses of the same rollouts"
    assert all(torch.isfinite(p).all() for p in trainer.sa2va.parameters())
