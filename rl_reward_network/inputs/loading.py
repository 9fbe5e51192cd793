"""Inputs of steps 1 and 2: the data and their split, the frozen Sa2VA, and the bank of its masks."""

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from tqdm import tqdm

from rl_reward_network.data.annotations import phrase_key
from rl_reward_network.data.grey_levels import given_levels, levels_of
from rl_reward_network.data.readers import read_images
from rl_reward_network.data.sample import Sample
from rl_reward_network.data.splits import Split, load_split, make_split, select, spread
from rl_reward_network.data.unlabelled import Unlabelled, open_unlabelled
from rl_reward_network.data_import.notes import import_notes
from rl_reward_network.data_import.write import check_named_alike
from rl_reward_network.depth import Levels
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
from rl_reward_network.inputs.config import PromptConfig, RunConfig
from rl_reward_network.inputs.imported import own_format
from rl_reward_network.inputs.segmenter import Sa2VASegmenter, load_segmenter
from rl_reward_network.models.default import DEFAULT_MODEL
from rl_reward_network.models.sa2va.loading_sa2va import check_device

Result = TypeVar("Result")


@dataclass(frozen=True)
class RunInputs:
    """Data, split, frozen model and mask bank of a run of steps 1 and 2.

    Args:
        config: settings, with the `grey_levels` of the data.
        samples: all (image, phrase) pairs of the data.
        split: reward / policy / val / test, by patient.
        prompts: P prompts.
        segmenter: the frozen Sa2VA.
        bank: its masks, each computed once.
        prompt_config: settings of prompts and segmenter.
        unlabelled: further images for training alone, without masks.
    """

    config: RunConfig
    samples: list[Sample]
    split: Split
    prompts: tuple[str, ...]
    segmenter: Sa2VASegmenter
    bank: MaskBank
    prompt_config: PromptConfig = field(default_factory=PromptConfig)
    unlabelled: Unlabelled | None = None

    @property
    def summary(self) -> str:
        """One line on the data."""
        return images_summary(self.samples, self.config.data_root, self.unlabelled)

    @property
    def data_fingerprint(self) -> str:
        """Fingerprint of the samples; the split belongs to it."""
        return self.split.fingerprint

    def pick(self, name: str, count: int, labelled: bool = False) -> list[Sample]:
        """At most `count` samples of one split, labelled ones first, one frame per series before a second.

        Raises:
            ValueError: the split has no such sample, or a file is damaged.
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


def open_inputs(
    config: RunConfig,
    prompt_config: PromptConfig | None = None,
    split_file: Path | None = None,
    prompts: Sequence[str] | None = None,
) -> RunInputs:
    """Read the data, split them and load the model.

    Args:
        config: model, data, seeds and device.
        prompt_config: prompts and limits of the segmenter; by default the built-in ones.
        split_file: split.json of an earlier run, used if it fits the data; by default the split is made by the seed.
        prompts: prompts of an earlier run, in place of those of `prompt_config`.

    Raises:
        ValueError: data, split, prompts or model are refused, in this order.
    """
    check_inputs(config)
    config = own_format(config)
    limits = prompt_config or PromptConfig()
    samples = read_samples(config.data_root, config.group_regex, given_levels(config.bit_depth, config.grey_levels))
    config = replace(config, grey_levels=levels_of(samples) or None)
    check_one_phrase(samples, config.data_root)
    prompts = load_prompts(limits.prompts) if prompts is None else tuple(prompts)
    if split_file is None:
        split = split_samples(samples, config.data_root, config.split_seed)
    else:
        split = load_split(split_file, samples)
    unlabelled = unlabelled_of(config, samples, split, finished=split_file is not None)
    sizes = limits.segment_batch, limits.max_new_tokens, limits.max_tiles
    segmenter = load_segmenter(config.model_path, config.device, *sizes, config.dtype, config.image_resize)
    bank = MaskBank(config.output_dir / "mask_bank", segmenter.segment, segmenter.fingerprint, prompts_of(prompts))
    return RunInputs(config, samples, split, prompts, segmenter, bank, limits, unlabelled)


def unlabelled_of(config: RunConfig, samples: list[Sample], split: Split, finished: bool = False) -> Unlabelled | None:
    """The images of `unlabelled_root`; None without such a folder.

    Args:
        config: names the folder.
        samples, split: of the data.
        finished: of a finished run that is evaluated: what is refused gives a warning, and None.

    Raises:
        ValueError: as `open_unlabelled`, and as `check_named_alike`.
    """
    if config.unlabelled_root is None:
        return None
    levels = given_levels(config.bit_depth, None)
    check_named_alike(config.data_root, config.unlabelled_root)
    try:
        return open_unlabelled(config.unlabelled_root, samples, split, config.group_regex, levels)
    except ValueError as error:
        if not finished:
            raise
        warnings.warn(f"the unlabelled images are left out of the evaluation: {error}", stacklevel=2)
        return None


def check_inputs(config: RunConfig) -> None:
    """Check what can be checked before anything is read.

    Raises:
        ValueError: no data are named for another model than the embedded one, or the GPU is missing.
    """
    check_named(config.model_path, config.data_root, DEFAULT_DATA)
    check_device(config.device)


def check_named(model_path: str, data_root: Path, default: Path) -> None:
    """Refuse to run another model than the embedded one on rendered data by default.

    Args:
        model_path: the model.
        data_root: the data; the object `default` itself where none were named.
        default: folder of the embedded data.

    Raises:
        ValueError: names the remedy.
    """
    if model_path != DEFAULT_MODEL and data_root is default:
        raise ValueError(
            f"model_path is {model_path}, but no data are named for it; name them by DATA_ROOT or --data_root "
            f"(the rendered ones of {DEFAULT_MODEL} by --data_root {default})"
        )


def images_summary(samples: Sequence[Sample], data_root: Path, unlabelled: Unlabelled | None = None) -> str:
    """One line on annotated images, e.g. "960 rendered angiograms (the embedded world), 960 with a mask"."""
    more = f"; {unlabelled.summary}" if unlabelled else ""
    kind = "rendered angiograms (the embedded world)" if is_rendered(data_root) else "annotated images"
    own = ", each image a group of its own (--groups none)" if import_notes(data_root) else ""
    return f"{len(samples)} {kind}, {sum(sample.labelled for sample in samples)} with a mask{own}{more}"


def regions_summary(summary: str, data_root: Path) -> str:
    """The summary of a reader of captioned regions, with a mark where they are rendered."""
    return f"rendered scenes of the embedded world, in the layout of {summary}" if is_rendered(data_root) else summary


def read_samples(
    data_root: Path, group_regex: str | None = None, grey_levels: dict[str, Levels] | None = None
) -> list[Sample]:
    """The samples of a data folder; the embedded data sets are rendered first when they are not there.

    Args:
        data_root, group_regex, grey_levels: as in `read_images`.

    Raises:
        ValueError: as `read_images`.
    """
    user_data = data_root.exists() and not is_rendered(data_root)
    for no_gap in (False, True):
        if data_root == angiogram_folder(DEFAULT_FOLDER, no_gap) and not user_data:
            embedded_angiograms(DEFAULT_FOLDER, no_gap)
    return read_images(data_root, group_regex, grey_levels)


def split_samples(samples: list[Sample], data_root: Path, seed: int) -> Split:
    """`make_split`, with the file's name in its message."""
    try:
        return make_split(samples, seed)
    except ValueError as error:
        raise ValueError(f"{data_root / 'annotations.json'}: {error}") from None


