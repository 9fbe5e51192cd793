"""What every stage works on: the data and their split, the frozen Sa2VA, and the bank of its masks."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
import torch
import tyro
from tqdm import tqdm

from rl_reward_network.data.annotations import phrase_key, read_annotations
from rl_reward_network.data.grey_levels import given_levels, levels_of
from rl_reward_network.data.images import white_of
from rl_reward_network.data.sample import Sample
from rl_reward_network.data.splits import Split, load_split, make_split, select, spread
from rl_reward_network.embedded.datasets import (
    DEFAULT_DATA,
    DEFAULT_FOLDER,
    angiogram_folder,
    embedded_angiograms,
    is_rendered,
)
from rl_reward_network.env.actions import prompts_of
from rl_reward_network.env.mask_bank import MaskBank
from rl_reward_network.env.prompts import load_prompts
from rl_reward_network.inputs.segmenter import Sa2VASegmenter, load_segmenter
from rl_reward_network.models.sa2va.checkpoint_sa2va import DEFAULT_MODEL
from rl_reward_network.models.sa2va.loading_sa2va import check_device
from rl_reward_network.reward_training.masks import RewardExample

Seen = TypeVar("Seen")


@dataclass(frozen=True)
class WorldConfig:
    """Model, data and limits: what must be the same for results to be comparable."""

    model_path: str = DEFAULT_MODEL
    """Sa2VA: a folder in the official or our layout, or a hub id (MODEL_PATH); by default the small embedded one."""
    data_root: Annotated[Path, tyro.conf.arg(aliases=["--data-dir"])] = DEFAULT_DATA
    """Folder with annotations.json and images/ (DATA_ROOT). The default, for the embedded model alone, is rendered when
    it is not there."""
    output_dir: Path = Path("outputs")
    """Parent of the run folders and of the mask bank (OUTPUT_DIR)."""
    seed: int = 0
    """Seed of everything drawn at random (SEED), but not of the split: runs of several seeds share their patients."""
    split_seed: int = 0
    """Seed of the split by patient; change it only to see how much the choice of test patients matters."""
    gpu: int | None = None
    """Index of the GPU (GPU); without it the first one if there is any, else the CPU; -1 is the CPU."""
    segment_batch: int = 16
    """Prompts decoded at once (SEGMENT_BATCH); lower it when memory runs out."""
    max_new_tokens: int = 64
    """Longest answer of Sa2VA."""
    max_tiles: int = 1
    """Most tiles an image is cut into for Sa2VA's eyes; 12 is its default at prediction and 7 to 10 times slower."""
    group_regex: str | None = None
    """Regular expression with a group named `group` that finds the patient in an image's name; a field `group` wins."""
    prompts: Path | None = None
    """Your own prompts, one per line; without it the 11 built-in ones."""
    bit_depth: int | None = None
    """Bits of grey images above 8 bit, 10 to 16; without it white is the 99.9 % point of all images, or of a series."""
    white_levels: Annotated[dict[str, int] | None, tyro.conf.Fixed, tyro.conf.Suppress] = None
    """What is white in such images, see `data.grey_levels`; an opened world says what was worked out."""

    def __post_init__(self) -> None:
        """Refuse counts nothing can be done with."""
        for name in ("segment_batch", "max_new_tokens", "max_tiles"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}; give 1 or more")
        for name in ("seed", "split_seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: got {getattr(self, name)}; give 0 or more")
        white_of(self.bit_depth)

    @property
    def device(self) -> str:
        """Name of the device for torch."""
        if self.gpu is None:
            return "cuda:0" if torch.cuda.is_available() else "cpu"
        return "cpu" if self.gpu < 0 else f"cuda:{self.gpu}"


