"""What an import would do: every image and mask of a source is decoded once, nothing is written."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from rl_reward_network.data.annotations import MAX_FAULTS_LISTED
from rl_reward_network.data.images import IMAGE_SUFFIXES, is_turned
from rl_reward_network.data_import.classes import chosen_classes, class_order
from rl_reward_network.data_import.files import broken_links, unread_note
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


@dataclass(frozen=True)
class Seen:
    """A decoded item: its (H, W), thumbnail, and the pixels of each class (None: unlabelled)."""

    item: Item
    size: tuple[int, int]
    thumbnail: np.ndarray
    pixels: dict[str, int] | None


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
    found.faults.extend(broken_links(source))
    if not (found.items or found.faults):
        raise ValueError(f"{source}: {description}, but no image; name the folder that holds them")
    looked = _looked_at(found.items)
    seen = [result for result in looked if isinstance(result, Seen)]
    found.notes.extend(_turned_note(source, seen))
    points = _fault_list(source, [*found.faults, *(result for result in looked if isinstance(result, str))])
    groups, groups_from = None, ""
    try:
        groups, groups_from = groups_of(found.items, options.groups, options.group_regex)
    except ValueError as error:
        points.append(str(error))
    classes = None
    try:
        classes = _classes(seen, found, options.label)
    except ValueError as error:
        points.append(str(error))
    leaks = _leaks(seen, found, groups)
    return Survey(
        *(source, options, layout, description, found, seen, classes, groups, groups_from, leaks), tuple(points)
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
        return Seen(item, size, thumbnail(image), pixels)

    with ThreadPoolExecutor() as threads:
        return list(tqdm(threads.map(look, items), "looking at images", len(items), leave=False, unit="image", delay=2))


def _turned_note(source: Path, seen: list[Seen]) -> list[str]:
    """How many labelled images EXIF turns: their masks' size need not show on which pixels they were drawn."""
    files = [source / one.item.found_as for one in seen if one.pixels is not None]
    turned = sum(path.suffix.lower() in IMAGE_SUFFIXES and is_turned(path) for path in files)
    return [f"{turned} image(s) have an EXIF rotation; masks must be drawn on the upright image"] if turned else []


def _fault_list(source: Path, faults: list[str]) -> list[str]:
    """One text with the first faults and their number; [] without any."""
    if len(faults) <= 1:
        return faults
    more = [f"... and {len(faults) - MAX_FAULTS_LISTED} more"] if len(faults) > MAX_FAULTS_LISTED else []
    return ["\n  ".join([f"{source}: {len(faults)} faults", *faults[:MAX_FAULTS_LISTED], *more])]


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
