"""Small sources of every layout, as the tools write them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, XRayAngiographicImageStorage, generate_uid

SIZE = (24, 32)  # (H, W)


def picture(number: int, size: tuple[int, int] = SIZE) -> np.ndarray:
    """uint8 (H, W, 3) of noise, so that no two pictures are alike."""
    return np.random.default_rng(number).integers(0, 255, (*size, 3), dtype=np.uint8)


def truth(number: int, size: tuple[int, int] = SIZE) -> np.ndarray:
    """bool (H, W): a box that differs between numbers."""
    mask = np.zeros(size, bool)
    mask[3 : 8 + number % 10, 5 : 12 + number % 7] = True
    return mask


def save(path: Path, array: np.ndarray, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path, **options)
    return path


def as_255(mask: np.ndarray) -> np.ndarray:
    return mask.astype(np.uint8) * 255


def write_pairs(
    source: Path,
    images: str = "images/{}.png",
    masks: str = "masks/{}.png",
    count: int = 5,
    stored: Callable[[np.ndarray], np.ndarray] = as_255,
) -> Path:
    for number in range(count):
        save(source / images.format(number), picture(number))
        save(source / masks.format(number), stored(truth(number)))
    return source


def box_polygon(number: int) -> list[float]:
    """The outline of `truth(number)`, exact in pycocotools."""
    bottom, right = 8 + number % 10, 12 + number % 7
    return [5.0, 3.0, right, 3.0, right, bottom, 5.0, bottom]


def coco_content(names: list[str], annotations: list[dict[str, Any]], categories: list[str]) -> dict[str, Any]:
    height, width = SIZE
    return {
        "images": [{"id": n, "file_name": name, "height": height, "width": width} for n, name in enumerate(names)],
        "annotations": [{"id": n, "iscrowd": 0, "bbox": [], **one} for n, one in enumerate(annotations)],
        "categories": [{"id": n, "name": name} for n, name in enumerate(categories, 1)],
    }


def write_json(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def annotation(number: int, image: int, category: int = 1) -> dict[str, Any]:
    return {"image_id": image, "category_id": category, "segmentation": [box_polygon(number)]}


def drawing(number: int, kind: str = "polygon", **changes: Any) -> dict[str, Any]:
    x = box_polygon(number)
    points = [[x[0], x[1]], [x[4], x[5]]] if kind == "rectangle" else [[x[n], x[n + 1]] for n in range(0, 8, 2)]
    shape = {"label": "vessel", "shape_type": kind, "points": points, "flags": {}}
    size = {"imageHeight": SIZE[0], "imageWidth": SIZE[1]}
    return {"version": "5.5.0", "shapes": [shape], "imagePath": f"{number}.png", "imageData": None, **size, **changes}


def line(number: int, index: int = 0) -> str:
    numbers = (value / SIZE[1 - place % 2] for place, value in enumerate(box_polygon(number)))
    return " ".join([str(index), *(f"{number:.6f}" for number in numbers)])


SECRET = "DOE^JANE"


def series_uid(patient: str) -> str:
    return generate_uid(entropy_srcs=[patient])


def write_dicom(path: Path, pixels: np.ndarray, bits: int = 12, patient: str = "4711", **tags: Any) -> Path:
    """pixels: (H, W) or (frames, H, W) of the stored values."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = XRayAngiographicImageStorage, generate_uid()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    data = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    data.SOPClassUID, data.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
    data.PatientName, data.PatientID, data.SeriesInstanceUID = SECRET, patient, series_uid(patient)
    data.Rows, data.Columns = pixels.shape[-2:]
    if pixels.ndim == 3:
        data.NumberOfFrames = len(pixels)
    data.SamplesPerPixel, data.PhotometricInterpretation = 1, "MONOCHROME2"
    data.BitsAllocated, data.BitsStored, data.HighBit = 8 if bits == 8 else 16, bits, bits - 1
    data.PixelRepresentation = 0
    data.PixelData = pixels.astype(np.uint8 if bits == 8 else "<u2").tobytes()
    for name, value in tags.items():
        setattr(data, name, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    data.save_as(path, enforce_file_format=True)
    return path
