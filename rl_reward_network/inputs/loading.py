"""Inputs of steps 1 and 2: the data (other layouts are imported first), their split, the frozen Sa2VA, its masks.

They are written into config.json of a run, and found again from it after the folder was moved.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from rl_reward_network.atomic_io import NAMES_ALONE, PICTURES, load_arrays, locked
from rl_reward_network.data.annotations import compile_group_regex, phrase_key, recognise_annotations
from rl_reward_network.data.identity import among, check_apart, join_groups, joined_note, judged_parts, thumbnails
from rl_reward_network.data.images import IMAGE_SUFFIXES, image_header
from rl_reward_network.data.items import Sample, data_fingerprint, first_names, pseudonym, recorded_grey, with_windows
from rl_reward_network.data.masks import looks_like_mask
from rl_reward_network.data.patients import NONE, picture_name, propose_patients
from rl_reward_network.data.readers import READERS, REGIONS, read_images
from rl_reward_network.data.splits import (
    Split,
    load_split,
    make_split,
    one_spelling,
    patient_key,
    save_split,
    select,
    subsample,
)
from rl_reward_network.data_import import write
from rl_reward_network.data_import.files import check_files, files_below, pictures_below, relative_path, without_role
from rl_reward_network.data_import.layouts import LAYOUTS, recognise_layout
from rl_reward_network.data_import.survey import ImportOptions, report_lines, survey_source
from rl_reward_network.embedded import datasets
from rl_reward_network.env.mask_bank import MaskBank
from rl_reward_network.env.prompts import load_prompts
from rl_reward_network.flags import changed
from rl_reward_network.inputs.config import PromptConfig, RunConfig, pick_fields
from rl_reward_network.inputs.segmenter import Sa2VASegmenter, load_segmenter
from rl_reward_network.models.default import DEFAULT_MODEL
from rl_reward_network.models.sa2va.loading_sa2va import check_device
from rl_reward_network.report.statistics import MIN_PATIENTS
from rl_reward_network.run import Run, portable

Result = TypeVar("Result")


@dataclass(frozen=True)
class RunInputs:
    """Data, split, frozen model and mask bank of a run of steps 1 and 2."""

    config: RunConfig
    samples: list[Sample]  # all of the data, those of `--unlabelled_root` last
    split: Split  # reward / policy / val / test, by patient
    prompts: tuple[str, ...]
    segmenter: Sa2VASegmenter
    bank: MaskBank  # the model's masks, each computed once
    prompt_config: PromptConfig = field(default_factory=PromptConfig)
    unlabelled: str | None = None  # fingerprint of the samples that have joined from `--unlabelled_root`

    @property
    def summary(self) -> str:
        """One line on the data."""
        return images_summary(self.samples, self.config.data_root, self.split)

    @property
    def grey_levels(self) -> dict[str, list[int]] | None:
        """The window of the data's grey images of more than 8 bit, for a config.json; None without any."""
        return recorded_grey(self.samples) or write.imported_grey(self.config.data_root)

    @property
    def data_fingerprint(self) -> str:
        """Fingerprint of the samples; the split belongs to it."""
        return self.split.fingerprint

    def pick(self, name: str, count: int, labelled: bool = False) -> list[Sample]:
        """At most `count` samples of one split, labelled ones first, one frame per series before a second.

        Without `labelled` up to half of them are of `--unlabelled_root`. ValueError where the split has no such sample,
        or a file is damaged.
        """
        samples = select(self.samples, self.split, name)
        picked = subsample([s for s in samples if s.labelled], count, self.config.seed)
        if not labelled:
            bare = [s for s in samples if not s.labelled and not s.joined]
            picked += subsample(bare, count - len(picked), self.config.seed)
            joined = subsample([s for s in samples if s.joined], count // 2, self.config.seed)
            picked = picked[: count - len(joined)] + joined
        if not picked:
            kind = "labelled images" if labelled else "images"
            other = "use --reward net" if name == "policy" else "name a trained reward network by REWARD_NET"
            remedy = "annotate more patients" + (f", or {other}" if labelled else "")
            there = f"{len(self.split.groups[name])} patient(s), {len(samples)} image(s)"
            raise ValueError(f"{self.config.data_root}: no {kind} in the {name} split ({there}); {remedy}")
        check_readable([load for sample in picked for load in (sample.load_image, sample.load_mask)])
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

    `split_file` is split.json of an earlier run, used if it fits the data, in place of a split by the seed; `prompts`
    are of an earlier run, in place of those of `prompt_config`. ValueError where data, split, prompts or model are
    refused, in this order.
    """
    check_inputs(config)
    config = own_format(config)
    limits = prompt_config or PromptConfig()
    samples, split = open_samples(config, split_file)
    check_one_phrase(samples, config.data_root)
    prompts = load_prompts(limits.prompts) if prompts is None else tuple(prompts)
    samples, split, unlabelled = join_unlabelled(config, samples, split)
    segmenter = segmenter_with(config.model_path, config, limits)
    bank = MaskBank(config.output_dir / "mask_bank", segmenter.segment, segmenter.fingerprint, prompts)
    return RunInputs(config, samples, split, prompts, segmenter, bank, limits, unlabelled)


def open_samples(config: RunConfig, split_file: Path | None = None) -> tuple[list[Sample], Split]:
    """The annotated images of a run and their split; the model was trained on none of its val and test images.

    ValueError where the data or the split are refused, or the model has seen such images, or was chosen on test images.
    """
    samples = read_samples(config.data_root, config.group_regex, config.bit_depth)
    split = load_split(split_file, samples) if split_file else split_samples(config, samples)
    remedy = (
        "use the data, --split_seed and --fractions of that training, the model that it began with, or leave these"
        " images out"
    )
    check_model_apart(config.model_path, judged_parts(samples, split, ("val", "test")), remedy)
    return samples, split


def check_model_apart(model_path: str, parts: Mapping[str, Sequence[Sample]], remedy: str) -> None:
    """`check_apart` of a model; that it was trained on images of `parts` without their masks is a warning alone."""
    pictures = load_arrays(Path(model_path) / PICTURES, NAMES_ALONE)  # none of a published model: it passes
    bare = pictures.pop("unlabelled", thumbnails([]))
    check_apart(pictures, parts, f"{model_path}: the model", remedy)
    for part, samples in parts.items() if len(bare) else ():
        if count := int(among(thumbnails(samples), bare).sum()):
            warnings.warn(
                f"{model_path}: the model was trained, without masks, on {count} of the {len(samples)} images of"
                f" {part}: on new images of the same place it may be worse than on these",
                stacklevel=2,
            )


def split_samples(config: RunConfig, samples: Sequence[Sample]) -> Split:
    """A new split of annotated images; ValueError as `make_split`, and for --fractions of data with their own split."""
    file = config.data_root / "annotations.json"
    if changed(config, "fractions") and any(sample.split for sample in samples):
        raise ValueError(
            f"fractions is {config.fractions}, but {file} has a field `split`: leave --fractions out to keep that"
            " split, or the field to have another one"
        )
    try:
        return make_split(samples, config.split_seed, fractions=config.fractions)
    except ValueError as error:
        joined = f" ({note})" if (note := joined_note(samples)) else ""
        raise ValueError(f"{file}: {error}{joined}") from None


def segmenter_with(model_path: str | Path, config: RunConfig, limits: PromptConfig) -> Sa2VASegmenter:
    """A frozen Sa2VA with the settings of a run, such as the run's own or one that was fine-tuned from it."""
    sizes = limits.segment_batch, limits.max_new_tokens, limits.max_tiles
    return load_segmenter(model_path, config.device, *sizes, config.dtype, config.image_resize)


def check_inputs(config: RunConfig) -> None:
    """Refuse, before anything is read, a wrong regular expression, data that nobody named, or a missing GPU."""
    compile_group_regex(config.group_regex)
    check_named(config.model_path, config.data_root, datasets.DEFAULT_DATA)
    check_device(config.device)


def check_named(model_path: str, data_root: Path, default: Path) -> None:
    """Refuse to run another model than the embedded one on rendered data that nobody named: the object `default`."""
    if model_path != DEFAULT_MODEL and data_root is default:
        raise ValueError(
            f"model_path is {model_path}, but no data are named for it; name them by DATA_ROOT or --data_root "
            f"(the rendered ones of {DEFAULT_MODEL} by --data_root {default})"
        )


def images_summary(samples: Sequence[Sample], data_root: Path, split: Split | None = None) -> str:
    """One line on annotated images and their split, e.g. "960 rendered angiograms (embedded data), 960 with a mask"."""
    data = [sample for sample in samples if not sample.joined]
    kind = "rendered angiograms (embedded data)" if datasets.is_rendered(data_root) else "annotated images"
    own = "".join(f", {note}" for note in (write.grouping_note(data_root, data), joined_note(data)) if note)
    more = f"; {unlabelled_summary(samples)}" if len(data) < len(samples) else ""
    labelled = sum(sample.labelled for sample in data)
    bare = f", {len(data) - labelled} without" * (labelled < len(data))
    words = "" if split is None else f"; {split_words(samples, split)}"
    return f"{len(data)} {kind}, {labelled} with a mask{bare}{own}{more}{words}"


def split_words(samples: Sequence[Sample], split: Split, groups: str = "patients") -> str:
    """The number of patients in each split, in the words of the data where they have their own."""
    counts = {name: len(ids) for name, ids in split.groups.items()}
    given = {sample.split for sample in samples} - {None}
    if not given:
        return f"{groups}: {', '.join(f'{name} {count}' for name, count in counts.items())}"
    own = {"train": counts["reward"] + counts["policy"], "val": counts["val"], "test": counts["test"]}
    taken = "".join(f"; {name} is cut from train" for name in own if name not in given)
    return f"split of the data: {', '.join(f'{name} {count}' for name, count in own.items())} patients{taken}"


def regions_summary(summary: str, data_root: Path) -> str:
    """The summary of a reader of captioned regions, with a mark where they are rendered."""
    return "rendered scenes (embedded data), in the layout of " * datasets.is_rendered(data_root) + summary


def read_samples(data_root: Path, group_regex: str | None = None, bit_depth: int | None = None) -> list[Sample]:
    """As `read_images`, with `join_groups`; the embedded data sets are rendered first when they are not there."""
    render_missing(data_root)
    return join_groups(read_images(data_root, group_regex, bit_depth))


def render_missing(data_root: Path) -> None:
    """Render embedded angiograms where `data_root` is theirs and holds nothing else."""
    user_data = data_root.exists() and not datasets.is_rendered(data_root)
    for no_gap in (False, True):
        if data_root == datasets.angiogram_folder(datasets.DEFAULT_FOLDER, no_gap) and not user_data:
            datasets.embedded_angiograms(datasets.DEFAULT_FOLDER, no_gap)


def check_readable(reads: Sequence[Callable[[], object]]) -> None:
    """As `decode_files`, without results: a damaged file is better reported now than hours later."""
    decode_files(reads, keep=False)


def decode_files(reads: Sequence[Callable[[], Result]], keep: bool = True) -> list[Result]:
    """Decode files in threads; memory holds only those being decoded, and the results, if they are to be kept.

    Each of `reads` decodes a file or two, and raises a ValueError where it cannot. ValueError with the first one's
    message, and how many there are.
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
            "a prompt policy is for one kind of object: make one data folder for each, with --prompts for it, or train "
            "by name (sa2va-rl grpo --objective supervised)"
        )


# ---- images of `--unlabelled_root` ----------------------------------------------------------------------------------

FLAG = "--unlabelled_root"
FEW_IMAGES = 10  # without masks; fewer teach a mean teacher nothing that masks do not
NAMELESS = "unlabelled image "  # begins the group of an image whose name gives none
APART_FROM = ("reward", "val", "test")  # splits whose patients must not be among the unlabelled ones


def join_unlabelled(
    config: RunConfig, samples: list[Sample], split: Split, apart: Sequence[str] = APART_FROM
) -> tuple[list[Sample], Split, str | None]:
    """The data with the images of `unlabelled_root`, without masks, as further ones of the split `policy`.

    The folder is a plain one of images, or one that `read_images` reads; None changes nothing. Groups are found as in
    `read_annotations`; an image of a plain folder whose name gives no group is one of its own. Gives all samples, the
    split, and 64 hex digits that change with images, phrase and groups of the folder, or None.

    ValueError for no images, captioned regions, another phrase than that of the data, or groups or images of a split of
    `apart`; or as `check_named_alike`.
    """
    root = config.unlabelled_root
    if root is None:
        return samples, split, None
    write.check_named_alike(config.data_root, root)
    found = _read_unlabelled(root, samples[0].text, config)
    bare = write.is_ungrouped(root, found)  # files of one name in two folders are no patient
    named = [f"{NAMELESS}{one.group}" if bare or one.shown_by == NONE else one.group for one in found]
    found = [
        one if one.group == group else replace(one, group=group, group_id=pseudonym("group", group))
        for one, group in zip(found, named, strict=True)
    ]
    phrases = {phrase_key(sample.text) for sample in [*found, *samples]}
    if len(phrases) > 1:
        raise ValueError(f"{root}: {FLAG}: text holds other phrases than the data ({sorted(phrases)[:3]}); use one")
    patients = {patient_key(sample.group): sample.group_id for sample in samples}  # in whatever spelling
    joined = [
        replace(
            sample,
            sample_id=pseudonym("unlabelled", sample.sample_id),
            group_id=patients.get(patient_key(sample.group), sample.group_id),
            mask_parts=None,
            joined=True,
            split=None,
        )
        for sample in found
    ]
    _check_no_masks(root, joined)
    check_unlabelled_apart(root, [*samples, *joined], split, apart)
    if note := nameless_note(joined):
        warnings.warn(note, stacklevel=2)
    groups = {sample.group_id for sample in joined} - {*split.groups["reward"]}  # no sample is in two splits
    return [*samples, *joined], replace(split, joined=tuple(sorted(groups))), data_fingerprint(joined)


def _read_unlabelled(root: Path, text: str, config: RunConfig) -> list[Sample]:
    """The samples of a data folder, or all images below a plain folder."""
    if not root.is_dir():
        raise ValueError(f"{root}: no such folder; {FLAG} names a folder of images")
    if recognise_annotations(root):
        return read_images(root, config.group_regex, config.bit_depth)
    if regions := [found for recognises, _ in REGIONS.values() if (found := recognises(root))]:
        raise ValueError(f"{root}: {FLAG}: holds {regions[0]}, expected images without captions")
    paths, masks = pictures_below(root)
    if not paths:
        named = f" ({len(masks)} pictures are masks by their folder or name)" if masks else ""
        raise ValueError(f"{root}: {FLAG}: no images here{named}; expected files {', '.join(IMAGE_SUFFIXES)}")
    pattern, samples, deep = compile_group_regex(config.group_regex), [], dict[Path, str | None]()
    matches: dict[Path, dict[str, str]] = {}
    shown = propose_patients([str(without_role(relative_path(path, root))) for path in paths])
    for path, (patient, _) in zip(paths, shown, strict=True):
        match = pattern.search(path.name)
        matches[path] = match.groupdict() if match else {"group": "" if config.group_regex else patient}
    patients = one_spelling(groups["group"] for groups in matches.values() if groups["group"])
    for path in paths:
        name, groups = path.relative_to(root).as_posix(), matches[path]
        group = patients.get(groups["group"] or "") or f"{NAMELESS}{picture_name(name)}"
        series = f"series {groups['series']}" if groups.get("series") else f"image {name}"
        size, is_deep = image_header(path)
        if is_deep:
            deep[path] = None
        ids = pseudonym("group", group), pseudonym("series", group, series), pseudonym("sample", name, phrase_key(text))
        samples.append(Sample(path, text, *ids, size, None, group))
    return with_windows(samples, deep, config.bit_depth)


def _check_no_masks(root: Path, joined: Sequence[Sample]) -> None:
    with ThreadPoolExecutor() as threads:
        flat = sum(threads.map(lambda sample: looks_like_mask(replace(sample, grey=None).load_image()), joined))
    if flat:
        raise ValueError(
            f"{root}: {FLAG}: {flat} of its {len(joined)} images hold a few flat colours, as masks do; leave them"
            " out, or put them into a folder masks/"
        )


def check_unlabelled_apart(root: Path, samples: Sequence[Sample], split: Split, apart: Sequence[str]) -> None:
    """Refuse images of `--unlabelled_root` of patients of some splits, by their group and by pictures."""
    if not apart:  # nothing to decode
        return
    joined, own = [sample for sample in samples if sample.joined], [sample for sample in samples if not sample.joined]
    groups, pictures, shared = {sample.group_id for sample in joined}, thumbnails(joined), dict[str, set[Path]]()
    for name in apart:
        if known := groups & set(split.groups[name]):
            raise ValueError(
                f"{root}: {FLAG}: {len(known)} of its {len(groups)} groups are in the {name} split of the data; "
                "leave these patients out"
            )
        seen = among(pictures, thumbnails(select(own, split, name)))
        if seen.any():
            shared[name] = {sample.image_path for sample, same in zip(joined, seen, strict=True) if same}
    if shared:
        found = set().union(*shared.values())
        raise ValueError(
            f"{root}: {FLAG}: {len(found)} images are also in the {' and '.join(shared)} split of the data, perhaps in"
            f" another format or mirrored ({first_names({path.name for path in found})}); leave them out"
        )


def unlabelled_summary(samples: Sequence[Sample]) -> str:
    """E.g. "600 unlabelled images of 100 groups", of the samples that have joined."""
    groups = [sample.group_id for sample in samples if sample.joined]
    return f"{len(groups)} unlabelled images of {len(set(groups))} groups"


def nameless_note(joined: Sequence[Sample]) -> str:
    """What cannot be known of patients, since the images do not name them; "" where they all do."""
    nameless = sum(sample.group.startswith(NAMELESS) for sample in joined)
    return (
        f"{nameless} of {len(joined)} unlabelled images name no patient: other images of test patients may be"
        " among them, and only pictures were compared; name patients in the files' names (--group_regex)"
    ) * bool(nameless)


# ---- other layouts --------------------------------------------------------------------------------------------------

IMPORTED = "imported"  # below the output folder


def own_format(config: RunConfig) -> RunConfig:
    """The settings with `data_root` and `unlabelled_root` in a format of this project; others are imported first.

    ValueError where a source cannot be imported as it is, or flags of the import are given for other data.
    """
    if (other := config.unlabelled_root) is not None:
        options = ImportOptions(
            None, config.group_regex, config.label, own_groups=True, bit_depth=config.bit_depth, no_split=True
        )
        try:
            config = replace(config, unlabelled_root=imported_root(other, config.output_dir, options) or other)
        except ValueError as error:
            remedy = f"import it by sa2va-rl data import {other} --to FOLDER --write, and name that folder"
            raise ValueError(f"unlabelled_root: {error}; {remedy}") from None
    options = ImportOptions(config.patients_csv, config.group_regex, config.label, bit_depth=config.bit_depth)
    root = imported_root(config.data_root, config.output_dir, options)
    if root is not None:
        regex = config.group_regex if config.unlabelled_root else None  # of no effect on imported data
        return replace(config, data_root=root, patients_csv=None, group_regex=regex, label=None)
    _check_masks(config.data_root)
    if flags := changed(config, "patients_csv", "label"):
        raise ValueError(f"{flags[0]} is for data that are imported, but {config.data_root} is not: leave it out")
    return config


def imported_root(data_root: Path, output_dir: Path, options: ImportOptions) -> Path | None:
    """The folder of imported data, made if it is missing; None for data that are read as they are.

    It is `<output_dir>/imported/<name>_<hash of the files and options>`. Raises as `survey_source` and `write_import`.
    """
    if not data_root.is_dir() or _read_as_it_is(data_root):
        return None
    check_files(data_root)  # before they are counted
    if not any(layout.recognise(data_root) for layout in LAYOUTS.values()):
        return None
    layout, description = recognise_layout(data_root, options.layout)
    name = layout if LAYOUTS[layout].private else data_root.resolve().name  # such a folder is named after a patient
    folder = output_dir / IMPORTED / f"{name}_{_digest(data_root, options)}"
    taken = f"{data_root}: taken for {description}"
    if not folder.exists():
        write.check_target(data_root, folder)
        tqdm.write(f"{taken}; importing, once")
        survey = survey_source(data_root, options)
        tqdm.write("\n".join(report_lines(survey)))
        survey.check()
        with locked(folder.parent):  # other processes wait while this one writes
            if not folder.exists():
                write.write_import(survey, folder)
    if os.environ.get("RANK", "0") == "0":
        tqdm.write(f"{taken}; imported: {folder}")
    return folder


def _check_masks(root: Path) -> None:
    """Refuse a plain folder of images."""
    if root.is_dir() and not _read_as_it_is(root) and (images := pictures_below(root)[0]):
        raise ValueError(
            f"{root}: {len(images)} images, none with a mask: `sa2va-rl segment {root}` works with a model as it is; to"
            f" improve one, annotate images of {MIN_PATIENTS} patients, e.g. a black and white masks/NAME.png for each"
            " images/NAME.png (docs/how-to/your-data.md has other layouts)"
        )


def _read_as_it_is(root: Path) -> bool:
    """Whether a reader takes the folder; COCO's annotations.json is an object, ours a list, which can be long."""
    file = root / "annotations.json"
    if file.is_file():
        with file.open(encoding="utf-8-sig", errors="replace") as text:
            object_ = text.read(4096).lstrip().startswith("{")
        return not (object_ and LAYOUTS["coco"].recognise(root))
    return any(recognise(root) for recognise, _ in READERS.values())


def _digest(source: Path, options: ImportOptions) -> str:
    """12 hex digits that change with the files of the source (names, sizes, times) and the options."""
    stats = [(path.relative_to(source).as_posix(), path.stat()) for path in files_below(source)]
    files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    rows = options.patients_csv
    if rows not in (None, NONE) and (table := Path(str(rows))).is_file():
        rows = table.read_text(encoding="utf-8", errors="replace")
    chosen = rows, options.group_regex, options.label, options.own_groups, options.bit_depth, options.no_split
    text = json.dumps([write.FORMAT_VERSION, write.IMPORT_RULES, files, *chosen])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def describe_run(
    run: Run, inputs: RunInputs, settings: dict[str, Any], facts: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Make the folder of a run on annotated images with config.json and split.json, and return the former.

    `settings` are those that a run to resume must share, `facts` further entries of the stage (plan, reward network,
    ...). ValueError if the folder holds a run already.
    """
    run.check_new()
    described = {
        **(facts or {}),
        "inputs": portable_settings(run.path, inputs.config, inputs.prompt_config)
        | {"grey_levels": inputs.grey_levels},
        "device": inputs.config.device,
        "data_fingerprint": inputs.data_fingerprint,
        "model_fingerprint": inputs.segmenter.fingerprint,
        "prompts": list(inputs.prompts),
        "patients": {name: len(ids) for name, ids in inputs.split.groups.items()},
        "grouping": write.grouping_note(inputs.config.data_root, inputs.samples),
        "images": len(inputs.samples),
    }
    save_split(inputs.split, run / "split.json")
    return run.begin(settings, described)  # last: a folder with a config.json is complete


def portable_settings(run: Path, config: RunConfig, *further: Any) -> dict[str, Any]:
    """Settings as "inputs" of config.json: a flat mapping, paths as `portable` returns them, names and hub ids as is.

    `further` are dataclasses with more settings of the stage.
    """
    values = {name: value for settings in (config, *further) for name, value in asdict(settings).items()}
    values = {name: portable(value, run) if isinstance(value, Path) else value for name, value in values.items()}
    named = {"model_path": Path(config.model_path), "data_root": config.data_root}
    return values | {name: portable(path, run) if path.exists() else str(path) for name, path in named.items()}


def saved_config(
    run: Path, config: dict[str, Any], data_root: Path | None = None, model_path: str | None = None
) -> tuple[RunConfig, PromptConfig]:
    """Settings of a run of step 1 or 2 in its present folder; the prompts are in `config` itself.

    `data_root` and `model_path` are where data and model are now, if not where they were. Raises as `located_model`.
    """
    saved = config["inputs"]
    output_dir = (run / saved["output_dir"]).resolve()
    paths: dict[str, Any] = {
        "data_root": data_root or located_data(run, config),
        "model_path": model_path or located_model(run, config, "--base_model"),
        "output_dir": output_dir if output_dir.is_dir() else run.parent.resolve(),
        "unlabelled_root": None,  # no evaluation needs it
    }
    return replace(pick_fields(RunConfig, saved), **paths), pick_fields(PromptConfig, {**saved, "prompts": None})


def located_data(run: Path, config: dict[str, Any]) -> Path:
    """The data of a run: a folder that exists, or a hub id. Raises as `located_model`."""
    return Path(_located(run, config, "data_root", "--data_root, the folder where the same data are now"))


def located_model(run: Path, config: dict[str, Any], flag: str) -> str:
    """The model of a run: a folder that exists, the name of an embedded model, or a hub id.

    ValueError where it was a folder and is missing; names `flag`, for its place.
    """
    return _located(run, config, "model_path", f"{flag}, the folder where the same model is now")


def _located(run: Path, config: dict[str, Any], name: str, remedy: str) -> str:
    saved = str(config["inputs"][name])
    if not saved.startswith((".", os.sep)):
        return saved
    folder = (run / saved).resolve()
    if not folder.is_dir():
        raise ValueError(f"{run / 'config.json'}: field inputs.{name} is {saved}, no folder here; give {remedy}")
    return str(folder)
