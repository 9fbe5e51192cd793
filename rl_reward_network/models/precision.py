"""The precision in which small convolutional networks are trained."""

import torch


def mixed_precision(device: torch.device) -> torch.autocast:
    """Autocast to bfloat16 where the hardware multiplies matrices in it; elsewhere it would be slower, so disabled."""
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = any(torch.cpu.get_capabilities().get(name) for name in ("amx_bf16", "avx512_bf16"))
    return torch.autocast(device.type, torch.bfloat16, enabled=fast)
