"""The settings that the memory of a run depends on, and what to lower where a stage does not fit a device.

Imports no torch, so that `--help` is fast.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from rl_reward_network.flags import Rare, check_at_least, check_range
from rl_reward_network.grpo.settings import (
    LARGE,
    LORA_R,
    SMALL,
    GRPOSettings,
    Objective,
    check_settings,
    with_whole_groups,
)
from rl_reward_network.inputs.config import RegionConfig

GIB = 2**30
MARGIN = 1.5  # of what is not known exactly: on CPUs at most 1.43 times as much was measured (docs/results.md)
EXACT = ("weights", "process")
CUDA_CONTEXT = 0.6  # GiB, of a GPU, which torch does not count
LIMIT_FILES = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container
SAVES = 0.995  # share of the memory; a change that leaves more than this is not worth its cost
FLAGS = {
    "per_device_train_batch_size": "batch_size",
    "activation_checkpointing": "gradient_checkpointing",
    "max_dynamic_patch": "max_tiles",
}


@dataclass(frozen=True)
class MemorySettings:
    """Settings of training and prediction that decide how much memory is needed; names as in these commands."""

    device: Literal["cpu", "cuda"] | None = None
    """Where the run will be: cpu or cuda; by default that of --gpu, or a GPU if there is one."""
    memory_gib: float | None = None
    """Memory of that device in GiB; by default that of this machine."""
    dtype: Rare[Literal["auto", "float32", "bfloat16"]] = "auto"
    """Number format of the weights: auto is bfloat16 on a GPU and float32 on the CPU."""
    quantization: Rare[Literal["4bit", "8bit"] | None] = None
    """Bits of the language model's frozen weights, as in training."""
    objective: Objective = "grpo"
    """Of training, as its own."""
    lora_r: Rare[int | None] = None
    """Rank of LoRA, by default that of training: 16 on a model of the embedded one's size, else 128."""
    side_network: bool = False
    """Train a side network, as in training."""
    side_pixels: Rare[int] = 512
    """Side of its input in pixels."""
    encoder: Rare[Literal["frozen", "lora", "full"]] = "frozen"
    """What trains of SAM 2's image encoder, as in training."""
    freeze_embeddings: Rare[bool] = False
    """Do not train the token embeddings and the head of a Qwen-VL, as in training."""
    per_device_train_batch_size: Annotated[
        int | None, tyro.conf.arg(aliases=["--batch-size", "--per-device-batch-size"])
    ] = None
    """Captions per process and forward pass, by default 64 on a model of the embedded one's size, else 8."""
    gradient_accumulation_steps: Rare[int] = 1
    """Forward passes per optimisation step; a GPU keeps the image features of all of them."""
    num_generations: int = 4
    """Captions per region."""
    num_mask_generations: Rare[int] = 8
    """Masks per phrase."""
    max_completion_length: Rare[int | None] = None
    """Tokens of a caption, by default 24 on a model of the embedded one's size, else 128."""
    activation_checkpointing: Annotated[bool, tyro.conf.arg(aliases=["--gradient-checkpointing"])] = False
    """Compute activations of training twice, to save memory."""
    ema_decay: Rare[float] = 0.999
    """Decay of the moving average; 0 keeps none."""
    max_dynamic_patch: Annotated[int, tyro.conf.arg(aliases=["--max-tiles"])] = 1
    """Most tiles of an image, as --max_dynamic_patch of training and --max_tiles of steps 1 and 2. Without effect on a
    Qwen-VL."""
    segment_batch: int = 16
    """Prompts decoded at once in steps 1 and 2 (SEGMENT_BATCH)."""
    images: Rare[int] = 1000
    """Images of training and validation; a run on the CPU keeps the features of all in its memory, up to:"""
    feature_cache_gib: Rare[float] = RegionConfig.feature_cache_gib
    """Memory for the features of images, as in training."""

    def __post_init__(self) -> None:
        """Refuse what training would refuse, and numbers out of range.

        Raises:
            ValueError: names the field, its value and what is expected.
        """
        shared = {field.name for field in fields(self)} & {field.name for field in fields(GRPOSettings)}
        check_settings(with_whole_groups(GRPOSettings(**{name: getattr(self, name) for name in shared})))
        check_at_least(self, 1, "lora_r", "segment_batch", "images")
        if self.side_pixels < 64 or self.side_pixels % 64:
            raise ValueError(f"side_pixels is {self.side_pixels}, expected a multiple of 64")
        RegionConfig(max_dynamic_patch=self.max_dynamic_patch, feature_cache_gib=self.feature_cache_gib)
        check_range(self, "memory_gib", above=True)

    def on_device(self, device: Literal["cpu", "cuda"]) -> "MemorySettings":
        """The settings, with this device unless they name one."""
        return self if self.device else replace(self, device=device)

    def of_model(self, small: bool) -> "MemorySettings":
        """The settings with the presets of a kind of model in place of None, and whole groups as in training."""
        preset: dict[str, Any] = {**(SMALL if small else LARGE), "lora_r": LORA_R["small" if small else "large"]}
        names = ("lora_r", "per_device_train_batch_size", "max_completion_length")
        missing = {name: preset[name] for name in names if getattr(self, name) is None}
        whole: MemorySettings = with_whole_groups(replace(self, **missing))
        return whole


