"""Images that join a training without their masks: any folder of images, or a data folder whose masks are ignored.

Groups are found as in `read_annotations`; an image of a plain folder whose name gives no group is a group of its own.
"""

import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from rl_reward_network.bit_depth import Levels
from rl_reward_network.data.annotations import compile_group_regex, phrase_key, recognise_annotations
from rl_reward_network.data.identity import among, some_names, thumbnails
from rl_reward_network.data.images import DATA_SET, IMAGE_SUFFIXES, given_levels, image_header, measured_levels
from rl_reward_network.data.items import Sample, data_fingerprint, pseudonym, with_levels
from rl_reward_network.data.mask_checks import looks_like_mask
from rl_reward_network.data.readers import REGIONS, read_images
from rl_reward_network.data.splits import Split, one_spelling, patient_key, select
from rl_reward_network.data_import.files import pictures_below
from rl_reward_network.data_import.groups import picture_name
from rl_reward_network.data_import.write import check_named_alike
from rl_reward_network.inputs.config import RunConfig

FLAG = "--unlabelled_root"
NAMELESS = "unlabelled image "  # begins the group of an image whose name gives none
APART_FROM = ("reward", "val", "test")  # splits whose patients must not be among the unlabelled ones


@dataclass(frozen=True, eq=False)
class Unlabelled:
    """The images of an unlabelled folder.

    Attributes:
        root: the folder.
        samples: its images, with the masks that the folder may have: for evaluations alone.
        fingerprint: 64 hex digits that change with images, phrase and groups, but not with masks.
    """

    root: Path
    samples: tuple[Sample, ...]
    fingerprint: str

    @property
    def for_training(self) -> list[Sample]:
        """The samples without their masks."""
        return [replace(sample, mask_parts=None) for sample in self.samples]

    @property
    def summary(self) -> str:
        """One line, e.g. "600 unlabelled images of 100 groups, 600 of them with a mask that training does not read"."""
        groups = len({sample.group_id for sample in self.samples})
        masks = sum(sample.labelled for sample in self.samples)
        ignored = f", {masks} of them with a mask that training does not read" if masks else ""
        return f"{len(self.samples)} unlabelled images of {groups} groups{ignored}"

    @property
    def note(self) -> str:
        """What cannot be known of patients, since the images do not name them; "" where they all do."""
        nameless = sum(sample.group.startswith(NAMELESS) for sample in self.samples)
        return (
            f"{nameless} of {len(self.samples)} unlabelled images name no patient: other images of test patients may be"
            " among them, and only pictures were compared; name patients in the files' names (--group_regex)"
        ) * bool(nameless)


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
        unlabelled = open_unlabelled(config.unlabelled_root, samples, split, config.group_regex, levels)
    except ValueError as error:
        if not finished:
            raise
        warnings.warn(f"the unlabelled images are left out of the evaluation: {error}", stacklevel=2)
        return None
    if unlabelled.note and not finished:
        warnings.warn(unlabelled.note, stacklevel=2)
    return unlabelled


def open_unlabelled(
    root: Path,
    samples: Sequence[Sample],
    split: Split,
    group_regex: str | None = None,
    grey_levels: Mapping[str, Levels] | None = None,
) -> Unlabelled:
    """Read an unlabelled folder, and check that it shares no patient with the data.

    Args:
        root: a plain folder of images, or one that `read_images` reads.
        samples: of the data, all of one phrase.
        split: of the data.
        group_regex: as in `read_annotations`.
        grey_levels: of images of more than 8 bit, as in `read_annotations`; by default measured in this folder.

    Raises:
        ValueError: no images, captioned regions, another phrase, or groups or images of a split of `APART_FROM`.
    """
    found = _read(root, samples[0].text, group_regex, grey_levels)
    phrases = {phrase_key(sample.text) for sample in [*found, *samples]}
    if len(phrases) > 1:
        raise ValueError(f"{root}: {FLAG}: text holds other phrases than the data ({sorted(phrases)[:3]}); use one")
    patients = {patient_key(sample.group): sample.group_id for sample in samples}  # in whatever spelling
    own = [
        replace(
            sample,
            sample_id=pseudonym("unlabelled", sample.sample_id),
            group_id=patients.get(patient_key(sample.group), sample.group_id),
        )
        for sample in found
    ]
    _check_apart(root, own, samples, split)
    bare = [replace(sample, mask_parts=None) for sample in own]
    return Unlabelled(root, tuple(own), data_fingerprint(bare))


