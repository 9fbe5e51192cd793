"""What an import would do: every image and mask of a source is decoded once, nothing is written."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from rl_reward_network.data.annotations import MAX_FAULTS_LISTED
from rl_reward_network.data.images import IMAGE_SUFFIXES, is_turned
from rl_reward_network.data.mask_checks import MaskShape, field_of_view, looks_like_mask, mask_shape
from rl_reward_network.data_import.classes import chosen_classes, class_order
from rl_reward_network.data_import.files import SHOWN, unread_note
from rl_reward_network.data_import.groups import Groups, groups_of
from rl_reward_network.data_import.items import Found, Item
from rl_reward_network.data_import.layouts import AUTO, LAYOUTS, recognise_layout
from rl_reward_network.data_import.leaks import suspected_leaks, thumbnail

PHRASE = "blood vessel"  # as in the built-in prompts


@dataclass(frozen=True)
class ImportOptions:
    """How a source is imported; the fields are flags of `sa2va-rl data import`."""

    groups: str | None = None
    group_regex: str | None = None
    label: str | None = None
    phrase: str | None = None
    layout: str = AUTO
    frames: str = "middle"
    skip: int = 0
    own_groups: bool = False
    """Of unlabelled images: one whose group is not known is a group of its own."""

    def __post_init__(self) -> None:
        """Refuse a negative limit."""
        if self.skip < 0:
            raise ValueError(f"skip is {self.skip}, expected 0 or more: at most so many broken files are left out")


@dataclass(frozen=True)
class Seen:
    """A decoded item: its (H, W), thumbnail, and the pixels and looks of each class (None: unlabelled).

    `flat` says whether the image itself looks like a mask.
    """

    item: Item
    size: tuple[int, int]
    thumbnail: np.ndarray
    pixels: dict[str, int] | None
    shapes: dict[str, MaskShape]
    flat: bool


@dataclass(frozen=True, eq=False)
class Survey:
    """A source, and what was decided for it.

    Attributes:
        source, options: as they were given.
        layout, description: key of `LAYOUTS`, and what it was taken for.
        found: its images.
        seen: the decoded ones, without those that have a fault.
        classes: those whose union is the mask; None while open.
        groups, groups_from: of each image, names not hidden yet; None while open.
        leaks: number of suspected pairs, and the most similar ones: index, index, correlation.
        open_points: what has to be repaired or decided before anything can be written.
        skipped: broken files that are left out, each with what is wrong; names no patient where names are hidden.
    """

    source: Path
    options: ImportOptions
    layout: str
    description: str
    found: Found
    seen: list[Seen]
    classes: list[str] | None
    groups: Groups | None
    groups_from: str
    leaks: tuple[int, list[tuple[int, int, float]]]
    open_points: tuple[str, ...]
    skipped: tuple[str, ...]

    @property
    def phrase(self) -> str:
        """The phrase of all records: as given, else the class's name, else that of the built-in prompts."""
        names = [name for name in self.classes or () if not (name.isdecimal() or name.startswith("#"))]
        named = names[0].replace("_", " ") if len(names) == len(self.classes or ()) == 1 else PHRASE
        return self.options.phrase or named

    def check(self) -> None:
        """Raise a ValueError with the open points, if there are any."""
        if self.open_points:
            raise ValueError("\n".join(self.open_points))


def survey_source(source: Path, options: ImportOptions) -> Survey:
    """Recognise, read and decode a source.

    Raises:
        ValueError: the layout is not recognised, or the source cannot be read at all; other faults are `open_points`.
    """
    layout, description = recognise_layout(source, options.layout)
    found = LAYOUTS[layout].read(source, options.frames)
    found.notes.extend(unread_note(source, named=not found.private))
    if not (found.items or found.faults or found.broken):
        raise ValueError(f"{source}: {description}, but no image; name the folder that holds them")
    looked = _looked_at(found.items)
    seen = [result for result in looked if isinstance(result, Seen)]
    failed = {item.name: fault for item, fault in zip(found.items, looked, strict=True) if isinstance(fault, str)}
    broken, skipped = {**found.broken, **failed}, tuple[str, ...]()
    if seen and 0 < len(broken) <= options.skip:
        skipped = tuple(_as_skipped(name, fault, found.private) for name, fault in broken.items())
        found, broken = replace(found, items=[one.item for one in seen]), {}
    found.notes.extend(_turned_note(source, seen))
    found.faults.extend(_flat_fault(source, seen, found))
    points = _fault_list(source, [*found.faults, *broken.values()], len(broken) if seen else 0)
    groups, groups_from = None, ""
    try:
        groups, groups_from = groups_of(found.items, options.groups, options.group_regex, options.own_groups)
    except ValueError as error:
        points.append(str(error))
    classes = None
    try:
        classes = _classes(seen, found, options.label)
    except ValueError as error:
        points.append(str(error))
    found.notes.extend(_mask_notes(seen, classes))
    leaks = _leaks(seen, found, groups)
    return Survey(
        *(source, options, layout, description, found, seen, classes, groups, groups_from, leaks),
        tuple(points),
        skipped,
    )


