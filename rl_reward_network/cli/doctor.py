"""Pre-flight table: is everything there that a run needs, and if not, what to do.

    sa2va-rl doctor [--model_path MODEL --data_root DATA]

No weight is loaded: of a model folder only file headers are read (a hub id is downloaded if it is not cached yet).
Every image and mask is decoded once (of captioned regions a thousand), so that a damaged one is found now and not in
the middle of a run, and so that what is readable but odd is seen. Nothing is rendered. The exit status is 1 when a line
says `missing`; `look` is for you to judge.
"""

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rl_reward_network.data.grey_levels import DATA_SET, given_levels, levels_of
from rl_reward_network.data.images import WHITE_PERCENTILE, white_of
from rl_reward_network.data.readers import DATASET_NAMES, REGIONS, read_region_data, recognise, region_fingerprint
from rl_reward_network.data.sample import Sample
from rl_reward_network.data.splits import make_split
from rl_reward_network.embedded.datasets import (
    DEFAULT_DATA,
    DEFAULT_FOLDER,
    angiogram_folder,
    is_rendered,
    region_folder,
)
from rl_reward_network.evaluation.bootstrap import MIN_PATIENTS
from rl_reward_network.grpo.inputs import seen_regions
from rl_reward_network.inputs.loading import check_named, check_one_phrase, read_samples, seen_images, split_samples
from rl_reward_network.inputs.preflight import NEARLY_FULL, Look, look_at_regions, look_at_samples, twins
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.models.sa2va.checkpoint_sa2va import DEFAULT_MODEL, open_checkpoint
from rl_reward_network.models.sa2va.modeling_sa2va import check_checkpoint

PACKAGES = ("torch", "transformers", "peft", "stable-baselines3", "gymnasium", "pycocotools", "scikit-image")
FREE_DISK_GB = 5
NAMED = 3  # files that a note names
IGNORE_UNKNOWN = True  # the shell files hand on the flags of the next command
PROJECT = Path(__file__).resolve().parents[1]
Row = tuple[str, list[str]]  # what is there, and notes on what looks odd


@dataclass(frozen=True)
class Args:
    """Check packages, model, data, reward network, GPU and disk before a run."""

    model_path: str = DEFAULT_MODEL
    """Sa2VA folder or hub id (MODEL_PATH); by default the small embedded one."""
    data_root: Annotated[Path, tyro.conf.arg(aliases=["--data-dir"])] = DEFAULT_DATA
    """Folder with annotations.json and images/, or with captioned regions (DATA_ROOT)."""
    dataset_name: str = "auto"
    """As in run_rl_train.sh: auto, gar, dam, or annotations, which steps 1 and 2 need; else a folder or a hub id."""
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
    bit_depth: int | None = None
    """As in training."""
    max_regions: int | None = None
    """As in run_rl_train.sh."""


