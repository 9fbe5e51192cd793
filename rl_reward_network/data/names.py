"""Objects asked for by name: `classes.json` beside annotations.json, with the wordings of each class.

The file is a list of classes with the fields of `NamedClass`; docs/how-to/your-data.md describes it. `name` is the
class's phrase in annotations.json. `ids` and the next three are of an import and name categories of the source; classes
whose `ids` have nothing in common compete for pixels in training, classes of `never_with` for the image in answers.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl_reward_network.atomic_io import read_json
from rl_reward_network.data.annotations import phrase_key

CLASSES_FILE = "classes.json"
ALL = "all"
TAG = re.compile(r"<[^<>\s]*>|\[SEG\]")
LISTS = ("phrases", "ids", "asked_only_with", "asked_not_with", "absent_with", "never_with")


@dataclass(frozen=True)
class NamedClass:
    """A class and how it is asked for; `ids` are ("all",) for the union of all categories, () outside of an import."""

    name: str
    phrases: tuple[str, ...]
    held_out: str
    ids: tuple[str, ...] = ()
    asked_only_with: tuple[str, ...] = ()
    asked_not_with: tuple[str, ...] = ()
    absent_with: tuple[str, ...] = ()
    never_with: tuple[str, ...] = ()  # names of classes that no image shows together with it

    def wording(self, sample_id: str) -> str:
        """One of `phrases`, the same for equal ids, each for about as many ids."""
        return self.phrases[int(hashlib.sha256(sample_id.encode()).hexdigest(), 16) % len(self.phrases)]

    def excludes(self, other: "NamedClass") -> bool:
        """Whether no image shows both, by either one's `never_with`."""
        return other.name in self.never_with or self.name in other.never_with

    def is_rival(self, other: "NamedClass") -> bool:
        """Whether no pixel belongs to both: both have `ids`, and none in common."""
        return bool(self.ids and other.ids) and ALL not in self.ids + other.ids and not {*self.ids} & {*other.ids}

    def asked(self, present: Iterable[str]) -> tuple[str, ...] | None:
        """The categories whose union is the mask in an image with these; () for an empty mask; None: not asked."""
        there = sorted(set(present))
        own = tuple(name for name in there if name in self.ids or ALL in self.ids)
        if not own:
            return () if set(self.absent_with) & set(there) else None
        wanted = not self.asked_only_with or set(self.asked_only_with) & set(there)
        return own if wanted and not set(self.asked_not_with) & set(there) else None


def definite(phrase: str) -> str:
    """An object as a question names it: "a red circle." -> "the red circle". Tags such as "<image>" are removed."""
    phrase = " ".join(TAG.sub(" ", phrase).split()).rstrip(".").strip()
    first, _, rest = phrase.partition(" ")
    return f"the {rest}" if first.lower() in ("a", "an") and rest else phrase


def read_classes(path: Path) -> list[NamedClass]:
    """The classes of a file; a ValueError names file, class, field and remedy."""
    value = read_json(path)
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"{path}: expected a list of classes {{name, phrases, held_out}}; see docs/how-to/your-data.md"
        )
    classes = [_parsed(entry, f"{path}: class {number}") for number, entry in enumerate(value)]
    _check_wordings(classes, path)
    names = {one.name for one in classes}
    for one in classes:
        if unknown := sorted({*one.never_with} - (names - {one.name})):
            where = f"{path}: class {one.name!r}: `never_with` has {unknown[0]!r}"
            raise ValueError(f"{where}, which is the `name` of no other class; correct it")
    return classes


def classes_of(folder: Path) -> dict[str, NamedClass]:
    """`phrase_key` of the name -> class, of a data folder; {} without `CLASSES_FILE`. Raises as `read_classes`."""
    path = folder / CLASSES_FILE
    return {phrase_key(one.name): one for one in read_classes(path)} if path.is_file() else {}


def as_json(classes: Sequence[NamedClass]) -> list[dict[str, Any]]:
    """The content of a `CLASSES_FILE`."""
    return [{key: value for key, value in asdict(one).items() if value} for one in classes]


def wordings_fingerprint(classes: Iterable[NamedClass]) -> str | None:
    """12 hex digits that change with any wording, category or exclusion; None without classes."""
    wordings = sorted([one.name, *one.phrases, one.held_out, *one.ids, *one.never_with] for one in classes)
    return hashlib.sha256(json.dumps(wordings).encode()).hexdigest()[:12] if wordings else None


def _parsed(entry: Any, where: str) -> NamedClass:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is {entry!r:.40}, expected an object {{name, phrases, held_out}}")
    where = f"{where} ({entry['name']!r})" if isinstance(entry.get("name"), str) else where
    if unknown := sorted(entry.keys() - NamedClass.__dataclass_fields__.keys()):
        known = ", ".join(NamedClass.__dataclass_fields__)
        raise ValueError(f"{where}: field {unknown[0]!r} is not known; the fields are {known}")
    for key in ("name", "held_out"):
        if not isinstance(entry.get(key), str) or not phrase_key(entry[key]):
            raise ValueError(f"{where}: `{key}` is {entry.get(key)!r}, expected a phrase such as 'the left kidney'")
    lists = {key: _texts(entry[key], f"{where}: `{key}`") for key in LISTS if key in entry}
    if not lists.get("phrases"):
        raise ValueError(f"{where}: `phrases` is missing or empty; give at least one wording, such as the name")
    return NamedClass(**{"phrases": (), **lists, "name": entry["name"].strip(), "held_out": entry["held_out"].strip()})


def _texts(value: Any, where: str) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str | int) and not isinstance(one, bool) and str(one).strip() for one in values):
        raise ValueError(f"{where} is {value!r:.60}, expected a list of texts")
    return tuple(str(one).strip() for one in values)


def _check_wordings(classes: Sequence[NamedClass], path: Path) -> None:
    """Refuse a name or wording of two classes, and a held-out wording that trains, each as a question has it."""
    names: dict[str, str] = {}
    owners: dict[str, str] = {}
    for one in classes:
        if phrase_key(one.name) in names:
            raise ValueError(f"{path}: class {one.name!r}: another class has this `name`; join them, or rename one")
        names[phrase_key(one.name)] = one.name
        for key in {phrase_key(definite(phrase)) for phrase in one.phrases}:
            if owners.setdefault(key, one.name) != one.name:
                raise ValueError(
                    f"{path}: class {one.name!r}: `phrases` has {key!r}, which is a wording of {owners[key]!r}, too; "
                    "leave it out of one"
                )
    held_out: dict[str, str] = {}
    for one in classes:
        key = phrase_key(definite(one.held_out))
        if owner := owners.get(key):
            raise ValueError(
                f"{path}: class {one.name!r}: `held_out` is {one.held_out!r}, but that wording trains {owner!r}; "
                "give one that is in no `phrases`"
            )
        if held_out.setdefault(key, one.name) != one.name:
            raise ValueError(
                f"{path}: class {one.name!r}: `held_out` is {one.held_out!r}, as of {held_out[key]!r}; give another"
            )
