"""The checks of `sa2va-rl doctor`: each returns a `Finding`, or raises a ValueError that names what is missing.

Each image and mask is decoded once, in threads. What a check notes is no error: only the user can tell whether a mask
that covers most of the image is right.
"""

import hashlib
import os
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import numpy as np
import torch
from scipy.ndimage import distance_transform_edt, label
from skimage.morphology import skeletonize

from rl_reward_network.data.images import DATA_SET, given_levels, levels_of
from rl_reward_network.data.items import RegionSample, Sample, region_fingerprint
from rl_reward_network.data.mask_checks import MaskShape, field_of_view, mask_shape
from rl_reward_network.data.readers import REGIONS, read_region_data, recognise
from rl_reward_network.data.ridges import IMAGES, check_labels
from rl_reward_network.data.splits import doubtful, make_split, select, spellings, spread
from rl_reward_network.data_import.files import unread_note
from rl_reward_network.data_import.survey import ImportOptions
from rl_reward_network.data_import.write import import_notes
from rl_reward_network.depth import levels_of_bits
from rl_reward_network.embedded.datasets import (
    DEFAULT_DATA,
    DEFAULT_FOLDER,
    angiogram_folder,
    is_rendered,
    region_folder,
)
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.inputs.loading import (
    check_named,
    check_one_phrase,
    check_readable,
    decode_files,
    images_summary,
    imported_root,
    own_format,
    read_samples,
    regions_summary,
    split_samples,
    unlabelled_of,
)
from rl_reward_network.inputs.unlabelled import FLAG
from rl_reward_network.models.default import is_small
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.models.sa2va.checkpoint_sa2va import CheckpointFolder, open_checkpoint
from rl_reward_network.models.sa2va.configuration_sa2va import Sa2VAConfig
from rl_reward_network.models.sa2va.modeling_sa2va import check_checkpoint
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.report.bootstrap import MIN_PATIENTS

CHECKED = 1000  # captioned regions that are decoded, spread over all
OUTLINED = 200  # masks whose outlines are measured, spread over all: annotators draw all trees alike
NEARLY_FULL = 0.95  # share of the image
FILLED = (12.0, 0.5)  # times the branches' width, and share of the mask; real trees reach 11, filled ones 17 to 48
WIDE = 3.0  # times the branches' width
BRANCHES = 0.35  # quantile of the widths along all centre lines, those of filled loops included: the branches' width
PIXELS = 10**6  # of an outline; a larger one is subsampled


@dataclass(frozen=True)
class ImageStatistics:
    """Statistics of one image and its mask.

    Attributes:
        name: file, or file and row; for the screen only, since it may name a patient.
        group_id: pseudonym of the patient or group.
        pixels: digest of the decoded image.
        mask: what the mask looks like from afar; None without one.
        bulge: widest place / width of the branches, and share of the mask in places wider than `WIDE` times that width;
            (1, 0) where it is not measured.
    """

    name: str
    group_id: str
    pixels: str
    mask: MaskShape | None = None
    bulge: tuple[float, float] = (1.0, 0.0)

    @property
    def share(self) -> float | None:
        """Share of the pixels that are foreground; None without a mask."""
        return None if self.mask is None else self.mask.share

    @property
    def filled(self) -> bool:
        """Whether the mask is probably the outer outline of a tree of thin branches, with its loops filled."""
        return self.bulge[0] > FILLED[0] and self.bulge[1] > FILLED[1]


