"""Merge what a GRPO run has trained into its base model: a full checkpoint that every command here loads.

    sa2va-rl merge --model_path outputs/sa2va_grpo_<time>/final_model --output models/mine
    sa2va-rl segment image.png --model_path models/mine

The folder is in our layout, with a model card. In float32 on the CPU its outputs equal those of the run's model up to
rounding. A GPU rounds the merged weights to bfloat16, where training kept the updates apart in float32.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Args:
    """Merge what a GRPO run has trained into its base model."""

    model_path: Path
    """The run's final_model folder, the run, or one of its checkpoints."""
    output: Path
    """Folder to write; must not exist."""
    base_model: str | None = None
    """Where the run's Sa2VA is now, if not where it was."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the merged weights; bfloat16 needs half of memory and disk, and rounds the updates."""


def main(args: Args) -> None:
    """Merge and write."""
    from rl_reward_network.grpo.merge import merge_run

    merge_run(args.model_path, args.output, args.base_model, args.dtype)
    print(f"merged model: {args.output}")
