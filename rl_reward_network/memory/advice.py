"""Whether a stage fits a device, and what to lower if it does not, in the order of least harm."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from rl_reward_network.memory.predict import GIB, Stage
from rl_reward_network.memory.settings import MemorySettings

MARGIN = 1.5  # of what is not known exactly: on CPUs at most 1.43 times as much was measured (docs/results.md)
EXACT = ("weights", "process")
CUDA_CONTEXT = 0.6  # GiB, of a GPU, which torch does not count
LIMIT_FILES = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container
FEWEST_TOKENS, SMALLEST_R, SMALLEST_CACHE_GIB = 32, 16, 0.25
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
    """What a device must have: the prediction, with a margin for all but the weights, and the context of a GPU."""
    exact = sum(stage.parts.get(name, 0.0) for name in EXACT) / GIB
    return exact + (stage.gib - exact) * MARGIN + (CUDA_CONTEXT if device == "cuda" else 0.0)


def fit(predict: Predict, settings: MemorySettings, available_gib: float, names: Collection[str]) -> Fit:
    """Lower one setting after the other until the stage fits, then raise again those that it fits without.

    What saves nothing is left as it is.

    Args:
        predict: the stage of settings.
        settings: as asked for.
        available_gib: memory of the device.
        names: the settings that the stage's command has.
    """
    device, usual = settings.device or "cpu", settings
    asked = stage = predict(settings)
    changes = [change for change in CHANGES if set(change.names) <= set(names)]
    for change in changes:
        while needed_gib(stage, device) > available_gib and (lowered := change.lower(settings)):
            smaller = predict(lowered)
            if smaller.gib > SAVES * stage.gib:
                break
            settings, stage = lowered, smaller
    fits = needed_gib(stage, device) <= available_gib
    for change in reversed(changes):
        raised = replace(settings, **{name: getattr(usual, name) for name in change.names})
        if fits and raised != settings and needed_gib(larger := predict(raised), device) <= available_gib:
            settings, stage = raised, larger
    harm = [change.harm for change in changes if change.differs(usual, settings)]
    return Fit(asked, stage, settings, harm, fits)


def changed_flags(before: MemorySettings, after: MemorySettings, names: Iterable[str]) -> str:
    """Those of the named settings that differ, as words of a command line."""
    changed = {name: value for name in names if (value := getattr(after, name)) != getattr(before, name)}
    return " ".join(
        f"--{FLAGS.get(name, name)}" + ("" if value is True else f" {value}") for name, value in changed.items()
    )


def _cache(settings: MemorySettings) -> MemorySettings | None:
    size = settings.feature_cache_gib / 2
    return replace(settings, feature_cache_gib=size) if size >= SMALLEST_CACHE_GIB else None


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


def _embeddings(settings: MemorySettings) -> MemorySettings | None:
    return None if settings.freeze_embeddings else replace(settings, freeze_embeddings=True)


def _partner(settings: MemorySettings) -> MemorySettings | None:
    return replace(settings, ema_decay=0.0) if settings.ema_decay else None


@dataclass(frozen=True)
class Change:
    """A way to need less memory.

    Args:
        lower: one step of it; None if there is none.
        harm: what it costs, in words.
        names: of the settings that it changes.
    """

    lower: Callable[[MemorySettings], MemorySettings | None]
    harm: str
    names: tuple[str, ...]

    def differs(self, first: MemorySettings, second: MemorySettings) -> bool:
        """Whether these settings differ in what it changes."""
        return any(getattr(first, name) != getattr(second, name) for name in self.names)


CHANGES = (  # in the order of least harm
    Change(_cache, "the same result, images are encoded again", ("feature_cache_gib",)),
    Change(_checkpointing, "the same result, slower", ("activation_checkpointing",)),
    Change(_segment_batch, "the same masks, slower", ("segment_batch",)),
    Change(_batch, "the same prompts per step, slower", ("per_device_train_batch_size", "gradient_accumulation_steps")),
    Change(_dtype, "weights are rounded", ("dtype",)),
    Change(_tiles, "small objects are seen less well", ("max_dynamic_patch",)),
    Change(_length, "longer captions are cut off", ("max_completion_length",)),
    Change(_embeddings, "embeddings and head do not train, unlike in the official recipe", ("freeze_embeddings",)),
    Change(_rank, "fewer weights train", ("lora_r",)),
    Change(_partner, "rewards measure the model's agreement with itself, too", ("ema_decay",)),
)
