"""What an import would do: every image and mask of a source is decoded once, nothing is written."""

import shlex
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations, compress
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from rl_reward_network.bit_depth import window_of_bits
from rl_reward_network.data.annotations import first_faults
from rl_reward_network.data.identity import SAME, same_in_two_groups, thumbnail
from rl_reward_network.data.masks import FULL, ignored_classes, looks_like_mask
from rl_reward_network.data.names import ALL, NamedClass, read_classes
from rl_reward_network.data.patients import NONE, PROPOSED, picture_name
from rl_reward_network.data.splits import OWN_SPLITS
from rl_reward_network.data_import.files import some, unread_note
from rl_reward_network.data_import.items import NUMBER, Found, Groups, Item, groups_of, oblong_remark
from rl_reward_network.data_import.layouts import AUTO, LAYOUTS, recognise_layout
from rl_reward_network.data_import.parts import Parts, in_two_parts, split_of


def chosen_classes(label: str | None, classes: Iterable[str], class_ids: dict[str, str]) -> list[str] | None:
    """The classes whose union is the mask; None where the user has to choose. ValueError for no class of that name.

    `label` is a class by name, number or colour, several with commas between, "all", or None: the only class there is.
    `classes` are those that occur, `class_ids` number -> name, see `Found`.
    """
    occurring = sorted(set(classes), key=class_order)
    known = sorted({*classes, *class_ids.values()}, key=class_order)
    if label is None:
        only = occurring or known
        return only if len(only) <= 1 else None
    if label == ALL and ALL not in known:
        return occurring or known
    parts = [label] if _named(label, known, class_ids) else [part.strip() for part in label.split(",")]
    chosen = [_named(part, known, class_ids) for part in parts]
    if unknown := [part for part, name in zip(parts, chosen, strict=True) if name is None]:
        raise ValueError(
            f"label {unknown[0]!r} is no class of the masks; they hold {', '.join(occurring) or 'nothing'}; --label"
            " all is the union"
        )
    return [name for name in chosen if name is not None]


def _named(label: str, known: list[str], class_ids: dict[str, str]) -> str | None:
    """The class of a name, a colour or a number, names first; None without one."""
    alike = [name for name in known if name.lower() == label.lower()]
    return label if label in known else alike[0] if len(alike) == 1 else class_ids.get(label)


def class_order(name: str) -> tuple[bool, int, str]:
    """Numbers by value, before names."""
    return (not name.isdecimal(), int(name) if name.isdecimal() else 0, name)


MOST_IGNORED = 0.2  # share of a picture; the rim of objects has less
PHRASE = "blood vessel"  # as in the built-in prompts


@dataclass(frozen=True)
class ImportOptions:
    """How a source is imported; the fields are flags of `sa2va-rl data import`."""

    patients_csv: str | None = None
    group_regex: str | None = None
    label: str | None = None
    phrase: str | None = None
    layout: str = AUTO
    frames: str = "middle"
    skip: int = 0
    own_groups: bool = False  # of unlabelled images: one whose group is not known is a group of its own
    classes: Path | None = None
    bit_depth: int | None = None
    no_split: bool = False

    def __post_init__(self) -> None:
        for name in ("label", "phrase") if self.classes else ():
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, but {self.classes} names the classes: leave it out"
                )
        window_of_bits(self.bit_depth)
        if self.skip < 0:
            raise ValueError(f"skip is {self.skip}, expected 0 or more: at most so many broken files are left out")


@dataclass(frozen=True)
class Seen:
    """A decoded item."""

    item: Item
    size: tuple[int, int]  # (H, W)
    thumbnail: np.ndarray
    pixels: dict[str, int] | None  # of each class; None: unlabelled
    flat: bool  # whether it has no mask and looks like one
    aspect: float = 1.0

    @property
    def present(self) -> list[str]:
        """The classes that it has."""
        return [name for name, count in (self.pixels or {}).items() if count]


