"""Pre-flight table: is everything there that a run needs, and if not, what to do.

    python -m scripts.doctor [--model_path MODEL --data_root DATA]

No weight is loaded: of a model folder only file headers are read (a hub id is downloaded if it is not cached yet).
Every image and mask is decoded once, so that a damaged one is found now and not in the middle of a run. The exit status
is 1 when a line says `missing`.
"""

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich.console import Console
from rich.table import Table

from rl_reward_network.data.embedded import DEFAULT_DATA, is_rendered
from rl_reward_network.evaluation.bootstrap import MIN_PATIENTS
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.models.sa2va.checkpoint_sa2va import DEFAULT_MODEL, open_checkpoint
from rl_reward_network.models.sa2va.modeling_sa2va import check_checkpoint
from rl_reward_network.training.world import check_files, check_named, read_samples, seen_images, split_samples
from scripts.cli import run

PACKAGES = ("torch", "transformers", "peft", "stable-baselines3", "gymnasium", "pycocotools", "scikit-image")
FREE_DISK_GB = 5


@dataclass(frozen=True)
class Args:
    """Check packages, model, data, reward network, GPU and disk before a run."""

    model_path: str = DEFAULT_MODEL
    """Sa2VA folder or hub id (MODEL_PATH); by default the small embedded one."""
    data_root: Annotated[Path, tyro.conf.arg(aliases=["--data-dir"])] = DEFAULT_DATA
    """Folder with annotations.json and images/ (DATA_ROOT); the default is rendered when it is not there."""
    reward_net: str = ""
    """Trained reward network (REWARD_NET); empty: one is found or trained."""
    output_dir: Path = Path("outputs")
    """Where runs are written (OUTPUT_DIR)."""
    gpu: int | None = None
    """Index of the GPU (GPU); -1 is the CPU."""
    group_regex: str | None = None
    """As in training."""
    split_seed: int = 0
    """As in training."""


def main(args: Args) -> None:
    """Print the table; leave with 1 if a line is missing."""
    checks: dict[str, Callable[[Args], str]] = {
        "packages": _packages,
        "model": _model,
        "data and split": _data,
        "reward network": _reward_network,
        "device": _device,
        f"disk, {FREE_DISK_GB} GB free": _disk,
    }
    table = Table(title="pre-flight")
    for column in ("what", "state", "details"):
        table.add_column(column)
    failed = 0
    for name, check in checks.items():
        try:
            table.add_row(name, "OK", check(args))
        except ValueError as error:
            failed += 1
            table.add_row(name, "[bold red]missing[/]", str(error).replace("[", r"\["))
    Console().print(table)
    sys.exit(1 if failed else 0)


def _packages(args: Args) -> str:
    try:
        return ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    except PackageNotFoundError as error:
        raise ValueError(f"{error.name} is not installed: pip install -r requirements.txt") from None


def _model(args: Args) -> str:
    folder = open_checkpoint(args.model_path)
    config = check_checkpoint(folder)
    text = config.text_config
    foreign = args.data_root.exists() and not is_rendered(args.data_root)
    hint = "; a rehearsal model, of no use on images of your own: set MODEL_PATH" if foreign else ""
    return (
        f"{'official' if folder.original else 'our'} layout, {text.num_hidden_layers} x {text.hidden_size} language "
        f"model, template {config.template}{hint if args.model_path == DEFAULT_MODEL else ''}"
    )


def _data(args: Args) -> str:
    check_named(args.model_path, args.data_root, DEFAULT_DATA)
    samples = read_samples(args.data_root, args.group_regex)
    check_files(samples)
    split = split_samples(samples, args.data_root, args.split_seed)
    patients = ", ".join(f"{name} {len(ids)}" for name, ids in split.groups.items())
    few = [name for name in ("val", "test") if len(split.groups[name]) < MIN_PATIENTS]
    meaning = {"val": "the best fixed prompt will be deployed", "test": "there will be no verdict"}
    hints = "".join(f"; fewer than {MIN_PATIENTS} {name} patients: {meaning[name]}" for name in few)
    return f"{seen_images(samples, args.data_root)}; patients: {patients}{hints}"


def _reward_network(args: Args) -> str:
    if not args.reward_net:
        return "none named: the newest fitting one is used, or one is trained first"
    info = RewardNetwork.from_pretrained(args.reward_net).training_info
    return f"mode {info.get('mode')}, trained on {len(info.get('train_groups', []))} patients"


def _device(args: Args) -> str:
    count = torch.cuda.device_count()
    if args.gpu is not None and args.gpu >= count:
        raise ValueError(f"GPU={args.gpu}, but {count} GPUs are visible; give an index below {count}, or unset GPU")
    if not count or (args.gpu or 0) < 0:
        return "CPU, float32"
    return f"{torch.cuda.get_device_name(args.gpu or 0)}, bfloat16"


def _disk(args: Args) -> str:
    folder = args.output_dir
    while not folder.exists():
        folder = folder.resolve().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{args.output_dir}: nothing can be written in {folder}; set OUTPUT_DIR to a folder of yours")
    free = shutil.disk_usage(folder).free / 1e9
    if free < FREE_DISK_GB:
        raise ValueError(
            f"{args.output_dir}: {free:.1f} GB free, {FREE_DISK_GB} needed; set OUTPUT_DIR to another disk"
        )
    return f"{free:.0f} GB"


if __name__ == "__main__":
    run(main, Args, ignore_unknown=True)
