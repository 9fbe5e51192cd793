"""The checks of `sa2va-rl doctor`: each returns a `Finding`, or raises a ValueError that names what is missing.

Each image and mask is decoded once, in threads. What a check notes is no error: only the user can tell whether an empty
mask is right.
"""

import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from scipy.ndimage import distance_transform_edt, label
from skimage.morphology import skeletonize

from rl_reward_network.atomic_io import NAMES_ALONE
from rl_reward_network.data.annotations import recognise_annotations
from rl_reward_network.data.identity import TRAIN_ANEW, check_apart, judged_parts, same_in_two_groups, thumbnail
from rl_reward_network.data.items import Sample, region_fingerprint
from rl_reward_network.data.names import classes_of
from rl_reward_network.data.readers import REGIONS, read_region_data, recognise
from rl_reward_network.data.splits import SPLITS, Split, make_split, patient_key, spellings
from rl_reward_network.data_import.files import some, unread_note
from rl_reward_network.data_import.write import grouping_note, import_notes, imported_grey, is_ungrouped
from rl_reward_network.embedded import datasets
from rl_reward_network.flags import changed
from rl_reward_network.inputs import loading
from rl_reward_network.inputs.config import RegionConfig, RunConfig
from rl_reward_network.models.default import is_small
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.models.sa2va.checkpoint_sa2va import open_checkpoint
from rl_reward_network.models.sa2va.modeling_sa2va import check_checkpoint
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.report.statistics import MIN_PATIENTS

PACKAGES = ("torch", "transformers", "peft", "stable-baselines3", "gymnasium", "pycocotools", "scikit-image")
FREE_DISK_GB = 5
CHECKED = 1000  # captioned regions that are decoded, spread over all
OUTLINED = 200  # masks whose outlines are measured, spread over all: annotators draw all trees alike
FILLED = (12.0, 0.5)  # times the branches' width, and share of the mask; real trees reach 11, filled ones 17 to 48
WIDE = 3.0  # times the branches' width
BRANCHES = 0.35  # quantile of the widths along all centre lines, those of filled loops included: the branches' width
NEXT = ("model_path", "data_root", "unlabelled_root", "patients_csv", "group_regex", "label", "split_seed", "bit_depth")
PIXELS = 10**6  # of an outline; a larger one is subsampled
# The shell files keep the embedded data in the clone. Of an installed wheel this is site-packages, where no data are.
CLONE = Path(__file__).resolve().parents[2]


class Finding(NamedTuple):
    """Result of a check; notes are suspicious but readable files, each with its remedy."""

    details: str
    notes: tuple[str, ...] = ()
    ending: tuple[str, ...] = ()  # lines for below the table; the last one names the next command


class ImageStatistics(NamedTuple):
    """What is measured of one image and its mask."""

    name: str  # file, or file and row; for the screen only, since it may name a patient
    group: str  # key of the patient or group, as the data name it
    small: np.ndarray  # thumbnail
    share: float | None  # of the pixels that are foreground; None without a mask
    filled: bool  # whether the mask is probably the outer outline of a tree of thin branches, with its loops filled


def checks(config: RunConfig, regions: RegionConfig, reward_net: str = "") -> dict[str, Callable[[], Finding]]:
    """The lines of the pre-flight table in their order: what is checked -> the check."""
    return {
        "packages": check_packages,
        "model": partial(check_model, config.model_path, config.data_root),
        "data and split": partial(check_data, config, regions),
        "reward network": partial(check_reward_network, reward_net, config),
        "device": partial(check_gpu, config.gpu),
        f"disk, {FREE_DISK_GB} GB free": partial(check_disk, config.output_dir),
    }


def check_packages() -> Finding:
    """Versions of the packages that matter most."""
    try:
        return Finding(", ".join(f"{name} {version(name)}" for name in PACKAGES))
    except PackageNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; install this project again with its requirements") from None


def check_model(model_path: str, data_root: Path) -> Finding:
    """Layout, family and sizes of a Sa2VA checkpoint, after a check of its tokens and of every value."""
    folder = open_checkpoint(model_path)
    config = check_checkpoint(folder)
    folder.tensors()
    text, template = config.text_config, f"template {config.template}"
    if config.family.body == "qwen_vl":  # the released ones were trained without the system turn of some templates
        processor = Sa2VAProcessor.from_config(config, folder.tokenizer(config), None, folder.image_processor(config))
        template = f"chat template {'with a' if processor.system_turn else 'without'} system turn"
    user_data = data_root.exists() and not datasets.is_rendered(data_root)
    hint = "; as it is, it knows rendered images alone: sa2va-rl improve trains it on your masks" if user_data else ""
    return Finding(
        f"{'official' if folder.original else 'our'} layout, {config.family.name}, {text.num_hidden_layers} x "
        f"{text.hidden_size} language model, {template}{hint if is_small(model_path) else ''}"
    )


