"""Decisions that all processes of a run must take alike: made by one of them, or as soon as one of them asks for it."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

Value = TypeVar("Value")


def by_first(accelerator: Accelerator, make: Callable[[], Value]) -> Value:
    """What `make` returns on the first process, on all of them; the others do not call it."""
    found: list[Any] = [make() if accelerator.is_main_process else None]
    if accelerator.num_processes > 1:
        broadcast_object_list(found)
    return found[0]


def told_by_any(accelerator: Accelerator, words: str | None) -> str | None:
    """What the first process that has something to say says; every process must ask."""
    everyone = gather_object([words]) if accelerator.num_processes > 1 else [words]
    return next((one for one in everyone if one), None)


def by_any(accelerator: Accelerator, flag: bool) -> bool:
    """Whether `flag` is set on at least one process; every process must ask."""
    return bool(accelerator.reduce(torch.tensor(float(flag), device=accelerator.device), "sum"))
