"""DICOM files: one image per frame or file, as grey PNG of 8 or 16 bit, and masks/ with the stem of the file.

The modality transform and the first window (or lookup table) of the file or frame are applied, MONOCHROME1 is inverted.
Written names are neutral, and no tag is kept: patient and series are written as keyed hashes, see `write.py`. Source:
DICOM PS3.3, C.7.6.3, C.7.6.16 and C.11.2; pydicom.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np
import pydicom
from pydicom.dataset import Dataset
from pydicom.errors import InvalidDicomError
from pydicom.pixels.processing import apply_color_lut, apply_modality_lut, apply_voi_lut
from pydicom.pixels.utils import pixel_array

from rl_reward_network.data.images import IMAGE_SUFFIXES
from rl_reward_network.data.mask_files import ClassMasks, Size, classes_of, load_class_masks
from rl_reward_network.data.roles import image_keys, images_and_masks, without_role
from rl_reward_network.data_import.files import files_below, grouped, relative_path, several_masks
from rl_reward_network.data_import.items import Found, Item

FRAMES = ("first", "middle", "all")
SUFFIXES = (".dcm", ".dicom")
MAGIC = b"DICM"  # after 128 bytes
MAY_BE_EMPTY = ("VOILUTFunction", "RescaleSlope", "RescaleIntercept")  # which pydicom takes for a value
TAGS = ["PatientID", "SeriesInstanceUID", "NumberOfFrames", "BurnedInAnnotation", "Rows", "Modality", "SOPClassUID"]
SEGMENTATION = "1.2.840.10008.5.1.4.1.1.66."  # SOP classes of segmentations and other derived objects
NO_PICTURES = ("SEG", "RTSTRUCT", "RTDOSE", "RTPLAN", "REG", "PR", "SR", "KO", "DOC")  # Modality


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
    items: list[Item] = []
    faults: list[str] = []
    burned = blank = assumed = 0
    other = Counter[str]()
    for number, path in enumerate(images, 1):
        try:
            header = pydicom.dcmread(path, stop_before_pixels=True, specific_tags=TAGS)
            if kind := _other_kind(header):
                other[kind] += 1
                continue
            blank += "Rows" not in header
            if "Rows" in header:
                items += _items(source, path, f"dicom_{number:05d}", header, frames, masks)
                burned += header.get("BurnedInAnnotation") == "YES"
                assumed += (
                    frames != "all" and int(header.get("NumberOfFrames") or 1) > 1 and _stem(path, source) in masks
                )
        except (InvalidDicomError, ValueError, EOFError, OSError) as error:
            faults.append(f"{path}: not read ({error})")
    used = {item.load_masks.args[0] for item in items if isinstance(item.load_masks, partial)}
    lost, bare = sum(map(len, masks.values())) - len(used), sum(item.load_masks is None for item in items)
    notes = [f"{bare} image(s) without a mask, imported as unlabelled"] if bare else []
    notes += [f"{lost} mask(s) without an image, left out"] if lost else []
    notes += _other_objects(other)
    notes += [f"{blank} file(s) without a picture (a report, or cut off), left out"] if blank else []
    notes += [f"{assumed} mask(s) without a frame, taken for the {frames} one; name them X_<n>.png"] if assumed else []
    notes += [f"{burned} file(s) say that text is burned into the picture, perhaps a name; look"] if burned else []
    return Found(items, {}, faults, notes, private=True)


def _other_kind(header: Dataset) -> str:
    """The modality of an object that has pixels, but is no image; "" of an image."""
    if str(header.get("SOPClassUID")).startswith(SEGMENTATION):
        return "SEG"
    modality = str(header.get("Modality"))
    return modality if modality in NO_PICTURES else ""


def _other_objects(counts: Counter[str]) -> list[str]:
    """Notes on the objects that are no images."""
    remedies = {"SEG": "; write the segmentation of each image as PNG in masks/, with the stem of its file"}
    return [
        f"{count} DICOM object(s) of modality {kind}, which are no images, left out{remedies.get(kind, '')}"
        for kind, count in sorted(counts.items())
    ]


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
    try:
        own = int(pydicom.dcmread(path, stop_before_pixels=True).get("NumberOfFrames") or 1)
        stored = pixel_array(path, index=frame if own == total else 0)
    except Exception as error:  # decoders raise RuntimeError, NotImplementedError, ValueError, AttributeError, ...
        raise ValueError(f"{path}: mask not read ({error}); write it as PNG of 0 and 255") from error
    if own not in (1, total) or stored.shape[:2] != tuple(size):
        raise ValueError(
            f"{path}: mask has {own} frame(s) of {stored.shape[1]} x {stored.shape[0]} (width x height), but its image"
            f" has {total} of {size[1]} x {size[0]}; export it again for this image"
        )
    return classes_of(stored, path)


def load_frame(path: Path, frame: int) -> np.ndarray:
    """A frame as it is meant to be seen: uint8 (H, W, 3) of colour, uint8 or uint16 (H, W) of grey.

    Grey keeps the range of its stored bits, e.g. 0..4095 of 12 bit.

    Args:
        path: the file.
        frame: from 0.

    Raises:
        ValueError: damaged, or compressed in a way that no installed package decodes.
    """
    return next(iter_frames(path, [frame]))


def iter_frames(path: Path, frames: Iterable[int]) -> Iterator[np.ndarray]:
    """Frames of a file as `load_frame` gives them, read one at a time; the header is read once.

    Raises:
        ValueError: as `load_frame`.
    """
    header = Dataset()
    for frame in frames:
        try:
            header = header or pydicom.dcmread(path, stop_before_pixels=True)
            stored = pixel_array(path, index=frame)  # colour becomes RGB
        except Exception as error:  # decoders raise RuntimeError, NotImplementedError, ValueError, AttributeError, ...
            raise ValueError(
                f"{path}: pixels cannot be decoded (frame {frame + 1}, {type(error).__name__}: {error}); decompress it,"
                " e.g. by dcmdjpeg, or export it again"
            ) from error
        try:
            seen = _as_seen(stored, _of_frame(header, frame))
        except (AttributeError, IndexError, ValueError, TypeError, NotImplementedError) as error:
            raise ValueError(
                f"{path}: its window or table is not usable ({error}); correct it, or export it again"
            ) from error
        yield seen


def _of_frame(header: Dataset, frame: int) -> Dataset:
    """The header of a file, with the transforms that an enhanced file holds for all frames or for one of them."""
    dataset = Dataset()
    dataset.update(header)
    dataset.set_original_encoding(*header.original_encoding)  # tables need it
    shared, own = (header.get(f"{kind}FunctionalGroupsSequence") or [] for kind in ("Shared", "PerFrame"))
    for group in [*shared[:1], *([own[frame]] if own else [])]:
        for transform in ("PixelValueTransformationSequence", "FrameVOILUTSequence"):
            for item in group.get(transform) or []:
                dataset.update(item)
    for keyword in MAY_BE_EMPTY:
        if keyword in dataset and dataset.get(keyword) in (None, ""):
            delattr(dataset, keyword)
    return dataset


def _as_seen(stored: np.ndarray, dataset: Dataset) -> np.ndarray:
    """The stored values by the palette, or by the transforms of grey."""
    if dataset.PhotometricInterpretation == "PALETTE COLOR":
        bits = dataset.RedPaletteColorLookupTableDescriptor[2]
        return (apply_color_lut(stored, dataset)[..., :3] >> (bits - 8)).astype(np.uint8)
    if stored.ndim == 3:
        return (stored >> max(dataset.BitsStored - 8, 0)).astype(np.uint8)
    seen = apply_voi_lut(apply_modality_lut(stored, dataset), dataset)
    low, high = _range(dataset)
    if low == high:
        raise ValueError("RescaleSlope is 0")
    share = np.clip((seen.astype(np.float64) - low) / (high - low), 0, 1)
    share = 1 - share if dataset.PhotometricInterpretation == "MONOCHROME1" else share
    deep = dataset.BitsStored > 8
    return np.round(share * (2**dataset.BitsStored - 1 if deep else 255)).astype(np.uint16 if deep else np.uint8)


def _range(dataset: Dataset) -> tuple[float, float]:
    """The lowest and the highest value after the transforms: of the last table, else of the stored bits."""
    for tables in ("VOILUTSequence", "ModalityLUTSequence"):
        if dataset.get(tables):
            return 0.0, float(2 ** dataset[tables][0].LUTDescriptor[2] - 1)
    low = -(2 ** (dataset.BitsStored - 1)) if dataset.PixelRepresentation else 0
    slope, intercept = float(dataset.get("RescaleSlope", 1)), float(dataset.get("RescaleIntercept", 0))
    return low * slope + intercept, (low + 2**dataset.BitsStored - 1) * slope + intercept


def is_dicom(path: Path) -> bool:
    """Whether a file has DICOM's suffix, or begins as DICOM files do."""
    return path.suffix.lower() in SUFFIXES or _begins(path)


def _dicom_files(source: Path) -> list[Path]:
    """Files of DICOM's suffix, and those without a suffix (or with a number for it) that begin as DICOM files do."""
    others = (path for path in files_below(source) if not path.suffix or path.suffix[1:].isdecimal())
    begun = [path for path in others if path.name != "DICOMDIR" and _begins(path)]
    return sorted([*files_below(source, *SUFFIXES), *begun])


def _begins(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(132)[128:] == MAGIC


def _stem(path: Path, source: Path) -> str:
    """The path below the source without the folder "images" / "masks" and without a suffix that is known."""
    place = without_role(relative_path(path, source))
    known = path.suffix.lower() in (*SUFFIXES, *IMAGE_SUFFIXES)
    return str(place.with_suffix("") if known else place)