def class_counts(seen: list[Seen], found: Found) -> dict[str, tuple[int, int]]:
    """Class -> number of images that have it, and its pixels; classes without any included."""
    images, pixels = Counter[str](), Counter[str]()
    for one in seen:
        images.update(name for name, count in (one.pixels or {}).items() if count)
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
        shapes = {name: mask_shape(mask) for name, mask in (masks or {}).items()}
        return Seen(item, size, thumbnail(image), pixels, shapes, masks is None and looks_like_mask(image))

    with ThreadPoolExecutor() as threads:
        return list(tqdm(threads.map(look, items), "looking at images", len(items), leave=False, unit="image", delay=2))


def _as_skipped(name: str, fault: str, private: bool) -> str:
    """The fault of a broken file, by the written name where that of the file may be a patient's."""
    return f"{name}: {fault.split(': ', 1)[-1]}" if private else fault


def _flat_fault(source: Path, seen: list[Seen], found: Found) -> list[str]:
    """The fault that images without a mask are probably masks themselves."""
    flat = [one.item.name if found.private else one.item.found_as for one in seen if one.flat]
    names = ", ".join([*flat[:SHOWN], *["..."] * (len(flat) > SHOWN)])
    what = f"{len(flat)} image(s) without a mask hold a few flat colours, as masks do ({names})"
    return [f"{source}: {what}; put them into masks/ with the name of their image, or leave them out"] if flat else []


def _mask_notes(seen: list[Seen], classes: list[str] | None) -> list[str]:
    """Masks that may be wrong, where one class is the mask; the pre-flight check notes the same."""
    (name,) = classes if classes and len(classes) == 1 else ("",)
    shapes = [one.shapes[name] for one in seen if name in one.shapes]
    inverted = sum(shape.inverted for shape in shapes)
    notes = [f"look: {inverted} mask(s) cover most of the picture and of its border: inverted?"] if inverted else []
    same = field_of_view(shapes)
    return notes + ([f"look: {same}"] if same else [])


def _turned_note(source: Path, seen: list[Seen]) -> list[str]:
    """How many labelled images EXIF turns: their masks' size need not show on which pixels they were drawn."""
    files = [source / one.item.found_as for one in seen if one.pixels is not None]
    turned = sum(path.suffix.lower() in IMAGE_SUFFIXES and is_turned(path) for path in files)
    return [f"{turned} image(s) have an EXIF rotation; masks must be drawn on the upright image"] if turned else []


def _fault_list(source: Path, faults: list[str], broken: int) -> list[str]:
    """One text with the first faults, their number, and how to leave out those of broken files; [] without any."""
    more = [f"... and {len(faults) - MAX_FAULTS_LISTED} more"] if len(faults) > MAX_FAULTS_LISTED else []
    head = [f"{source}: {len(faults)} faults"] if len(faults) > 1 else []
    skip = [f"--skip {broken} of sa2va-rl data import leaves out the files that cannot be read"] if broken else []
    return ["\n  ".join([*head, *faults[:MAX_FAULTS_LISTED], *more, *skip])] if faults else []


def _classes(seen: list[Seen], found: Found, label: str | None) -> list[str]:
    """The classes of the mask; ValueError if the user has to choose, or the choice has no pixel."""
    counts = class_counts(seen, found)
    listed = ", ".join(f"{name} ({images} images)" for name, (images, _) in counts.items())
    chosen = chosen_classes(label, counts, found.class_ids)
    if chosen is None:
        raise ValueError(
            f"the masks hold {len(counts)} classes: {listed}; give --label NAME, or --label all for their union"
        )
    labelled = any(one.pixels is not None for one in seen)
    if labelled and not sum(counts[name][0] for name in chosen):
        what = f"class {', '.join(chosen)} is" if chosen else "all masks are"
        raise ValueError(
            f"{what} empty in every image; the masks hold {listed or 'zeros only'}; choose another --label"
        )
    return chosen


def _leaks(seen: list[Seen], found: Found, groups: Groups | None) -> tuple[int, list[tuple[int, int, float]]]:
    """Suspected leaks among the decoded images; while groups are open each image is taken for its own."""
    if not seen:
        return 0, []
    names = {item.name: group for item, (group, _) in zip(found.items, groups or (), strict=bool(groups))}
    own = [names.get(one.item.name, one.item.name) for one in seen]
    return suspected_leaks(np.stack([one.thumbnail for one in seen]), own)
