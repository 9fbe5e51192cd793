"""Model and processor of a checkpoint in one call, on an available device."""

from importlib.util import find_spec
from pathlib import Path

import torch

from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor


def load_sa2va_model(
    path: str | Path, device: str = "cpu", use_flash_attn: bool = False
) -> tuple[Sa2VAForConditionalGeneration, Sa2VAProcessor]:
    """Model and processor in one call: bfloat16 on CUDA, float32 on the CPU.

    Args:
        path: local folder, embedded model, or hub id; either layout.
        device: "cpu", "cuda" or "cuda:INDEX".
        use_flash_attn: FlashAttention 2 in place of PyTorch's attention; CUDA only.

    Raises:
        ValueError: flash attention without CUDA or its package, an unavailable GPU, or an error of `from_pretrained`.
    """
    check_device(device)
    cuda = torch.device(device).type == "cuda"
    if use_flash_attn:
        check_flash_attn(device)
    model = Sa2VAForConditionalGeneration.from_pretrained(
        path,
        dtype=torch.bfloat16 if cuda else torch.float32,
        attn_implementation="flash_attention_2" if use_flash_attn else "sdpa",
    )
    return model.to(device), Sa2VAProcessor.from_pretrained(path)  # type: ignore[arg-type]


def check_flash_attn(device: str) -> None:
    """Raise a ValueError unless FlashAttention 2 can run on the device."""
    if torch.device(device).type != "cuda":
        raise ValueError(f"use_flash_attn needs a CUDA device, got device={device!r}; leave it out on a CPU")
    if find_spec("flash_attn") is None:
        raise ValueError("use_flash_attn: the package is not installed; pip install flash-attn, or leave the flag out")


def check_device(device: str) -> None:
    """Raise a ValueError for an unavailable GPU, or a string that is no device."""
    try:
        torch.device(device)
    except RuntimeError:
        raise ValueError(f"device is {device!r}, expected cpu, cuda or cuda:INDEX") from None
    count = torch.cuda.device_count()
    if torch.device(device).type == "cuda" and (torch.device(device).index or 0) >= count:
        remedy = f"give an index below {count}" if count else "give -1, the CPU"
        raise ValueError(
            f"device is {device!r}, but {count} GPUs are visible; {remedy}, as GPU or --gpu, or leave it out"
        )
