"""Errors that end a run: each message has the step, the last checkpoint and the remedy."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from transformers.trainer_utils import get_last_checkpoint

TILES = "max_dynamic_patch"  # a Qwen-VL has no tiles: its image tokens grow with the image


def fail_not_finite(trainer: Any, problem: str) -> NoReturn:
    """Raise a ValueError for a loss or gradient that is not finite.

    Args:
        trainer: Sa2VAGRPOTrainer.
        problem: the first part of the message, such as "a gradient is not finite".
    """
    checkpoint = get_last_checkpoint(str(trainer.args.output_dir))
    state = f"the last good checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint yet"
    raise ValueError(f"{_step(trainer)}: {problem}; training stops, {state}; lower learning_rate, or raise beta")


def resume_hint(trainer: Any) -> str:
    """A sentence on the possible use of the last checkpoint."""
    checkpoint = get_last_checkpoint(str(trainer.args.output_dir))
    return f"--resume goes on from {checkpoint}" if checkpoint else "there is no checkpoint yet"


@contextmanager
def hint_to_resume(trainer: Any) -> Iterator[None]:
    """Add step and resume hint to a ValueError of the block, such as a judge that cannot be reached any more."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{_step(trainer)}: {error}; {resume_hint(trainer)}") from error


@contextmanager
def hint_out_of_memory(trainer: Any, phase: str, remedy: str) -> Iterator[None]:
    """Turn an out-of-memory error of the block into a ValueError that names the phase and the settings to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if TILES in remedy and trainer.sa2va.config.family.body == "qwen_vl":
            remedy = remedy.replace(TILES, "the size of the images")
        raise ValueError(
            f"{_step(trainer)}: out of GPU memory in {phase}; lower {remedy}, or turn on gradient_checkpointing"
        ) from error


def _step(trainer: Any) -> str:
    return f"step {trainer.state.global_step + 1}"