@dataclass(frozen=True)
class World:
    """An opened `WorldConfig`.

    Args:
        config: what was asked for, and its `white_levels`.
        samples: all (image, phrase) pairs of the data.
        split: reward / policy / val / test, by patient.
        prompts: the P prompts.
        segmenter: the frozen Sa2VA.
        bank: its masks, each computed once.
    """

    config: WorldConfig
    samples: list[Sample]
    split: Split
    prompts: tuple[str, ...]
    segmenter: Sa2VASegmenter
    bank: MaskBank

    @property
    def seen(self) -> str:
        """One line on the data."""
        return seen_images(self.samples, self.config.data_root)

    @property
    def data_fingerprint(self) -> str:
        """Of the samples; the split is made for it."""
        return self.split.fingerprint

    def pick(self, name: str, count: int, labelled: bool = False) -> list[Sample]:
        """At most `count` samples of one split, labelled ones first, one frame per series before a second.

        Raises:
            ValueError: the split has no such sample, or a file of theirs is damaged: better now than hours later.
        """
        samples = select(self.samples, self.split, name)
        picked = spread([s for s in samples if s.labelled], count, self.config.seed)
        if not labelled:
            picked += spread([s for s in samples if not s.labelled], count - len(picked), self.config.seed)
        if not picked:
            kind = "labelled images" if labelled else "images"
            other = "use --reward net" if name == "policy" else "name a trained reward network by REWARD_NET"
            remedy = "annotate more patients" + (f", or {other}" if labelled else "")
            raise ValueError(f"{self.config.data_root}: no {kind} in the {name} split; {remedy}")
        check_files(picked)
        return picked

    def probabilities(self, image: np.ndarray) -> np.ndarray:
        """float32 (P, H, W): Sa2VA's mask of each prompt at the size of a uint8 (H, W, 3) image, from the bank."""
        return self.segmenter.upsample(self.bank.answer(image).mask_logits, image.shape[:2])


def open_world(config: WorldConfig, split_file: Path | None = None, prompts: Sequence[str] | None = None) -> World:
    """Read the data, split them and load the model.

    Args:
        config: what to open.
        split_file: an earlier run's split.json, used if it fits the data; without it the split is made by the seed.
        prompts: an earlier run's, in place of those of `config`.

    Raises:
        ValueError: what any of these refuses; the data are read first, since they are the cheapest to mend.
    """
    check_world(config)
    samples = read_samples(config.data_root, config.group_regex, given_levels(config.bit_depth, config.white_levels))
    config = replace(config, white_levels=levels_of(samples) or None)
    check_one_phrase(samples, config.data_root)
    prompts = load_prompts(config.prompts) if prompts is None else tuple(prompts)
    if split_file is None:
        split = split_samples(samples, config.data_root, config.split_seed)
    else:
        split = load_split(split_file, samples)
    segmenter = load_segmenter(
        config.model_path, config.device, config.segment_batch, config.max_new_tokens, config.max_tiles
    )
    bank = MaskBank(config.output_dir / "mask_bank", segmenter.segment, segmenter.fingerprint, prompts_of(prompts))
    return World(config, samples, split, prompts, segmenter, bank)


def check_world(config: WorldConfig) -> None:
    """Raise a ValueError for what can be refused before anything is read: no data named, or a GPU that is not there."""
    check_named(config.model_path, config.data_root, DEFAULT_DATA)
    check_device(config.device)


def check_named(model_path: str, data_root: Path, default: Path) -> None:
    """Raise where a model of the user's own would work on rendered data that nobody asked for.

    Args:
        model_path: the model.
        data_root: the data; the very object `default` where none were named (an equal path was named).
        default: where the embedded data are.

    Raises:
        ValueError: names the remedy.
    """
    if model_path != DEFAULT_MODEL and data_root is default:
        raise ValueError(
            f"model_path is {model_path}, but no data are named for it; name them by DATA_ROOT or --data_root "
            f"(the rendered ones of {DEFAULT_MODEL} by --data_root {default})"
        )


def seen_images(samples: Sequence[Sample], data_root: Path) -> str:
    """One line on annotated images, e.g. "960 rendered angiograms (the embedded world), 960 with a mask"."""
    kind = "rendered angiograms (the embedded world)" if is_rendered(data_root) else "annotated images"
    return f"{len(samples)} {kind}, {sum(sample.labelled for sample in samples)} with a mask"


