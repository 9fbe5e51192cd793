"""Checkpoints of a GRPO run: everything a resumed run needs, whole or not there, and only the newest ones."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.trainer_utils import get_last_checkpoint

from rl_reward_network.curves import load_checkpoint
from rl_reward_network.grpo.checkpoint import EMA_WEIGHTS, SAVE_TOTAL_LIMIT, STATE
from rl_reward_network.grpo.trainer import Sa2VAGRPOTrainer
from rl_reward_network.models.ema import trainable_tensors
from rl_reward_network.models.lora import read_trainable
from tests.grpo.nano import config, make_trainer, nano, regions, rewards

SAVING = {"save_strategy": "steps", "save_steps": 1, "caption": 1.0, "loop2_iou": 1.0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("run")
    trainer = make_trainer(folder, max_steps=3, **SAVING)
    trainer.train()
    return folder, trainer


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_holds_all_that_changes(trained: tuple[Path, Any]) -> None:
    folder, trainer = trained
    files = ["ema.safetensors", "grpo_state.pt", "optimizer.pt", "scheduler.pt", "trainable", "trainer_state.json"]
    assert names(folder / "checkpoint-3") == files
    saved = read_trainable(folder / "checkpoint-3" / "trainable")
    now = trainable_tensors(trainer.sa2va)
    assert saved.keys() == now.keys()
    assert all(torch.equal(tensor, now[name]) for name, tensor in saved.items())
    teacher = load_file(folder / "checkpoint-3" / EMA_WEIGHTS)
    assert all(torch.equal(tensor, trainer.ema.weights[name]) for name, tensor in teacher.items())
    assert any(not torch.equal(tensor, saved[name]) for name, tensor in teacher.items())
    state = load_checkpoint(folder / "checkpoint-3" / STATE)
    assert 0 < state.pop("seconds") < trainer.seconds
    assert set(state.pop("reached")) == trainer.tensors_with_gradient == now.keys()
    assert state == {
        "sigma": trainer.rollout_generator.sigma_controller.sigma,
        "ema_steps": 3,
        "any_spread": True,
        "ended": False,
        "loop_weights": {"norms": {}},
        "alike_rewards": {"loop1": 0, "loop2": 0},
        "curriculum": {},
        "taught": {},
        "validation": {},
        "watch": {},
    }


def test_only_the_newest_are_kept(trained: tuple[Path, Any]) -> None:
    folder, _ = trained
    assert SAVE_TOTAL_LIMIT == 2
    assert names(folder) == ["checkpoint-2", "checkpoint-3"]
    assert get_last_checkpoint(str(folder)) == str(folder / "checkpoint-3")


def test_without_a_teacher_none_is_saved(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=1, ema_decay=0.0, **SAVING)
    trainer.train()
    assert EMA_WEIGHTS not in names(tmp_path / "checkpoint-1")
    assert load_checkpoint(tmp_path / "checkpoint-1" / STATE)["ema_steps"] == 0
    trainer.rollout_generator.sigma_controller.sigma = 9.0
    trainer.load_checkpoint(tmp_path / "checkpoint-1")
    assert trainer.rollout_generator.sigma_controller.sigma != 9.0


@pytest.mark.parametrize("name", [STATE, EMA_WEIGHTS, "optimizer.pt", "scheduler.pt"])
def test_a_file_that_is_missing_is_named(trained: tuple[Path, Any], tmp_path: Path, name: str) -> None:
    shutil.copytree(trained[0] / "checkpoint-3", tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-3" / name).unlink()
    with pytest.raises(ValueError, match=f"checkpoint-3: {name} is missing; delete"):
        trained[1].load_checkpoint(tmp_path / "checkpoint-3")


def test_an_adapter_of_another_rank_is_refused(trained: tuple[Path, Any], tmp_path: Path) -> None:
    model, processor = nano(r=8)
    other = Sa2VAGRPOTrainer(model, processor, config(tmp_path), regions(), rewards())
    message = r"lora\.json: the adapter is of \{'r': 4, .*\}, the model's LoRA layers of \{'r': 8, "
    with pytest.raises(ValueError, match=message):
        other.train(resume_from_checkpoint=str(trained[0] / "checkpoint-3"))


def test_a_damaged_state_is_named(trained: tuple[Path, Any], tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(trained[0] / "checkpoint-3", folder)
    (folder / STATE).write_bytes((folder / STATE).read_bytes()[:40])
    with pytest.raises(ValueError, match=r"grpo_state\.pt: damaged \(.*\); delete it"):
        make_trainer(tmp_path / "other").load_checkpoint(folder)
