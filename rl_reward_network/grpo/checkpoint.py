"""Checkpoints of a GRPO run, written atomically: a resumed run ends with the weights of an uninterrupted one."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Trainer, TrainerState
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import rotate_checkpoints

from rl_reward_network.atomic_io import whole_folder
from rl_reward_network.curves import load_checkpoint, save_checkpoint
from rl_reward_network.models.ema import EMA
from rl_reward_network.models.lora import load_trainable, save_trainable
from rl_reward_network.models.sa2va.checkpoint_sa2va import TRAINABLE
from rl_reward_network.models.weights import read_tensors

EMA_WEIGHTS, STATE = "ema.safetensors", "grpo_state.pt"
SAVE_TOTAL_LIMIT = 2  # checkpoints


@dataclass(frozen=True)
class RunState:
    """The state of a run besides weights, optimiser, schedule and step.

    Rollouts and states of random number generators are not in it: a checkpoint lies between rollouts, and all random
    numbers follow from seed and step.

    Args:
        sigma: of the mask policy.
        seconds: of training.
        reached: names of the tensors that had a gradient other than 0.
        ended: whether the run has ended before its last step.
        any_spread: whether the rewards of some group differed, on any process.
        alike_rewards: loop -> steps in a row in which the rewards of every group were alike.
        loop_weights: gradient norms of the loops.
        curriculum: of the order of the prompts; empty without a curriculum.
        ema_steps: updates of the teacher.
        validation: of the validation; empty without one.
        taught: images that a mean teacher was asked for, and those whose answer had no mask; written for
            that objective alone.
    """

    sigma: float
    seconds: float
    reached: list[str]
    ended: bool
    any_spread: bool
    alike_rewards: dict[str, int]
    loop_weights: dict[str, dict[str, float]]
    curriculum: dict[str, Any]
    ema_steps: int
    validation: dict[str, Any]
    taught: dict[str, int] = field(default_factory=dict)


def save_run_state(trainer: Trainer, model: Any, ema: EMA | None, state: RunState) -> None:
    """Write `checkpoint-<step>`; every process must call this.

    Args:
        trainer: with optimiser, schedule and step.
        model: Sa2VA, whose trained tensors are written.
        ema: the teacher.
        state: the rest.
    """
    folder = Path(str(trainer.args.output_dir)) / f"checkpoint-{trainer.state.global_step}"
    with _deepspeed_state(trainer, folder) as deepspeed_files:
        if trainer.args.should_save:
            with whole_folder(folder) as temporary:
                save_trainable(model, temporary / TRAINABLE)
                if ema is not None:
                    save_file(ema.weights, temporary / EMA_WEIGHTS)
                of_all = {name: value for name, value in vars(state).items() if value or name != "taught"}
                save_checkpoint(temporary / STATE, of_all)
                if trainer.is_deepspeed_enabled:  # which saves the optimiser itself
                    assert trainer.lr_scheduler is not None
                    torch.save(trainer.lr_scheduler.state_dict(), temporary / SCHEDULER_NAME)
                else:
                    trainer._save_optimizer_and_scheduler(str(temporary))
                trainer.state.save_to_json(str(temporary / TRAINER_STATE_NAME))
                for path in deepspeed_files:
                    path.rename(temporary / path.name)
            rotate_checkpoints(output_dir=str(folder.parent), save_total_limit=SAVE_TOTAL_LIMIT)
        trainer.accelerator.wait_for_everyone()


@contextmanager
def _deepspeed_state(trainer: Trainer, folder: Path) -> Iterator[list[Path]]:
    """Under DeepSpeed what every process writes of weights and optimiser, in a folder that all processes see."""
    if not trainer.is_deepspeed_enabled:
        yield []
        return
    parts = folder.with_name(f".{folder.name}_deepspeed")
    if trainer.args.should_save:
        shutil.rmtree(parts, ignore_errors=True)  # of a run that was killed here
    trainer.accelerator.wait_for_everyone()
    engine: Any = trainer.model_wrapped
    engine.save_checkpoint(str(parts), exclude_frozen_parameters=True)
    trainer.accelerator.wait_for_everyone()
    yield list(parts.iterdir())
    if trainer.args.should_save:
        shutil.rmtree(parts, ignore_errors=True)


def state_if_finished(folder: Path, planned_steps: int) -> TrainerState | None:
    """The Trainer's state in a checkpoint after whose step nothing is left to train; None for any other.

    The Trainer's loop checks for the end only after a step, so it would train one step too many.
    """
    state = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
    finished = state.global_step >= planned_steps or load_checkpoint(folder / STATE).get("ended")
    return state if finished else None


def load_run_state(folder: Path, model: Any, ema: EMA | None, deepspeed: bool) -> RunState:
    """Load the weights of model and teacher from a checkpoint, and return the rest.

    Raises:
        ValueError: a file is missing.
    """
    load_trainable(model, folder / TRAINABLE)
    state = load_checkpoint(folder / STATE)
    optimizer = "latest" if deepspeed else OPTIMIZER_NAME  # DeepSpeed's note of its folder
    required = [STATE, SCHEDULER_NAME, optimizer, *([EMA_WEIGHTS] if ema is not None else [])]
    if missing := [name for name in required if not (folder / name).exists()]:
        raise ValueError(f"{folder}: {missing[0]} is missing; delete this checkpoint, and the one before it is taken")
    run_state = RunState(**state)
    if ema is not None:
        ema.steps, weights = run_state.ema_steps, read_tensors(folder / EMA_WEIGHTS)
        with torch.no_grad():
            for name, tensor in ema.weights.items():
                tensor.copy_(weights[name])
    return run_state