@dataclass(frozen=True, eq=False)
class Survey:
    """A source, and what was decided for it."""

    source: Path
    options: ImportOptions
    layout: str  # key of `LAYOUTS`
    description: str
    found: Found
    seen: list[Seen]  # without those that have a fault
    classes: list[str] | None  # those whose union is the mask; None while open
    groups: Groups | None  # of each image, names not hidden yet; None while open
    groups_from: str
    leaks: list[tuple[int, int, float]]  # `same_in_two_groups` of `seen`
    open_points: tuple[str, ...]  # to be repaired or decided before anything can be written
    skipped: tuple[str, ...]  # broken files that are left out, and why; names no patient where names are hidden
    named: tuple[NamedClass, ...] = ()  # asked for by name, with categories as the masks name them; () for one phrase
    parts: Parts = field(default_factory=dict)  # the split of the source, if it is kept

    @property
    def alone(self) -> int:
        """Images of which nothing shows a patient: each is one of its own."""
        if not self.groups_from.startswith((NONE, PROPOSED)):
            return 0
        pairs = zip(self.found.items, self.groups or (), strict=bool(self.groups))
        return sum(group == picture_name(item.found_as) for item, (group, _) in pairs)

    @property
    def phrase(self) -> str:
        """The phrase of all records: as given, else the class's name, else that of the built-in prompts."""
        names = [name for name in self.classes or () if not (NUMBER.fullmatch(name) or name.startswith("#"))]
        named = names[0].replace("_", " ") if len(names) == len(self.classes or ()) == 1 else PHRASE
        return self.options.phrase or named

    def check(self) -> None:
        """Raise a ValueError with the open points, if there are any."""
        if self.open_points:
            raise ValueError("\n".join(self.open_points))


def survey_source(source: Path, options: ImportOptions) -> Survey:
    """Recognise, read and decode a source.

    ValueError where the layout is not recognised, or the source cannot be read at all; other faults are `open_points`.
    """
    layout, description = recognise_layout(source, options.layout)
    found = LAYOUTS[layout].read(source, options.frames)
    bare = [item.found_as for item in found.items if item.load_masks is None]
    named = "" if found.private else f" ({some(bare)})"
    found.notes.extend([f"{len(bare)} image(s) without a mask, imported as unlabelled{named}"] if bare else [])
    given = [Path(path) for path in (options.patients_csv, options.classes) if path]
    found.notes.extend(unread_note(source, not found.private, [*found.read, *given]))
    if not (found.items or found.faults or found.broken):
        raise ValueError(f"{source}: {description}, but no image; name the folder that holds them")
    looked = _looked_at(found.items)
    seen = [result for result in looked if isinstance(result, Seen)]
    failed = {item.name: fault for item, fault in zip(found.items, looked, strict=True) if isinstance(fault, str)}
    broken, skipped = {**found.broken, **failed}, tuple[str, ...]()
    if seen and 0 < len(broken) <= options.skip:
        # By the written name where that of the file may be a patient's.
        private = [f"{name}: {fault.split(': ', 1)[-1]}" for name, fault in broken.items()]
        skipped = tuple(private if found.private else broken.values())
        found, broken = replace(found, items=[one.item for one in seen]), {}
    if flat := [one.item.name if found.private else one.item.found_as for one in seen if one.flat]:
        what = f"{len(flat)} image(s) without a mask hold a few flat colours, as masks do ({some(flat)})"
        found.faults.append(f"{source}: {what}; put them into masks/ with the name of their image, or leave them out")
    found.remarks.extend(oblong_remark(one.aspect for one in seen))
    seen = _without_ignored(seen, found, options)
    points = []
    if faults := [*found.faults, *broken.values()]:
        head = [f"{source}: {len(faults)} faults"] if len(faults) > 1 else []
        skip = f"--skip {len(broken)} of sa2va-rl data import leaves out the files that cannot be read"
        points = ["\n  ".join([*head, *first_faults(faults), *([skip] if broken and seen else [])])]
    groups, groups_from = None, ""
    try:
        groups, groups_from = groups_of(found.items, options.patients_csv, options.group_regex, options.own_groups)
    except ValueError as error:
        points.append(str(error))
    classes, asked_for = None, tuple[NamedClass, ...]()
    try:
        if options.classes:
            counted = class_counts(seen, found)
            asked_for = _named_classes(options.classes, list(counted), found)
            categories = set().union(*(counted if ALL in one.ids else one.ids for one in asked_for))
            classes = sorted(categories, key=class_order)
            found, seen, groups = _only_asked(asked_for, found, seen, groups)
        else:
            classes = _classes(source, seen, found, options.label)
    except ValueError as error:
        points.append(str(error))
    # While groups are open each image is taken for its own.
    names = {item.name: group for item, (group, _) in zip(found.items, groups or (), strict=bool(groups))}
    own = [names.get(one.item.name, one.item.name) for one in seen]
    leaks = same_in_two_groups(np.stack([one.thumbnail for one in seen]), own) if seen else []
    parts, notes = ({}, []) if options.no_split else split_of(found.items)
    found.notes.extend(notes)
    alike = [(seen[first].item.name, seen[other].item.name) for first, other, _ in leaks]
    if groups is not None and (pairs := in_two_parts(parts, groups, alike)):
        shown = {item.name: item.name if found.private else item.found_as for item in found.items}
        points.append(
            f"{source}: {len(pairs)} patient(s) or picture(s) are in two parts of its split"
            f" ({some([f'{shown[one]} and {shown[other]}' for one, other in pairs])}): give the images of one patient"
            " to one part or delete those of the other, correct the groups, or leave the split out by sa2va-rl data"
            " import --no_split"
        )
    decided = classes, groups, groups_from, leaks, tuple(points), skipped, asked_for
    return Survey(source, options, layout, description, found, seen, *decided, parts)


