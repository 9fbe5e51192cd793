"""The split that a source has, by folders train/, val/ and test/ or by its files, which an import keeps."""

from collections.abc import Sequence
from pathlib import PurePosixPath

from rl_reward_network.data.splits import OWN_SPLITS
from rl_reward_network.data_import.files import part_of, some
from rl_reward_network.data_import.items import Groups, Item

TRAIN = OWN_SPLITS[0]
Parts = dict[str, str]
"""Name of an image -> train, val or test; {} without a split."""


def split_of(items: Sequence[Item]) -> tuple[Parts, list[str]]:
    """The part of each image, where masks are in train and in another part, and notes.

    Images of a part without any mask are unlabelled ones of train.
    """
    parts = {item.name: part_of(PurePosixPath(item.found_as)) if item.part is None else item.part for item in items}
    with_masks = {parts[item.name] for item in items if item.load_masks} - {""}
    if TRAIN not in with_masks or len(with_masks) < 2:
        return {}, []
    if outside := [name for name, part in parts.items() if not part]:
        return {}, [f"split of the source is not kept: {len(outside)} image(s) are in no part of it ({some(outside)})"]
    bare = [name for name, part in parts.items() if part not in with_masks]
    notes = [f"{len(bare)} image(s) of a part without masks ({some(bare)}) join train, unlabelled"] if bare else []
    return {name: part if part in with_masks else TRAIN for name, part in parts.items()}, notes


def in_two_parts(parts: Parts, groups: Groups, alike: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Pairs of images that no split may part, but this one does: one for each patient, and those that are `alike`.

    `groups` are those of the images of `parts`, in their order.
    """
    first: dict[str, dict[str, str]] = {}
    for (name, part), (group, _) in zip(parts.items(), groups if parts else (), strict=True):
        first.setdefault(group, {}).setdefault(part, name)
    patients = [(names[0], names[1]) for of in first.values() if len(names := list(of.values())) > 1]
    return patients + [pair for pair in alike if parts and parts[pair[0]] != parts[pair[1]]]
