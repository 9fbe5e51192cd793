"""Which Sa2VA fits which GPU, and by which command: the table of docs/how-to/your-model.md, in Markdown.

    python -m benchmarks.needs                                # minutes
    python -m benchmarks.needs --sizes 4b --memory_gib 24

Predicted as by `sa2va-rl doctor --memory`, bfloat16, nothing is downloaded.
"""

from dataclasses import dataclass
from functools import partial

from benchmarks.random_checkpoint import Size, official_config
from rl_reward_network.cli.app import run
from rl_reward_network.cli.memory import SEGMENT, TRAIN, Row
from rl_reward_network.memory.advice import MemorySettings, changed_flags, fit
from rl_reward_network.models.sa2va.configuration_sa2va import HIERA_L, config_from_original

NAMES: dict[Size, str] = {
    "1b": "Sa2VA-1B",
    "4b": "Sa2VA-4B",
    "8b-internlm2": "Sa2VA-8B",
    "8b": "Sa2VA-InternVL3-8B",
    "14b": "Sa2VA-InternVL3-14B",
    "qwen3-vl-2b": "Sa2VA-Qwen3-VL-2B",
    "qwen3-vl-4b": "Sa2VA-Qwen3-VL-4B",
    "qwen2.5-vl-3b": "Sa2VA-Qwen2_5-VL-3B",
    "qwen2.5-vl-7b": "Sa2VA-Qwen2_5-VL-7B",
}


@dataclass(frozen=True)
class Args:
    """Print the table."""

    sizes: tuple[Size, ...] = tuple(NAMES)
    """Of the released checkpoints."""
    memory_gib: tuple[float, ...] = (16.0, 24.0, 40.0, 80.0)
    """Of the GPU."""


def main(args: Args) -> None:
    """Print one line after the other."""
    print("| model | GPU (GiB) | step 2 | needs | GRPO | needs |\n|---|---|---|---|---|---|")
    for size in args.sizes:
        for memory in args.memory_gib:
            cells = [cell for row in (SEGMENT, TRAIN) for cell in _cells(row, size, memory)]
            print(f"| {NAMES[size]} | {memory:g} | {' | '.join(cells)} |", flush=True)


def _cells(row: Row, size: Size, memory_gib: float) -> tuple[str, str]:
    """The command that fits, and the memory that it needs in GiB."""
    config = config_from_original(official_config(size), HIERA_L, size)
    usual = MemorySettings(device="cuda").of_model(small=False)
    result = fit(partial(row.predict, config), usual, memory_gib, row.flags)
    needed = f"{result.stage.needed_gib('cuda'):.1f}"
    if not result.fits:
        return "does not fit", needed
    words = changed_flags(usual, result.settings, row.flags)
    command = f"{row.command} --model_path ByteDance/{NAMES[size]} --data_root DATA {words}"
    return f"`{command.strip()}`", needed


if __name__ == "__main__":
    run(main, Args)
