"""Who is one patient, splits in which no patient is twice, and the file that stores the split of a run.

`reward` trains the reward network; `policy` trains the prompt policy, on patients that the reward network has not been
trained on; `val` selects; `test` is for the final evaluation.

A patient in two spellings would leak. "Patient 7", "patient_07" and "PATIENT  7" are one, and so are the two Unicode
forms of an umlaut. Whether "Mueller" is "Müller", or "7" is "Patient 7", only the user can tell.
"""

import random
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rl_reward_network.atomic_io import read_json, write_json
from rl_reward_network.data.items import data_fingerprint, first_names

SPLITS = ("reward", "policy", "val", "test")
FRACTIONS = (0.30, 0.30, 0.15, 0.25)  # of the groups; 14 groups give 4, 4, 2, 4
FORMAT_VERSION = 1
OTHER_DATA = (
    "the split is of other data, or these were changed: name that data folder (--data_root), or begin a new run"
)


class Grouped(Protocol):
    """Anything that can be split, such as a `Sample` or a `RegionSample`, by these pseudonyms."""

    @property
    def sample_id(self) -> str:
        """Of the sample."""

    @property
    def group_id(self) -> str:
        """Of the unit that must not be in two splits."""

    @property
    def series_id(self) -> str:
        """Of a series of nearly identical images."""

    @property
    def labelled(self) -> bool:
        """Whether there is ground truth."""


S = TypeVar("S", bound=Grouped)


@dataclass(frozen=True)
class Split:
    """Which group is in which split."""

    groups: dict[str, tuple[str, ...]]  # split name -> sorted group ids (pseudonyms)
    seed: int
    fingerprint: str  # `data_fingerprint` of the data that were split
    joined: tuple[str, ...] = field(default=(), compare=False)  # further groups of `policy`; not saved

    def ids(self, name: str) -> set[str]:
        """The groups of a split, with those that join it."""
        return {*self.groups[name], *(self.joined if name == "policy" else ())}


def make_split(samples: Sequence[Grouped], seed: int, fingerprint: Callable[[Any], str] = data_fingerprint) -> Split:
    """Shuffle the groups and cut them 30 / 30 / 15 / 25 % (largest remainder: at least one group each).

    Equal for equal data and seed, whatever the order of `samples`. Groups without any mask go to `policy`, the only
    split that can use them, in addition to its share; if no group has a mask, all groups are cut. ValueError for fewer
    than 4 groups.
    """
    all_groups = {sample.group_id for sample in samples}
    labelled = {sample.group_id for sample in samples if sample.labelled}
    cut = sorted(labelled or all_groups)
    bare = all_groups - set(cut)
    if len(cut) < len(SPLITS):
        raise ValueError(
            f"{len(cut)} group(s){' with masks' if labelled else ''}, but {', '.join(SPLITS)} need one each; annotate"
            " images of more patients, or check that `group` / --group_regex tells the patients apart"
        )
    random.Random(seed).shuffle(cut)
    taken = iter(cut)
    groups = {name: {next(taken) for _ in range(n)} for name, n in zip(SPLITS, _counts(len(cut)), strict=True)}
    groups["policy"] |= bare
    return Split({name: tuple(sorted(ids)) for name, ids in groups.items()}, seed, fingerprint(samples))


def _counts(total: int) -> list[int]:
    """Number of groups per split, by largest remainder; each at least 1 from 4 groups on."""
    exact = [round(fraction * total, 6) for fraction in FRACTIONS]  # 0.15 * 20 must be 3, not 2.9999
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def save_split(split: Split, path: Path) -> None:
    """Write a split as JSON, whole or not at all."""
    content = {"groups": split.groups, "seed": split.seed, "fingerprint": split.fingerprint}
    write_json(path, {"format_version": FORMAT_VERSION, **content})


