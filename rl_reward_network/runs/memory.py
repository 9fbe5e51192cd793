"""The memory that a training process needs."""

import re
import sys
from pathlib import Path

import psutil

STATUS = Path("/proc/self/status")  # of Linux; ru_maxrss there is at least that of the process that began this one


def peak_memory_gib(device: str = "cpu") -> float:
    """The largest memory of this process so far, in GiB.

    Args:
        device: name for torch: of a GPU the memory that torch has reserved there counts, else that of the process.
    """
    if device.startswith("cuda"):
        import torch  # here, so that this module stays light

        return torch.cuda.max_memory_reserved(device) / 2**30
    if STATUS.exists() and (found := re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text())):
        return int(found.group(1)) / 2**20
    if sys.platform == "win32":
        return float(psutil.Process().memory_info().peak_wset) / 2**30
    import resource  # which Windows lacks

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20
