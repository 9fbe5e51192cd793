"""Write an imported data set in our own format: annotations.json, images/, masks/, import.json.

Perhaps skipped.txt, and classes.json where objects are asked for by name.
"""

import hmac
import shutil
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from rl_reward_network.atomic_io import read_json, secret_key, whole_folder, write_json
from rl_reward_network.data.annotations import read_annotations
from rl_reward_network.data.items import Sample, recorded_grey
from rl_reward_network.data.names import CLASSES_FILE, as_json
from rl_reward_network.data.patients import NONE, PROPOSED, proposed_from
from rl_reward_network.data.splits import patient_key
from rl_reward_network.data_import.items import Groups, Item
from rl_reward_network.data_import.layouts import LAYOUTS
from rl_reward_network.data_import.survey import Survey

IMPORT_FILE = "import.json"  # beside the annotations of imported data
FORMAT_VERSION = 2  # 2: names of patients are hashed in one spelling
IMPORT_RULES = 4  # changes where a source gives other pictures, masks or splits: training imports it anew


def import_notes(data_root: Path, samples: Iterable[Sample] = ()) -> tuple[str, ...]:
    """What reports repeat: that groups are not known, or proposed and not confirmed, and remarks of an import.

    `samples` are of the data, for those that were not imported. ValueError where import.json is damaged or of another
    version.
    """
    origin = _origin_of(data_root)
    source, alone = grouping_of(data_root, samples)
    notes = list[str]()
    if source == NONE or alone:
        who = "no patient is named" if source == NONE else f"{alone} images name no patient"
        leaks = origin.get("suspected_leaks")
        pairs = f", and {leaks} pairs look nearly identical" * bool(leaks)
        notes.append(
            f"Possible leak: {who}, so each image is a group of its own, as with --patients_csv none{pairs}; images of"
            " one patient may be in training and test, and intervals may be too narrow."
        )
    if source.startswith(PROPOSED):
        notes.append(
            f"Patients {source}, not confirmed: where a name is wrong, one patient may be in training and test;"
            " --patients_csv names them, in annotations.json the field `group`."
        )
    return (*notes, *map(str, origin.get("remarks", ())))


def grouping_of(data_root: Path, samples: Iterable[Sample] = ()) -> tuple[str, int]:
    """What has named the patients (`proposed_from`, a flag, "" of fields of the data), and how many images none.

    `samples` and errors are as of `import_notes`.
    """
    shown = {one.image_path: one.shown_by for one in samples if one.shown_by and not one.joined}
    if shown:
        return proposed_from([(by.replace(NONE, ""), by) for by in shown.values()]), [*shown.values()].count(NONE)
    origin = _origin_of(data_root)
    return str(origin.get("groups", "")), int(origin.get("alone", 0))


def grouping_note(data_root: Path, samples: Iterable[Sample] = ()) -> str:
    """The same in words, for the line on the data; "" where the user has named the patients. Raises as it does."""
    source, alone = grouping_of(data_root, samples)
    if source == NONE:
        return "no patient named, each image a group of its own"
    unknown = f" ({alone} images name none)" * bool(alone)
    return f"patients {source}, not confirmed{unknown}" if source.startswith(PROPOSED) else ""


def imported_grey(data_root: Path) -> dict[str, list[int]] | None:
    """The window in which an import wrote images of more than 8 bit; None of other data. Raises as `import_notes`."""
    return _origin_of(data_root).get("grey_levels")


def is_ungrouped(data_root: Path, samples: Iterable[Sample] = ()) -> bool:
    """Whether no patient is known, and each image a group of its own. Arguments and errors as of `import_notes`."""
    return grouping_of(data_root, samples)[0] == NONE


Asked = dict[str, tuple[str, tuple[str, ...]]]  # phrase -> folder of its masks, and the categories of the mask
SKIPPED_FILE = "skipped.txt"  # what --skip has left out
KEY_FILE = ".group_key"  # in the parent of imported data: the imports of a folder name patients alike


def check_named_alike(*folders: Path) -> None:
    """Refuse imports of DICOM files in different parents, or by different versions: they name a patient differently."""
    layouts = {folder: LAYOUTS.get(_origin_of(folder).get("layout", "")) for folder in folders}
    private = [folder for folder, layout in layouts.items() if layout is not None and layout.private]
    files = [folder.resolve().parent / KEY_FILE for folder in private]
    keys = {path.read_bytes() if path.is_file() else path for path in files}
    if len(keys) > 1 or len({_origin_of(folder).get("format_version") for folder in private}) > 1:
        raise ValueError(
            f"{' and '.join(map(str, private))}: imports of DICOM files in different folders, or by different versions,"
            " name one patient differently, so shared patients cannot be found; import both into one parent folder"
            " (sa2va-rl data import)"
        )


def _origin_of(folder: Path) -> dict[str, Any]:
    """What import.json says of an imported folder; {} of another one. Raises as `import_notes`."""
    path = folder / IMPORT_FILE
    origin = read_json(path) if path.is_file() else {"format_version": FORMAT_VERSION}
    if not isinstance(origin, dict) or origin.get("format_version") not in (1, FORMAT_VERSION):
        raise ValueError(f"{path}: expected format_version 1 or {FORMAT_VERSION}; import the data again")
    return origin