def sample_statistics(samples: Sequence[Sample], images: Path) -> list[ImageStatistics]:
    """Statistics of every image and mask.

    Args:
        samples: all samples of a data folder.
        images: the folder of the images.

    Raises:
        ValueError: as `decode_files`.
    """
    outlined = [s for s in samples if s.mask_parts and s.mask_parts.polygons and not s.mask_parts.pngs]
    measured = {s.sample_id for s in outlined[:: -(-len(outlined) // OUTLINED) or 1]}

    def read(sample: Sample) -> ImageStatistics:
        name, outline = sample.image_path.relative_to(images).as_posix(), sample.sample_id in measured
        return image_statistics(name, sample.group_id, sample.load_image(), sample.load_mask(), outline)

    return decode_files([partial(read, sample) for sample in samples])


def region_statistics(regions: Sequence[RegionSample]) -> list[ImageStatistics]:
    """Statistics of captioned regions, `CHECKED` of them at most.

    Raises:
        ValueError: as `decode_files`.
    """
    picked = regions[:: -(-len(regions) // CHECKED) or 1]
    return decode_files([lambda r=r: image_statistics(r.where, r.group_id, *r.load()) for r in picked])  # type: ignore[misc]


def duplicates(images: Sequence[ImageStatistics]) -> list[tuple[ImageStatistics, ImageStatistics]]:
    """Pairs of images with equal pixels in two groups, each pair of groups once for each image."""
    by_pixels: dict[str, dict[str, ImageStatistics]] = defaultdict(dict)
    for image in images:
        by_pixels[image.pixels].setdefault(image.group_id, image)
    return [(first, other) for groups in by_pixels.values() for first, *rest in [groups.values()] for other in rest]


def image_statistics(
    name: str, group_id: str, image: np.ndarray, mask: np.ndarray | None, outlined: bool = False
) -> ImageStatistics:
    """Statistics of one image and its mask.

    Args:
        name, group_id: see `ImageStatistics`.
        image: uint8 (H, W, 3).
        mask: bool (H, W).
        outlined: whether `bulge` is measured.
    """
    pixels = f"{image.shape} {hashlib.sha256(image.tobytes()).hexdigest()}"
    if mask is None:
        return ImageStatistics(name, group_id, pixels)
    bulge = bulge_of(mask) if outlined and mask.any() else (1.0, 0.0)
    return ImageStatistics(name, group_id, pixels, mask_shape(mask), bulge)


def bulge_of(mask: np.ndarray) -> tuple[float, float]:
    """`ImageStatistics.bulge` of the largest part of a mask.

    Width is measured along the centre lines. A tube has (1, 0), a disc about that; an outer outline round a tree with
    loops is thin along many of its lines while most of its pixels lie in the filled loops.

    Args:
        mask: bool (H, W), not empty.
    """
    part = _largest_part(mask)
    radius = distance_transform_edt(part)
    thin = np.quantile(radius[skeletonize(part)], BRANCHES)
    deep = radius > WIDE * thin
    if not deep.any():
        return float(radius.max() / thin), 0.0
    wide = (distance_transform_edt(~deep) <= WIDE * thin) & part
    return float(radius.max() / thin), float(wide.sum() / part.sum())


def _largest_part(mask: np.ndarray) -> np.ndarray:
    """The largest connected part of a mask, cut out with a border, every k-th pixel of a very large one."""
    parts, _ = label(mask, np.ones((3, 3)))
    part = parts == np.bincount(parts.ravel())[1:].argmax() + 1
    rows, cols = np.flatnonzero(part.any(axis=1)), np.flatnonzero(part.any(axis=0))
    cut = part[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1]
    step = int(np.ceil(np.sqrt(cut.size / PIXELS)))
    return np.pad(cut[::step, ::step], 1)


PACKAGES = ("torch", "transformers", "peft", "stable-baselines3", "gymnasium", "pycocotools", "scikit-image")
FREE_DISK_GB = 5
MAX_NAMES = 3  # files named in a note
# The shell files keep the embedded data in the clone. Of an installed wheel this is site-packages, where no data are.
CLONE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Finding:
    """Result of a check.

    Attributes:
        details: one or more lines.
        notes: suspicious but readable files, each with its remedy.
    """

    details: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class DataChoice:
    """The data of a run and how they are read; the fields are flags of the training commands."""

    data_root: Path
    dataset_name: str
    max_regions: int | None
    group_regex: str | None
    split_seed: int
    bit_depth: int | None
    groups: str | None = None
    label: str | None = None
    output_dir: Path = Path("outputs")
    unlabelled_root: Path | None = None


def check_packages() -> Finding:
    """Versions of the packages that matter most."""
    try:
        return Finding(", ".join(f"{name} {version(name)}" for name in PACKAGES))
    except PackageNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; install this project again with its requirements") from None


def check_model(model_path: str, data_root: Path) -> Finding:
    """Layout, family and sizes of a Sa2VA checkpoint, from its file headers."""
    folder = open_checkpoint(model_path)
    config = check_checkpoint(folder)
    text = config.text_config
    user_data = data_root.exists() and not is_rendered(data_root)
    hint = "; a rehearsal model, of no use on your own images: set MODEL_PATH" if user_data else ""
    return Finding(
        f"{'official' if folder.original else 'our'} layout, {config.family.name}, {text.num_hidden_layers} x "
        f"{text.hidden_size} language model, {_template(folder, config)}{hint if is_small(model_path) else ''}"
    )


def _template(folder: CheckpointFolder, config: Sa2VAConfig) -> str:
    """The prompt format; the released Qwen-VL models were trained without the system turn that some templates have."""
    if config.family.body != "qwen_vl":
        return f"template {config.template}"
    processor = Sa2VAProcessor.from_config(config, folder.tokenizer(config), None, folder.image_processor(config))
    return f"chat template {'with a' if processor.system_turn else 'without'} system turn"


def check_data(model_path: str, choice: DataChoice) -> Finding:
    """Decode every image and mask once; describe data and split, and note what is suspicious."""
    check_named(model_path, choice.data_root, DEFAULT_DATA)
    if _to_be_rendered(choice.data_root):
        return Finding("embedded data, not there yet: the run renders them")
    if choice.dataset_name not in REGIONS:
        options = ImportOptions(choice.groups, choice.group_regex, choice.label)
        root = imported_root(choice.data_root, choice.output_dir, options) or choice.data_root
        choice = replace(choice, data_root=root)
    return _regions(choice) if _captioned(choice) else _images(choice)


def check_unlabelled(choice: DataChoice) -> Finding:
    """Decode every unlabelled image once, and check that no patient is also in the reward, val or test split."""
    if _to_be_rendered(choice.data_root):
        raise ValueError(f"{choice.data_root}: not there yet, so its patients cannot be compared; run sa2va-rl data")
    if choice.dataset_name in REGIONS or _captioned(choice):
        raise ValueError(f"{choice.unlabelled_root}: {FLAG} is for images, but {choice.data_root} holds captions")
    config = RunConfig(
        data_root=choice.data_root,
        unlabelled_root=choice.unlabelled_root,
        output_dir=choice.output_dir,
        group_regex=choice.group_regex,
        groups=choice.groups,
        label=choice.label,
        bit_depth=choice.bit_depth,
    )
    config = own_format(config)
    samples = read_samples(config.data_root, config.group_regex, given_levels(config.bit_depth, None))
    split = split_samples(samples, config.data_root, choice.split_seed)
    unlabelled = unlabelled_of(config, samples, split)
    assert unlabelled is not None
    check_readable([sample.load_image for sample in unlabelled.samples])
    look = tuple(f"look: {note}" for note in unread_note(unlabelled.root))
    return Finding(f"{unlabelled.summary}; none of them in the reward, val or test split", look)


def _to_be_rendered(root: Path) -> bool:
    """Whether these are embedded data that do not exist yet."""
    folders = (angiogram_folder, partial(angiogram_folder, no_gap=True), region_folder)
    embedded = [folder(parent).resolve() for parent in (DEFAULT_FOLDER, CLONE / "data") for folder in folders]
    return not root.exists() and root.resolve() in embedded


def _captioned(choice: DataChoice) -> bool:
    """Whether these are captioned regions."""
    if choice.dataset_name != "auto":
        return choice.dataset_name in REGIONS
    try:
        return recognise(choice.data_root) in REGIONS
    except ValueError:
        return False


def _images(choice: DataChoice) -> Finding:
    """Annotated images, for all three trainings."""
    root = choice.data_root
    samples = read_samples(root, choice.group_regex, given_levels(choice.bit_depth, None))
    check_one_phrase(samples, root)
    split = split_samples(samples, root, choice.split_seed)
    images = sample_statistics(samples, root / "images")
    patients = ", ".join(f"{name} {len(ids)}" for name, ids in split.groups.items())
    judges = {one.group_id for name in ("policy", "val") for one in select(samples, split, name) if one.labelled}
    tested = {one.group_id for one in select(samples, split, "test") if one.labelled}
    few = (
        ("policy and val", judges, "step 2 will deploy the model as it is"),
        ("test", tested, "there will be no verdict"),
    )
    hints = "".join(
        f"; fewer than {MIN_PATIENTS} {name} patients with masks: {meaning}"
        for name, groups, meaning in few
        if len(groups) < MIN_PATIENTS
    )
    summary = f"{images_summary(samples, root)}; patients: {patients}{hints}"
    origin = import_notes(root)
    same = field_of_view([image.mask for image in images if image.mask])
    look = [f"look: {note}" for note in (same, *unread_note(root)) if note]
    notes = (*origin, *_notes(images), *look, *_label_notes(samples), *(() if origin else _patient_notes(samples)))
    return Finding("\n".join([summary, *_grey(samples, choice.bit_depth), *_foreground(images)]), notes)


def _regions(choice: DataChoice) -> Finding:
    """Captioned regions, for GRPO."""
    name, root = choice.dataset_name, choice.data_root
    regions, summary = read_region_data(root, name, choice.max_regions, levels_of_bits(choice.bit_depth))
    split = make_split(regions, choice.split_seed, region_fingerprint)
    images = region_statistics(regions)
    groups = ", ".join(f"{name} {len(ids)}" for name, ids in split.groups.items())
    words = [len(region.caption.split()) for region in regions]
    captions = f"captions: {min(words)} to {max(words)} words, median {median(words):g}"
    first = f"{regions_summary(summary, root)}, for GRPO; groups: {groups}"
    return Finding("\n".join([first, *_foreground(images), captions]), _notes(images))


def _grey(samples: list[Sample], bit_depth: int | None) -> list[str]:
    """The levels, where images have more than 8 bit."""
    levels = levels_of(samples)
    if not levels:
        return []
    images = len({sample.image_path for sample in samples if sample.levels is not None})
    source = f"--bit_depth {bit_depth}" if bit_depth else "beyond each are 0.1 % of the pixels; --bit_depth sets them"
    series = [pair for key, pair in levels.items() if key != DATA_SET]
    ranges = [f"{min(values)} to {max(values)}" for values in zip(*series, strict=True)]
    black, white = ranges or levels[DATA_SET]
    among = f" in {len(series)} series" if series else ""
    return [f"grey above 8 bit in {images} images: black is {black}, white is {white}{among} ({source})"]


def _foreground(images: list[ImageStatistics]) -> list[str]:
    """Share of the pixels that is foreground, over all masks."""
    shares = [image.share for image in images if image.share is not None]
    if not shares:
        return []
    return [
        f"foreground: {min(shares):.1%} to {max(shares):.1%} of the picture, median {median(shares):.1%}"
        f" ({len(shares)} masks)"
    ]


def _notes(images: list[ImageStatistics]) -> tuple[str, ...]:
    """Files that are readable but suspicious, each kind with its remedy."""
    kinds: dict[str, list[str]] = {
        "empty mask(s), which mean that the object is absent; leave `mask` out where an image is not annotated": [
            image.name for image in images if image.share == 0
        ],
        f"nearly full mask(s), above {NEARLY_FULL:.0%} of the picture": [
            image.name for image in images if image.share is not None and image.share > NEARLY_FULL
        ],
        "mask(s) that cover most of the picture and of its border: inverted? 1 (or 255) must be the object": [
            image.name for image in images if image.mask and image.mask.inverted
        ],
        "outline(s) of thin branches whose loops may be filled: what they enclose is no object; give PNG or RLE": [
            image.name for image in images if image.filled
        ],
        "picture(s) that are the same in two patients or groups: training and test may share them; give both one "
        "`group`, or delete one": [f"{first.name} = {second.name}" for first, second in duplicates(images)],
    }
    return tuple(
        f"look: {len(names)} {kind} ({', '.join([*names[:MAX_NAMES], *['...'] * (len(names) > MAX_NAMES)])})"
        for kind, names in kinds.items()
        if names
    )


def _label_notes(samples: list[Sample]) -> tuple[str, ...]:
    """Whether labels seem to leave out what is plain to see, in some of the images."""
    some = spread([sample for sample in samples if sample.labelled], IMAGES, seed=0)
    masks = ((sample.load_image(), sample.load_mask()) for sample in some)
    note = check_labels((image, mask) for image, mask in masks if mask is not None).note
    return () if note is None else (f"look: {note}",)


def _patient_notes(samples: list[Sample]) -> tuple[str, ...]:
    """Patients whose name is written in several ways, and groups that may be one patient; images stand for names."""
    images = {sample.group: sample.image_path.name for sample in reversed(samples)}
    kinds = {
        "patient(s) whose name is written in several ways, taken for one each": [
            [images[name] for name in written] for written in spellings(images).values() if len(written) > 1
        ],
        "pair(s) of groups whose names differ little, perhaps of one patient; if so, give both one `group`": [
            [images[name] for name in pair] for pair in doubtful(images)
        ],
    }
    return tuple(
        f"look: {len(found)} {kind} (see {', '.join(found[0][:MAX_NAMES])})" for kind, found in kinds.items() if found
    )


def check_reward_network(path: str) -> Finding:
    """How a reward network was trained."""
    if not path:
        return Finding("none named: step 2 uses the newest fitting one, or trains one first")
    info = RewardNetwork.from_pretrained(path).training_info
    return Finding(f"mode {info.get('mode')}, trained on {len(info.get('train_groups', []))} patients")


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