def read_samples(
    data_root: Path, group_regex: str | None = None, white_levels: dict[str, int] | None = None
) -> list[Sample]:
    """The samples of a data folder; the embedded data sets are rendered first when they are not there.

    Args:
        data_root, group_regex, white_levels: as `read_annotations` takes them.

    Raises:
        ValueError: what `read_annotations` refuses.
    """
    theirs = data_root.exists() and not is_rendered(data_root)
    for no_gap in (False, True):
        if data_root == angiogram_folder(DEFAULT_FOLDER, no_gap) and not theirs:
            embedded_angiograms(DEFAULT_FOLDER, no_gap)
    return read_annotations(data_root, group_regex, white_levels=white_levels)


def split_samples(samples: list[Sample], data_root: Path, seed: int) -> Split:
    """`make_split`, with the file's name in its message."""
    try:
        return make_split(samples, seed)
    except ValueError as error:
        raise ValueError(f"{data_root / 'annotations.json'}: {error}") from None


def check_files(samples: Sequence[Sample]) -> None:
    """Decode every image and mask once.

    Raises:
        ValueError: what `check_readable` says.
    """
    check_readable([load for sample in samples for load in (sample.load_image, sample.load_mask)])


def check_readable(loads: Sequence[Callable[[], object]]) -> None:
    """Decode files: better now than hours later.

    Args:
        loads: each decodes an image or a mask, or both, and raises a ValueError where it cannot.

    Raises:
        ValueError: some cannot be read: the first one's message, and how many there are.
    """
    survey([partial(_forget, load) for load in loads])


def survey(looks: Sequence[Callable[[], Seen]]) -> list[Seen]:
    """What is seen in files, each decoded in a thread; memory holds only those being looked at.

    Args:
        looks: each decodes a file or two, says what it sees there, and raises a ValueError where it cannot.

    Raises:
        ValueError: as `check_readable`.
    """
    with ThreadPoolExecutor() as threads:  # decoders run beside each other
        bar = tqdm(threads.map(_tried, looks), "checking files", len(looks), leave=False, unit="file", delay=2)
        found = list(bar)
    if damaged := [str(one) for one in found if isinstance(one, ValueError)]:
        more = f" (and {len(damaged) - 1} more of {len(looks)} looked at)" if len(damaged) > 1 else ""
        raise ValueError(damaged[0] + more)
    return [one for one in found if not isinstance(one, ValueError)]


def _tried(look: Callable[[], Seen]) -> Seen | ValueError:
    """What is seen, or what is wrong with the file."""
    try:
        return look()
    except ValueError as error:
        return ValueError(str(error))  # without the traceback, which would keep pictures in memory


def _forget(load: Callable[[], object]) -> None:
    """Decode a file and keep nothing of it."""
    load()


def check_one_phrase(samples: list[Sample], where: Path) -> None:
    """Refuse several kinds of object: every prompt is tried on every image, so it must mean the same object."""
    phrases = sorted({phrase_key(sample.text) for sample in samples})
    if len(phrases) > 1:
        raise ValueError(
            f"{where / 'annotations.json'}: text holds {len(phrases)} different phrases, {phrases[:3]} first; "
            "a prompt policy is for one kind of object: make one data folder for each, with --prompts of its own"
        )


@dataclass(frozen=True)
class RewardExamples:
    """Labelled samples with every prompt's mask, for step 1: one image in memory at a time, as often as is asked for.

    Args:
        world: where the masks come from.
        samples: labelled ones.
        desc: name of the progress bar.
    """

    world: World
    samples: list[Sample]
    desc: str

    def __iter__(self) -> Iterator[RewardExample]:
        """One after the other, under a progress bar."""
        for sample in tqdm(self.samples, desc=self.desc, unit="image"):
            image, truth = sample.load_image(), sample.load_mask()
            if truth is None:
                raise ValueError(f"sample {sample.sample_id} has no mask; step 1 learns from labelled images")
            yield RewardExample(image, truth, self.world.probabilities(image) > 0.5, sample.group_id)