def check_target(source: Path, to: Path) -> None:
    """Refuse a target that holds something, lies in the source, or has the source in it."""
    inner, outer = to.resolve(), source.resolve()
    if inner.is_relative_to(outer) or outer.is_relative_to(inner):
        raise ValueError(
            f"the import would be written to {to}, which lies in {source} or has it in it; name a folder beside it"
            " (--to, or --output_dir of a run)"
        )
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ValueError(f"the import would be written to {to}, which is not empty; name a new folder, or delete it")


def write_import(survey: Survey, to: Path) -> None:
    """Write the images of a survey, whole or not at all; the source is only read.

    ValueError where the survey has open points, the target is refused, or a file has changed and cannot be read.
    """
    survey.check()
    check_target(survey.source, to)
    items, groups = survey.found.items, survey.groups or []
    groups = _hidden(groups, secret_key(to.parent / KEY_FILE)) if survey.found.private else groups
    stems = Counter(PurePosixPath(item.name).with_suffix("") for item in items)
    paths = {item.name: PurePosixPath(item.name) for item in items}  # of a mask: the stem, or the whole if two share it
    masks = {
        name: f"{path.with_suffix('') if stems[path.with_suffix('')] == 1 else path}.png"
        for name, path in paths.items()
    }
    asked = _asked(survey)
    with whole_folder(to) as folder:
        with ThreadPoolExecutor() as threads:
            jobs = threads.map(lambda item: _write_item(folder, item, masks[item.name], asked[item.name]), items)
            for _ in tqdm(jobs, "writing", len(items), leave=False, unit="image", delay=2):
                pass
        records = [
            _record(item, *group, masks[item.name], asked[item.name], survey.parts.get(item.name))
            for item, group in zip(items, groups, strict=True)
        ]
        write_json(folder / "annotations.json", records)
        if survey.named:
            write_json(folder / CLASSES_FILE, as_json(survey.named))
        if survey.skipped:
            (folder / SKIPPED_FILE).write_text("\n".join(survey.skipped) + "\n", encoding="utf-8")
        grey = _as_8_bit(folder, survey.options.bit_depth)
        write_json(folder / IMPORT_FILE, {**_origin(survey), "grey_levels": grey})


def _as_8_bit(folder: Path, bit_depth: int | None) -> dict[str, list[int]] | None:
    """Write images of more than 8 bit as training would see them, so that viewers show them, too; their grey window."""
    samples = read_annotations(folder, bit_depth=bit_depth)
    deep = {sample.image_path: sample for sample in samples if sample.grey is not None}
    with ThreadPoolExecutor() as threads:
        for _ in threads.map(lambda one: Image.fromarray(one.load_image()[..., 0]).save(one.image_path), deep.values()):
            pass
    return recorded_grey(samples)


def _hidden(groups: Groups, key: bytes) -> Groups:
    """12 hex digits in place of each name, which nobody can find out by trying names without the key."""

    def digest(name: str) -> str:
        return hmac.new(key, name.encode(), "sha256").hexdigest()[:12]

    return [(digest(patient_key(group)), series and digest(series)) for group, series in groups]


def _asked(survey: Survey) -> dict[str, Asked]:
    """Image name -> what is asked of it."""
    if not survey.named:
        return {item.name: {survey.phrase: ("masks", tuple(survey.classes or ()))} for item in survey.found.items}
    return {
        image.item.name: {
            one.name: (f"masks/{number}", names)
            for number, one in enumerate(survey.named)
            if (names := one.asked(image.present)) is not None
        }
        for image in survey.seen
    }


def _write_item(folder: Path, item: Item, mask_name: str, asked: Asked) -> None:
    place = folder / "images" / item.name
    place.parent.mkdir(parents=True, exist_ok=True)
    image = item.load_image()
    if item.file is not None:
        shutil.copyfile(item.file, place)
    else:
        Image.fromarray(image).save(place)
    if item.load_masks is not None:
        parts = item.load_masks((image.shape[0], image.shape[1]))
        for below, categories in asked.values():
            mask = np.zeros(image.shape[:2], bool)
            for name in categories:
                mask |= parts.get(name, False)
            place = folder / below / mask_name
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(mask.astype(np.uint8) * 255).save(place)


def _record(
    item: Item, group: str, series: str | None, mask_name: str, asked: Asked, part: str | None
) -> dict[str, Any]:
    files = [f"{below}/{mask_name}" for below, _ in asked.values()]
    mask = {"mask_png": files[0] if len(files) == 1 else files} if item.load_masks else {}
    rest = {key: value for key, value in (("series", series), ("split", part)) if value}
    return {"image": item.name, "text": list(asked), **mask, "group": group, **rest}


def _origin(survey: Survey) -> dict[str, Any]:
    """The content of import.json; without paths, which may name a patient."""
    return {
        "format_version": FORMAT_VERSION,
        "layout": survey.layout,
        "groups": survey.groups_from,
        "alone": survey.alone,
        "classes": survey.classes,
        "images": len(survey.found.items),
        "labelled": sum(item.load_masks is not None for item in survey.found.items),
        "suspected_leaks": len(survey.leaks),
        "skipped": len(survey.skipped),
        "remarks": survey.found.remarks,
    }