def _read(root: Path, text: str, group_regex: str | None, grey_levels: Mapping[str, Levels] | None) -> list[Sample]:
    if not root.is_dir():
        raise ValueError(f"{root}: no such folder; {FLAG} names a folder of images")
    if recognise_annotations(root):
        return read_images(root, group_regex, grey_levels)
    if regions := [found for recognises, _ in REGIONS.values() if (found := recognises(root))]:
        raise ValueError(f"{root}: {FLAG}: holds {regions[0]}, expected images without captions")
    return _read_plain(root, text, group_regex, grey_levels)


def _read_plain(
    root: Path, text: str, group_regex: str | None, grey_levels: Mapping[str, Levels] | None
) -> list[Sample]:
    """All images below a folder without annotations."""
    paths, masks = pictures_below(root)
    if not paths:
        named = f" ({len(masks)} pictures are masks by their folder or name)" if masks else ""
        raise ValueError(f"{root}: {FLAG}: no images here{named}; expected files {', '.join(IMAGE_SUFFIXES)}")
    pattern, samples, deep = compile_group_regex(group_regex), [], {}
    found = {path: match.groupdict() for path in paths if (match := pattern.search(path.name))}
    patients = one_spelling(groups["group"] for groups in found.values() if groups["group"])
    for path in paths:
        name, groups = path.relative_to(root).as_posix(), found.get(path, {})
        group = patients.get(groups.get("group") or "") or f"{NAMELESS}{picture_name(name)}"
        series = f"series {groups['series']}" if groups.get("series") else f"image {name}"
        size, is_deep = image_header(path)
        if is_deep:
            deep[path] = DATA_SET
        ids = pseudonym("group", group), pseudonym("series", group, series), pseudonym("sample", name, phrase_key(text))
        samples.append(Sample(path, text, *ids, size, None, group))
    return with_levels(samples, deep, grey_levels or measured_levels(deep))


def _check_apart(root: Path, unlabelled: Sequence[Sample], samples: Sequence[Sample], split: Split) -> None:
    """Refuse patients of the splits that must not see training, by their group and by pictures."""
    groups = {sample.group_id for sample in unlabelled}
    with ThreadPoolExecutor() as threads:
        flat = sum(threads.map(lambda sample: looks_like_mask(replace(sample, levels=None).load_image()), unlabelled))
    if flat:
        raise ValueError(
            f"{root}: {FLAG}: {flat} of its {len(unlabelled)} images hold a few flat colours, as masks do; leave them"
            " out, or put them into a folder masks/"
        )
    own, shared = thumbnails(unlabelled), dict[str, set[Path]]()
    for name in APART_FROM:
        if known := groups & set(split.groups[name]):
            raise ValueError(
                f"{root}: {FLAG}: {len(known)} of its {len(groups)} groups are in the {name} split of the data; "
                "leave these patients out"
            )
        seen = among(own, thumbnails(select(samples, split, name)))
        if seen.any():
            shared[name] = {sample.image_path for sample, same in zip(unlabelled, seen, strict=True) if same}
    if shared:
        found = set().union(*shared.values())
        raise ValueError(
            f"{root}: {FLAG}: {len(found)} images are also in the {' and '.join(shared)} split of the data, perhaps in"
            f" another format or mirrored ({some_names(found)}); leave them out"
        )
