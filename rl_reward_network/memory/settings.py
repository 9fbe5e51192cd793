"""What the memory of a run depends on, as flags. Imports no torch, so that `--help` is fast."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import tyro

from rl_reward_network.flags import Rare
from rl_reward_network.grpo.settings import LARGE, LORA_R, SMALL, Objective


@dataclass(frozen=True)
class MemorySettings:
    """Settings of training and prediction that decide how much memory is needed; names as in these commands."""

    device: Literal["cpu", "cuda"] | None = None
    """Where the run will be: cpu or cuda; by default a GPU if there is one."""
    memory_gib: float | None = None
    """Memory of that device in GiB; by default that of this machine."""
    dtype: Rare[Literal["auto", "float32", "bfloat16"]] = "auto"
    """As in training: auto is bfloat16 on a GPU and float32 on the CPU."""
    objective: Objective = "grpo"
    """As in `grpo`."""
    lora_r: Rare[int | None] = None
    """As in `grpo`."""
    per_device_train_batch_size: Annotated[
        int | None, tyro.conf.arg(aliases=["--batch-size", "--per-device-batch-size"])
    ] = None
    """As in `grpo`."""
    gradient_accumulation_steps: Rare[int] = 1
    """As in `grpo`; it needs no memory."""
    num_generations: int = 4
    """As in `grpo`."""
    num_mask_generations: Rare[int] = 8
    """As in `grpo`."""
    max_completion_length: Rare[int | None] = None
    """As in `grpo`."""
    activation_checkpointing: Annotated[bool, tyro.conf.arg(aliases=["--gradient-checkpointing"])] = False
    """As in `grpo`."""
    ema_decay: Rare[float] = 0.999
    """As in `grpo`: 0 keeps no moving average."""
    max_dynamic_patch: Annotated[int, tyro.conf.arg(aliases=["--max-tiles"])] = 1
    """As in `grpo`; in steps 1 and 2 it is max_tiles."""
    segment_batch: int = 16
    """As in steps 1 and 2 (SEGMENT_BATCH)."""

    def __post_init__(self) -> None:
        """Refuse counts out of range."""
        counts = ("lora_r", "per_device_train_batch_size", "num_generations", "num_mask_generations")
        for name in (*counts, "max_completion_length", "max_dynamic_patch", "segment_batch"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}, expected 1 or more")
        if self.memory_gib is not None and self.memory_gib <= 0:
            raise ValueError(f"memory_gib is {self.memory_gib}, expected more than 0")

    def on_device(self, device: Literal["cpu", "cuda"]) -> "MemorySettings":
        """The settings, with this device unless they name one."""
        return self if self.device else replace(self, device=device)

    def of_model(self, small: bool) -> "MemorySettings":
        """The settings with the presets of a kind of model in place of None."""
        preset: dict[str, Any] = {**(SMALL if small else LARGE), "lora_r": LORA_R["small" if small else "large"]}
        names = ("lora_r", "per_device_train_batch_size", "max_completion_length")
        return replace(self, **{name: preset[name] for name in names if getattr(self, name) is None})
