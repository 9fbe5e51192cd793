"""A short identifier of a network's weights."""

import hashlib

import torch

FINGERPRINT_SAMPLES = 65536  # per tensor; of a smaller tensor, all values are read


def weights_fingerprint(model: torch.nn.Module) -> str:
    """16 hex digits of a hash over names, shapes, dtypes and up to 65,536 evenly spaced values of each tensor."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, -(-flat.numel() // FINGERPRINT_SAMPLES))].float().cpu().numpy()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(sample.tobytes())
    return digest.hexdigest()[:16]
