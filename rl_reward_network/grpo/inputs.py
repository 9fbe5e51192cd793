"""What a GRPO run works on: the items of each split, from caption data or from annotated images."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from rl_reward_network.data.grasp_any_region import is_hub_id
from rl_reward_network.data.grey_levels import given_levels, levels_of
from rl_reward_network.data.images import white_of
from rl_reward_network.data.readers import DATASET_NAMES, IMAGES, read_region_data, recognise, region_fingerprint
from rl_reward_network.data.splits import Split, load_split, make_split, select
from rl_reward_network.embedded.datasets import DEFAULT_FOLDER, embedded_regions, is_rendered, region_folder
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.grpo.items import DESCRIBE, DESCRIBE_REAL, GRPOItem, prompted_item, region_item
from rl_reward_network.inputs.loading import (
    check_named,
    check_one_phrase,
    check_readable,
    read_samples,
    seen_images,
    split_samples,
)
from rl_reward_network.models.sa2va.checkpoint_sa2va import DEFAULT_MODEL
from rl_reward_network.models.sa2va.loading_sa2va import check_device, check_flash_attn

CHECKED = 1000  # items whose files are decoded before a run
DEFAULT_REGIONS = region_folder(DEFAULT_FOLDER)
KINDS = DATASET_NAMES


@dataclass(frozen=True)
class GRPOWorldConfig:
    """Model and data of a GRPO run."""

    model_path: str = DEFAULT_MODEL
    """Sa2VA: a folder in the official or our layout, or a hub id (MODEL_PATH); by default the small embedded one."""
    data_root: Annotated[Path, tyro.conf.arg(aliases=["--data-dir"])] = DEFAULT_REGIONS
    """Captioned regions (Grasp-Any-Region or describe-anything), or annotated images (DATA_ROOT); a folder, or of
    Grasp-Any-Region a hub id. The default, for the embedded model alone, is rendered when it is not there."""
    dataset_name: str = "auto"
    """auto looks what is in data_root; gar, dam and annotations insist. A hub id or a folder is another way to name
    data_root."""
    output_dir: Path = Path("outputs")
    """Parent of the run folders (OUTPUT_DIR)."""
    seed: int = 0
    """Seed of everything drawn at random (SEED), but not of the split."""
    split_seed: int = 0
    """Seed of the split."""
    gpu: int | None = None
    """-1 is the CPU, 0 the first GPU, the default if there is one (GPU); take another by CUDA_VISIBLE_DEVICES."""
    use_flash_attn: bool = False
    """FlashAttention 2 in the image encoders (pip install flash-attn, a GPU); the language model keeps torch's fused
    attention, since the rows it is trained on need a mask of their own."""
    max_dynamic_patch: Annotated[int, tyro.conf.arg(aliases=["--max-tiles"])] = 1
    """Most tiles an image is cut into; 12 is Sa2VA's default at prediction and makes GRPO several times slower."""
    max_regions: int | None = None
    """Read at most so many regions; without it all."""
    describe_question: str | None = None
    """What asks for the caption of `region1`; without it one of Sa2VA's own training questions."""
    segment_question: str = PROMPTS[0]
    """What annotated images are asked for, all of them."""
    group_regex: str | None = None
    """Of annotated images: regular expression with a group named `group` that finds the patient in a file name."""
    bit_depth: int | None = None
    """Bits of grey images above 8 bit, 10 to 16; without it white is a 99.9 % point (of captions, each image's)."""
    white_levels: Annotated[dict[str, int] | None, tyro.conf.Fixed, tyro.conf.Suppress] = None
    """What is white in such annotated images, see `data.grey_levels`; an opened world says what was worked out."""

    def __post_init__(self) -> None:
        """Refuse counts nothing can be done with."""
        if self.max_dynamic_patch < 1:
            raise ValueError(f"max_dynamic_patch is {self.max_dynamic_patch}, expected 1 or more")
        if self.max_regions is not None and self.max_regions < 4:
            raise ValueError(f"max_regions is {self.max_regions}, expected 4 or more")
        if self.gpu not in (None, -1, 0):
            raise ValueError(f"gpu is {self.gpu}, expected 0 or -1; choose one by CUDA_VISIBLE_DEVICES={self.gpu}")
        for name in ("seed", "split_seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 0 or more")
        white_of(self.bit_depth)

    @property
    def device(self) -> str:
        """Name of the device for torch."""
        if self.gpu == -1 or (self.gpu is None and not torch.cuda.is_available()):
            return "cpu"
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"  # torchrun's processes each take their own


