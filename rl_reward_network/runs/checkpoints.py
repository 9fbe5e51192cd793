"""Checkpoints of a training: tensors and plain values in one file, written atomically and never unpickled."""

import io
from pathlib import Path
from typing import Any

import torch

from rl_reward_network.artefacts import whole_file

CHECKPOINT = "checkpoint.pt"  # its name in a run folder


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write `state` (tensors, numbers, texts, and lists and dicts of them).

    Raises:
        ValueError: the disk is full, or nothing may be written there.
    """
    buffer = io.BytesIO()  # torch.save to a file hides the reason of a failure
    torch.save(state, buffer)
    with whole_file(path) as temporary:
        temporary.write_bytes(buffer.getbuffer())


def load_checkpoint(path: Path, device: str = "cpu") -> dict[str, Any]:
    """The state that `save_checkpoint` wrote, its tensors on `device`; empty if the file is missing.

    Raises:
        ValueError: the file is damaged, or holds more than tensors and plain values.
    """
    if not path.exists():
        return {}
    try:
        return dict(torch.load(path, map_location=device, weights_only=True))
    except Exception as error:  # damage raises RuntimeError, EOFError, KeyError, UnpicklingError, ...
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path}: damaged ({reason}); delete it, and this stage begins anew") from None
