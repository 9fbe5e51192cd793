"""Predicted masks of any tool: which file is of which image, and what its numbers mean.

A file is of an image by its name without suffix, with or without an ending such as `_mask` (which wins over the bare
name, so that a folder may hold the images, too) and the words of a prompt, as `segment` writes them; `case.png` is of
`case_0000.png`, as in nnU-Net. Where two images of the data share a name, folders count, too.

The numbers of all files of a folder have one meaning: 0 and one other value are a mask; more values are a soft mask of
8 or 16 bit, whose largest possible value is 1; a few low numbers are classes, and refused. Arrays (.npy, .npz) hold
bool, such numbers, or probabilities. COCO is a data set or a list of results, with outlines or RLEs.
"""

import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any
from zipfile import BadZipFile

import numpy as np

from rl_reward_network.atomic_io import read_json
from rl_reward_network.data.annotations import first_faults
from rl_reward_network.data.images import IMAGE_SUFFIXES, SEEN_KEY, SHEET, load_grid, text_of
from rl_reward_network.data.items import Sample, first_names
from rl_reward_network.data.masks import MAX_CLASSES, Size, classes_of
from rl_reward_network.data_import.coco import NAMES, outlines_of
from rl_reward_network.data_import.files import files_below, json_files, listed, pair_key, relative_path, unread_note
from rl_reward_network.data_import.items import OutlineMasks, id_text
from rl_reward_network.inputs.loading import decode_files
from rl_reward_network.rewards.metrics import ROUNDING
from rl_reward_network.segment.files import prompt_of, words_of

ARRAYS = (".npy", ".npz")
SOFT_ARRAYS = ("soft", "probabilities", "mask")  # names of the array in a .npz with several
ENDING = re.compile(
    r"(?P<base>.+)[ _.-](?P<word>masks?|pred|prediction|seg|segmentation|label|soft|prob)", re.IGNORECASE
)
OVERLAY = "_overlay"  # pictures that `segment` writes beside the masks
CHANNEL = "_0000"  # of an image in nnU-Net
FEW = 8  # values of a mask of classes; a soft mask has more, or none as low as a class
SURE = 0.5  # of a COCO result: tools write many that they hardly believe in
LoadMask = Callable[[Size], np.ndarray]


@dataclass(frozen=True)
class Predictions:
    """The masks of one tool."""

    source: Path
    masks: Mapping[str, LoadMask]  # sample id -> bool (H, W), from the size of its image
    notes: tuple[str, ...] = ()  # what was left out, or decided


def read_predictions(source: Path, samples: Sequence[Sample], root: Path, ids_from: Path) -> Predictions:
    """The predictions in a folder or a COCO file, of those samples of the data in `root` that have one.

    All files are decoded once, so that what is wrong is said before anything is measured. `ids_from` is where COCO
    files may tell which image an id means. ValueError with file and remedy: nothing is of any image, two files are of
    one, a mask is not of the size of its image, or what its numbers mean cannot be told.
    """
    if not source.exists():
        raise ValueError(f"--predictions {source}: no such file or folder; name the folder of the predicted masks")
    if source.is_file():
        return _read_coco(source, samples, root, ids_from)
    images = {sample.image_path.resolve() for sample in samples}
    pictures = files_below(source, *IMAGE_SUFFIXES, *ARRAYS, predictions=True)
    pictures = [path for path in pictures if not path.stem.endswith(OVERLAY) and path.name != SHEET]
    pictures = [path for path in pictures if path.resolve() not in images]
    if not pictures and (found := [path for path in files_below(source, ".json") if _is_coco(path)]):
        return _read_coco(found[0], samples, root, ids_from)
    if not pictures:
        kinds = ", ".join((*IMAGE_SUFFIXES, *ARRAYS, ".json"))
        unread = "".join(f"; {note}" for note in unread_note(source))
        raise ValueError(f"--predictions {source}: no masks here; expected one file an image ({kinds}){unread}")
    files, rest = _matched({path: relative_path(path, source) for path in pictures}, samples, root)
    if not files:
        _refuse_strangers(source, [path.name for path in rest], samples, root)
    sizes = {sample.sample_id: sample.size for sample in samples}
    values = decode_files([partial(_values, path, sizes[sample]) for sample, path in files.items()])
    full = _full_value(set().union(*values), source)
    notes = [f"{source}: {len(rest)} files are of no image of the data, left out"] if rest else []
    if rest:
        print(f"of no image of the data: {listed(rest, source)}")  # notes are for reports, and names may be of patients
    if seen := sum(text_of(path, SEEN_KEY) is not None for path in files.values()):
        notes.append(
            f"{source}: the model has seen {seen} of these {len(files)} images in training, so its masks of new"
            " patients are worse than these."
        )
    return Predictions(source, {name: partial(_load, path, full) for name, path in files.items()}, tuple(notes))


def _refuse_strangers(source: Path, names: list[str], samples: Sequence[Sample], root: Path) -> None:
    images = {sample.image_path for sample in samples}
    apart = len({path.name for path in images}) == len(images)  # else folders tell them apart
    shown = first_names(path.name if apart else os.path.relpath(path, root) for path in images)
    raise ValueError(
        f"--predictions {source}: none of {len(names)} names ({first_names(names)}) is of an image of the data "
        f"({shown}); name each mask like its image, with or without _mask"
        f"{'' if apart else ', and put it into a folder of the same name'}"
    )


