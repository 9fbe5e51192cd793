"""DICOM files: one image per frame or file, as it is meant to be seen, and masks/ with the stem of the file.

Written names are neutral, and no tag is kept: patient and series are written as keyed hashes, see `write.py`. The
modality transform and the first window (or lookup table) of the file or frame are applied, MONOCHROME1 is inverted.
Files without preamble or meta information, as old archives write them, are read, too. Source: DICOM PS3.3, C.7.6.3,
C.7.6.16 and C.11.2; PS3.5, 8.1.1; pydicom.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np
import pydicom
from pydicom.dataset import Dataset
from pydicom.pixels.processing import apply_color_lut, apply_modality_lut, apply_voi_lut
from pydicom.pixels.utils import pixel_array
from pydicom.uid import ExplicitVRBigEndian, ExplicitVRLittleEndian, ImplicitVRLittleEndian, RLELossless

from rl_reward_network.bit_depth import BRIGHTEST_SHARE, DARKEST_SHARE
from rl_reward_network.data.images import DICOM_MARK, IMAGE_SUFFIXES, check_sides, missing_file, not_fetched, start_of
from rl_reward_network.data.masks import ClassMasks, Size, classes_of, load_class_masks
from rl_reward_network.data_import.files import (
    DICOM_SUFFIXES,
    files_below,
    grouped,
    image_keys,
    images_and_masks,
    relative_path,
    several_masks,
    without_role,
)
from rl_reward_network.data_import.items import Found, Item

BARE = (b"\x02\0", b"\x08\0")  # without a preamble: the groups of tags that come first
SPACINGS = ("PixelSpacing", "ImagerPixelSpacing", "NominalScannedPixelSpacing", "PixelAspectRatio")  # rows, columns
MAY_BE_EMPTY = ("VOILUTFunction", "WindowCenter", "WindowWidth", "RescaleSlope", "RescaleIntercept")
DEEPEST = 16  # bits of what is written
VISIBLE = 32  # range of stored values, from which on a picture of one grey is an error; a blank frame has less
EXPORT = "export it again from the archive"
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

    Masks are pictures or DICOM files in masks/ whose stem is that of the file, or `<stem>_<n>` of its frame n (from 1),
    perhaps with an affix such as `_mask`. `frames` of files with several are "first", "middle" or "all"; ValueError for
    others.
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
            segments = str(header.get("SOPClassUID")).startswith(SEGMENTATION)
            kind = "SEG" if segments else str(header.get("Modality"))
            if kind in NO_PICTURES or "Rows" not in header:
                other[kind if kind in NO_PICTURES else "blank"] += 1
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


def _items(
    source: Path, path: Path, name: str, header: Dataset, frames: str, masks: dict[str, list[Path]]
) -> list[Item]:
    """The chosen frames of a file; ValueError if a mask may be of any of them, or two are of one."""
    total, stem = int(header.get("NumberOfFrames") or 1), _stem(path, source)
    chosen = {"first": [0], "middle": [total // 2], "all": list(range(total))}[frames]
    if len(chosen) > 1 and stem in masks:
        raise ValueError(f"{masks[stem][0]} is the mask of one of {total} frames; name it {path.stem}_<n>, n from 1")
    patient, series = (str(header.get(tag) or "").strip() for tag in ("PatientID", "SeriesInstanceUID"))
    found_as = relative_path(path, source).as_posix()
    items = []
    for frame in chosen:
        found = [*masks.get(f"{stem}_{frame + 1}", []), *masks.get(stem, [])]
        if several := several_masks(found, source):
            raise ValueError(several[0])
        load_masks: Callable[[Size], ClassMasks] | None = None  # a DICOM mask has one frame or as many as the image
        if found:
            load_masks = partial(load_dicom_masks, found[0], frame, total)
            if found[0].suffix.lower() in IMAGE_SUFFIXES:
                load_masks = partial(load_class_masks, found[0])
        written = f"{name}.png" if total == 1 else f"{name}_frame_{frame + 1:04d}.png"
        load, aspect = partial(load_frame, path, frame), partial(pixel_aspect, header)
        items.append(Item(written, found_as, load, load_masks, None, patient or None, series or None, aspect))
    return items


def _masks_by_stem(masks: list[Path], images: list[Path], source: Path) -> dict[str, list[Path]]:
    """Masks by the stem of their image, or by that and the number of a frame; an affix ("_mask") is taken off."""
    stems = {_stem(path, source) for path in images}

    def stem_of(mask: Path) -> str:
        stem = _stem(mask, source)
        bases = [str(base) for base in image_keys(PurePosixPath(f"{stem}.png"))]
        return stem if stem in stems else next((base for base in bases if base in stems), stem)

    return grouped(masks, stem_of)


def load_dicom_masks(path: Path, frame: int, total: int, size: Size) -> ClassMasks:
    """The classes of a DICOM file by its stored values, without window or inversion; see `load_class_masks`.

    `frame` (from 0), `total` and `size` (H, W) are of the image; a mask with a single frame is that of all. ValueError
    if the file cannot be decoded, or has another size or number of frames.
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


