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
OWN_SPLITS = ("train", "val", "test")  # of data that have the field `split`; `train` becomes reward and policy
FRACTIONS = (0.60, 0.15, 0.25)  # of the groups in `OWN_SPLITS`; 14 groups give 4, 4, 2, 4
VERDICT = 6  # groups of val, and of test, below which no decision and no verdict is possible (`MIN_PATIENTS`)
TRAINING = 8  # groups of reward and policy that stay where val and test are filled up to `VERDICT`
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
    sizes: tuple[int, ...] | None = field(default=None, compare=False)  # where 60 / 15 / 25 % give others; not saved

    @property
    def settings(self) -> dict[str, Any]:
        """What, beside the data, runs must share to have one split."""
        return {"split_seed": self.seed, "split_sizes": None if self.sizes is None else list(self.sizes)}

    def ids(self, name: str) -> set[str]:
        """The groups of a split, with those that join it."""
        return {*self.groups[name], *(self.joined if name == "policy" else ())}


def make_split(
    samples: Sequence[Grouped],
    seed: int,
    fingerprint: Callable[[Any], str] = data_fingerprint,
    fractions: tuple[float, float, float] = FRACTIONS,
) -> Split:
    """Shuffle the groups and cut them into `SPLITS`, or keep the split that the data have.

    `fractions` are the shares of train, which is halved for reward and policy, val and test. By the default ones val
    and test have at least `VERDICT` groups from 20 groups on. Of data with a split its `train` is cut in halves, and
    gives a share to val or test where the data have none.

    Equal for equal data and seed, whatever the order of `samples`. Groups without any mask go to `policy`, the only
    split that can use them, in addition to its share; if no group has a mask, all groups are cut. ValueError for fewer
    groups than splits, or a group in two parts of the data's own split.
    """
    given, pool = _given(samples)
    labelled = {sample.group_id for sample in samples if sample.labelled}
    cut = sorted(pool & labelled if labelled else pool)
    names = [name for name in SPLITS if name not in given]
    if len(cut) < len(names):
        kind = "labelled patient(s)" if labelled else "patient(s)"
        where = f" in `train` of the field `split` ({', '.join(given)} as given)" * bool(given)
        images = len({getattr(one, "image_path", one.sample_id) for one in samples if one.group_id in cut})
        raise ValueError(
            f"{len(cut)} {kind}{where} with {images} image(s), but {', '.join(names)} need one each; annotate images of"
            " more patients (from 6 labelled ones on `sa2va-rl improve` decides by cross-validation), or check that"
            " `group` / --group_regex tells the patients apart"
        )
    random.Random(seed).shuffle(cut)
    counts = _counts(len(cut), names, fractions)
    taken = iter(cut)
    groups = given | {name: {next(taken) for _ in range(n)} for name, n in zip(names, counts, strict=True)}
    groups["policy"] |= pool - set(cut)
    usual = given or counts == _largest_remainder(len(cut), _shares(names, FRACTIONS))
    sizes = None if usual else tuple(counts)
    return Split({name: tuple(sorted(groups[name])) for name in SPLITS}, seed, fingerprint(samples), sizes=sizes)


def _given(samples: Sequence[Grouped]) -> tuple[dict[str, set[str]], set[str]]:
    """The groups of val and test as the data give them, and those that are to be cut."""
    parts: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))  # group -> its names -> parts
    for sample in samples:  # captioned regions have neither `split` nor `group`
        name, part = getattr(sample, "group", sample.group_id), getattr(sample, "split", None)
        parts[sample.group_id][name].add(part or OWN_SPLITS[0])
    own = {group: set().union(*names.values()) for group, names in parts.items()}
    if twice := [parts[group] for group, of in own.items() if len(of) > 1]:
        told = [" = ".join(f"{name} ({', '.join(sorted(of))})" for name, of in sorted(one.items())) for one in twice]
        raise ValueError(
            f"{len(twice)} patient(s) or group(s) in two parts of the field `split`: {first_names(told)}; a patient, or"
            " groups that hold the same picture (=), must be in one: correct `split`, or leave the records of one out"
        )
    given = {name: {group for group, of in own.items() if name in of} for name in OWN_SPLITS[1:]}
    return {name: groups for name, groups in given.items() if groups}, own.keys() - set().union(*given.values())


def _shares(names: Sequence[str], fractions: Sequence[float]) -> list[float]:
    """The shares of some of `SPLITS`, which sum to 1."""
    train, val, test = fractions
    shares = [dict(zip(SPLITS, (train / 2, train / 2, val, test), strict=True))[name] for name in names]
    return [share / sum(shares) for share in shares]


def _counts(total: int, names: Sequence[str], fractions: Sequence[float]) -> list[int]:
    """Number of groups per split; each at least 1 if there are so many."""
    counts = _largest_remainder(total, _shares(names, fractions))
    further = len(names) - 2  # beside reward and policy
    filled = tuple(fractions) == FRACTIONS and total >= TRAINING + VERDICT * further
    least = [1, 1, *[VERDICT if filled else 1] * further]
    for place, number in enumerate(least):
        while counts[place] < number:
            spare = [count - kept for count, kept in zip(counts, least, strict=True)]
            counts[spare.index(max(spare))] -= 1
            counts[place] += 1
    return counts


def _largest_remainder(total: int, shares: Sequence[float]) -> list[int]:
    exact = [round(share * total, 6) for share in shares]  # 0.15 * 20 must be 3, not 2.9999
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
    ids_valid = all(
        isinstance(ids, list) and (ids or name in ("val", "test")) and all(isinstance(i, str) for i in ids)
        for name, ids in groups.items()  # a fold of a cross-validation has no test, a training on all no val
    )
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
