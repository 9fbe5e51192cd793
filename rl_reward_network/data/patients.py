"""Who is one patient where nobody says so: proposed from the names of folders and files.

A patient in training and in test would make a bad model look good, so in doubt images are joined: whatever shares the
name of a patient, a folder or a run of frames is one patient.

A name counts by itself where a word such as "patient" stands before a number. Short words (`p07`), other folders and
runs of frames (`07_frame3`) count only if they repeat as patients do: a camera numbers its pictures, too.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePosixPath

from rl_reward_network.data.splits import patient_key

FOLDERS, FILES, NONE = "folder names", "file names", "none"
PROPOSED = "proposed from "  # FOLDERS, FILES or both; the user has not confirmed it
FEWEST = 4  # other folders, or runs of frames: fewer may be parts of the data, such as train/, or classes
ID = r"[ _.#-]*[^\W\d_]?\d+|[ _.#-]+[^\W\d_](?![^\W_])"  # "07", "A12", or a single letter after a separator
WORD = re.compile(rf"(?<![^\W_])(?:patient|pat|pt|subject|subj|sub|participant|proband|person)(?:{ID})", re.IGNORECASE)
SHORT = re.compile(r"(?<![^\W_])(?:p|pid|id|case|child)[ _.#-]*\d+", re.IGNORECASE)
NO_PATIENTS = re.compile(
    r"(?:batch|chunk|class|centre|center|device|fold|grade|group|hospital|part|set|site|split|subset)\w*", re.IGNORECASE
)
FRAME = re.compile(
    r"(?P<base>.*[^\W_])[ _.-]+(?:frame|frm|fr|slice|image|img|im|view|shot|run|seq|series|f|s|t|z)[ _.-]*\d+",
    re.IGNORECASE,
)
EYE = re.compile(r"(?P<base>.*\d)[ _.-]?(?:l|r|left|right|od|os)", re.IGNORECASE)
NUMBER = re.compile(r"(?P<base>.*\d.*?)[ _]\(?\d+\)?")
VERSION = re.compile(r"\.rf\.[0-9A-Za-z]+(?=\.\w+$)")  # of one picture, as Roboflow names its augmented copies


def propose_patients(paths: Sequence[str]) -> list[tuple[str, str]]:
    """The patient of each image and what shows it, `FOLDERS` or `FILES`; ("", `NONE`) where nothing does.

    `paths` are below the data folder, with forward slashes and without a folder such as "images". In doubt images are
    joined, so spellings of a patient in two folders are one.

    >>> propose_patients(["Patient 01/a.png", "train/p07_frame3.png", "train/p07_frame4.png", "x.png"])
    [('Patient 01', 'folder names'), ('p07', 'file names'), ('p07', 'file names'), ('', 'none')]
    """
    places = [PurePosixPath(unicodedata.normalize("NFC", path)) for path in paths]
    found = [("", NONE)] * len(places)
    for source, rule in (
        (FOLDERS, _named_folders),
        (FILES, _named_files),
        (FOLDERS, _other_folders),
        (FILES, _runs_of_frames),
    ):
        open_ = [number for number, (patient, _) in enumerate(found) if not patient]
        for number, patient in zip(open_, rule([places[number] for number in open_]), strict=True):
            if patient:
                found[number] = patient, source
    return found


def proposed_from(found: Sequence[tuple[str, str]]) -> str:
    """What has shown the patients of `propose_patients`, e.g. "proposed from folder names"; `NONE` if nothing has."""
    sources = sorted({source for patient, source in found if patient})
    return PROPOSED + " and ".join(sources) if sources else NONE


def picture_name(path: str) -> str:
    """What all versions of one picture share: the name without its hash, wherever the file lies; else the path."""
    name = PurePosixPath(path).name
    return VERSION.sub("", name) if VERSION.search(name) else path


def _words(names: Sequence[str]) -> list[str]:
    """The part of each name that is a patient's by a word, "" without one; short words only if one repeats."""
    words = [match[0].strip() if (match := WORD.search(name)) else "" for name in names]
    short = [match[0] if (match := SHORT.search(name)) else "" for name in names]
    return [word or other for word, other in zip(words, _repeated(short, 1), strict=True)]


def _repeated(names: list[str], fewest: int) -> list[str]:
    """The names, or nothing where none comes twice, or fewer than so many differ."""
    counts = Counter(patient_key(name) for name in names if name)
    return names if len(counts) >= fewest and max(counts.values(), default=0) > 1 else [""] * len(names)


def _named_folders(places: Sequence[PurePosixPath]) -> list[str]:
    """The outermost folder with a word of patients; beside such folders, others are patients as well."""
    depth = max((len(place.parts) - 1 for place in places), default=0)
    found = [""] * len(places)
    for level in range(depth):
        folders = [place.parts[level] if level < len(place.parts) - 1 else "" for place in places]
        words = _words(folders)
        if any(words):
            found = [one or word or folder for one, word, folder in zip(found, words, folders, strict=True)]
    return found


def _named_files(places: Sequence[PurePosixPath]) -> list[str]:
    return _words([place.stem for place in places])


def _other_folders(places: Sequence[PurePosixPath]) -> list[str]:
    """The folders of the outermost level that has enough of them."""
    depth = max((len(place.parts) - 1 for place in places), default=0)
    for level in range(depth):
        folders = [place.parts[level] if level < len(place.parts) - 1 else "" for place in places]
        names = {name for name in folders if name}
        if len(names) >= FEWEST and not all(NO_PATIENTS.fullmatch(name) for name in names):
            return folders
    return [""] * len(places)


def _runs_of_frames(places: Sequence[PurePosixPath]) -> list[str]:
    """The name without the number of the frame, its run or the side of an eye."""
    return _repeated([_base(VERSION.sub("", place.name).rpartition(".")[0]) for place in places], FEWEST)


def _base(stem: str) -> str:
    """ "07" of "07_run2_frame3", "Image_01" of "Image_01L"; "" where no frame is named."""
    base = stem
    while match := FRAME.fullmatch(base) or EYE.fullmatch(base):
        base = match["base"]
    number = NUMBER.fullmatch(base)
    return number["base"] if number else base if base != stem else ""
