"""Versions of everything that a run rests on, as a table in Markdown for bug reports.

    sa2va-rl env

It has no user name, no name of this machine and no path.
"""

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

EXTRAS = ("accelerate", "datasets", "tensorboard", "wandb", "bitsandbytes", "flash-attn", "deepspeed")


@dataclass(frozen=True)
class Args:
    """Print versions of packages, system and GPU, for bug reports."""


def main(args: Args) -> None:
    """Print the table."""
    print("\n".join(["| what | version |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts())]))


def facts() -> Iterator[tuple[str, str]]:
    """Name and value of each row."""
    import psutil
    import torch

    from rl_reward_network.run import provenance

    made = provenance()
    yield "rl-reward-network", f"{made['version']}, commit {(made['commit'] or 'unknown')[:12]}"
    yield from made["versions"].items()
    for name in EXTRAS:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"
    yield "system", f"{platform.system()} {platform.release()}, {platform.machine()}"
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "CPU", f"{os.cpu_count()} cores, {allowed} for this process, {torch.get_num_threads()} threads of torch"
    memory = psutil.virtual_memory()
    yield "memory", f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} free"
    yield "CUDA of torch", str(torch.version.cuda or "none")
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        yield f"GPU {index}", f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB, capability {gpu.major}.{gpu.minor}"
    if not torch.cuda.is_available():
        yield "GPU", "none that torch can use"
