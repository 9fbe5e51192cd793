"""Small sources of every layout, as the tools write them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

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
