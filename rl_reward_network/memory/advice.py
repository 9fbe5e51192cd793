"""Whether a stage fits a device, and what to lower if it does not, in the order of least harm."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from rl_reward_network.memory.predict import GIB, Stage
from rl_reward_network.memory.settings import MemorySettings

MARGIN = {"cpu": 1.25, "cuda": 1.1}  # measured on CPUs: at most 1.23 times the prediction (docs/results.md)
CUDA_CONTEXT = 0.6  # GiB, of a GPU, which torch does not count
LIMIT_FILES = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container
FEWEST_TOKENS, SMALLEST_R = 32, 16
SAVES = 0.995  # share of the memory; a change that leaves more than this is not worth its cost
FLAGS = {
    "per_device_train_batch_size": "batch_size",
    "activation_checkpointing": "gradient_checkpointing",
    "max_dynamic_patch": "max_tiles",
}

Predict = Callable[[MemorySettings], Stage]


@dataclass(frozen=True)
class Fit:
    """A stage with the settings that were found for it.

    Args:
        asked: the stage with the settings that were asked for.
        stage: with the lowered ones.
        settings: the lowered ones.
        harm: what each lowered setting costs, in order; empty if the stage fits as it is.
        fits: whether the lowered stage does.
    """

    asked: Stage
    stage: Stage
    settings: MemorySettings
    harm: list[str]
    fits: bool


def memory_gib(device: str) -> float:
    """Memory of this machine, or of its first GPU, in GiB.

    Raises:
        ValueError: there is no GPU.
    """
    if device == "cpu":
        limits = [Path(file).read_text().strip() for file in LIMIT_FILES if Path(file).is_file()]
        return min([psutil.virtual_memory().total, *map(int, filter(str.isdigit, limits))]) / GIB
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no GPU; give its memory: --memory_gib 24")
    return torch.cuda.get_device_properties(0).total_memory / GIB


def needed_gib(stage: Stage, device: str) -> float:
    """What a device must have: the prediction with a margin, and the context of a GPU."""
    return stage.gib * MARGIN[device] + (CUDA_CONTEXT if device == "cuda" else 0.0)


def fit(predict: Predict, settings: MemorySettings, available_gib: float) -> Fit:
    """Lower one setting after the other until the stage fits; what saves nothing is left as it is.

    Args:
        predict: the stage of settings.
        settings: as asked for.
        available_gib: memory of the device.
    """
    device = settings.device or "cpu"
    asked = stage = predict(settings)
    harm: list[str] = []
    for lower, cost in CHANGES:
        while needed_gib(stage, device) > available_gib and (changed := lower(settings)):
            smaller = predict(changed)
            if smaller.gib > SAVES * stage.gib:
                break
            settings, stage = changed, smaller
            harm.append(cost)
    return Fit(asked, stage, settings, list(dict.fromkeys(harm)), needed_gib(stage, device) <= available_gib)


def changed_flags(before: MemorySettings, after: MemorySettings, names: Iterable[str]) -> str:
    """Those of the named settings that differ, as words of a command line."""
    changed = {name: value for name in names if (value := getattr(after, name)) != getattr(before, name)}
    return " ".join(
        f"--{FLAGS.get(name, name)}" + ("" if value is True else f" {value}") for name, value in changed.items()
    )


def _checkpointing(settings: MemorySettings) -> MemorySettings | None:
    return None if settings.activation_checkpointing else replace(settings, activation_checkpointing=True)


def _segment_batch(settings: MemorySettings) -> MemorySettings | None:
    return replace(settings, segment_batch=settings.segment_batch // 2) if settings.segment_batch > 1 else None


def _batch(settings: MemorySettings) -> MemorySettings | None:
    batch, group = settings.per_device_train_batch_size or 1, settings.num_generations
    if batch % (2 * group):
        return None
    steps = 2 * settings.gradient_accumulation_steps
    return replace(settings, per_device_train_batch_size=batch // 2, gradient_accumulation_steps=steps)


def _dtype(settings: MemorySettings) -> MemorySettings | None:
    half = settings.dtype == "bfloat16" or (settings.dtype == "auto" and settings.device == "cuda")
    return None if half else replace(settings, dtype="bfloat16")


def _tiles(settings: MemorySettings) -> MemorySettings | None:
    return replace(settings, max_dynamic_patch=1) if settings.max_dynamic_patch > 1 else None


def _length(settings: MemorySettings) -> MemorySettings | None:
    length = settings.max_completion_length or 0
    return replace(settings, max_completion_length=length // 2) if length >= 2 * FEWEST_TOKENS else None


def _rank(settings: MemorySettings) -> MemorySettings | None:
    r = settings.lora_r or 0
    return replace(settings, lora_r=r // 2) if r >= 2 * SMALLEST_R else None


def _partner(settings: MemorySettings) -> MemorySettings | None:
    return replace(settings, ema_decay=0.0) if settings.ema_decay else None


CHANGES: tuple[tuple[Callable[[MemorySettings], MemorySettings | None], str], ...] = (
    (_checkpointing, "the same result, slower"),
    (_segment_batch, "the same masks, slower"),
    (_batch, "the same prompts per step, slower"),
    (_dtype, "weights are rounded"),
    (_tiles, "small objects are seen less well"),
    (_length, "longer captions are cut off"),
    (_rank, "fewer weights train"),
    (_partner, "rewards measure the model's agreement with itself, too"),
)
