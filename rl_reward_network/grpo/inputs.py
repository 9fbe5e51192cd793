"""Inputs of a GRPO run: the prompts of each split, from captioned regions or annotated images."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from tqdm import tqdm

from rl_reward_network.data.annotations import compile_group_regex, phrase_key, read_annotations
from rl_reward_network.data.grasp_any_region import is_hub_id
from rl_reward_network.data.items import RegionSample, Sample, recorded_grey, region_fingerprint
from rl_reward_network.data.names import CLASSES_FILE, classes_of, wordings_fingerprint
from rl_reward_network.data.readers import DATASET_NAMES, IMAGES, NAMES, read_region_data, recognise
from rl_reward_network.data.splits import Split, load_split, make_split, select, subsample
from rl_reward_network.data_import.write import grouping_note, imported_grey
from rl_reward_network.embedded.datasets import DEFAULT_FOLDER, embedded_regions, is_rendered
from rl_reward_network.flags import changed
from rl_reward_network.grpo.prompts import (
    DESCRIBE,
    DESCRIBE_REAL,
    TrainingItem,
    image_prompt,
    named_prompt,
    region_prompt,
)
from rl_reward_network.inputs.config import DEFAULT_REGIONS, RegionConfig, RunConfig
from rl_reward_network.inputs.loading import (
    APART_FROM,
    check_named,
    check_readable,
    images_summary,
    join_unlabelled,
    open_samples,
    own_format,
    regions_summary,
    render_missing,
    split_samples,
    split_words,
)
from rl_reward_network.models.default import is_small
from rl_reward_network.models.sa2va.arguments_sa2va import check_bits
from rl_reward_network.models.sa2va.loading_sa2va import check_device, check_first_gpu, check_flash_attn
from rl_reward_network.rewards.learned import DomainCheck, ForegroundMaps, in_domain

VALIDATED = 48  # prompts of each validation
CHECKED = 1000  # prompts whose files are decoded before a run


@dataclass(frozen=True)
class GRPOInputs:
    """Prompts and split of a GRPO run."""

    config: RunConfig  # model, data, seeds and device
    regions: RegionConfig  # format of the data, questions and tiles
    kind: Literal["regions", "images"]  # with captions, or with one question for all, or one per class
    summary: str  # one line on the data
    prompts: list[TrainingItem]  # of all splits
    split: Split  # by image, video or patient
    unlabelled: str | None = None  # fingerprint of the images that have joined from `--unlabelled_root`
    wordings: str | None = None  # fingerprint of the wordings of `CLASSES_FILE`, by which classes are asked for
    samples: Sequence[Sample] = ()  # the annotated images, of which the prompts are; none of captioned regions

    @property
    def by_name(self) -> bool:
        """Whether several classes are asked for, each by its name."""
        return any(prompt.name for prompt in self.prompts)

    @property
    def captions_are_names(self) -> bool:
        """Whether each region's caption is the name of its class."""
        return self.regions.dataset_name == NAMES

    @property
    def grey_levels(self) -> dict[str, list[int]] | None:
        """The window of the data's grey images of more than 8 bit; None without any."""
        return recorded_grey(self.samples) or imported_grey(self.config.data_root)

    @property
    def own_splits(self) -> set[str]:
        """The parts into which the user has split the data, of train, val and test."""
        return {sample.split for sample in self.samples if sample.split}

    @property
    def device(self) -> str:
        """Device of this process."""
        return self.config.rank_device

    def set_up(self, processor: Any) -> None:
        """Give Sa2VA's processor the settings of the run; a ValueError for one that this model does not have."""
        how = self.regions.region_prompt
        if processor.shows_regions and changed(self.regions, "region_prompt"):
            raise ValueError(f"region_prompt is {how!r}, but this model is shown regions by its text; leave it out")
        processor.max_tiles, processor.region_prompt = self.regions.max_dynamic_patch, how
        processor.set_image_resize(self.config.image_resize)

    def pick(self, *names: str) -> list[TrainingItem]:
        """Prompts of some splits; a ValueError if there are none."""
        prompts = [prompt for name in names for prompt in select(self.prompts, self.split, name)]
        if not prompts:
            raise ValueError(f"{self.config.data_root}: no item in the split {' or '.join(names)}; give more data")
        return prompts


def open_grpo_inputs(
    config: RunConfig,
    regions: RegionConfig | None = None,
    split_file: Path | None = None,
    apart: Sequence[str] = APART_FROM,
) -> GRPOInputs:
    """Read the data and split them, as in the `split_file` of an earlier run; embedded data are rendered if missing.

    `apart` are the splits whose patients `--unlabelled_root` must not have.
    """
    config, regions = check_config(config, regions or RegionConfig())
    config = own_format(config)
    root = config.data_root
    if root == DEFAULT_REGIONS and (not root.exists() or is_rendered(root)):
        embedded_regions(DEFAULT_FOLDER)
    render_missing(root)
    if recognise(root, regions.dataset_name) in IMAGES:
        return _open_images(config, regions, split_file, apart)
    return _open_regions(config, regions, split_file)


