"""Model and processor of a checkpoint in one call, on an available device."""

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor

Dtype = Literal["auto", "float32", "bfloat16"]


def load_sa2va_model(
    path: str | Path, device: str = "cpu", use_flash_attn: bool = False, dtype: Dtype = "auto"
) -> tuple[Sa2VAForConditionalGeneration, Sa2VAProcessor]:
    """Model and processor in one call; each tensor goes from its file to the device by itself.

    Args:
        path: local folder, embedded model, or hub id; either layout.
        device: "cpu", "cuda" or "cuda:INDEX".
        use_flash_attn: FlashAttention 2 in place of PyTorch's attention; CUDA only.
        dtype: of the weights; "auto" is bfloat16 on CUDA, float32 on the CPU.

    Raises:
        ValueError: flash attention without CUDA or its package, an unavailable GPU, or an error of `from_pretrained`.
    """
    check_device(device)
    if use_flash_attn:
        check_flash_attn(device)
    model = Sa2VAForConditionalGeneration.from_pretrained(
        path,
        dtype=weight_dtype(device, dtype),
        attn_implementation="flash_attention_2" if use_flash_attn else "sdpa",
        device_map=None if device == "cpu" else {"": device},
    )
    return model, Sa2VAProcessor.from_pretrained(path)


def weight_dtype(device: str, dtype: Dtype = "auto") -> torch.dtype:
    """The dtype of Sa2VA's weights on a device."""
    if dtype == "auto":
        return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    return torch.float32 if dtype == "float32" else torch.bfloat16


def check_flash_attn(device: str) -> None:
    """Raise a ValueError unless FlashAttention 2 can run on the device."""
    if torch.device(device).type != "cuda":
        raise ValueError(f"use_flash_attn needs a CUDA device, got device={device!r}; leave it out on a CPU")
    if find_spec("flash_attn") is None:
        raise ValueError("use_flash_attn: the package is not installed; pip install flash-attn, or leave the flag out")


def check_device(device: str) -> None:
    """Raise a ValueError for an unavailable GPU, or a string that is no device of this project (mps is none)."""
    if not (parts := re.fullmatch(r"cpu|cuda(?::(0|[1-9][0-9]*))?", device)):
        raise ValueError(f"device is {device!r}, expected cpu, cuda or cuda:INDEX")
    count = torch.cuda.device_count()
    if device != "cpu" and int(parts[1] or 0) >= count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
        remedy = f"give an index below {count}" if count else "give -1, the CPU"
        raise ValueError(
            f"device is {device!r}, but {count} GPUs are visible{shown}; {remedy}, as GPU or --gpu, or leave it out"
        )


def check_first_gpu(gpu: int | None) -> None:
    """Raise a ValueError for a GPU that is not the first visible one, which transformers' Trainer takes."""
    if gpu in (None, -1, 0):
        return
    name = str(gpu)
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):  # under SLURM; the index counts these alone
        check_device(f"cuda:{gpu}")
        name = visible.split(",")[gpu].strip()
    raise ValueError(f"gpu is {gpu}, expected 0 or -1; choose one by CUDA_VISIBLE_DEVICES={name}")
