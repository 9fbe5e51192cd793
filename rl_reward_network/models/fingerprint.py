"""A short name for the weights of any network."""

import hashlib

import torch

FINGERPRINT_SAMPLES = 65536  # per tensor; smaller ones are read whole


def weights_fingerprint(model: torch.nn.Module) -> str:
    """16 hex digits that change when a weight does: names, shapes and up to 65,536 evenly spaced values per tensor."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, -(-flat.numel() // FINGERPRINT_SAMPLES))].float().cpu().numpy()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(sample.tobytes())
    return digest.hexdigest()[:16]