def load_split(path: Path, samples: Sequence[Grouped], fingerprint: Callable[[Any], str] = data_fingerprint) -> Split:
    """Read a split; ValueError for one of other data, of another version, or with a group in two splits or in none."""
    split = _parse(read_json(path), path)
    owners = Counter(group for ids in split.groups.values() for group in ids)
    if leaks := [group for group, count in owners.items() if count > 1]:
        raise ValueError(f"{path}: leak: group(s) {first_names(leaks)} appear more than once; begin a new run")
    present = {sample.group_id for sample in samples}
    if missing := present - owners.keys():
        raise ValueError(f"{path}: group(s) {first_names(missing)} of the data are in no split; {OTHER_DATA}")
    if absent := owners.keys() - present:
        raise ValueError(f"{path}: group(s) {first_names(absent)} are not in the data; {OTHER_DATA}")
    if split.fingerprint != (actual := fingerprint(samples)):
        raise ValueError(f"{path}: fingerprint is {split.fingerprint[:12]}, the data give {actual[:12]}; {OTHER_DATA}")
    return split


def _parse(value: Any, path: Path) -> Split:
    version = value.get("format_version") if isinstance(value, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(f"{path}: format_version is {version!r}, this program reads {FORMAT_VERSION}; begin a new run")
    groups, seed, fingerprint = (value.get(key) for key in ("groups", "seed", "fingerprint"))
    if not isinstance(groups, dict) or groups.keys() != set(SPLITS):
        raise ValueError(f"{path}: `groups` must have exactly the keys {', '.join(SPLITS)}; begin a new run")
    ids_valid = all(isinstance(ids, list) and ids and all(isinstance(i, str) for i in ids) for ids in groups.values())
    if not ids_valid or not isinstance(seed, int) or not isinstance(fingerprint, str):
        raise ValueError(f"{path}: each split needs a list of group ids, and `seed` and `fingerprint`; begin a new run")
    return Split({name: tuple(groups[name]) for name in SPLITS}, seed, fingerprint)


def select(samples: Iterable[S], split: Split, name: str) -> list[S]:
    """The samples of one split, in the given order."""
    if name not in SPLITS:
        raise ValueError(f"split {name!r} is unknown, expected one of {', '.join(SPLITS)}")
    groups = split.ids(name)
    return [sample for sample in samples if sample.group_id in groups]


def subsample(samples: Iterable[S], count: int, seed: int) -> list[S]:
    """`count` samples (all, if there are fewer), one of each series before a second of any.

    Frames of one series are nearly identical, so a few of them are representative. Equal for equal samples and seed,
    whatever their order.
    """
    if count < 0:
        raise ValueError(f"count must be >= 0, got {count}")
    ordered = sorted(samples, key=lambda sample: sample.sample_id)
    random.Random(seed).shuffle(ordered)
    series: dict[str, list[S]] = defaultdict(list)
    for sample in ordered:
        series[sample.series_id].append(sample)
    return [sample for turn in zip_longest(*series.values()) for sample in turn if sample is not None][:count]


PARTS = re.compile(r"\d+|[^\d ]+")


def patient_key(name: str) -> str:
    """What all spellings of a name share: letters without case, numbers without leading zeros, one space between."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    marks = "".join(one if one.isalnum() or unicodedata.category(one)[0] == "M" else " " for one in folded)
    parts = [str(int(part)) if part.isdecimal() else part for part in PARTS.findall(marks)]
    return " ".join(parts) or folded.strip()


def spellings(names: Iterable[str]) -> dict[str, list[str]]:
    """Key -> its different spellings, sorted."""
    found: dict[str, set[str]] = defaultdict(set)
    for name in names:
        found[patient_key(name)].add(name)
    return {key: sorted(written) for key, written in found.items()}


def one_spelling(names: Iterable[str]) -> dict[str, str]:
    """Name -> the name that stands for all spellings of that patient: the first one in sorted order."""
    return {name: written[0] for written in spellings(names).values() for name in written}
