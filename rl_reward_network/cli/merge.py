"""Merge what was trained beside a model into it: a full checkpoint that every command here loads.

    sa2va-rl merge outputs/sa2va_grpo_<time>/final_model --output models/mine
    sa2va-rl merge ADAPTER --base_model MODEL --output models/mine
    sa2va-rl segment image.png --model_path models/mine

Of a GRPO run the base must have the weights of training; an adapter of peft must have exactly the tensors of its
layers. The folder is in our layout, of a run with a model card. In float32 on the CPU its outputs equal those of the
run's model up to rounding. A GPU rounds the merged weights to bfloat16, where training kept the updates apart in
float32.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro


@dataclass(frozen=True)
class Args:
    """Merge what a GRPO run, or peft, has trained into its base model."""

    model_path: Path | None = None
    """A run's final_model folder, the run, one of its checkpoints, or an adapter of peft (adapter_config.json)."""
    output: Path = tyro.MISSING
    """Folder to write; must not exist."""
    base_model: str | None = None
    """Where the base model is now, if not where it was; of an adapter of peft that does not name it, too."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the merged weights; bfloat16 needs half of memory and disk, and rounds the updates."""
    path: tyro.conf.Positional[Path | None] = None
    """As --model_path."""


def main(args: Args) -> None:
    """Merge and write."""
    from rl_reward_network.grpo.final_model import merge_run

    if (path := args.path or args.model_path) is None or (args.path and args.model_path):
        raise ValueError(f"path is {args.path} and model_path {args.model_path}, expected one; name what was trained")
    merge_run(path, args.output, args.base_model, args.dtype)
    print(f"merged model: {args.output}")