def check_data(config: RunConfig, regions: RegionConfig) -> Finding:
    """Decode every image and mask once; describe data and split, and note what is suspicious."""
    loading.check_named(config.model_path, config.data_root, datasets.DEFAULT_DATA)
    if _to_be_rendered(config.data_root):
        if config.unlabelled_root is not None:
            raise ValueError(
                f"{config.data_root}: not there yet, so {loading.FLAG} cannot be compared; run sa2va-rl data"
            )
        return Finding("embedded data, not there yet: the run renders them")
    named = config
    if regions.dataset_name not in REGIONS:
        config = loading.own_format(config)
    return _regions(config, regions) if _captioned(config, regions) else _images(config, named)


def _to_be_rendered(root: Path) -> bool:
    folders = (datasets.angiogram_folder, partial(datasets.angiogram_folder, no_gap=True), datasets.region_folder)
    embedded = [folder(parent).resolve() for parent in (datasets.DEFAULT_FOLDER, CLONE / "data") for folder in folders]
    return not root.exists() and root.resolve() in embedded


def _captioned(config: RunConfig, regions: RegionConfig) -> bool:
    if regions.dataset_name != "auto":
        return regions.dataset_name in REGIONS
    try:
        return recognise(config.data_root) in REGIONS
    except ValueError:
        return False


def _images(config: RunConfig, named: RunConfig) -> Finding:
    """Annotated images, for all three trainings; `named` are the settings as they were given."""
    root = config.data_root
    samples, split = loading.open_samples(config)
    by_name = []
    if classes := classes_of(root):
        by_name = [f"asked for by name, in GRPO with labels alone: {', '.join(one.name for one in classes.values())}"]
    else:
        loading.check_one_phrase(samples, root)
    samples, split, _ = loading.join_unlabelled(config, samples, split, apart=())
    images = sample_statistics(samples)
    summary = loading.images_summary(samples, root, split)
    joined = [sample for sample in samples if sample.joined]
    unread = [note for folder in (root, config.unlabelled_root) if folder for note in unread_note(folder)]
    shared = _shared_note(config, samples, split)
    look = [f"look: {note}" for note in (*unread, loading.nameless_note(joined), shared) if note]
    annotated = [sample for sample in samples if not sample.joined]
    spelled = () if is_ungrouped(root, annotated) else _spelling_note(samples)
    notes = (*import_notes(root, annotated), *_notes(images), *look, *spelled)
    details = [summary, *by_name, *_grey(samples, root, config.bit_depth), *_foreground(images)]
    return Finding("\n".join(details), notes, _ending(named, root, samples, split, bool(by_name)))


def _shared_note(config: RunConfig, samples: Sequence[Sample], split: Split) -> str:
    """Whom of `--unlabelled_root` other commands than improve refuse; "" where there is nobody."""
    if config.unlabelled_root is None:
        return ""
    try:
        loading.check_unlabelled_apart(config.unlabelled_root, samples, split, loading.APART_FROM)
    except ValueError as error:
        return f"{error}; improve does so by itself where they judge"
    return ""


def _ending(named: RunConfig, root: Path, samples: Sequence[Sample], split: Split, by_name: bool) -> tuple[str, ...]:
    """What is there, what works with so much, and the next command; for below the table."""
    data = [one for one in samples if not one.joined]
    images = {one.image_path: one.labelled for one in data}
    masks, labelled = sum(images.values()), {one.group_id for one in data if one.labelled}
    how, more = grouping_note(root, data), len({one.image_path for one in samples if one.joined})
    there = (
        f"there: {masks} images with masks, {len(images) - masks} without{f', {more} of {loading.FLAG}' * bool(more)};"
        f" {len({one.group_id for one in data})} patients, {len(labelled)} of them with masks{f'; {how}' * bool(how)}"
    )
    lacking = MIN_PATIENTS - len(labelled)
    roads = ["segment", *["the prompt policy"] * (len(labelled) >= len(SPLITS)), *["improve"] * (lacking <= 0)]
    tested = len(labelled & split.ids("test"))
    verdict = f"a verdict on {tested} test patients"
    if tested < MIN_PATIENTS:
        own = "improve has its verdict from folds, " * (lacking <= 0)
        verdict = (
            f"{own}the others not yet from a test split, which has {tested} patients with masks, of {MIN_PATIENTS}"
        )
    flags = {flag: str(getattr(named, flag[2:])) for flag in changed(named, *NEXT)}
    words = " ".join(f"{flag} {shlex.quote(value)}" for flag, value in flags.items())
    command = f"sa2va-rl {'grpo quick --objective supervised' if by_name else 'improve quick'} {words}".strip()
    first = f"annotate images of {lacking} more patients, then " * (lacking > 0)
    bare = len(images) - masks + more
    full = f"; without the word quick it trains on the {bare} images without masks, too" * (
        not by_name and bare >= loading.FEW_IMAGES
    )
    return there, f"works: {', '.join(roads)}; {verdict}", f"next: {first}{command}{full}"


