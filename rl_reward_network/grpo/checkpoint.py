"""The state of a GRPO run: what its processes (ranks) decide together, and its atomic checkpoints."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list, gather_object
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
from rl_reward_network.run import Run

EMA_WEIGHTS, STATE = "ema.safetensors", "grpo_state.pt"
SAVE_TOTAL_LIMIT = 2  # checkpoints
LONGEST_WAIT = timedelta(days=1)  # for a process with a slow judge, or for validation, which the first one makes alone
Value = TypeVar("Value")


# ---- all processes together: every one must call these functions ----------------------------------------------------


def connect(cpu: bool) -> None:
    """Connect the processes of torchrun, also on `cpu` beside a GPU; nothing without torchrun.

    On CPUs the Trainer would ignore `ddp_timeout`, and a process would wait for others for half an hour at most.
    """
    if processes() > 1:
        PartialState(cpu=cpu, timeout=LONGEST_WAIT)


def run_of_all(run: Run, cpu: bool) -> Run:
    """Connect the processes, and return the run of the first one in all of them: names have the time."""
    connect(cpu)
    names = [str(run)]
    if processes() > 1:
        broadcast_object_list(names)
    return replace(run, path=Path(names[0]))


def processes() -> int:
    """The number of processes of torchrun; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def first_process() -> bool:
    """Whether this is the process that writes and prints."""
    return os.environ.get("RANK", "0") == "0"


def wait_for_all() -> None:
    """Wait until every process is here; nothing without torchrun."""
    if processes() > 1:
        PartialState().wait_for_everyone()


def from_first_rank(accelerator: Accelerator, make: Callable[[], Value]) -> Value:
    """The result of `make` on rank 0, on all ranks; the others do not call it."""
    values: list[Any] = [make() if accelerator.is_main_process else None]
    if accelerator.num_processes > 1:
        broadcast_object_list(values)
    return values[0]


def from_all_ranks(accelerator: Accelerator, value: Value) -> list[Value]:
    """The values of all ranks, in their order, on each of them."""
    return list(gather_object([value])) if accelerator.num_processes > 1 else [value]


def first_message(accelerator: Accelerator, message: str | None) -> str | None:
    """The message of the lowest rank that has one, on all ranks; None if there is none."""
    return next((text for text in from_all_ranks(accelerator, message) if text), None)


def any_rank(accelerator: Accelerator, flag: bool) -> bool:
    """Whether `flag` is set on at least one rank."""
    return bool(accelerator.reduce(torch.tensor(float(flag), device=accelerator.device), "sum"))


# ---- checkpoints ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunState:
    """The state of a run besides weights, optimiser, schedule and step.

    Rollouts and states of random number generators are not in it: a checkpoint lies between rollouts, and all random
    numbers follow from seed and step.
    """

    sigma: float  # of the mask policy
    seconds: float  # of training
    reached: list[str]  # names of the tensors that had a gradient other than 0
    ended: bool  # before its last step
    any_spread: bool  # whether the rewards of some group differed, on any process
    alike_rewards: dict[str, int]  # loop -> steps in a row in which the rewards of every group were alike
    loop_weights: dict[str, dict[str, float]]  # gradient norms of the loops
    curriculum: dict[str, Any]  # of the order of the prompts; empty without a curriculum
    ema_steps: int  # updates of the teacher
    validation: dict[str, Any]  # empty without one
    taught: dict[str, int]  # images that a mean teacher was asked for, and those whose answer had no mask
    watch: dict[str, Any] = field(default_factory=dict)  # of a mean teacher: its masks at the start, and a collapse


def save_run_state(trainer: Trainer, model: Any, ema: EMA | None, state: RunState) -> None:
    """Write `checkpoint-<step>` with the trained tensors of Sa2VA (`model`); every process must call this."""
    folder = Path(str(trainer.args.output_dir)) / f"checkpoint-{trainer.state.global_step}"
    with _deepspeed_state(trainer, folder) as deepspeed_files:
        if trainer.args.should_save:
            with whole_folder(folder) as temporary:
                save_trainable(model, temporary / TRAINABLE)
                if ema is not None:
                    save_file(ema.weights, temporary / EMA_WEIGHTS)
                save_checkpoint(temporary / STATE, vars(state))
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
    """The Trainer's state in a checkpoint after whose step nothing is left to train; None for any other."""
    state = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
    return state if state.global_step >= planned_steps or load_checkpoint(folder / STATE).get("ended") else None


def load_run_state(folder: Path, model: Any, ema: EMA | None, deepspeed: bool) -> RunState:
    """Load the weights of model and teacher from a checkpoint, and return the rest; a missing file is a ValueError."""
    load_trainable(model, folder / TRAINABLE)
    optimizer = "latest" if deepspeed else OPTIMIZER_NAME  # DeepSpeed's note of its folder
    required = [STATE, SCHEDULER_NAME, optimizer, *([EMA_WEIGHTS] if ema is not None else [])]
    if missing := [name for name in required if not (folder / name).exists()]:
        raise ValueError(f"{folder}: {missing[0]} is missing; delete this checkpoint, and the one before it is taken")
    state = RunState(**load_checkpoint(folder / STATE))
    if ema is not None:
        ema.load(read_tensors(folder / EMA_WEIGHTS), state.ema_steps)
    return state
