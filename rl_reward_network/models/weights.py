"""Safetensors files of weights, opened and read with checks, and the precision in which small networks are trained."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

CHECKED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LFS_POINTER = b"version https://git-lfs"


def open_safetensors(file: Path) -> Any:
    """An open safetensors file; a ValueError if it is missing, cut off, or a pointer of Git LFS."""
    refuse_pointer(file)
    try:
        return safe_open(file, "pt")
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{file}: not a whole safetensors file ({error}); download or copy it again") from error


def refuse_pointer(file: Path) -> None:
    """Raise a ValueError for a file in whose place a clone without Git LFS has a pointer."""
    if file.is_file() and file.stat().st_size < 1024 and file.read_bytes().startswith(LFS_POINTER):
        raise ValueError(f"{file}: a Git LFS pointer, not the file itself; fetch it: git lfs pull")


def read_tensors(file: Path, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name, memory-mapped; the checks are those of `check_finite`."""
    with open_safetensors(file) as handle:
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    check_finite(tensors, file, dtype)
    return tensors


def check_finite(tensors: Mapping[str, Tensor], where: str | Path, dtype: torch.dtype | None = None) -> None:
    """Raise a ValueError for NaN and infinity, which would make every output of a model empty or arbitrary.

    It names the first such tensor of `where`, and counts its values. `dtype` is what the values will be converted to:
    large ones may be infinite in it. Only floating-point numbers of 16 bit or more are read.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in CHECKED or not tensor.numel():
            continue
        ends = torch.stack(tensor.aminmax())  # one pass without a copy; NaN if there is one
        if not ends.isfinite().all():
            kinds = {"NaN": int(tensor.isnan().sum()), "infinity": int(tensor.isinf().sum())}
            found = " and ".join(f"{kind} ({count} of {tensor.numel()})" for kind, count in kinds.items() if count)
            raise ValueError(f"{where}: tensor {name} holds {found}; copy it again, or train again")
        if dtype is not None and not ends.to(dtype).isfinite().all():
            raise ValueError(f"{where}: tensor {name} holds {ends.abs().max():g}, which is infinite in {dtype}")


def mixed_precision(device: torch.device) -> torch.autocast:
    """Autocast to bfloat16 where the hardware multiplies matrices in it; elsewhere it would be slower, so disabled."""
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = any(torch.cpu.get_capabilities().get(name) for name in ("amx_bf16", "avx512_bf16"))
    return torch.autocast(device.type, torch.bfloat16, enabled=fast)