def _without_ignored(seen: list[Seen], found: Found, options: ImportOptions) -> list[Seen]:
    """Images without the classes that are to be ignored and those of the background, unless the user names one."""
    ignored, background = ignored_classes((one.pixels or {}).keys() for one in seen)
    parts = {name.strip() for name in (options.label or "").split(",")}
    with suppress(ValueError):  # said where the classes are chosen
        parts |= {part for one in read_classes(options.classes) for part in one.ids} if options.classes else set()
    parts -= {"", ALL}
    wanted = {_named(part, sorted(ignored | background), found.class_ids) for part in parts}
    ignored, background = ignored - wanted, background - wanted
    shares = [sum((one.pixels or {}).get(name, 0) for name in ignored) / (one.size[0] * one.size[1]) for one in seen]
    of = ", ".join(sorted(ignored))
    hidden = [one.item.name for one, share in zip(seen, shares, strict=True) if share > MOST_IGNORED]
    if hidden and not (parts and ignored == {FULL}):  # 255 may be a class that is not wanted
        found.faults.append(
            f"{len(hidden)} mask(s) ({some(hidden)}) have more than {MOST_IGNORED:.0%} of pixels to be ignored ({of}),"
            " and masks have none: annotate them, leave the images out, name the class background if it is that, or"
            " give --label NAME if they are a class"
        )
    elif ignored:
        found.remarks.append(
            f"pixels to be ignored ({of}) count as background: in {sum(map(bool, shares))} mask(s),"
            f" {max(shares):.1%} of the picture at most"
        )
    if background:
        found.notes.append(f"class(es) of the background, left out: {', '.join(sorted(background))}")
    left_out = ignored | background
    for number in [number for number, name in found.class_ids.items() if name in left_out]:
        del found.class_ids[number]
    kept = [{n: count for n, count in (one.pixels or {}).items() if n not in left_out} for one in seen]
    return [replace(one, pixels=one.pixels and pixels) for one, pixels in zip(seen, kept, strict=True)]


def _named_classes(path: Path, known: list[str], found: Found) -> tuple[NamedClass, ...]:
    """The classes of a file, their categories by the names that the masks have.

    ValueError as `read_classes`, or for a category that the source does not have; names class, field and remedy.
    """
    resolved = []
    for number, one in enumerate(read_classes(path)):
        where, fields = f"{path}: class {number} ({one.name!r})", dict[str, Any]()
        if not one.ids:
            raise ValueError(f"{where}: `ids` is missing; give the categories of its mask, or {ALL!r}")
        for key in ("ids", "asked_only_with", "asked_not_with", "absent_with"):
            whole = (ALL,) if key == "ids" else ()
            names = {p: ALL if p in whole else _named(p, known, found.class_ids) for p in getattr(one, key)}
            if unknown := [part for part, name in names.items() if name is None]:
                listed = ", ".join(known) or "nothing"
                raise ValueError(f"{where}: `{key}` has {unknown[0]!r}, but the masks hold {listed}; correct it")
            fields[key] = tuple(name for name in names.values() if name is not None)
        resolved.append(replace(one, **fields))
    return tuple(resolved)


