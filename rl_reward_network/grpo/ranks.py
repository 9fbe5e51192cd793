"""Decisions that all processes (ranks) of a run must take alike. Every rank must call these functions."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

Value = TypeVar("Value")


def from_first_rank(accelerator: Accelerator, make: Callable[[], Value]) -> Value:
    """The result of `make` on rank 0, on all ranks; the others do not call it."""
    values: list[Any] = [make() if accelerator.is_main_process else None]
    if accelerator.num_processes > 1:
        broadcast_object_list(values)
    return values[0]


def first_message(accelerator: Accelerator, message: str | None) -> str | None:
    """The message of the lowest rank that has one, on all ranks; None if there is none."""
    messages = gather_object([message]) if accelerator.num_processes > 1 else [message]
    return next((text for text in messages if text), None)


def any_rank(accelerator: Accelerator, flag: bool) -> bool:
    """Whether `flag` is set on at least one rank."""
    return bool(accelerator.reduce(torch.tensor(float(flag), device=accelerator.device), "sum"))