@dataclass(frozen=True)
class Stage:
    """What a stage needs at its peak: its name, and the bytes of its parts."""

    name: str
    parts: dict[str, float]

    @property
    def gib(self) -> float:
        """Sum of the parts, in GiB."""
        return sum(self.parts.values()) / GIB

    def needed_gib(self, device: str) -> float:
        """What a device must have: a margin on all but the weights is added, and the context of a GPU."""
        exact = sum(self.parts.get(name, 0.0) for name in EXACT) / GIB
        return exact + (self.gib - exact) * MARGIN + (CUDA_CONTEXT if device == "cuda" else 0.0)


@dataclass(frozen=True)
class Fit:
    """A stage with the settings that were found for it.

    Args:
        asked: the stage with the settings as given.
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
        import psutil

        limits = [Path(file).read_text().strip() for file in LIMIT_FILES if Path(file).is_file()]
        return float(min([psutil.virtual_memory().total, *map(int, filter(str.isdigit, limits))])) / GIB
    import torch

    if not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no GPU; give its memory: --memory_gib 24")
    return float(torch.cuda.get_device_properties(0).total_memory) / GIB


def fit(
    predict: Callable[[MemorySettings], Stage], settings: MemorySettings, available_gib: float, names: Collection[str]
) -> Fit:
    """Lower one setting after the other until the stage fits, then raise again those that it fits without.

    What saves nothing is left as it is.

    Args:
        predict: the stage of settings.
        settings: as given.
        available_gib: memory of the device.
        names: the settings that the stage's command has.
    """
    device, usual = settings.device or "cpu", settings
    asked = stage = predict(settings)
    changes = [(changed, lower, harm) for changed, lower, harm in CHANGES if set(changed) <= set(names)]
    for _, lower, _ in changes:
        while stage.needed_gib(device) > available_gib and (lowered := lower(settings)):
            smaller = predict(replace(settings, **lowered))
            if smaller.gib > SAVES * stage.gib:
                break
            settings, stage = replace(settings, **lowered), smaller
    fits = stage.needed_gib(device) <= available_gib
    for changed, _, _ in reversed(changes):
        raised = replace(settings, **{name: getattr(usual, name) for name in changed})
        if fits and raised != settings and (larger := predict(raised)).needed_gib(device) <= available_gib:
            settings, stage = raised, larger
    harm = [harm for changed, _, harm in changes if any(getattr(usual, n) != getattr(settings, n) for n in changed)]
    return Fit(asked, stage, settings, harm, fits)


def changed_flags(before: MemorySettings, after: MemorySettings, names: Iterable[str]) -> str:
    """Those of the named settings that differ, as words of a command line."""
    changed = {name: value for name in names if (value := getattr(after, name)) != getattr(before, name)}
    return " ".join(
        f"--{FLAGS.get(name, name)}" + ("" if value is True else f" {value}") for name, value in changed.items()
    )


def _halved(name: str, least: float) -> Callable[[MemorySettings], dict[str, Any] | None]:
    """Half of a setting, not below `least`."""

    def lower(settings: MemorySettings) -> dict[str, Any] | None:
        value = getattr(settings, name) or 0
        half = value / 2 if isinstance(value, float) else value // 2
        return {name: half} if half >= least else None

    return lower


def _batch(settings: MemorySettings) -> dict[str, Any] | None:
    """Half of the batch in twice as many passes, in whole groups."""
    batch = settings.per_device_train_batch_size or 1
    if batch % (2 * settings.num_generations):
        return None
    steps = 2 * settings.gradient_accumulation_steps
    return {"per_device_train_batch_size": batch // 2, "gradient_accumulation_steps": steps}


def _dtype(settings: MemorySettings) -> dict[str, Any] | None:
    half = settings.dtype == "bfloat16" or (settings.dtype == "auto" and settings.device == "cuda")
    return None if half else {"dtype": "bfloat16"}


Lower = Callable[[MemorySettings], dict[str, Any] | None]  # one step of lowering; None if there is none
CHANGES: tuple[tuple[tuple[str, ...], Lower, str], ...] = (  # names, step, cost; in the order of least harm
    (("feature_cache_gib",), _halved("feature_cache_gib", 0.25), "the same result, images are encoded again"),
    (
        ("activation_checkpointing",),
        lambda of: None if of.activation_checkpointing else {"activation_checkpointing": True},
        "the same result, slower",
    ),
    (("segment_batch",), _halved("segment_batch", 1), "the same masks, slower"),
    (
        ("per_device_train_batch_size", "gradient_accumulation_steps"),
        _batch,
        "the same prompts per step, slower",
    ),
    (("dtype",), _dtype, "weights are rounded"),
    (
        ("max_dynamic_patch",),
        lambda of: {"max_dynamic_patch": 1} if of.max_dynamic_patch > 1 else None,
        "small objects are seen less well",
    ),
    (("max_completion_length",), _halved("max_completion_length", 32), "longer captions are cut off"),
    (
        ("freeze_embeddings",),
        lambda of: None if of.freeze_embeddings else {"freeze_embeddings": True},
        "embeddings and head do not train, unlike in the official recipe",
    ),
    (("lora_r",), _halved("lora_r", 16), "fewer weights train"),
    (
        ("quantization",),
        lambda of: {"quantization": "4bit"} if of.device == "cuda" and of.quantization is None else None,
        "the language model is rounded to 4 bit; pip install -e '.[quantization]'",
    ),
    (
        ("ema_decay",),
        lambda of: {"ema_decay": 0.0} if of.ema_decay else None,
        "rewards measure the model's agreement with itself, too",
    ),
)