def _only_asked(
    named: tuple[NamedClass, ...], found: Found, seen: list[Seen], groups: Groups | None
) -> tuple[Found, list[Seen], Groups | None]:
    """Images, decoded ones and groups without those in which no class is asked for; a note counts them."""
    wanted = {image.item.name for image in seen if any(one.asked(image.present) is not None for one in named)}
    if not wanted:
        raise ValueError("no image has a mask for a class of classes.json; correct its `ids`, or name other data")
    kept = [item.name in wanted for item in found.items]
    if not all(kept):
        note = f"{kept.count(False)} image(s) in which no class is asked for, left out"
        found = replace(found, items=list(compress(found.items, kept)), notes=[*found.notes, note])
        groups = groups and list(compress(groups, kept))
    return found, [image for image in seen if image.item.name in wanted], groups


def class_counts(seen: list[Seen], found: Found) -> dict[str, tuple[int, int]]:
    """Class -> number of images that have it, and its pixels; classes without any included."""
    images, pixels = Counter[str](), Counter[str]()
    for one in seen:
        images.update(one.present)
        pixels.update(one.pixels or {})
    names = {*pixels, *found.class_ids.values()}
    return {name: (images[name], pixels[name]) for name in sorted(names, key=class_order)}


def _looked_at(items: list[Item]) -> list[Seen | str]:
    """Each item decoded, or what is wrong with it."""

    def look(item: Item) -> Seen | str:
        try:
            image = item.load_image()
            size = (image.shape[0], image.shape[1])
            masks = item.load_masks(size) if item.load_masks else None
        except ValueError as error:
            return str(error)
        pixels = None if masks is None else {name: int(mask.sum()) for name, mask in masks.items()}
        return Seen(item, size, thumbnail(image), pixels, masks is None and looks_like_mask(image), item.aspect())

    with ThreadPoolExecutor() as threads:
        return list(tqdm(threads.map(look, items), "looking at images", len(items), leave=False, unit="image", delay=2))


def _classes(source: Path, seen: list[Seen], found: Found, label: str | None) -> list[str]:
    """The classes of the mask; ValueError if the user has to choose, or the choice has no pixel."""
    counts = class_counts(seen, found)
    occurring = [name for name, (images, _) in counts.items() if images]
    listed = ", ".join(f"{name} ({counts[name][0]} images)" for name in occurring)
    if (unused := sorted(counts.keys() - set(occurring), key=class_order)) and occurring:
        found.notes.append(f"{len(unused)} class(es) that no mask holds: {some(unused)}")
    open_choice = label is None and not occurring and len(counts) > 1  # of classes that are declared alone
    chosen = [] if open_choice else chosen_classes(label, occurring, found.class_ids)
    if chosen is None:
        raise ValueError(
            f"the masks hold {len(occurring)} classes: {listed}; choose one by --label NAME, or --label all for their"
            f" union: sa2va-rl doctor --data_root {shlex.quote(str(source))} --label"
            f" {shlex.quote(max(occurring, key=lambda name: counts[name]))}"
        )
    labelled = any(one.pixels is not None for one in seen)
    if labelled and not sum(counts[name][0] for name in chosen):
        what = f"class {', '.join(chosen)} is" if chosen else "all masks are"
        raise ValueError(
            f"{what} empty in every image; the masks hold {listed or 'zeros only'}; choose another --label"
        )
    return chosen


SIZES_SHOWN, LEAKS_SHOWN = 3, 10
NAME = "name them by --patients_csv patients.csv (columns image, group) or --group_regex '(?P<group>[^_/]+)_'"


def report_lines(survey: Survey) -> list[str]:
    """Layout, counts, sizes, classes, groups, what does not match, and suspected leaks; for the screen only."""
    items, seen = survey.found.items, survey.seen
    labelled = sum(item.load_masks is not None for item in items)
    sizes = Counter(one.size for one in seen).most_common()
    shown = ", ".join(f"{width} x {height} ({count})" for (height, width), count in sizes[:SIZES_SHOWN])
    more = f" and {len(sizes) - SIZES_SHOWN} other sizes" if len(sizes) > SIZES_SHOWN else ""
    head = f"skipped: {len(survey.skipped)} broken file(s), left out by --skip {survey.options.skip}"
    return [
        f"layout: {survey.description}",
        f"images: {len(items)}, {labelled} with a mask{f'; {shown}{more}' if sizes else ''}",
        *_class_lines(survey),
        *_phrase_lines(survey),
        _patients_line(survey),
        *_split_line(survey),
        *(f"note: {note}" for note in (*survey.found.notes, *survey.found.remarks)),
        *([head, *(f"  {fault}" for fault in survey.skipped)] if survey.skipped else []),
        *_leak_lines(survey),
    ]