@dataclass(frozen=True)
class GRPOWorld:
    """Opened data.

    Args:
        config: what was asked for, and its `white_levels`.
        kind: regions (with captions), or images (one question for all).
        seen: one line on what was read.
        items: all.
        split: by image, video or patient.
    """

    config: GRPOWorldConfig
    kind: Literal["regions", "images"]
    seen: str
    items: list[GRPOItem]
    split: Split

    def pick(self, *names: str) -> list[GRPOItem]:
        """Items of some splits.

        Raises:
            ValueError: there are none.
        """
        found = [item for name in names for item in select(self.items, self.split, name)]
        if not found:
            raise ValueError(f"{self.config.data_root}: no item in the split {' or '.join(names)}; give more data")
        return found


def open_grpo_world(config: GRPOWorldConfig, split_file: Path | None = None) -> GRPOWorld:
    """Read the data and split them; embedded data are rendered first when they are not there.

    Args:
        config: what to open.
        split_file: an earlier run's split.json, used if it fits the data.

    Raises:
        ValueError: what a reader refuses.
    """
    config = check_config(config)
    root = config.data_root
    if root == DEFAULT_REGIONS and (not root.exists() or is_rendered(root)):
        embedded_regions(DEFAULT_FOLDER)
    if recognise(root, config.dataset_name) in IMAGES:
        _refuse(config, "annotated images", "max_regions", "describe_question")
        samples = read_samples(root, config.group_regex, given_levels(config.bit_depth, config.white_levels))
        config = replace(config, white_levels=levels_of(samples) or None)
        check_one_phrase(samples, root)
        made = load_split(split_file, samples) if split_file else split_samples(samples, root, config.split_seed)
        items = [prompted_item(sample, config.segment_question) for sample in samples]
        return GRPOWorld(config, "images", seen_images(samples, root), items, made)
    _refuse(config, "captioned regions", "group_regex", "segment_question")
    asked = DESCRIBE if config.model_path == DEFAULT_MODEL else DESCRIBE_REAL
    describe = config.describe_question or asked
    regions, seen = read_region_data(root, config.dataset_name, config.max_regions, white_of(config.bit_depth))
    if split_file:
        made = load_split(split_file, regions, region_fingerprint)
    else:
        made = make_split(regions, config.split_seed, region_fingerprint)
    return GRPOWorld(
        config, "regions", seen_regions(seen, root), [region_item(sample, describe) for sample in regions], made
    )


def seen_regions(seen: str, data_root: Path) -> str:
    """What a reader said of captioned regions, and whether they are rendered."""
    return f"rendered scenes of the embedded world, in the layout of {seen}" if is_rendered(data_root) else seen


def check_config(config: GRPOWorldConfig) -> GRPOWorldConfig:
    """The settings with the data under one name, after all that can be refused before anything is read.

    Raises:
        ValueError: data named twice or not at all, a GPU or a package that is not there.
    """
    config = _named_once(config)
    check_named(config.model_path, config.data_root, DEFAULT_REGIONS)
    check_device(config.device)
    if config.use_flash_attn:
        check_flash_attn(config.device)
    return config


def _named_once(config: GRPOWorldConfig) -> GRPOWorldConfig:
    """`dataset_name` one of KINDS, and the data in `data_root` alone."""
    name, root = config.dataset_name, config.data_root
    if name in KINDS:
        return config
    if not Path(name).is_dir() and not is_hub_id(name):
        raise ValueError(
            f"dataset_name is {name!r}, expected one of {', '.join(KINDS)}, a hub id owner/name or a folder"
        )
    if root is not DEFAULT_REGIONS and root != Path(name):
        raise ValueError(
            f"dataset_name is {name}, but data_root is {root}: two names for the data; leave one of them out"
        )
    return replace(config, dataset_name="auto", data_root=Path(name))


def _refuse(config: GRPOWorldConfig, what: str, *names: str) -> None:
    """Raise for a flag that these data have no use for."""
    if flags := changed(config, *names):
        raise ValueError(f"{flags[0]} is for other data, but {config.data_root} holds {what}; leave it out")


def changed(settings: Any, *names: str) -> list[str]:
    """Flags among these fields of a settings class that are not at their defaults."""
    return [f"--{name}" for name in names if getattr(settings, name) != getattr(type(settings), name)]


def check_items(items: Sequence[GRPOItem]) -> None:
    """Decode images and masks, a thousand of them spread over the whole.

    Raises:
        ValueError: what `check_readable` says.
    """
    check_readable([item.load for item in items[:: max(1, len(items) // CHECKED)]])


def labelled_items(items: Sequence[GRPOItem]) -> list[GRPOItem]:
    """Those with a true mask, which supervised training learns from.

    Raises:
        ValueError: there are none.
    """
    labelled = [item for item in items if item.labelled]
    if not labelled:
        raise ValueError(
            f"objective supervised: none of the {len(items)} training items has a mask; annotate some, or train "
            "without labels by --reward_net"
        )
    return labelled