def _dicom_files(source: Path) -> list[Path]:
    """Files of DICOM's suffix, and those that begin as DICOM files do, with another suffix than images or none."""
    others = (path for path in files_below(source) if path.suffix.lower() not in (*DICOM_SUFFIXES, *IMAGE_SUFFIXES))
    begun = [path for path in others if path.name != "DICOMDIR" and begins_as_dicom(path)]
    return sorted([*files_below(source, *DICOM_SUFFIXES), *begun])


def _stem(path: Path, source: Path) -> str:
    """The path below the source without the folder "images" / "masks" and without a suffix that is known."""
    place = without_role(relative_path(path, source))
    known = path.suffix.lower() in (*DICOM_SUFFIXES, *IMAGE_SUFFIXES)
    return str(place.with_suffix("") if known else place)


# ---- pixels ---------------------------------------------------------------------------------------------------------


def load_frame(path: Path, frame: int) -> np.ndarray:
    """A frame, from 0, as it is meant to be seen: uint8 (H, W, 3) of colour, uint8 or uint16 (H, W) of grey.

    Grey keeps the range of its stored bits, e.g. 0..4095 of 12 bit. ValueError for a file that is damaged, or
    compressed in a way that no installed package decodes.
    """
    return next(iter_frames(path, [frame]))


def iter_frames(path: Path, frames: Iterable[int]) -> Iterator[np.ndarray]:
    """Frames of a file as `load_frame` gives them, read one at a time; the header is read once. Raises as it does."""
    header = Dataset()
    for frame in frames:
        header = header or read_header(path)
        stored = stored_values(path, frame, header)
        try:
            seen = _as_seen(stored, _of_frame(header, frame))
        except Exception as error:  # of tags of any kind: AttributeError, IndexError, TypeError, OverflowError, ...
            raise ValueError(
                f"{path}: its window or table is not usable ({error}); correct it, or export it again"
            ) from error
        yield seen


def stored_values(path: Path, frame: int = 0, header: Dataset | None = None) -> np.ndarray:
    """The stored values of a frame, without any transform: integers (H, W), or (H, W, 3) of colour, which becomes RGB.

    `header` is that of the file, where it was read before. Raises as `load_frame`.
    """
    header = header or read_header(path)
    try:
        syntax = header.file_meta.get("TransferSyntaxUID")
        # As whole words, unused bits included; other codecs store the used bits alone.
        in_words = not syntax or not syntax.is_encapsulated or syntax == RLELossless
        source = path if syntax and not syntax.is_deflated else _whole(path)
        if not in_words or header.get("HighBit", 0) < header.get("BitsStored", 16):
            return pixel_array(source, index=frame)
        above = header.BitsAllocated - 1 - header.HighBit
        values = pixel_array(source, index=frame, correct_unused_bits=False)
        return values << above >> (header.BitsAllocated - header.BitsStored)  # with the sign, if there is one
    except Exception as error:  # decoders raise RuntimeError, NotImplementedError, ValueError, AttributeError, ...
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"{path}: pixels cannot be decoded (frame {frame + 1}, {type(error).__name__}: {reason}); decompress it,"
            f" e.g. by dcmdjpeg or gdcmconv --raw, or {EXPORT}"
        ) from error


def read_header(path: Path, tags: list[str] | None = None) -> Dataset:
    """The tags before the pixels, those of the keywords `tags` or all; ValueError for what is no whole DICOM file."""
    start = start_of(path)
    if found := not_fetched(start):
        raise ValueError(f"{path}: not a DICOM file ({found[0]}); {found[1]}")
    if not path.is_file():
        raise ValueError(missing_file(path))
    if not begins_as_dicom(path):
        what = "it begins otherwise" if start else "the file is empty"
        raise ValueError(f"{path}: not a DICOM file ({what}); copy it again, {EXPORT}, or leave it out")
    try:
        header = pydicom.dcmread(path, stop_before_pixels=True, specific_tags=tags, force=True)
        if tags:
            list(header)  # damaged values are met when they are parsed
    except Exception as error:  # of a damaged header: InvalidDicomError, EOFError, KeyError, struct.error, ...
        raise ValueError(
            f"{path}: not a readable DICOM file ({type(error).__name__}: {error}); copy it again, or {EXPORT}"
        ) from error
    return header


def pixel_aspect(header: Dataset) -> float:
    """Height of a pixel, as a multiple of its width, by the first tag that gives it; 1.0 without any."""
    with suppress(AttributeError, IndexError, TypeError, ValueError, ZeroDivisionError):  # missing, or damaged
        measures = header.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
        return float(measures.PixelSpacing[0]) / float(measures.PixelSpacing[1])
    for tag in SPACINGS:
        with suppress(IndexError, TypeError, ValueError, ZeroDivisionError):
            return float(header.get(tag)[0]) / float(header.get(tag)[1])
    return 1.0