def _regions(config: RunConfig, settings: RegionConfig) -> Finding:
    """Captioned regions, for GRPO."""
    root = config.data_root
    if config.unlabelled_root is not None:
        raise ValueError(f"{config.unlabelled_root}: {loading.FLAG} is for images, but {root} holds captions")
    regions, summary = read_region_data(root, settings.dataset_name, settings.max_regions, config.bit_depth)
    split = make_split(regions, config.split_seed, region_fingerprint, config.fractions)
    picked = regions[:: -(-len(regions) // CHECKED) or 1]
    images = loading.decode_files([lambda r=r: image_statistics(r.where, r.group_id, *r.load()) for r in picked])  # type: ignore[misc]
    words = [len(region.caption.split()) for region in regions]
    captions = f"captions: {min(words)} to {max(words)} words, median {median(words):g}"
    first = f"{loading.regions_summary(summary, root)}, for GRPO; {loading.split_words((), split, 'groups')}"
    return Finding("\n".join([first, *_foreground(images), captions]), _notes(images))


def sample_statistics(samples: Sequence[Sample]) -> list[ImageStatistics]:
    """Statistics of every image and mask. Raises as `decode_files`."""
    outlined = [s for s in samples if s.mask_parts and s.mask_parts.polygons and not s.mask_parts.pngs]
    measured = {s.sample_id for s in outlined[:: -(-len(outlined) // OUTLINED) or 1]}

    def read(sample: Sample) -> ImageStatistics:
        mask = sample.load_mask()
        filled = mask is not None and sample.sample_id in measured and has_filled_loops(mask)
        place = sample.image_path.as_posix().rpartition("/images/")[2]  # with the folders below
        return image_statistics(place, patient_key(sample.group), sample.load_image(), mask, filled)

    return loading.decode_files([partial(read, sample) for sample in samples])


def has_filled_loops(mask: np.ndarray) -> bool:
    """Whether a bool (H, W) mask is probably the outer outline of a tree of thin branches, with its loops filled.

    Width is measured along the centre lines of the largest part. An outer outline round a tree with loops is thin along
    many of its lines, while most of its pixels lie in the filled loops.
    """
    if not mask.any():
        return False
    parts, _ = label(mask, np.ones((3, 3)))
    part = parts == np.bincount(parts.ravel())[1:].argmax() + 1  # the largest, cut out with a border
    rows, cols = np.flatnonzero(part.any(axis=1)), np.flatnonzero(part.any(axis=0))
    cut = part[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1]
    step = int(np.ceil(np.sqrt(cut.size / PIXELS)))
    part = np.pad(cut[::step, ::step], 1)
    radius = distance_transform_edt(part)
    thin = np.quantile(radius[skeletonize(part)], BRANCHES)
    deep = radius > WIDE * thin
    if radius.max() <= FILLED[0] * thin or not deep.any():
        return False
    wide = (distance_transform_edt(~deep) <= WIDE * thin) & part
    return bool(wide.sum() > FILLED[1] * part.sum())


def image_statistics(
    name: str, group: str, image: np.ndarray, mask: np.ndarray | None, filled: bool = False
) -> ImageStatistics:
    """Statistics of an image, uint8 (H, W, 3), and its mask, bool (H, W)."""
    return ImageStatistics(name, group, thumbnail(image), None if mask is None else float(mask.mean()), filled)


def _grey(samples: list[Sample], root: Path, bit_depth: int | None) -> list[str]:
    """The grey windows, where images have more than 8 bit: from the lowest to the highest end of several."""
    deep = [sample for sample in samples if sample.grey is not None]
    if not deep:
        pairs = (imported_grey(root) or {}).values()
        return [f"grey above 8 bit, imported as 8 bit: black was {black}, white was {white}" for black, white in pairs]
    windows = {(one.series_id, one.grey) for one in deep if one.grey is not None}
    ends = [{getattr(window, end) for _, window in windows} for end in ("black", "white")]
    black, white = (f"{min(values)} to {max(values)}" if len(values) > 1 else f"{min(values)}" for values in ends)
    series = sum(window.of_series for _, window in windows)
    among = f" in {series} series" if series else ""
    source = f"--bit_depth {bit_depth}" if bit_depth else "beyond each are 0.1 % of the pixels; --bit_depth sets them"
    images = len({sample.image_path for sample in deep})
    return [f"grey above 8 bit in {images} images: black is {black}, white is {white}{among} ({source})"]


def _foreground(images: list[ImageStatistics]) -> list[str]:
    shares = [image.share for image in images if image.share is not None]
    if not shares:
        return []
    ends = f"{min(shares):.1%} to {max(shares):.1%} of the picture"
    return [f"foreground: {ends}, median {median(shares):.1%} ({len(shares)} masks)"]


def _notes(images: list[ImageStatistics]) -> tuple[str, ...]:
    """Files that are readable but suspicious, each kind with its remedy."""
    once = list({image.name: image for image in images}.values())  # of several phrases, each image once
    pairs = same_in_two_groups(np.stack([image.small for image in once]), [image.group for image in once])
    kinds: dict[str, list[str]] = {
        "empty mask(s), which mean that the object is absent; leave `mask` out where an image is not annotated": [
            image.name for image in images if image.share == 0
        ],
        "outline(s) of thin branches whose loops may be filled: what they enclose is no object; give PNG or RLE": [
            image.name for image in images if image.filled
        ],
        "picture(s) that are the same in two patients or groups, perhaps mirrored or in another format: a run takes "
        "such groups of annotated images for one; give both one `group`, or delete one": [
            f"{once[first].name} = {once[other].name}" for first, other, _ in pairs
        ],
    }
    return tuple(f"look: {len(names)} {kind} ({some(names)})" for kind, names in kinds.items() if names)


def _spelling_note(samples: list[Sample]) -> tuple[str, ...]:
    """Patients whose name is written in several ways; images stand for names."""
    images = {sample.group: sample.image_path.name for sample in reversed(samples)}
    found = [[images[name] for name in written] for written in spellings(images).values() if len(written) > 1]
    what = "patient(s) whose name is written in several ways, taken for one each"
    return (f"look: {len(found)} {what} (see {some(found[0])})",) if found else ()


def check_reward_network(path: str, config: RunConfig) -> Finding:
    """How a reward network was trained, and that it has not seen the annotated images that it is to judge."""
    if not path:
        return Finding("none named: step 2 uses the newest fitting one, or trains one first")
    network = RewardNetwork.from_pretrained(path)
    info = network.training_info
    known = f"mode {info.get('mode')}, trained on {len(info.get('train_groups', []))} patients"
    if not network.pictures:
        return Finding(f"{known}; its images are not recorded: {NAMES_ALONE}")
    if not _to_be_rendered(config.data_root):
        config = loading.own_format(config)
        if recognise_annotations(config.data_root):
            parts = judged_parts(*loading.open_samples(config))
            check_apart(network.pictures, parts, f"{path}: the reward network", TRAIN_ANEW)
    return Finding(known)


def check_gpu(gpu: int | None) -> Finding:
    """The device of a run and its number format."""
    count = torch.cuda.device_count()
    if gpu is not None and gpu >= count:
        raise ValueError(f"GPU={gpu}, but {count} GPUs are visible; give an index below {count}, or unset GPU")
    if not count or (gpu or 0) < 0:
        return Finding("CPU, float32")
    return Finding(f"{torch.cuda.get_device_name(gpu or 0)}, bfloat16")


def check_disk(output_dir: Path) -> Finding:
    """Free space where runs are written."""
    folder = output_dir
    while not folder.exists():
        folder = folder.resolve().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{output_dir}: nothing can be written in {folder}; set OUTPUT_DIR to a folder of yours")
    free = shutil.disk_usage(folder).free / 1e9
    if free < FREE_DISK_GB:
        raise ValueError(f"{output_dir}: {free:.1f} GB free, {FREE_DISK_GB} needed; set OUTPUT_DIR to another disk")
    return Finding(f"{free:.0f} GB")
