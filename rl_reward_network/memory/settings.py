"""What the memory of a run depends on, as flags. Imports no torch, so that `--help` is fast."""

from dataclasses import dataclass, fields, replace
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


@dataclass(frozen=True)
class MemorySettings:
    """Settings of training and prediction that decide how much memory is needed; names as in these commands."""

    device: Literal["cpu", "cuda"] | None = None
    """Where the run will be: cpu or cuda; by default that of --gpu, or a GPU if there is one."""
    memory_gib: float | None = None
    """Memory of that device in GiB; by default that of this machine."""
    dtype: Rare[Literal["auto", "float32", "bfloat16"]] = "auto"
    """Number format of the weights: auto is bfloat16 on a GPU and float32 on the CPU."""
    objective: Objective = "grpo"
    """Of training: grpo or supervised."""
    lora_r: Rare[int | None] = None
    """Rank of LoRA, by default that of training: 16 on a model of the embedded one's size, else 128."""
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
