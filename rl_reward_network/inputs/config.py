"""Settings of the inputs of a run: model, data, seeds, device. Imports no torch, so that `--help` is fast."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from rl_reward_network.bit_depth import window_of_bits
from rl_reward_network.embedded.datasets import DEFAULT_DATA, DEFAULT_FOLDER, region_folder
from rl_reward_network.flags import RARE, Rare, check_at_least, check_range
from rl_reward_network.models.default import DEFAULT_MODEL

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"  # of a run
NOT_OF_A_RUN = ("config", "run_folder", "resume")  # flags that are left out of run.yaml
Tracker = Literal["tensorboard", "wandb", "none"]  # named as transformers' setting report_to
DEFAULT_REGIONS = region_folder(DEFAULT_FOLDER)
Settings = TypeVar("Settings")


@dataclass(frozen=True)
class RunConfig:
    """Model, data, seeds and device of a run of any command."""

    model_path: str = DEFAULT_MODEL
    """Sa2VA: a folder in the official or our layout, or a hub id (MODEL_PATH); by default the small embedded one."""
    data_root: Annotated[Path, tyro.conf.arg(aliases=["--data-dir", "--dataset-path"])] = DEFAULT_DATA
    """Folder with annotations.json and images/ (DATA_ROOT); GRPO also takes captioned regions (Grasp-Any-Region,
    describe-anything), or a hub id of Grasp-Any-Region. The default, for the embedded model alone, is rendered if
    missing."""
    output_dir: Path = Path("outputs")
    """Parent of the run folders and of the mask bank (OUTPUT_DIR)."""
    seed: int = 0
    """Seed of everything random but the split (SEED): runs of several seeds share their patients."""
    split_seed: Rare[int] = 0
    """Seed of the split by patient; change it only to see how much the choice of test patients matters."""
    gpu: int | None = None
    """Index of the GPU (GPU) among the visible ones, -1 for the CPU; by default the first GPU if there is one. GRPO
    takes 0 or -1; choose another GPU by GPU of the shell file, or by CUDA_VISIBLE_DEVICES."""
    dtype: Rare[Literal["auto", "float32", "bfloat16"]] = "auto"
    """Number format of Sa2VA's weights: auto is bfloat16 on a GPU and float32 on the CPU. bfloat16 takes half of the
    memory on the CPU as well; what GRPO trains is float32 in any case."""
    image_resize: Rare[Literal["prediction", "training"] | None] = None
    """How images become patches of a Qwen-VL: resized twice, as in its official prediction (the default), or once, as
    in its training. An InternVL cuts images into tiles."""
    unlabelled_root: Annotated[Path | None, tyro.conf.arg(aliases=["--unlabelled"])] = None
    """Folder of images without masks that join the split `policy` of a training that needs none (UNLABELLED_ROOT): a
    plain folder of images, or a data folder, whose masks are then not read. Its patients are others than those of the
    data; `improve` takes these, too, and leaves them out of a training that they judge."""
    group_regex: Rare[str | None] = None
    """Regular expression with a group named `group` that finds the patient in an image's name; a field `group` in
    annotations.json takes precedence."""
    patients_csv: Rare[str | None] = None
    """For data that are imported (images/ with masks/, COCO, ...): a CSV table with the columns image and group, or
    none; by default names of folders and files propose the patients, see `sa2va-rl data import`."""
    label: Rare[str | None] = None
    """For data that are imported: the class that is the mask, by name, number or #rrggbb, or all."""
    bit_depth: Rare[int | None] = None
    """Bits of grey images above 8 bit, 10 to 16; by default black and white are the 0.1 and 99.9 % points of all
    images, or of a series (of captioned regions, of each image)."""
    fractions: Rare[tuple[float, float, float]] = (0.60, 0.15, 0.25)
    """Shares of the patients for train, val and test; train is halved for the reward network and the policy. By the
    default ones val and test have at least 6 patients each from 20 labelled ones on. Data with a field `split` keep
    their own split."""

    config: Path | None = None
    """YAML file of settings, such as the run.yaml that every run leaves in its folder: the defaults of all flags, by
    their names. Flags on the command line win."""
    name: str | None = None
    """Ends the name of the run's folder, <kind>_<time>_NAME; letters, digits and ._-"""
    report_to: Tracker = "tensorboard"
    """Where curves, hyperparameters and sample images go, beside metrics.jsonl: tensorboard, files in logs/; wandb,
    the same to Weights & Biases as well (pip install -e '.[tracking]'); none."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "seed", "split_seed")
        if self.name is not None and not re.fullmatch(NAME, self.name):
            raise ValueError(
                f"--name is {self.name!r}, expected at most 64 letters, digits, '.', '_' and '-' that begin with a "
                "letter or a digit, since it is part of the name of a folder"
            )
        check_at_least(self, -1, "gpu")
        if not (min(self.fractions) > 0 and abs(sum(self.fractions) - 1) < 1e-6):
            raise ValueError(
                f"fractions is {self.fractions}, expected the shares of train, val and test, each above 0, with sum 1"
            )
        window_of_bits(self.bit_depth)

    @property
    def device(self) -> str:
        """Name of the device for torch, e.g. "cpu" or "cuda:0"."""
        if self.gpu is not None:
            return "cpu" if self.gpu < 0 else f"cuda:{self.gpu}"
        import torch  # here, so that `--help` is fast

        return "cuda:0" if torch.cuda.is_available() else "cpu"

    @property
    def rank_device(self) -> str:
        """As `device`; each process of torchrun takes the GPU of its local rank."""
        rank = os.environ.get("LOCAL_RANK", "0")
        return "cpu" if self.device == "cpu" else f"cuda:{rank}"


@dataclass(frozen=True)
class PromptConfig:
    """Prompts of steps 1 and 2, and limits of the frozen model that segments by them."""

    segment_batch: int = 16
    """Prompts decoded at once (SEGMENT_BATCH); lower it when memory runs out."""
    max_new_tokens: Rare[int] = 64
    """Longest answer of Sa2VA, in tokens."""
    max_tiles: Rare[int] = 1
    """Most tiles an image is cut into as input of Sa2VA; 12 is its default at prediction and 7 to 10 times slower.
    Without effect on a Qwen-VL, which has no tiles."""
    prompts: Rare[Path | None] = None
    """File with your own prompts, one per line; by default the 11 built-in ones."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "segment_batch", "max_new_tokens", "max_tiles")


