"""Pre-flight table: what a run needs, whether it is available, and the remedy where it is missing.

    sa2va-rl doctor [--model_path MODEL --data_root DATA]
    sa2va-rl doctor --memory --model_path MODEL [--device cuda --memory_gib 24]

No weights are loaded: of a model folder only file headers are read (a hub id is downloaded if it is not cached yet).
Every image and mask is decoded once (of captioned regions a thousand), so that a damaged file is found before the run
starts and suspicious masks are reported. Nothing is rendered. The exit status is 1 when the state of a line is
`missing`; lines in state `look` are hints that only you can judge.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rl_reward_network.bit_depth import levels_of_bits
from rl_reward_network.embedded.datasets import DEFAULT_DATA
from rl_reward_network.flags import Rare, check_at_least, check_range
from rl_reward_network.grpo.settings import GRPOSettings, Objective, Optimizer, check_settings, with_whole_groups
from rl_reward_network.inputs.config import RegionConfig, RunConfig
from rl_reward_network.models.default import DEFAULT_MODEL, is_small


def ignore_unknown(words: Sequence[str]) -> bool:
    """The shell files hand on the flags of the next command; they never ask for the memory."""
    return "--memory" not in words


@dataclass(frozen=True)
class MemorySettings:
    """What the memory of a run depends on; names as in training."""

    device: Literal["cpu", "cuda"] | None = None
    """Where the run will be; by default that of --gpu, or a GPU if there is one."""
    memory_gib: float | None = None
    """Memory of that device in GiB; by default that of this machine."""
    dtype: Rare[Literal["auto", "float32", "bfloat16"]] = "auto"
    """Number format of the weights: auto is bfloat16 on a GPU and float32 on the CPU."""
    quantization: Rare[Literal["4bit", "8bit"] | None] = None
    """Bits of the language model's frozen weights in training."""
    objective: Objective = "grpo"
    """Of training, as its own."""
    lora_r: Rare[int | None] = None
    """Rank of LoRA: 16 on a model of the embedded one's size, else 128."""
    encoder: Rare[Literal["frozen", "lora", "full"]] = "frozen"
    """What trains of SAM 2's image encoder, as in training."""
    freeze_embeddings: Rare[bool] = False
    """Do not train the token embeddings and the head of a Qwen-VL, as in training."""
    per_device_train_batch_size: Annotated[
        int | None, tyro.conf.arg(aliases=["--batch-size", "--per-device-batch-size"])
    ] = None
    """Captions per process and forward pass: 64 on a model of the embedded one's size, else 8."""
    num_generations: Rare[int] = 4
    """Captions per region."""
    max_completion_length: Rare[int | None] = None
    """Tokens of a caption: 24 on a model of the embedded one's size, else 128."""
    activation_checkpointing: Annotated[bool, tyro.conf.arg(aliases=["--gradient-checkpointing"])] = False
    """Compute activations of training twice, to save memory."""
    optim: Rare[Optimizer | None] = None
    """Optimiser; those of 8 bit keep its moments in a quarter of the memory."""
    ema_decay: Rare[float] = 0.999
    """Decay of the moving average; 0 keeps none."""

    def __post_init__(self) -> None:
        """Refuse what training would refuse, and numbers out of range.

        Raises:
            ValueError: names the field, its value and what is expected.
        """
        shared = {field.name for field in fields(self)} & {field.name for field in fields(GRPOSettings)}
        check_settings(with_whole_groups(GRPOSettings(**{name: getattr(self, name) for name in shared})))
        check_at_least(self, 1, "lora_r")
        check_range(self, "memory_gib", above=True)


