"""Errors that end a run name the step, the last checkpoint and the remedy."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_reward_network.grpo.trainer import fail_not_finite, hint_out_of_memory, hint_to_resume, resume_hint


def trainer_in(folder: Path, step: int) -> Any:
    """The parts of a trainer that messages depend on."""
    return SimpleNamespace(
        args=SimpleNamespace(output_dir=str(folder)),
        state=SimpleNamespace(global_step=step),
    )


def test_a_loss_that_is_not_finite_names_the_newest_checkpoint_if_there_is_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"step 3: the loss is nan;.*no checkpoint.*learning_rate"):
        fail_not_finite(trainer_in(tmp_path, 2), "the loss is nan")
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
    with pytest.raises(ValueError, match=r"step 12: the loss is nan;.*checkpoint-10;.*learning_rate"):
        fail_not_finite(trainer_in(tmp_path, 11), "the loss is nan")


def test_the_resume_hint_names_the_checkpoint(tmp_path: Path) -> None:
    assert "no checkpoint" in resume_hint(trainer_in(tmp_path, 0))
    checkpoint = tmp_path / "checkpoint-4"
    checkpoint.mkdir()
    assert resume_hint(trainer_in(tmp_path, 5)) == f"--resume goes on from {checkpoint}"


def test_only_errors_of_values_get_the_resume_hint(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, 1)
    with pytest.raises(ValueError, match=r"^step 2: server down; .*checkpoint"), hint_to_resume(trainer):
        raise ValueError("server down")
    with pytest.raises(RuntimeError, match=r"^bug$"), hint_to_resume(trainer):
        raise RuntimeError("bug")


def test_out_of_memory_names_phase_and_remedy(tmp_path: Path) -> None:
    message = r"^step 1: .*memory in rollouts; lower batch_size.*gradient_checkpointing"
    with (
        pytest.raises(ValueError, match=message),
        hint_out_of_memory(trainer_in(tmp_path, 0), "rollouts", "batch_size"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("body", "remedy"), [("internvl", "batch_size or max_dynamic_patch"), ("qwen_vl", "batch_size or the size of the")]
)
def test_a_model_without_tiles_needs_smaller_images(tmp_path: Path, body: str, remedy: str) -> None:
    trainer = trainer_in(tmp_path, 0)
    trainer.sa2va = SimpleNamespace(config=SimpleNamespace(family=SimpleNamespace(body=body)))
    with (
        pytest.raises(ValueError, match=f"memory in the loss; lower {remedy}"),
        hint_out_of_memory(trainer, "the loss", "batch_size or max_dynamic_patch"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