@dataclass(frozen=True)
class RegionConfig:
    """Inputs of GRPO alone: the format of its data, its questions, and the tiles of an image."""

    dataset_name: str = "auto"
    """Format of data_root: gar, dam, annotations, or auto, which recognises it; names reads annotated images as regions
    that their phrases caption. A hub id or a folder is another way to name data_root."""
    use_flash_attn: Rare[bool] = False
    """FlashAttention 2 in the image encoders (pip install flash-attn, a GPU); the language model keeps torch's fused
    attention, since it is trained on packed rows with a mask."""
    quantization: Rare[Literal["4bit", "8bit"] | None] = None
    """QLoRA: keep the language model's frozen weights in 4 bit (NF4) or 8 bit (pip install -e '.[quantization]'), with
    LoRA beside them; everything that makes masks stays in dtype (docs/how-to/transformers.md)."""
    max_dynamic_patch: Annotated[int, tyro.conf.arg(aliases=["--max-tiles"]), RARE] = 1
    """Most tiles an image is cut into; 12 is Sa2VA's default at prediction and makes GRPO several times slower.
    Without effect on a Qwen-VL, which has no tiles."""
    feature_cache_gib: Rare[float] = 4.0
    """Main memory for the features of images, which are then encoded once; with less, images are encoded again."""
    max_regions: Rare[int | None] = None
    """Read at most so many regions; by default all."""
    region_prompt: Rare[Literal["outline", "crop"]] = "outline"
    """How a region is shown to a Qwen-VL, whose text cannot refer to one: outlined in red, or cropped with a margin."""
    describe_question: Rare[str | None] = None
    """Question for the caption of `region1`; by default one of Sa2VA's own training questions."""
    segment_question: Rare[str] = "Please segment the blood vessel."
    """Prompt of all annotated images; by default the first built-in prompt."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_dynamic_patch")
        check_at_least(self, 4, "max_regions")
        check_range(self, "feature_cache_gib")


def pick_fields(settings: type[Settings], saved: Mapping[str, Any]) -> Settings:
    """Settings from a flat mapping with further keys, such as "inputs" of a run's config.json."""
    names = [field.name for field in fields(settings) if field.name in saved]  # type: ignore[arg-type]
    return settings(**{name: tuple(saved[name]) if isinstance(saved[name], list) else saved[name] for name in names})