def _open_images(config: RunConfig, regions: RegionConfig, split_file: Path | None, apart: Sequence[str]) -> GRPOInputs:
    """Annotated images, all with one prompt; or of several phrases, each image with a prompt per phrase."""
    root = config.data_root
    _refuse(root, "annotated images", changed(regions, "max_regions", "describe_question", "region_prompt"))
    samples, split = open_samples(config, split_file)
    if len({phrase_key(sample.text) for sample in samples}) > 1 or (root / CLASSES_FILE).is_file():
        return _open_named(config, regions, samples, split)
    samples, split, unlabelled = join_unlabelled(config, samples, split, apart)
    prompts = [image_prompt(sample, regions.segment_question) for sample in samples]
    summary = images_summary(samples, root, split)
    return GRPOInputs(config, regions, "images", summary, prompts, split, unlabelled, None, samples)


def _open_named(config: RunConfig, regions: RegionConfig, samples: list[Sample], split: Split) -> GRPOInputs:
    """Images of several classes that are asked for by name."""
    root, classes = config.data_root, classes_of(config.data_root)
    other = changed(regions, "segment_question") + changed(config, "unlabelled_root")
    _refuse(root, "images of several phrases", other)
    phrases = {phrase_key(sample.text): sample.text for sample in samples}
    if classes and (unknown := sorted(phrases.keys() - classes.keys())):
        raise ValueError(
            f"{root / CLASSES_FILE}: annotations.json has the phrase {phrases[unknown[0]]!r}, which is the `name` of no"
            " class; add the class, or delete the file to ask by the phrases themselves"
        )
    prompts = [named_prompt(sample, classes.get(phrase_key(sample.text))) for sample in samples]
    masks = f"{sum(sample.labelled for sample in samples)} of {len(samples)} questions with a mask"
    images, wordings = {prompt.image_key for prompt in prompts}, wordings_fingerprint(classes.values())
    own = f", {note}" if (note := grouping_note(root, samples)) else ""
    summary = f"{len(images)} annotated images, {len(phrases)} phrases, {masks}{own}; {split_words(samples, split)}"
    return GRPOInputs(config, regions, "images", summary, prompts, split, None, wordings, samples)


def _open_regions(config: RunConfig, regions: RegionConfig, split_file: Path | None) -> GRPOInputs:
    """Captioned regions."""
    root, named = config.data_root, regions.dataset_name == NAMES
    of_images = changed(config, *(("patients_csv", "label") if named else ("group_regex", "patients_csv", "label")))
    other = changed(config, "unlabelled_root") + changed(regions, "segment_question")
    _refuse(root, "captioned regions", of_images + other)
    question = regions.describe_question or (DESCRIBE if is_small(config.model_path) else DESCRIBE_REAL)
    how = regions.dataset_name, regions.max_regions, config.bit_depth, config.group_regex
    samples, summary = read_region_data(root, *how)
    if split_file:
        split = load_split(split_file, samples, region_fingerprint)
    elif named:
        split = _split_of_images(config, samples)
    else:
        split = make_split(samples, config.split_seed, region_fingerprint, config.fractions)
    prompts = [region_prompt(sample, question) for sample in samples]
    return GRPOInputs(config, regions, "regions", regions_summary(summary, root), prompts, split)


def _split_of_images(config: RunConfig, regions: Sequence[RegionSample]) -> Split:
    """The split of the images that the regions are of, without patients who have no region."""
    whole = split_samples(config, read_annotations(config.data_root, config.group_regex))
    present = {region.group_id for region in regions}
    groups = {name: tuple(group for group in ids if group in present) for name, ids in whole.groups.items()}
    if empty := [name for name, ids in groups.items() if not ids]:
        raise ValueError(
            f"{config.data_root}: no region in the split {empty[0]}; give more data, another --split_seed, or leave "
            "--max_regions out"
        )
    return replace(whole, groups=groups, fingerprint=region_fingerprint(regions))


def check_config(config: RunConfig, regions: RegionConfig) -> tuple[RunConfig, RegionConfig]:
    """Check the settings before anything is read, and return them; `data_root` alone then names the data.

    Raises:
        ValueError: data named twice or not at all; a GPU or a package that is missing.
    """
    if regions.dataset_name not in DATASET_NAMES:
        config, regions = _named_once(config, regions.dataset_name), replace(regions, dataset_name="auto")
    compile_group_regex(config.group_regex)
    check_first_gpu(config.gpu)
    check_named(config.model_path, config.data_root, DEFAULT_REGIONS)
    check_device(config.rank_device)
    if regions.use_flash_attn:
        check_flash_attn(config.rank_device)
    if regions.quantization is not None:
        check_bits()
    return config, regions


