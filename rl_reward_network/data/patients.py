"""Which names are those of one patient, however they are written: a patient in two spellings would leak.

"Patient 7", "patient_07" and "PATIENT  7" are one, and so are the two Unicode forms of an umlaut. Whether "Mueller" is
"Müller", or "7" is "Patient 7", only the user can tell: `doubtful` lists such pairs.
"""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable

PARTS = re.compile(r"\d+|[^\d ]+")
WORDS = {"patient", "patients", "pat", "pt", "p", "subject", "subj", "sub", "s", "case", "id", "pid", "no", "nr"}
LATIN = str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue", "ß": "ss", "ø": "oe", "æ": "ae", "å": "aa"})


def patient_key(name: str) -> str:
    """What all spellings of a name share: letters without case, numbers without leading zeros, one space between.

    >>> patient_key("Patient 7") == patient_key("patient_07") == patient_key("PATIENT  7") != patient_key("Patient 70")
    True
    """
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


def doubtful(names: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of names with different keys that may be one patient's.

    They have equal parts in another order, without accents, or without a word such as "patient" before a number.
    """
    similar: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for key, (name, *_) in spellings(names).items():
        parts = key.translate(LATIN).split()
        number = any(part.isdecimal() for part in parts)
        kept = sorted(_without_accents(part) for part in parts if not (number and part in WORDS))
        similar[tuple(kept)].append(name)
    return [(first, other) for first, *others in similar.values() for other in others]


def _without_accents(text: str) -> str:
    return "".join(letter for letter in unicodedata.normalize("NFD", text) if not unicodedata.combining(letter))