def _split_line(survey: Survey) -> list[str]:
    counts = Counter(survey.parts.values())
    sizes = ", ".join(f"{part} {counts[part]}" for part in OWN_SPLITS if counts[part])
    return [f"split of the source is kept: {sizes}"] if counts else []


def _patients_line(survey: Survey) -> str:
    """How many patients there are, by what, and an example, which no name of a patient in a DICOM file is."""
    if survey.groups is None:
        return "patients: not known"
    if survey.groups_from == NONE:
        return (
            "patients: none is named, so each image is one of its own, which every report repeats as a possible leak;"
            f" {NAME}"
        )
    images = Counter(group for group, _ in survey.groups)
    name, count = max(images.items(), key=lambda one: one[1])
    example = "" if survey.found.private else f", e.g. {name!r}: {count} image{'s' * (count > 1)}"
    alone = f"; {survey.alone} images name no patient, each is one of its own" * bool(survey.alone)
    by = survey.groups_from.removeprefix(PROPOSED)
    open_ = f"; proposed, not confirmed; if they are wrong, {NAME}" * (by != survey.groups_from)
    return f"patients by {by}: {len(images) - survey.alone}{example}{alone}{open_}"


def _class_lines(survey: Survey) -> list[str]:
    """Each class with its images and its share of their pixels."""
    annotated = [one for one in survey.seen if one.pixels is not None]
    total = sum(one.size[0] * one.size[1] for one in annotated)
    lines = [
        f"class {name}: in {images} images, {pixels / max(total, 1):.2%} of the pixels"
        + ", the mask" * (name in (survey.classes or ()))
        for name, (images, pixels) in class_counts(survey.seen, survey.found).items()
        if images
    ]
    empty = sum(not set(one.present) & set(survey.classes or ()) for one in annotated)
    if survey.classes and empty and not survey.named:
        lines.append(f"empty masks: {empty}, which mean that the object is absent")
    return lines


def _phrase_lines(survey: Survey) -> list[str]:
    """The phrase; or each class that is asked for by name, with its images and certain absences."""
    if not survey.options.classes:
        default = survey.phrase == PHRASE and survey.options.phrase is None  # the object may be another one
        note = "; note: the default, which `sa2va-rl data import --phrase` changes" if default else ""
        return [f"phrase: {survey.phrase}{note}"]
    lines = []
    for one in survey.named:
        asked = [categories for image in survey.seen if (categories := one.asked(image.present)) is not None]
        absent = asked.count(())
        counts = f"{len(asked) - absent} images, certainly absent in {absent}"
        lines.append(f"asked for by name: {one.name}: {counts}; {len(one.phrases)} wordings, 1 held out")
    for one, other in combinations(survey.named, 2):
        both = [image for image in survey.seen if one.asked(image.present) and other.asked(image.present)]
        if both and one.excludes(other):
            lines.append(
                f"`never_with`: {len(both)} image(s) hold {one.name} and {other.name}; correct masks or classes"
            )
    return lines


def _leak_lines(survey: Survey) -> list[str]:
    """Pictures that are in two groups, the most similar pairs by name."""
    if not survey.leaks:
        return []
    own = "" if survey.groups else " (no groups are known yet)"
    what = f"pairs of images in two groups{own} whose thumbnails correlate above {SAME}"
    head = f"suspected leaks: {len(survey.leaks)} {what}, the same picture"
    # Paths of DICOM files name patients, and the main job's output may be kept.
    names = [one.item.name if survey.layout == "dicom" else one.item.found_as for one in survey.seen]
    shown = [f"  {names[first]} and {names[second]} ({likeness:.3f})" for first, second, likeness in survey.leaks]
    rest = "  look at them: a run takes such groups for one; images of one patient need one group (--patients_csv FILE)"
    return [head, *shown[:LEAKS_SHOWN], rest]