def _named_once(config: RunConfig, name: str) -> RunConfig:
    """The settings whose `data_root` is the folder or hub id that --dataset_name gives."""
    root = config.data_root
    if not Path(name).is_dir() and not is_hub_id(name):
        raise ValueError(
            f"dataset_name is {name!r}, expected one of {', '.join(DATASET_NAMES)}, a hub id owner/name or a folder"
        )
    if root is not DEFAULT_REGIONS and root != Path(name):
        raise ValueError(
            f"dataset_name is {name}, but data_root is {root}: two names for the data; leave one of them out"
        )
    return replace(config, data_root=Path(name))


def _refuse(root: Path, content: str, flags: list[str]) -> None:
    """Raise for flags without effect on these data."""
    if flags:
        raise ValueError(f"{flags[0]} is for other data, but {root} holds {content}; leave it out")


def check_prompts(prompts: Sequence[TrainingItem]) -> None:
    """`check_readable` of the images and masks of about a thousand prompts, spread over all."""
    check_readable([prompt.load for prompt in prompts[:: max(1, len(prompts) // CHECKED)]])


def validation_prompts(inputs: GRPOInputs) -> list[TrainingItem]:
    """The prompts of each validation, of `VALIDATED` images; those with a mask, which choose the weights, first."""
    prompts = inputs.pick("val")
    ordered = sorted(subsample(prompts, len(prompts), inputs.config.seed), key=lambda prompt: not prompt.labelled)
    chosen = of_images(ordered, VALIDATED)
    check_foreground(chosen, "the choice of weights", "validation", "keeps those that draw")
    return chosen


def of_images(prompts: Sequence[TrainingItem], most: int) -> list[TrainingItem]:
    """The prompts, in their order, of the first `most` images; a captioned region counts as an image."""
    kept = set(list(dict.fromkeys(prompt.image_key or prompt.sample_id for prompt in prompts))[:most])
    return [prompt for prompt in prompts if (prompt.image_key or prompt.sample_id) in kept]


def count_images(prompts: Sequence[TrainingItem]) -> int:
    """The number of different images (regions)."""
    return len({prompt.image_key or prompt.sample_id for prompt in prompts})


def within_budget(inputs: GRPOInputs, prompts: Sequence[TrainingItem], most: int) -> list[TrainingItem]:
    """The prompts of at most `most` labelled images, those of the `reward` split first: `policy` stays free of labels.

    With equal seeds these are the images of a reward network of the same budget, up to the size of the `reward` split,
    and a smaller budget is a subset of a larger one.
    """
    by_split = [select(prompts, inputs.split, name) for name in ("reward", "policy")]
    ordered = [prompt for part in by_split for prompt in subsample(part, len(part), inputs.config.seed)]
    return of_images(ordered, most)


def labelled_prompts(prompts: Sequence[TrainingItem], use: str) -> list[TrainingItem]:
    """The training prompts with a true mask; a ValueError without any, in which `use` is what needs the masks."""
    labelled = [prompt for prompt in prompts if prompt.labelled]
    if not labelled:
        raise ValueError(
            f"{use} needs masks, but none of the {len(prompts)} training images has one; annotate some, or train "
            "without labels by --reward_net"
        )
    return labelled


def check_foreground(
    prompts: Sequence[TrainingItem], use: str, split: str = "training", does: str = "teaches to draw"
) -> None:
    """Raise a ValueError if all true masks are empty, so that a model without masks would be the best one.

    Parts of the message: `use` as in `labelled_prompts`, the `split` of the prompts, and what its masks do.
    """
    labelled = [prompt for prompt in prompts if prompt.labelled]
    masks = (prompt.load()[1] for prompt in labelled)
    if labelled and not any(mask is not None and mask.any() for mask in masks):
        raise ValueError(
            f"{use}: the masks of all {len(labelled)} {split} images are empty, which {does} nothing; give images with "
            "foreground, or check how the masks were made"
        )


def judged_prompts(
    prompts: list[TrainingItem], maps: ForegroundMaps | None, by_labels: bool = False
) -> tuple[list[TrainingItem], DomainCheck | None]:
    """The training prompts less those that the reward network cannot judge, and how many these are.

    Without a network all stay; with `by_labels` the labelled ones, too, which then teach without it. The second is None
    where no prompt was looked at. A ValueError if none is left.
    """
    asked = [] if maps is None else [prompt for prompt in prompts if not (by_labels and prompt.labelled)]
    if maps is None or not asked:
        return prompts, None
    bar = tqdm(asked, "the reward network's domain", unit="image", leave=False)
    decided = [in_domain(maps, (prompt.load()[0] for prompt in bar))]
    if PartialState().num_processes > 1:
        broadcast_object_list(decided)  # an image near a limit must not join on one rank alone
    inside, check = decided[0]
    outside = {id(prompt) for prompt, is_inside in zip(asked, inside, strict=True) if not is_inside}
    if len(outside) == len(prompts):
        raise ValueError(f"no training image is left: {check.sentence}")
    return [prompt for prompt in prompts if id(prompt) not in outside], check
