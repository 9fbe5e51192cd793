"""Checkpoints of a GRPO run, written atomically: a resumed run ends with the weights of an uninterrupted one."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerState
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import rotate_checkpoints

from rl_reward_network.artefacts import whole_folder
from rl_reward_network.curves import load_checkpoint, save_checkpoint
from rl_reward_network.grpo.ranks import any_rank
from rl_reward_network.models.lora import load_trainable, save_trainable

EMA_WEIGHTS, STATE = "ema.safetensors", "grpo_state.pt"
TRAINABLE = "trainable"  # folder of the trained tensors, in a checkpoint and in a final_model
SAVE_TOTAL_LIMIT = 2  # checkpoints


def save_run_state(trainer: Any) -> None:
    """Write `checkpoint-<step>` with trained tensors, partner, optimiser, schedule, controller and training time.

    Rollouts and states of random number generators are not in it: a checkpoint lies between rollouts, and all random
    numbers follow from seed and step.
    """
    folder = Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}"
    any_spread = any_rank(trainer.accelerator, trainer.any_spread)
    with _deepspeed_state(trainer, folder) as deepspeed_files:
        if trainer.args.should_save:
            with whole_folder(folder) as temporary:
                _write(trainer, temporary, any_spread)
                for path in deepspeed_files:
                    path.rename(temporary / path.name)
            rotate_checkpoints(output_dir=str(folder.parent), save_total_limit=SAVE_TOTAL_LIMIT)
        trainer.accelerator.wait_for_everyone()


@contextmanager
def _deepspeed_state(trainer: Any, folder: Path) -> Iterator[list[Path]]:
    """Under DeepSpeed what every process writes of weights and optimiser, in a folder that all processes see."""
    if not trainer.is_deepspeed_enabled:
        yield []
        return
    parts = folder.with_name(f".{folder.name}_deepspeed")
    if trainer.args.should_save:
        shutil.rmtree(parts, ignore_errors=True)  # of a run that was killed here
    trainer.accelerator.wait_for_everyone()
    trainer.model_wrapped.save_checkpoint(str(parts), exclude_frozen_parameters=True)
    trainer.accelerator.wait_for_everyone()
    yield list(parts.iterdir())
    if trainer.args.should_save:
        shutil.rmtree(parts, ignore_errors=True)


def _write(trainer: Any, folder: Path, any_spread: bool) -> None:
    save_trainable(trainer.sa2va, folder / TRAINABLE)
    if trainer.ema is not None:
        save_file(trainer.ema.weights, folder / EMA_WEIGHTS)
    save_checkpoint(folder / STATE, _state(trainer) | {"any_spread": any_spread})
    if trainer.is_deepspeed_enabled:  # which saves the optimiser itself
        torch.save(trainer.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)
    else:
        trainer._save_optimizer_and_scheduler(str(folder))
    trainer.state.save_to_json(str(folder / TRAINER_STATE_NAME))


def _state(trainer: Any) -> dict[str, Any]:
    """State besides weights, optimiser, schedule and step."""
    state: dict[str, Any] = {
        "spread": trainer.rollout_generator.spread_controller.spread,
        "seconds": trainer.seconds,
        "reached": sorted(trainer.tensors_with_gradient),
        "ended": trainer.ended,
        "alike_rewards": trainer.alike_rewards.steps,
        "loop_weights": trainer.loop_weights.state_dict(),
    }
    if trainer.args.curriculum:
        state["curriculum"] = trainer.order.state_dict()
    if trainer.ema is not None:
        state["ema_steps"] = trainer.ema.steps
    if trainer.validation is not None:
        state |= trainer.validation.state_dict()
    return state


def load_if_finished(trainer: Any, folder: Path) -> bool:
    """Load the state of a checkpoint of the last step; returns whether it is one.

    The Trainer's loop checks for the end only after a step, so it would train one step too many.
    """
    state = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
    if state.global_step < trainer.planned_steps and not load_checkpoint(folder / STATE).get("ended"):
        return False
    load_run_state(trainer, folder)
    trainer.state = state
    return True


def load_run_state(trainer: Any, folder: Path) -> None:
    """Restore the state that the Trainer does not load itself (it loads optimiser, schedule and step).

    Raises:
        ValueError: a file is missing.
    """
    load_trainable(trainer.sa2va, folder / TRAINABLE)
    state = load_checkpoint(folder / STATE)
    optimizer = "latest" if trainer.is_deepspeed_enabled else OPTIMIZER_NAME  # DeepSpeed's note of its folder
    required = [STATE, SCHEDULER_NAME, optimizer, *([EMA_WEIGHTS] if trainer.ema is not None else [])]
    if missing := [name for name in required if not (folder / name).exists()]:
        raise ValueError(f"{folder}: {missing[0]} is missing; delete this checkpoint, and the one before it is taken")
    trainer.rollout_generator.spread_controller.spread, trainer.earlier_seconds = state["spread"], state["seconds"]
    trainer.loop_weights.load_state_dict(state["loop_weights"])
    trainer.alike_rewards.steps = state["alike_rewards"]
    trainer.tensors_with_gradient, trainer.any_spread = set(state["reached"]), state["any_spread"]
    if trainer.args.curriculum:
        trainer.order.load_state_dict(state["curriculum"])
    if trainer.validation is not None:
        trainer.validation.load_state_dict(state)
    if trainer.ema is not None:
        trainer.ema.steps, weights = state["ema_steps"], load_file(folder / EMA_WEIGHTS)
        with torch.no_grad():
            for name, tensor in trainer.ema.weights.items():
                tensor.copy_(weights[name])