def main(args: Args) -> None:
    """Print the table; leave with 1 if a line is missing."""
    if args.dataset_name not in DATASET_NAMES:
        args = replace(args, data_root=Path(args.dataset_name), dataset_name="auto")
    checks: dict[str, Callable[[Args], str | Row]] = {
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
            found = check(args)
            details, notes = (found, []) if isinstance(found, str) else found
            table.add_row(name, "[bold yellow]look[/]" if notes else "OK", escape("\n".join([details, *notes])))
        except ValueError as error:
            failed += 1
            table.add_row(name, "[bold red]missing[/]", escape(str(error)))
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


def _data(args: Args) -> str | Row:
    check_named(args.model_path, args.data_root, DEFAULT_DATA)
    if _to_be_rendered(args.data_root):
        return "embedded data, not there yet: the run renders them"
    if args.dataset_name in REGIONS or (args.dataset_name == "auto" and _captioned(args.data_root)):
        return _regions(args)
    return _images(args)


def _to_be_rendered(root: Path) -> bool:
    """Whether these are embedded data that are not there yet."""
    folders = (angiogram_folder, partial(angiogram_folder, no_gap=True), region_folder)
    embedded = [folder(parent).resolve() for parent in (DEFAULT_FOLDER, PROJECT / "data") for folder in folders]
    return not root.exists() and root.resolve() in embedded


def _captioned(root: Path) -> bool:
    """Whether these are captioned regions."""
    try:
        return recognise(root) in REGIONS
    except ValueError:
        return False


def _images(args: Args) -> Row:
    """Annotated images, for all three commands."""
    samples = read_samples(args.data_root, args.group_regex, given_levels(args.bit_depth, None))
    check_one_phrase(samples, args.data_root)
    split = split_samples(samples, args.data_root, args.split_seed)
    looks = look_at_samples(samples, args.data_root / "images")
    patients = ", ".join(f"{name} {len(ids)}" for name, ids in split.groups.items())
    few = [name for name in ("val", "test") if len(split.groups[name]) < MIN_PATIENTS]
    meaning = {"val": "the best fixed prompt will be deployed", "test": "there will be no verdict"}
    hints = "".join(f"; fewer than {MIN_PATIENTS} {name} patients: {meaning[name]}" for name in few)
    read = f"{seen_images(samples, args.data_root)}; patients: {patients}{hints}"
    return "\n".join([read, *_grey(samples, args.bit_depth), *_foreground(looks)]), _notes(looks)


def _regions(args: Args) -> Row:
    """Captioned regions, for GRPO."""
    name, root = args.dataset_name, args.data_root
    regions, seen = read_region_data(root, name, args.max_regions, white_of(args.bit_depth))
    split = make_split(regions, args.split_seed, region_fingerprint)
    looks = look_at_regions(regions)
    groups = ", ".join(f"{name} {len(ids)}" for name, ids in split.groups.items())
    words = [len(region.caption.split()) for region in regions]
    captions = f"captions: {min(words)} to {max(words)} words, median {median(words):g}"
    return "\n".join(
        [f"{seen_regions(seen, root)}, for GRPO; groups: {groups}", *_foreground(looks), captions]
    ), _notes(looks)


def _grey(samples: list[Sample], bit_depth: int | None) -> list[str]:
    """What is white, where images have more than 8 bit."""
    levels = levels_of(samples)
    if not levels:
        return []
    images = len({sample.image_path for sample in samples if sample.white_level is not None})
    source = f"--bit_depth {bit_depth}" if bit_depth else f"{WHITE_PERCENTILE} % of the pixels; --bit_depth sets it"
    series = [level for key, level in levels.items() if key != DATA_SET]
    range_ = f"{min(series)} to {max(series)} in {len(series)} series" if series else f"{levels[DATA_SET]}"
    return [f"grey above 8 bit in {images} images: white is {range_} ({source})"]


def _foreground(looks: list[Look]) -> list[str]:
    """How much of the pictures is drawn."""
    shares = [look.share for look in looks if look.share is not None]
    if not shares:
        return []
    return [
        f"foreground: {min(shares):.1%} to {max(shares):.1%} of the picture, median {median(shares):.1%}"
        f" ({len(shares)} masks)"
    ]


def _notes(looks: list[Look]) -> list[str]:
    """What is readable but odd, each with its remedy."""
    kinds: dict[str, list[str]] = {
        "empty mask(s), which say that nothing is there; leave `mask` out where nobody has drawn": [
            look.name for look in looks if look.share == 0
        ],
        f"nearly full mask(s), above {NEARLY_FULL:.0%} of the picture": [
            look.name for look in looks if look.share is not None and look.share > NEARLY_FULL
        ],
        "mask(s) that cover most of the picture and of its border: inverted? 1 (or 255) must be the object": [
            look.name for look in looks if look.inverted
        ],
        "outline(s) of thin branches whose loops may be filled: what they enclose is no object; give PNG or RLE": [
            look.name for look in looks if look.filled
        ],
        "picture(s) that are the same in two patients or groups: training and test may share them; give both one "
        "`group`, or delete one": [f"{one.name} = {other.name}" for one, other in twins(looks)],
    }
    return [f"look: {len(names)} {what} ({_some(names)})" for what, names in kinds.items() if names]


def _some(names: list[str]) -> str:
    """The first names."""
    return ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")


def _reward_network(args: Args) -> str:
    if not args.reward_net:
        return "none named: step 2 uses the newest fitting one, or trains one first"
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