# ---- names ----------------------------------------------------------------------------------------------------------


def _matched(
    places: Mapping[Any, PurePosixPath], samples: Sequence[Sample], root: Path
) -> tuple[dict[str, Any], list[Any]]:
    """Sample id -> the key of `places` (file or id -> its path) that is of it, and the keys that are of none."""
    images = {sample.sample_id: _place(sample.image_path, root) for sample in samples}
    bare = len({place.name for place in images.values()}) == len(images)
    names = {place.name if bare else str(place): sample for sample, place in images.items()}
    for name, sample in [*names.items()]:
        names.setdefault(name.removesuffix(CHANNEL), sample)
    found: dict[str, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
    rest = []
    for key, place in places.items():
        whole = pair_key(place)
        sample_of, rank = _sample_of(key, whole.name if bare else str(whole), names)
        if sample_of is None:
            rest.append(key)
        else:
            found[sample_of][rank].append(key)
    best = {sample: ranks[min(ranks)] for sample, ranks in found.items()}
    if any(0 in ranks for ranks in found.values()):  # then a bare name is an image
        best = {sample: keys for sample, keys in best.items() if keys is not found[sample].get(1)}
    if double := next((keys for keys in best.values() if len(keys) > 1), None):
        raise ValueError(f"{', '.join(map(str, double))}: predictions of one image; keep one of them")
    return {sample: keys[0] for sample, keys in best.items()}, rest


def _place(path: Path, root: Path) -> PurePosixPath:
    return pair_key(relative_path(path, root) if path.is_relative_to(root) else PurePosixPath(path.name))


def _sample_of(key: Any, name: str, names: Mapping[str, str]) -> tuple[str | None, int]:
    """The sample that a name is of, and how surely it is its mask (0 is surest); arrays come after pictures."""
    later = 3 * (isinstance(key, Path) and key.suffix.lower() in ARRAYS)
    if name in names:
        return names[name], 1 + later
    if not (ending := ENDING.fullmatch(name)):
        return None, 0
    base, rank = ending["base"], later + 2 * (not ending["word"].lower().startswith("mask"))
    if base not in names and isinstance(key, Path) and (prompt := prompt_of(key)):
        base = base.removesuffix(f"_{words_of(prompt).rstrip('_')}")
    return names.get(base), rank


# ---- numbers --------------------------------------------------------------------------------------------------------


def _stored(path: Path) -> np.ndarray:
    """The stored numbers, (H, W) bool, integer or float; of a coloured picture whether a pixel has its only colour."""
    if path.suffix.lower() in ARRAYS:
        return _array(path)
    grid = load_grid(path)
    if grid.ndim == 2:
        return grid
    colours, alpha = (grid[..., :3], grid[..., 3:]) if grid.shape[2] > 2 else (grid[..., :1], grid[..., 1:])
    if (colours == colours[..., :1]).all() and not (alpha.size and np.ptp(alpha)):
        return np.asarray(colours[..., 0])
    classes = classes_of(grid, path)
    if len(classes) > 1:
        raise ValueError(f"{path}: holds the colours {', '.join(sorted(classes)[:3])}; write masks of 0 and 255")
    return next(iter(classes.values()), np.zeros(grid.shape[:2], bool))


def _array(path: Path) -> np.ndarray:
    """The (H, W) array of a .npy or .npz file; of nnU-Net's two probabilities that of the object."""
    try:
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if not isinstance(loaded, np.ndarray):
                names = loaded.files if len(loaded.files) == 1 else [n for n in SOFT_ARRAYS if n in loaded.files]
                if not names:
                    raise ValueError(f"it holds {', '.join(loaded.files) or 'nothing'}, expected one array")
                loaded = loaded[names[0]]
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise ValueError(f"{path}: no array can be read ({error}); save one of (H, W) by numpy.save") from None
    array = np.squeeze(loaded)
    return array[1] if array.ndim == 3 and len(array) == 2 else array


def _values(path: Path, size: Size) -> set[int]:
    """The different whole numbers of a mask; none of bool and of probabilities. A ValueError if it does not fit."""
    grid = _stored(path)
    if grid.shape != size:
        got = f"{grid.shape[1]} x {grid.shape[0]}" if grid.ndim == 2 else f"of the shape {grid.shape}"
        raise ValueError(
            f"{path}: the prediction is {got}, but its image is {size[1]} x {size[0]} (width x height); write it at "
            "the size of the image: enlarge the soft mask, then threshold it; the other order loses thin vessels"
        )
    if grid.dtype.kind == "f" and not ((grid >= -ROUNDING) & (grid <= 1 + ROUNDING)).all():
        raise ValueError(
            f"{path}: values are {grid.min():g} to {grid.max():g}, expected probabilities in 0 to 1; of logits save "
            "the sigmoid"
        )
    if grid.dtype.kind in "bf":
        return set()
    values: list[int] = np.unique(grid).tolist()
    if grid.dtype.kind not in "iu" or values[0] < 0:
        raise ValueError(f"{path}: values are {grid.dtype} from {values[0]}, expected 0 and above; save it as PNG")
    return set(values)


def _full_value(values: Iterable[int], source: Path) -> int:
    """The number that stands for 1, of the numbers in all files: the only one beside 0, or 255 or 65535 if soft."""
    others = sorted({*values} - {0})
    if len(others) <= 1:
        return others[0] if others else 1
    if others[-1] <= MAX_CLASSES or (len(others) <= FEW and others[0] <= MAX_CLASSES):
        raise ValueError(
            f"--predictions {source}: the masks hold the classes {', '.join(map(str, others[:FEW]))}, and which is the "
            "object cannot be told; write masks of it alone, 0 and 255"
        )
    return 255 if others[-1] <= 255 else 65535


def _load(path: Path, full: int, size: Size) -> np.ndarray:
    grid = _stored(path)
    return np.asarray(grid if grid.dtype == bool else grid > (0.5 if grid.dtype.kind == "f" else full / 2))


# ---- COCO -----------------------------------------------------------------------------------------------------------


def _is_coco(path: Path) -> bool:
    content = json_files([path])[0].get(path)
    records = content.get("annotations") if isinstance(content, dict) else content
    return isinstance(records, list) and all(isinstance(one, dict) and "image_id" in one for one in records)


def _read_coco(file: Path, samples: Sequence[Sample], root: Path, ids_from: Path) -> Predictions:
    """The masks of a COCO data set (an image without annotations has an empty one) or of a list of results.

    In a list, images without a record have an empty mask, as COCO counts them.
    """
    if not _is_coco(file):
        raise ValueError(
            f"--predictions {file}: no COCO annotations or results; expected records with image_id and segmentation"
        )
    content = read_json(file)
    names, records = _image_names([content]), content
    if isinstance(content, dict):
        records = believed = content["annotations"]  # each is meant, also with a score, as `segment` writes
    else:
        believed = _believed(file, records)
        names = _image_names(json_files(files_below(ids_from, ".json"))[0].values() if ids_from.is_dir() else [])
        named = {id_text(one["image_id"]): str(one.get("file_name") or one["image_id"]) for one in records}
        names = {one: names[one] for one in named} if named.keys() <= names.keys() else named
    annotations = [{"id": number, **one} for number, one in enumerate(believed)]
    categories = {id_text(one.get("category_id")): id_text(one.get("category_id")) for one in annotations}
    if len(categories) > 1:
        raise ValueError(f"--predictions {file}: annotations of {len(categories)} categories; keep those of the object")
    outlines, faults = outlines_of(
        file, {"images": [{"id": one} for one in names], "annotations": annotations}, categories
    )
    if faults:
        raise ValueError("\n".join(first_faults(faults)))
    ids, rest = _matched({one: _file_of(name) for one, name in names.items()}, samples, root)
    if rest and not ids:
        _refuse_strangers(file, [names[one] for one in rest], samples, root)
    found = {sample: OutlineMasks(tuple(outlines.get(one, ()))) for sample, one in ids.items()}
    notes = [f"{file}: {len(records) - len(believed)} results with a score below {SURE} are left out"]
    notes = notes if len(believed) < len(records) else []
    if isinstance(content, list) and (empty := [one.sample_id for one in samples if one.sample_id not in found]):
        notes.append(f"{file}: {len(empty)} images have no record: an empty mask")
        found |= {sample: OutlineMasks(()) for sample in empty}
    sizes = {sample.sample_id: sample.size for sample in samples}
    decode_files([partial(masks, sizes[sample]) for sample, masks in found.items()], keep=False)
    return Predictions(file, {sample: partial(_union, masks) for sample, masks in found.items()}, tuple(notes))


def _believed(file: Path, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results without a score below `SURE`; a ValueError for one that is no number."""
    scores = [one["score"] for one in records if one.get("score") is not None]
    if wrong := [score for score in scores if not isinstance(score, int | float) or math.isnan(score)]:
        raise ValueError(f"--predictions {file}: score is {wrong[0]!r}, expected a number; correct it, or delete it")
    return [one for one in records if one.get("score") is None or one["score"] >= SURE]


def _image_names(contents: Iterable[Any]) -> dict[str, str]:
    """Id -> name of the images that COCO files list."""
    images = [one for content in contents if isinstance(content, dict) for one in content.get("images") or ()]
    images = [one for one in images if isinstance(one, dict) and "id" in one]
    named = {id_text(one["id"]): next((str(one[key]) for key in NAMES if one.get(key)), "") for one in images}
    return {number: name for number, name in named.items() if name}


def _file_of(name: str) -> PurePosixPath:
    """The path of a file_name, or of an id that is a name without suffix."""
    path = PurePosixPath(name.replace("\\", "/"))
    return path if path.suffix.lower() in IMAGE_SUFFIXES else path.with_name(f"{path.name}.png")


def _union(masks: OutlineMasks, size: Size) -> np.ndarray:
    return next(iter(masks(size).values()), np.zeros(size, bool))
