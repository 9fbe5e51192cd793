"""What all processes (ranks) of a run do together: every rank must call these functions."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list, gather_object

Value = TypeVar("Value")
LONGEST_WAIT = timedelta(days=1)  # for a process with a slow judge, or for validation, which the first one makes alone


def connect(cpu: bool) -> None:
    """Connect the processes of torchrun; nothing without torchrun.

    On CPUs the Trainer would ignore `ddp_timeout`, and a process would wait for others for half an hour at most.

    Args:
        cpu: whether the run is on CPUs, also on a machine that has a GPU.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        PartialState(cpu=cpu, timeout=LONGEST_WAIT)


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
