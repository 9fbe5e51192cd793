"""DICOM files: one image per frame or file, as grey PNG of 8 or 16 bit, and masks/ with the stem of the file.

Written names are neutral, and no tag is kept: patient and series are written as keyed hashes, see `write.py`. What a
frame looks like is decided in `dicom_pixels`.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath

from pydicom.dataset import Dataset

from rl_reward_network.data.images import IMAGE_SUFFIXES, check_sides
from rl_reward_network.data.masks import ClassMasks, Size, classes_of, load_class_masks
from rl_reward_network.data_import.dicom_pixels import (
    SPACINGS,
    SUFFIXES,
    begins_as_dicom,
    load_frame,
    pixel_aspect,
    read_header,
    stored_values,
)
from rl_reward_network.data_import.files import (
    files_below,
    grouped,
    image_keys,
    images_and_masks,
    relative_path,
    several_masks,
    without_role,
)
from rl_reward_network.data_import.items import Found, Item

FRAMES = ("first", "middle", "all")
TAGS = [
    *("PatientID", "SeriesInstanceUID", "NumberOfFrames", "BurnedInAnnotation", "Rows", "Columns"),
    *("Modality", "SOPClassUID", "SharedFunctionalGroupsSequence", *SPACINGS),
]
SEGMENTATION = "1.2.840.10008.5.1.4.1.1.66."  # SOP classes of segmentations and other derived objects
NO_PICTURES = ("SEG", "RTSTRUCT", "RTDOSE", "RTPLAN", "REG", "PR", "SR", "KO", "DOC")  # Modality
OTHER = "DICOM object(s) of modality {}, which are no images, left out"
LEFT_OUT = {
    "SEG": f"{OTHER.format('SEG')}; write the segmentation of each image as PNG in masks/, with the stem of its file",
    "blank": "file(s) without a picture (a report, or cut off), left out",
}


def recognise_dicom(source: Path) -> str:
    """ "12 DICOM files"; "" without any."""
    count = len(_dicom_files(source))
    return f"{count} DICOM files" if count else ""


def read_dicom(source: Path, frames: str = "middle") -> Found:
    """One item per chosen frame; frames without a mask are unlabelled.

    Args:
        source: the folder; masks are pictures or DICOM files in masks/ whose stem is that of the file, or `<stem>_<n>`
            of its frame n (from 1), perhaps with an affix such as `_mask`.
        frames: of files with several: "first", "middle" or "all".

    Raises:
        ValueError: `frames` is unknown.
    """
    if frames not in FRAMES:
        raise ValueError(f"frames is {frames!r}, expected {', '.join(FRAMES)}")
    files = _dicom_files(source)
    images, mask_files = images_and_masks(files, source)
    images = sorted({*files} - {*mask_files})
    masks = _masks_by_stem([*files_below(source, *IMAGE_SUFFIXES), *mask_files], images, source)
    items, faults, broken = list[Item](), list[str](), dict[str, str]()
    burned = assumed = 0
    other = Counter[str]()
    for number, path in enumerate(images, 1):
        name = f"dicom_{number:05d}"
        try:
            header = read_header(path, TAGS)
            if kind := _other_kind(header):
                other[kind] += 1
                continue
            check_sides((header.Rows, header.get("Columns") or 0), path)
        except ValueError as error:
            broken[name] = str(error)
            continue
        try:
            items += _items(source, path, name, header, frames, masks)
        except ValueError as error:
            faults.append(str(error))
        burned += header.get("BurnedInAnnotation") == "YES"
        assumed += frames != "all" and int(header.get("NumberOfFrames") or 1) > 1 and _stem(path, source) in masks
    used = {item.load_masks.args[0] for item in items if isinstance(item.load_masks, partial)}
    lost = sum(map(len, masks.values())) - len(used)
    notes = [f"{lost} mask(s) without an image, left out"] if lost else []
    notes += [f"{count} {LEFT_OUT.get(kind, OTHER.format(kind))}" for kind, count in sorted(other.items())]
    notes += [f"{assumed} mask(s) without a frame, taken for the {frames} one; name them X_<n>.png"] if assumed else []
    notes += [f"{burned} file(s) say that text is burned into the picture, perhaps a name; look"] if burned else []
    return Found(items, {}, faults, notes, private=True, broken=broken, read=tuple(files))


def _other_kind(header: Dataset) -> str:
    """The modality of an object that is no image, "blank" of one without a picture; "" of an image."""
    if str(header.get("SOPClassUID")).startswith(SEGMENTATION):
        return "SEG"
    modality = str(header.get("Modality"))
    return modality if modality in NO_PICTURES else "" if "Rows" in header else "blank"


def _items(
    source: Path, path: Path, name: str, header: Dataset, frames: str, masks: dict[str, list[Path]]
) -> list[Item]:
    """The chosen frames of a file; ValueError if a mask may be of any of them, or two are of one."""
    total, stem = int(header.get("NumberOfFrames") or 1), _stem(path, source)
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
                load_masks=_reader_of(found[0], frame, total) if found else None,
                group=patient or None,
                series=series or None,
                aspect=partial(pixel_aspect, header),
            )
        )
    return items


def _masks_by_stem(masks: list[Path], images: list[Path], source: Path) -> dict[str, list[Path]]:
    """Masks by the stem of their image, or by that and the number of a frame; an affix ("_mask") is taken off."""
    stems = {_stem(path, source) for path in images}

    def stem_of(mask: Path) -> str:
        stem = _stem(mask, source)
        bases = [str(base) for base in image_keys(PurePosixPath(f"{stem}.png"))]
        return stem if stem in stems else next((base for base in bases if base in stems), stem)

    return grouped(masks, stem_of)


def _reader_of(mask: Path, frame: int, total: int) -> Callable[[Size], ClassMasks]:
    """Reads the mask of a frame from a picture, or from a DICOM file of one frame or of as many as the image has."""
    if mask.suffix.lower() in IMAGE_SUFFIXES:
        return partial(load_class_masks, mask)
    return partial(load_dicom_masks, mask, frame, total)


def load_dicom_masks(path: Path, frame: int, total: int, size: Size) -> ClassMasks:
    """The classes of a DICOM file by its stored values, without window or inversion; see `load_class_masks`.

    Args:
        path: the file.
        frame: of the image, from 0; a mask with a single frame is that of every image.
        total: frames of the image.
        size: (H, W) of the image.

    Raises:
        ValueError: it cannot be decoded, or has another size or number of frames.
    """
    header = read_header(path)
    own = int(header.get("NumberOfFrames") or 1)
    stored = stored_values(path, frame if own == total else 0, header)
    if own not in (1, total) or stored.shape[:2] != tuple(size):
        raise ValueError(
            f"{path}: mask has {own} frame(s) of {stored.shape[1]} x {stored.shape[0]} (width x height), but its image"
            f" has {total} of {size[1]} x {size[0]}; export it again for this image"
        )
    return classes_of(stored, path)


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
