"""DICOM files: one image per frame or file, as grey PNG of 8 or 16 bit, and masks/ with the stem of the file.

Written names are neutral, and no tag is kept: patient and series are written as keyed hashes, see `write.py`. What a
frame looks like is decided in `dicom_pixels`.
"""

from functools import partial
from pathlib import Path

from pydicom.dataset import Dataset

from rl_reward_network.data.images import IMAGE_SUFFIXES, check_sides
from rl_reward_network.data_import.classes import load_class_masks
from rl_reward_network.data_import.dicom_pixels import SUFFIXES, begins_as_dicom, load_frame, read_header
from rl_reward_network.data_import.files import files_below, grouped, relative_path, several_masks, without_role
from rl_reward_network.data_import.items import Found, Item

FRAMES = ("first", "middle", "all")
TAGS = ["PatientID", "SeriesInstanceUID", "NumberOfFrames", "BurnedInAnnotation", "Rows", "Columns"]


def recognise_dicom(source: Path) -> str:
    """ "12 DICOM files"; "" without any."""
    count = len(_dicom_files(source))
    return f"{count} DICOM files" if count else ""


def read_dicom(source: Path, frames: str = "middle") -> Found:
    """One item per chosen frame; frames without a mask are unlabelled.

    Args:
        source: the folder; masks are images whose stem is that of the file, or `<stem>_<n>` of its frame n (from 1).
        frames: of files with several: "first", "middle" or "all".

    Raises:
        ValueError: `frames` is unknown.
    """
    if frames not in FRAMES:
        raise ValueError(f"frames is {frames!r}, expected {', '.join(FRAMES)}")
    masks = grouped(files_below(source, *IMAGE_SUFFIXES), lambda path: _stem(path, source))
    items: list[Item] = []
    faults: list[str] = []
    broken: dict[str, str] = {}
    burned = blank = assumed = 0
    for number, path in enumerate(_dicom_files(source), 1):
        name = f"dicom_{number:05d}"
        try:
            header = read_header(path, TAGS)
        except ValueError as error:
            broken[name] = str(error)
            continue
        try:
            blank += "Rows" not in header
            if "Rows" in header:
                items += _items(source, path, name, header, frames, masks)
                burned += header.get("BurnedInAnnotation") == "YES"
                assumed += (
                    frames != "all" and int(header.get("NumberOfFrames") or 1) > 1 and _stem(path, source) in masks
                )
        except ValueError as error:
            faults.append(str(error))
    used = {item.load_masks.args[0] for item in items if isinstance(item.load_masks, partial)}
    lost, bare = sum(map(len, masks.values())) - len(used), sum(item.load_masks is None for item in items)
    notes = [f"{bare} image(s) without a mask, imported as unlabelled"] if bare else []
    notes += [f"{lost} mask(s) without an image, left out"] if lost else []
    notes += [f"{blank} file(s) without a picture (a report, or cut off), left out"] if blank else []
    notes += [f"{assumed} mask(s) without a frame, taken for the {frames} one; name them X_<n>.png"] if assumed else []
    notes += [f"{burned} file(s) say that text is burned into the picture, perhaps a name; look"] if burned else []
    return Found(items, {}, faults, notes, private=True, broken=broken)


def _items(
    source: Path,
    path: Path,
    name: str,
    header: Dataset,
    frames: str,
    masks: dict[str, list[Path]],
) -> list[Item]:
    """The chosen frames of a file; ValueError if a mask may be of any of them, or two are of one."""
    total, stem = int(header.get("NumberOfFrames") or 1), _stem(path, source)
    check_sides((header.Rows, header.get("Columns") or 0), path)
    chosen = {"first": [0], "middle": [total // 2], "all": list(range(total))}[frames]
    if len(chosen) > 1 and stem in masks:
        raise ValueError(f"{masks[stem][0]} is the mask of one of {total} frames; name it {path.stem}_<n>, n from 1")
    patient, series = (str(header.get(tag) or "").strip() for tag in ("PatientID", "SeriesInstanceUID"))
    items = []
    for frame in chosen:
        found = [*masks.get(f"{stem}_{frame + 1}", []), *masks.get(stem, [])]
        if several := several_masks(found, source):
            raise ValueError(several[0])
        items.append(
            Item(
                name=f"{name}.png" if total == 1 else f"{name}_frame_{frame + 1:04d}.png",
                found_as=relative_path(path, source).as_posix(),
                load_image=partial(load_frame, path, frame),
                load_masks=partial(load_class_masks, found[0]) if found else None,
                group=patient or None,
                series=series or None,
            )
        )
    return items


def is_dicom(path: Path) -> bool:
    """Whether a file has DICOM's suffix, or begins as DICOM files do."""
    return path.suffix.lower() in SUFFIXES or begins_as_dicom(path)


def _dicom_files(source: Path) -> list[Path]:
    """Files of DICOM's suffix, and those of any other that no image has, or of none, that begin as DICOM files do."""
    others = (path for path in files_below(source) if path.suffix.lower() not in (*SUFFIXES, *IMAGE_SUFFIXES))
    begun = [path for path in others if path.name != "DICOMDIR" and begins_as_dicom(path)]
    return sorted([*files_below(source, *SUFFIXES), *begun])


def _stem(path: Path, source: Path) -> str:
    """The path below the source without the folder "images" / "masks" and without a suffix that is known."""
    place = without_role(relative_path(path, source))
    known = path.suffix.lower() in (*SUFFIXES, *IMAGE_SUFFIXES)
    return str(place.with_suffix("") if known else place)