@dataclass(frozen=True)
class Args:
    """Check packages, model, data, reward network, GPU and disk before a run."""

    model_path: str = DEFAULT_MODEL
    """Sa2VA folder or hub id (MODEL_PATH); by default the small embedded one."""
    data_root: Annotated[Path, tyro.conf.arg(aliases=["--data-dir", "--dataset-path"])] = DEFAULT_DATA
    """Folder with annotations.json and images/, or with captioned regions (DATA_ROOT)."""
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
    group_regex: str | None = None
    """As in training."""
    patients_csv: str | None = None
    """As in training."""
    label: str | None = None
    """As in training."""
    split_seed: int = 0
    """As in training."""
    bit_depth: int | None = None
    """As in training."""
    max_regions: int | None = None
    """As in `grpo`."""
    memory: bool = False
    """Print the memory that each stage needs instead, from the model's config.json and the settings below."""
    needs: Annotated[MemorySettings, tyro.conf.arg(name="")] = field(default_factory=MemorySettings)


def main(args: Args) -> None:
    """Print the table; the exit status is 1 if a line is missing, or if a stage does not fit."""
    check_at_least(args, 0, "split_seed")
    check_at_least(args, -1, "gpu")
    regions = RegionConfig(max_regions=args.max_regions)
    levels_of_bits(args.bit_depth)
    if args.memory:
        device: Literal["cpu", "cuda"] | None = None if args.gpu is None else "cpu" if args.gpu < 0 else "cuda"
        if not show_memory(args.model_path, replace(args.needs, device=args.needs.device or device)):
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
    failed = False
    for name, check in checks(config, regions, args.reward_net).items():
        try:
            finding = check()
            state = "[bold yellow]look[/]" if finding.notes else "OK"
            table.add_row(name, state, escape("\n".join([finding.details, *finding.notes])))
        except ValueError as error:
            failed = True
            table.add_row(name, "[bold red]missing[/]", escape(str(error)))
    Console().print(table)
    if failed:
        sys.exit(1)


def show_memory(model_path: str, settings: MemorySettings) -> bool:
    """Print what each stage needs, and what lowers it; whether all stages fit.

    Args:
        model_path: of Sa2VA; of a hub id only the configuration is downloaded.
        settings: None is the default of training or of this machine.

    Raises:
        ValueError: not a model of ours, or a GPU is asked for where none is and no memory is given.
    """
    from rl_reward_network.cli.memory import available_gib, complete, count, needed_gib
    from rl_reward_network.models.sa2va.checkpoint_sa2va import open_checkpoint

    settings = complete(settings, is_small(model_path))
    available = settings.memory_gib or available_gib(str(settings.device))
    counted = count(open_checkpoint(model_path, weights=False).model_config(), settings)
    needed = needed_gib(counted, settings)
    table = Table("stage", "needed (GiB)", "", title=f"{model_path} on {settings.device}, {available:.1f} GiB")
    for stage, gib in needed.items():
        table.add_row(stage, f"{gib:.1f}", "fits" if gib <= available else "does not fit")
    console = Console()
    console.print(table)
    changes = lower_memory(settings)
    changes["all of these"] = {name: value for change in changes.values() for name, value in change.items()}
    lowered = {flag: needed_gib(counted, replace(settings, **change))["train"] for flag, change in changes.items()}
    told = [f"{flag} {gib:.1f}" for flag, gib in lowered.items() if gib < needed["train"]]
    if told:
        console.print(f"train, GiB with {'; '.join(told)}", soft_wrap=True)
    return all(gib <= available for gib in needed.values())


def lower_memory(settings: MemorySettings) -> dict[str, dict[str, Any]]:
    """Flags that lower the memory of training, and the settings that they change; none that are given already."""
    changes: dict[str, dict[str, Any]] = {}
    if not settings.activation_checkpointing:
        changes["--gradient_checkpointing"] = {"activation_checkpointing": True}
    if settings.quantization is None and settings.device == "cuda":
        changes["--quantization 4bit"] = {"quantization": "4bit"}
    if settings.optim is None:
        changes["--optim adamw_8bit"] = {"optim": "adamw_8bit"}
    half, odd = divmod(settings.per_device_train_batch_size or 1, 2)
    if not odd and half % settings.num_generations == 0:
        changes[f"--batch_size {half} --gradient_accumulation_steps 2"] = {"per_device_train_batch_size": half}
    return changes