def check_files(samples: Sequence[Sample]) -> None:
    """Decode every image and mask once.

    Raises:
        ValueError: as `decode_files`.
    """
    check_readable([load for sample in samples for load in (sample.load_image, sample.load_mask)])


def check_readable(reads: Sequence[Callable[[], object]]) -> None:
    """As `decode_files`, without results: a damaged file is better reported now than hours later."""
    decode_files(reads, keep=False)


def decode_files(reads: Sequence[Callable[[], Result]], keep: bool = True) -> list[Result]:
    """Decode files in threads; memory holds only those being decoded, and the results.

    Args:
        reads: each decodes a file or two, returns its result, and raises a ValueError where it cannot.
        keep: whether the results are returned.

    Raises:
        ValueError: some files cannot be read: the first one's message, and how many there are.
    """

    def attempt(read: Callable[[], Result]) -> list[Result] | ValueError:
        try:
            result = read()
        except ValueError as error:
            return ValueError(str(error))  # without the traceback, which would keep images in memory
        return [result] if keep else []

    with ThreadPoolExecutor() as threads:
        bar = tqdm(threads.map(attempt, reads), "checking files", len(reads), leave=False, unit="file", delay=2)
        results = list(bar)
    if damaged := [str(result) for result in results if isinstance(result, ValueError)]:
        more = f" (and {len(damaged) - 1} more of {len(reads)} checked)" if len(damaged) > 1 else ""
        raise ValueError(damaged[0] + more)
    return [value for result in results if not isinstance(result, ValueError) for value in result]


def check_one_phrase(samples: list[Sample], data_root: Path) -> None:
    """Refuse several kinds of object: a prompt is tried on every image and must mean the same object."""
    phrases = sorted({phrase_key(sample.text) for sample in samples})
    if len(phrases) > 1:
        raise ValueError(
            f"{data_root / 'annotations.json'}: text holds {len(phrases)} different phrases, {phrases[:3]} first; "
            "a prompt policy is for one kind of object: make one data folder for each, with --prompts for it"
        )