def begins_as_dicom(path: Path) -> bool:
    """Whether a file has DICOM's mark; or begins with tags, without a preamble, and has no suffix of another format."""
    start, suffix = start_of(path), path.suffix.lower()
    bare = start[:2] in BARE and start[3:4] == b"\0" and (suffix in ("", *DICOM_SUFFIXES) or suffix[1:].isdecimal())
    return bare or start[128:132] == DICOM_MARK


def _whole(path: Path) -> Dataset:
    """A whole file; one that does not say how it is encoded is taken for what pydicom found it to be."""
    dataset = pydicom.dcmread(path, force=True)
    if "TransferSyntaxUID" not in dataset.file_meta:
        implicit, little = dataset.original_encoding
        explicit = ExplicitVRLittleEndian if little else ExplicitVRBigEndian
        dataset.file_meta.TransferSyntaxUID = ImplicitVRLittleEndian if implicit else explicit
    return dataset


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
    for keyword in MAY_BE_EMPTY:  # pydicom takes an empty one for a value, and needs both of a pair
        if keyword in dataset and dataset.get(keyword) in (None, ""):
            delattr(dataset, keyword)
    for keyword, other in (("WindowWidth", "WindowCenter"), ("WindowCenter", "WindowWidth")):
        if other not in dataset and keyword in dataset:
            delattr(dataset, keyword)
    if "RescaleSlope" in dataset or "RescaleIntercept" in dataset:
        dataset.RescaleSlope = dataset.get("RescaleSlope", 1)
        dataset.RescaleIntercept = dataset.get("RescaleIntercept", 0)
    return dataset


def _as_seen(stored: np.ndarray, dataset: Dataset) -> np.ndarray:
    """The stored values by the palette, or by the transforms of grey."""
    if dataset.PhotometricInterpretation == "PALETTE COLOR":
        bits = dataset.RedPaletteColorLookupTableDescriptor[2]
        return (apply_color_lut(stored, dataset)[..., :3] >> (bits - 8)).astype(np.uint8)
    if stored.ndim == 3:
        return (stored >> max(dataset.BitsStored - 8, 0)).astype(np.uint8)
    seen = apply_voi_lut(apply_modality_lut(stored, dataset), dataset).astype(np.float64)
    low, high = _range(dataset, stored)
    if low == high:
        raise ValueError("RescaleSlope is 0")
    share = np.clip((seen - low) / (high - low), 0, 1)
    share = 1 - share if dataset.PhotometricInterpretation == "MONOCHROME1" else share
    padded = _padded(stored, dataset)
    if padded.any() and not padded.all():
        share[padded] = share[~padded].min()  # no picture: it is to widen no window
    bits = min(dataset.BitsStored, DEEPEST)
    grey = np.round(share * (2**bits - 1 if bits > 8 else 255)).astype(np.uint16 if bits > 8 else np.uint8)
    _check_visible(grey[~padded], stored[~padded])
    return grey


def _padded(stored: np.ndarray, dataset: Dataset) -> np.ndarray:
    """bool (H, W): the pixels outside of the picture, of the values that the file declares. PS3.3, C.7.5.1.1.2."""
    ends = [dataset.get(tag) for tag in ("PixelPaddingValue", "PixelPaddingRangeLimit")]
    ends = [int(end) % 2**dataset.BitsAllocated for end in ends if end not in (None, "")]  # its sign may be missing
    ends = [end - 2**dataset.BitsAllocated * (end > np.iinfo(stored.dtype).max) for end in ends]
    return (stored >= min(ends)) & (stored <= max(ends)) if ends else np.zeros(stored.shape, bool)


def _check_visible(grey: np.ndarray, stored: np.ndarray) -> None:
    """Raise if a picture, (N,) pixels as they are seen, is of one grey although its stored values differ."""
    counts = np.bincount(grey)
    if counts.max(initial=0) < (BRIGHTEST_SHARE - DARKEST_SHARE) * grey.size or not grey.size:
        return
    low, high = np.quantile(stored, (DARKEST_SHARE, BRIGHTEST_SHARE))
    if high - low >= VISIBLE:
        raise ValueError(f"all is of grey {counts.argmax()}, but stored values are {low:g} to {high:g}")


def _range(dataset: Dataset, stored: np.ndarray) -> tuple[float, float]:
    """The values that are black and white after the transforms: of the last table, else of the stored bits."""
    for tables in ("VOILUTSequence", "ModalityLUTSequence"):
        if dataset.get(tables):
            return 0.0, float(2 ** dataset[tables][0].LUTDescriptor[2] - 1)
    windowed = "WindowWidth" in dataset
    used, signed = dataset.BitsStored, bool(dataset.PixelRepresentation)
    fewer = -signed * 2 ** (DEEPEST - 1)
    if not windowed and fewer <= stored.min() and stored.max() < fewer + 2**DEEPEST:
        used = min(used, DEEPEST)  # of more bits few greys would be left
    low = -signed * 2 ** (used - 1)
    slope, intercept = float(dataset.get("RescaleSlope", 1)), float(dataset.get("RescaleIntercept", 0))
    ends = low * slope + intercept, (low + 2**used - 1) * slope + intercept
    return ends if windowed else (min(ends), max(ends))  # pydicom's window ends where the stored bits do
