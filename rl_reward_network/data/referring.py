"""Released sets of referring expressions: RefCOCO, RefCOCO+ and RefCOCOg, gRefCOCO, ReasonSeg; and questions in JSON.

    refcoco/   instances.json, refs(unc).p, images/        sentences of one object each
    grefcoco/  instances.json, grefs(unc).json, images/    sentences of several objects, or of none
    val/       X.jpg, X.json, ...                          ReasonSeg
    own.json   [{"image": "a.jpg", "question": "...", "mask": "a.png"}, {"image": "a.jpg", "question": "..."}]

A question without "mask" has a text as its answer. "mask" is a file, a COCO RLE, or null where there is no such object.
Source: the formats of lichengunc/refer, henghuiding/gRefCOCO and dvlab-research/LISA, as released.
"""

import io
import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from rl_reward_network.atomic_io import read_json
from rl_reward_network.data.images import IMAGE_SUFFIXES, load_image
from rl_reward_network.data.masks import MaskParts, load_mask, parse_polygon, parse_rle, rasterise

ASK, ASK_SENTENCE = "Please segment {} in this image.", "{} Please respond with segmentation mask."
IGNORE = 255  # in ReasonSeg's masks: pixels that count for nothing
BESIDE = ("images", "train2014", "coco2014/train2014", "coco/train2014")
SPLITS = ("val", "test")  # of several in a file, those whose names begin so
Truth = np.ndarray  # uint8 (H, W): 0, 1, and IGNORE


@dataclass(frozen=True, eq=False)
class Question:
    """A question about an image; with a mask as its answer, or a text."""

    image: Path
    text: str
    truth: Callable[[np.ndarray], Truth] | None  # from the image; None where the answer is a text

    def load(self) -> tuple[np.ndarray, Truth]:
        """Image uint8 (H, W, 3) and its mask; a ValueError that names the image for one that does not fit."""
        assert self.truth is not None
        image = load_image(self.image)
        try:
            return image, self.truth(image)
        except ValueError as error:
            raise ValueError(f"{self.image}: {error}") from error


def read_questions(path: Path) -> list[Question]:
    """The questions of a folder or file in one of these formats; a ValueError for any other, or a missing image."""
    if path.is_file() and path.suffix.lower() == ".json":
        found = list(_own(path))
    elif (path / "instances.json").is_file():
        found = list(_refcoco(path))
    else:
        found = list(_reasonseg(path))
    if not found:
        raise ValueError(
            f"{path}: no question; expected instances.json beside refs(*).p or grefs(*).json, a folder of ReasonSeg"
            " with X.jpg and X.json, or a JSON list of {image, question, mask}"
        )
    if missing := [question.image for question in found if not question.image.is_file()]:
        raise ValueError(f"{missing[0]}: no such image ({len(missing)} of {len(found)} questions); copy it there")
    return found


# ---- RefCOCO and gRefCOCO ----


def _refcoco(folder: Path) -> Iterator[Question]:
    instances, file = read_json(folder / "instances.json"), _sentences(folder)
    images = {image["id"]: image["file_name"] for image in instances["images"]}
    outlines = {one["id"]: one for one in instances["annotations"]}
    refs = read_json(file) if file.suffix == ".json" else unpickled(file)
    if held := [ref for ref in refs if str(ref.get("split")).startswith(SPLITS)]:
        refs = held  # a set without such a split is one of the user's own
    for ref in refs:
        ids = ref["ann_id"] if isinstance(ref["ann_id"], list) else [ref["ann_id"]]
        if unknown := [number for number in ids if number != -1 and number not in outlines]:
            raise ValueError(f"{file}: object {unknown[0]} is not in instances.json; they belong to two sets")
        own = [outlines[number] for number in ids if number != -1]
        image = _place(folder, images[ref["image_id"]])
        for sentence in ref["sentences"]:
            yield Question(image, ASK.format(sentence["sent"]), _union(own))


def _sentences(folder: Path) -> Path:
    """The file of sentences; of several, which split the images in different ways, that which papers use."""
    files = [*folder.glob("refs(*).p"), *folder.glob("grefs(*).json"), *folder.glob("grefs(*).p")]
    for known in ("refs(unc).p", "refs(umd).p", "grefs(unc).json", "grefs(unc).p"):
        if folder / known in files:
            return folder / known
    if len(files) != 1:
        raise ValueError(f"{folder}: {len(files)} files like refs(*).p or grefs(*).json, expected one; leave one there")
    return files[0]


