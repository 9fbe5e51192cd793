"""What `sa2va-rl data import` prints about a source."""

from collections import Counter

from rl_reward_network.data_import.groups import NONE
from rl_reward_network.data_import.leaks import SUSPECT
from rl_reward_network.data_import.survey import Survey, class_counts

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
        f"phrase: {survey.phrase}",
        f"groups: {_groups(survey)}",
        *(f"note: {note}" for note in survey.found.notes),
        *_leaks(survey),
    ]


def _sizes(survey: Survey) -> str:
    """The commonest sizes, width x height."""
    sizes = Counter(one.size for one in survey.seen).most_common()
    shown = ", ".join(f"{width} x {height} ({count})" for (height, width), count in sizes[:SIZES_SHOWN])
    return f"; {shown}{f' and {len(sizes) - SIZES_SHOWN} other sizes' if len(sizes) > SIZES_SHOWN else ''}" * bool(
        sizes
    )


def _classes(survey: Survey) -> list[str]:
    """Each class with its images and its share of their pixels."""
    total = sum(one.size[0] * one.size[1] for one in survey.seen if one.pixels is not None)
    lines = []
    for name, (images, pixels) in class_counts(survey.seen, survey.found).items():
        used = ", the mask" if name in (survey.classes or ()) else ""
        lines.append(f"class {name}: in {images} images, {pixels / max(total, 1):.2%} of the pixels{used}")
    empty = sum(
        one.pixels is not None and not any(one.pixels.get(c) for c in survey.classes or ()) for one in survey.seen
    )
    if survey.classes and empty:
        lines.append(f"empty masks: {empty}, which mean that the object is absent")
    return lines


def _groups(survey: Survey) -> str:
    if survey.groups is None:
        return "not known"
    if survey.groups_from == NONE:
        return "none; each image is its own, which every report will repeat as a possible leak"
    return f"{len({group for group, _ in survey.groups})}, {FROM[survey.groups_from]}"


def _leaks(survey: Survey) -> list[str]:
    """Suspected pairs, the most similar ones by name."""
    count, pairs = survey.leaks
    if not count:
        return []
    own = "" if survey.groups else " (no groups are known yet)"
    lines = [
        f"suspected leaks: {count} pairs of nearly identical images in two groups{own}, correlation above {SUSPECT}"
    ]
    lines += [
        f"  {survey.seen[a].item.found_as} = {survey.seen[b].item.found_as} ({likeness:.3f})"
        for a, b, likeness in pairs
    ]
    return [*lines, "  give images of one patient one group (--groups patients.csv)"]
