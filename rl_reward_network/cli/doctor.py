"""Pre-flight table: what a run needs, whether it is available, and the remedy where it is missing.

    sa2va-rl doctor [--model_path MODEL --data_root DATA]
    sa2va-rl doctor --memory --model_path MODEL [--device cuda --memory_gib 24]

No weights are loaded: of a model folder only file headers are read (a hub id is downloaded if it is not cached yet).
Every image and mask is decoded once (of captioned regions a thousand), so that a damaged file is found before the run
starts and suspicious masks are reported. Nothing is rendered. The exit status is 1 when the state of a line is
`missing`; lines in state `look` are hints that only you can judge.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rl_reward_network.bit_depth import window_of_bits
from rl_reward_network.embedded.datasets import DEFAULT_DATA
from rl_reward_network.flags import check_at_least, check_range
from rl_reward_network.inputs.config import RegionConfig, RunConfig
from rl_reward_network.models.default import DEFAULT_MODEL, is_small


def ignore_unknown(words: Sequence[str]) -> bool:
    """The shell files hand on the flags of the next command; they never ask for the memory."""
    return "--memory" not in words


@dataclass(frozen=True)
class Args:
    """Check packages, model, data, reward network, GPU and disk before a run."""

    model_path: str = DEFAULT_MODEL
    """Sa2VA folder or hub id (MODEL_PATH); by default the small embedded one."""
    data_root: Annotated[Path, tyro.conf.arg(aliases=["--data-dir", "--dataset-path"])] = DEFAULT_DATA
    """Folder of images with masks (annotations.json, images/ with masks/, COCO, ...) or of captioned regions
    (DATA_ROOT)."""
    unlabelled_root: Path | None = None
    """Folder of images without masks (UNLABELLED_ROOT), as in training."""
    dataset_name: str = "auto"
    """As in `grpo`: auto, gar, dam, or annotations, which steps 1 and 2 need; else a folder or a hub id."""
    reward_net: str = ""
    """Trained reward network (REWARD_NET); empty: step 2 finds or trains one."""
    output_dir: Path = Path("outputs")
    """Parent of the run folders (OUTPUT_DIR)."""
    gpu: int | None = None
    """Index of the GPU (GPU); -1 is the CPU."""
    patients_csv: str | None = None
    """Who is a patient, where names of folders and files do not show it: a CSV table with the columns image and group
    (--patients_csv patients.csv), or none: each image is a group of its own."""
    group_regex: str | None = None
    """Regular expression that finds the patient in an image's name, e.g. --group_regex '^(?P<group>[^_]+)_' for
    PATIENT_1.png."""
    label: str | None = None
    """The class that is the mask, where there are several, e.g. --label vessel, a number, #rrggbb, or all."""
    split_seed: int = 0
    """As in training."""
    fractions: tuple[float, float, float] = RunConfig.fractions
    """As in training."""
    bit_depth: int | None = None
    """As in training."""
    max_regions: int | None = None
    """As in `grpo`."""
    memory: bool = False
    """Print the memory that each stage needs instead, from the model's config.json and the defaults of training."""
    device: Literal["cpu", "cuda"] | None = None
    """With --memory: where the run will be; by default as --gpu says, or a GPU if there is one."""
    memory_gib: float | None = None
    """With --memory: memory of that device in GiB; by default that of this machine."""


def main(args: Args) -> None:
    """Print the table; the exit status is 1 if a line is missing, or if a stage does not fit."""
    check_at_least(args, 0, "split_seed")
    check_at_least(args, -1, "gpu")
    regions = RegionConfig(max_regions=args.max_regions)
    window_of_bits(args.bit_depth)
    check_range(args, "memory_gib", above=True)
    if args.memory:
        device = args.device or RunConfig(gpu=args.gpu).device.split(":")[0]
        if not show_memory(args.model_path, device, args.memory_gib):
            sys.exit(1)
        return
    from rl_reward_network.data.readers import DATASET_NAMES
    from rl_reward_network.inputs.doctor import checks

    if args.dataset_name in DATASET_NAMES:
        regions = replace(regions, dataset_name=args.dataset_name)
    else:
        args = replace(args, data_root=Path(args.dataset_name))
    shared = {field.name for field in fields(RunConfig)} & {field.name for field in fields(args)}
    config = RunConfig(**{name: getattr(args, name) for name in shared})
    table = Table(title="pre-flight")
    for column in ("what", "state", "details"):
        table.add_column(column)
    failed, ending = False, tuple[str, ...]()
    for name, check in checks(config, regions, args.reward_net).items():
        try:
            finding = check()
            ending = ending or finding.ending
            state = "[bold yellow]look[/]" if finding.notes else "OK"
            table.add_row(name, state, escape("\n".join([finding.details, *finding.notes])))
        except ValueError as error:
            failed = True
            table.add_row(name, "[bold red]missing[/]", escape(str(error)))
    Console().print(table)
    goes_on = failed or "SA2VA_RL_CALLED_AS" in os.environ  # a shell file itself begins what comes next
    print("\n".join(ending[: len(ending) - goes_on]))
    if failed:
        sys.exit(1)


def show_memory(model_path: str, device: str, memory_gib: float | None) -> bool:
    """Print what each stage needs, and training with the flags that lower it; whether all stages fit.

    Of a hub id only the configuration is downloaded. `memory_gib` is of the device; None: of this machine. ValueError
    for no model of ours, or a GPU where none is and no memory is given.
    """
    from rl_reward_network.cli.memory import available_gib, needed_gib
    from rl_reward_network.models.sa2va.checkpoint_sa2va import open_checkpoint

    available = memory_gib or available_gib(device)
    needed = needed_gib(open_checkpoint(model_path, weights=False).model_config(), device, is_small(model_path))
    table = Table("stage", "needed (GiB)", "", title=f"{model_path} on {device}, {available:.1f} GiB")
    for stage, gib in needed.items():
        table.add_row(stage, f"{gib:.1f}", "fits" if gib <= available else "does not fit")
    Console().print(table)
    return all(needed[stage] <= available for stage in ("load", "segment", "train"))