def _place(folder: Path, name: str) -> Path:
    """An image of the set: in its folder, or beside it, as COCO's train2014; the first place where there is none."""
    beside = (folder / "images", folder, folder / "train2014", *(folder.parent / place for place in BESIDE))
    return next((place / name for place in beside if (place / name).is_file()), beside[0] / name)


def _union(annotations: Sequence[dict[str, Any]]) -> Callable[[np.ndarray], Truth]:
    def truth(image: np.ndarray) -> Truth:
        size, parts = image.shape[:2], MaskParts()
        for one in annotations:
            stored = one["segmentation"]
            polygons = stored if isinstance(stored, list) else []
            parts = sum((parse_polygon(polygon, size) for polygon in polygons), parts)
            parts = parts + (parse_rle(stored, size) if isinstance(stored, dict) else MaskParts())
        return rasterise(parts, size).astype(np.uint8)

    return truth


class _Plain(pickle.Unpickler):
    """Reads lists, dictionaries, texts and numbers alone: a pickle can call nothing."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"holds {module}.{name}, expected lists, dictionaries, texts and numbers alone")


def unpickled(file: Path) -> Any:
    """The value of a released refs(*).p, which Python 2 wrote; a ValueError for one that is more than plain values."""
    try:
        return _Plain(io.BytesIO(file.read_bytes()), encoding="latin1").load()
    except (ValueError, pickle.UnpicklingError, EOFError, IndexError) as error:
        raise ValueError(f"{file}: not a file of referring expressions ({error}); download it again") from error


# ---- ReasonSeg ----


def _reasonseg(folder: Path) -> Iterator[Question]:
    images = {file.stem: file for file in sorted(folder.glob("*")) if file.suffix.lower() in IMAGE_SUFFIXES}
    for file in sorted(folder.glob("*.json")):
        content = _read(file)
        if not isinstance(content, dict) or not {"shapes", "text", "is_sentence"} <= content.keys():
            raise ValueError(f"{file}: expected the fields shapes, text and is_sentence of ReasonSeg; correct it there")
        text = (ASK_SENTENCE if content["is_sentence"] else ASK).format(content["text"][0])
        yield Question(images.get(file.stem, file.with_suffix(".jpg")), text, _shapes(content["shapes"]))


def _read(file: Path) -> Any:
    """The JSON of a file, of which some in the release are in a Windows encoding."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        return json.loads(file.read_text(encoding="cp1252"))


def _shapes(shapes: Sequence[dict[str, Any]]) -> Callable[[np.ndarray], Truth]:
    """Outlines painted as in LISA, the largest first: with their line, on points that are cut to whole numbers."""

    def truth(image: np.ndarray) -> Truth:
        drawn = [(shape["label"].lower(), np.array(shape["points"]).astype(np.int32)) for shape in shapes]
        areas = []
        for _, points in drawn:
            alone = np.zeros(image.shape[:2], np.uint8)
            _paint(alone, points, 1)
            areas.append(int(alone.sum()))
        mask = np.zeros(image.shape[:2], np.uint8)
        for row in sorted(range(len(drawn)), key=lambda row: -areas[row]):
            label, points = drawn[row]
            if "flag" not in label:
                _paint(mask, points, IGNORE if "ignore" in label else 1)
        return mask

    return truth


def _paint(mask: np.ndarray, points: np.ndarray, value: int) -> None:
    cv2.polylines(mask, [points], True, value, 1)
    cv2.fillPoly(mask, [points], value)


# ---- questions of one's own ----


def _own(file: Path) -> Iterator[Question]:
    content = read_json(file)
    for number, entry in enumerate(content if isinstance(content, list) else []):
        where = f"{file}: entry {number}"
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("image", "question")):
            raise ValueError(f"{where} is {entry!r:.60}, expected an object with image, question and, for a mask, mask")
        image = file.parent / entry["image"]
        yield Question(image, entry["question"], _stored(entry["mask"], file, where) if "mask" in entry else None)


def _stored(mask: Any, file: Path, where: str) -> Callable[[np.ndarray], Truth]:
    if not (mask is None or isinstance(mask, str | dict)):
        raise ValueError(f"{where}: mask is {mask!r:.60}, expected a file, a COCO RLE, or null for no object")

    def truth(image: np.ndarray) -> Truth:
        size = image.shape[:2]
        if isinstance(mask, str):
            return load_mask(file.parent / mask, size).astype(np.uint8)
        return rasterise(parse_rle(mask, size) if mask else MaskParts(), size).astype(np.uint8)

    return truth
