"""The memory that a training process needs."""

import resource
import sys


def peak_memory_gib(device: str = "cpu") -> float:
    """The largest memory of this process so far, in GiB.

    Args:
        device: name for torch: of a GPU the memory that torch had reserved there counts, else that of the process.
    """
    if device.startswith("cuda"):
        import torch  # here, so that this module stays light

        return torch.cuda.max_memory_reserved(device) / 2**30
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "darwin" else 1)
    return kibibytes / 2**20
