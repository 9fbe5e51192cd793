"""What `sa2va-rl data import` prints about a source."""

from collections import Counter

from rl_reward_network.data_import.groups import NONE
from rl_reward_network.data_import.leaks import SUSPECT
from rl_reward_network.data_import.survey import PHRASE, Survey, class_counts

SIZES_SHOWN = 3
FROM = {"layout": "from the files themselves", "table": "from --groups", "file names": "from the file names"}


def report_lines(survey: Survey) -> list[str]:
    """Layout, counts, sizes, classes, groups, what does not match, and suspected leaks; for the screen only."""
    items = survey.found.items
    labelled = sum(item.load_masks is not None for item in items)
    return [
        f"layout: {survey.description}",
        f"images: {len(items)}, {labelled} with a mask{_sizes(survey)}",
        *_classes(survey),
        f"phrase: {survey.phrase}{_default_phrase(survey)}",
        f"groups: {_groups(survey)}",
        *(f"note: {note}" for note in survey.found.notes),
        *_skipped(survey),
        *_leaks(survey),
    ]


def _sizes(survey: Survey) -> str:
    """The commonest sizes, width x height."""
    sizes = Counter(one.size for one in survey.seen).most_common()
    shown = ", ".join(f"{width} x {height} ({count})" for (height, width), count in sizes[:SIZES_SHOWN])
    more = f" and {len(sizes) - SIZES_SHOWN} other sizes" if len(sizes) > SIZES_SHOWN else ""
    return f"; {shown}{more}" if sizes else ""


def _classes(survey: Survey) -> list[str]:
    """Each class with its images and its share of their pixels."""
    total = sum(one.size[0] * one.size[1] for one in survey.seen if one.pixels is not None)
    lines = []
    for name, (images, pixels) in class_counts(survey.seen, survey.found).items():
        used = ", the mask" if name in (survey.classes or ()) else ""
        lines.append(f"class {name}: in {images} images, {pixels / max(total, 1):.2%} of the pixels{used}")
    labelled = [one.pixels for one in survey.seen if one.pixels is not None]
    empty = sum(not any(pixels.get(name) for name in survey.classes or ()) for pixels in labelled)
    if survey.classes and empty:
        lines.append(f"empty masks: {empty}, which mean that the object is absent")
    return lines


def _default_phrase(survey: Survey) -> str:
    """What to do where the phrase is no name of a class, and the object may be another one."""
    default = survey.phrase == PHRASE and survey.options.phrase is None
    return "; note: the default, which `sa2va-rl data import --phrase` changes" if default else ""


def _groups(survey: Survey) -> str:
    if survey.groups is None:
        return "not known"
    if survey.groups_from == NONE:
        return "none; each image is its own, which every report will repeat as a possible leak"
    return f"{len({group for group, _ in survey.groups})}, {FROM[survey.groups_from]}"


def _skipped(survey: Survey) -> list[str]:
    """The broken files that are left out, each of them: they are few."""
    head = f"skipped: {len(survey.skipped)} broken file(s), left out by --skip {survey.options.skip}"
    return [head, *(f"  {fault}" for fault in survey.skipped)] if survey.skipped else []


def _leaks(survey: Survey) -> list[str]:
    """Suspected pairs, the most similar ones by name."""
    count, pairs = survey.leaks
    if not count:
        return []
    own = "" if survey.groups else " (no groups are known yet)"
    head = f"suspected leaks: {count} pairs of images in two groups{own} whose thumbnails correlate above {SUSPECT}"
    # Paths of DICOM files name patients, and the main job's output may be kept.
    names = [one.item.name if survey.layout == "dicom" else one.item.found_as for one in survey.seen]
    shown = [f"  {names[first]} and {names[second]} ({likeness:.3f})" for first, second, likeness in pairs]
    return [head, *shown, "  look at them; images of one patient need one group (--groups patients.csv)"]
