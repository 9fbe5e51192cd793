"""Which file is of which image, and what its numbers mean: masks of many tools, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rl_reward_network.data.annotations import read_annotations
from rl_reward_network.data.masks import to_rle
from rl_reward_network.segment.files import save_mask
from rl_reward_network.segment.predictions import Predictions, read_predictions
from tests.data_import.sources import SIZE, as_255, box_polygon, coco_content, picture, save, truth

COUNT = 7
NAMES = [f"case_{number}" for number in range(COUNT)]
BOXES = [truth(number) for number in range(COUNT)]
Write = Callable[[Path], object]


def write_data(folder: Path, names: list[str] = NAMES) -> Path:
    """Images of a patient each; the mask of the last is missing."""
    records = []
    for number, name in enumerate(names):
        save(folder / f"images/{name}.png", picture(number))
        save(folder / f"truth/{name}.png", as_255(truth(number)))
        record = {"image": f"{name}.png", "text": ["vessel"], "group": name}
        records.append(record | ({"mask_png": f"truth/{name}.png"} if number < len(names) - 1 else {}))
    (folder / "annotations.json").write_text(json.dumps(records))
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


def read(source: Path, data: Path, ids_from: Path | None = None) -> Predictions:
    return read_predictions(source, read_annotations(data), data, ids_from or data)


def pictures(name: str, stored: Callable[[np.ndarray], np.ndarray]) -> Write:
    return lambda folder: [save(folder / name.format(n), stored(box)) for n, box in zip(NAMES, BOXES, strict=True)]


def arrays(stored: Callable[[np.ndarray], np.ndarray]) -> Write:
    return lambda folder: [np.save(folder / f"{n}.npy", stored(box)) for n, box in zip(NAMES, BOXES, strict=True)]


def soft(box: np.ndarray) -> np.ndarray:
    """float64 (H, W) in [0, 1], above 0.5 in the box."""
    return box * 0.55 + np.random.default_rng(0).random(box.shape) * 0.44


def drawn(box: np.ndarray) -> np.ndarray:
    """Red on a transparent ground."""
    return np.where(box[..., None], np.uint8([255, 0, 0, 255]), np.uint8([0, 0, 0, 0]))


def with_images_and_overlays(folder: Path) -> None:
    pictures("{}_mask.png", as_255)(folder)
    save(folder / "contact_sheet.png", picture(0))
    for number, name in enumerate(NAMES):
        save(folder / f"{name}.png", picture(number))
        save(folder / f"{name}_overlay.png", picture(number))
        save(folder / f"{name}_soft.png", (soft(~BOXES[number]) * 65535).astype(np.uint16))


def by_a_prompt(folder: Path) -> None:
    for name, box in zip(NAMES, BOXES, strict=True):
        save_mask(folder / f"{name}_please-segment-it_mask.png", box, "Please segment it!")


def of_nnunet(folder: Path) -> None:
    """Probabilities of background and object beside the masks, and those alone."""
    for name, box in zip(NAMES, BOXES, strict=True):
        both = np.stack([1 - soft(box), soft(box)])[:, None].astype(np.float32)
        np.savez(folder / f"{name}.npz", probabilities=both)
    save(folder / f"{NAMES[0]}.png", BOXES[0].astype(np.uint8))
    (folder / "dataset.json").write_text("{}")


def as_coco(folder: Path) -> None:
    """A data set, whose scores below 0.5 leave nothing out."""
    record = {"category_id": 1, "score": 0.1}
    annotations = [record | {"id": n, "image_id": n, "segmentation": [box_polygon(n)]} for n in range(COUNT)]
    content = coco_content([f"{name}.png" for name in NAMES], annotations, ["background", "vessel"])
    (folder / "predictions.json").write_text(json.dumps(content))


def as_results(folder: Path) -> None:
    records = [
        {"image_id": name, "category_id": 1, "segmentation": to_rle(box), "score": 0.9}
        for name, box in zip(NAMES, BOXES, strict=True)
    ]
    unsure = {"image_id": NAMES[0], "category_id": 1, "segmentation": to_rle(~BOXES[0]), "score": 0.2}
    (folder / "results.json").write_text(json.dumps([*records, unsure]))


READ: dict[str, Write] = {
    "0/255 as segment writes it": pictures("{}_mask.png", as_255),
    "0/1": pictures("{}.png", lambda box: box.astype(np.uint8)),
    "bool, below folders": pictures("labelsTs/{}.png", lambda box: box),
    "a class": pictures("{}_seg.tif", lambda box: box.astype(np.uint8) * 3),
    "0/255 in 16 bit": pictures("{}.png", lambda box: box.astype(np.uint16) * 255),
    "soft, 16 bit": pictures("{}_soft.png", lambda box: (soft(box) * 65535).astype(np.uint16)),
    "soft, 8 bit": pictures("{}_pred.png", lambda box: (soft(box) * 255).astype(np.uint8)),
    "grey as RGB": pictures("{}.png", lambda box: np.repeat(as_255(box)[..., None], 3, axis=2)),
    "drawn": pictures("{}.png", drawn),
    "array of bool": arrays(lambda box: box),
    "array of probabilities": arrays(lambda box: soft(box).astype(np.float32)[None]),
    "beside images and overlays": with_images_and_overlays,
    "a prompt in the name": by_a_prompt,
    "nnU-Net": of_nnunet,
    "COCO": as_coco,
    "COCO results": as_results,
}


@pytest.mark.parametrize("kind", READ)
def test_masks_of_many_tools_are_read_alike(kind: str, data: Path, tmp_path: Path) -> None:
    READ[kind](tmp_path)
    found = read(tmp_path, data)
    ids = {sample.sample_id: int(sample.image_path.stem[-1]) for sample in read_annotations(data)}
    assert found.masks.keys() == ids.keys()
    for sample, number in ids.items():
        mask = found.masks[sample](SIZE)
        assert mask.dtype == bool
        np.testing.assert_array_equal(mask, BOXES[number])
    assert len(found.notes) == (kind == "COCO results")


def test_images_of_one_name_are_told_apart_by_folders_and_channels_are_dropped(tmp_path: Path) -> None:
    names = ["a/1_0000", "b/1_0000", "b/2_0000"]
    data = write_data(tmp_path / "data", names)
    for number, name in enumerate(names):
        save(tmp_path / f"masks/{name.removesuffix('_0000')}.png", as_255(BOXES[number]))
    save(tmp_path / "masks/3.png", as_255(BOXES[0]))
    found = read(tmp_path / "masks", data)
    for sample, box in zip(read_annotations(data), BOXES, strict=False):
        np.testing.assert_array_equal(found.masks[sample.sample_id](SIZE), box)
    assert found.notes[0].endswith("1 files are of no image of the data, left out"), "no name: it is for reports"
    for name in names:
        (tmp_path / f"masks/{name.removesuffix('_0000')}.png").unlink()
    with pytest.raises(ValueError, match=r"\(images/a/1_0000.png, .*and put it into a folder of the same name"):
        read(tmp_path / "masks", data)


def test_ids_of_results_are_those_of_the_data_and_no_record_is_an_empty_mask(data: Path, tmp_path: Path) -> None:
    as_coco(tmp_path)
    (tmp_path / "predictions.json").rename(tmp_path / "instances.json")
    record = {"image_id": 2, "category_id": 1, "segmentation": to_rle(BOXES[2]), "score": 0.9}
    results = tmp_path / "results.json"
    results.write_text(json.dumps([record]))
    found = read(results, data, tmp_path)
    sums = [found.masks[sample.sample_id](SIZE).sum() for sample in read_annotations(data)]
    assert sums == [0, 0, BOXES[2].sum(), 0, 0, 0, 0]
    assert f"{COUNT - 1} images have no record" in found.notes[0]
    results.write_text("[]")
    assert len(read(results, data, tmp_path).masks) == COUNT, "nothing was found in any image"


def both_names(folder: Path) -> None:
    pictures("{}.png", as_255)(folder)
    save(folder / f"{NAMES[0]}.tif", as_255(BOXES[0]))


def two_categories(folder: Path) -> None:
    as_results(folder)
    records = json.loads((folder / "results.json").read_text())
    (folder / "results.json").write_text(json.dumps([*records, records[0] | {"category_id": 2}]))


def scored(score: object) -> Write:
    record = {"image_id": NAMES[0], "category_id": 1, "segmentation": to_rle(BOXES[0]), "score": score}
    return lambda folder: (folder / "results.json").write_text(json.dumps([record]))


REFUSED: dict[str, tuple[Write, str]] = {
    "no folder": (lambda folder: folder.rmdir(), "no such file or folder"),
    "nothing": (lambda folder: None, r"no masks here; expected one file an image \(.png"),
    "volumes": (lambda folder: (folder / "a.nii.gz").touch(), "volumes: write each slice as PNG"),
    "other names": (lambda folder: save(folder / "x.png", as_255(BOXES[0])), r"none of 1 names \(x.png\) is of an"),
    "another size": (
        pictures("{}.png", lambda box: as_255(box)[::2, ::2]),
        r"case_0.png: the prediction is 16 x 12, but its image is 32 x 24 .*\(and 6 more of 7 checked\)",
    ),
    "two of one": (both_names, "case_0.png, .*case_0.tif: predictions of one image"),
    "classes": (pictures("{}.png", lambda box: box + np.uint8(1) * truth(9)), "hold the classes 1, 2"),
    "a class and void": (pictures("{}.png", lambda box: np.where(box, np.uint8(1), 255)), "the classes 1, 255"),
    "logits": (arrays(lambda box: soft(box) * 8), "values are .* expected probabilities"),
    "a broken array": (lambda folder: (folder / "case_0.npy").write_bytes(b"x"), "no array can be read"),
    "colours": (
        pictures("{}.png", lambda box: np.where(box[..., None], np.uint8([255, 0, 0]), np.uint8([0, 0, 255]))),
        "holds the colours #0000ff, #ff0000",
    ),
    "a score in words": (scored("high"), "score is 'high', expected a number"),
    "no score": (scored(float("nan")), "score is nan, expected a number"),
    "two categories": (two_categories, "annotations of 2 categories"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_told_is_refused(kind: str, data: Path, tmp_path: Path) -> None:
    write, message = REFUSED[kind]
    folder = tmp_path / "masks"
    folder.mkdir()
    write(folder)
    with pytest.raises(ValueError, match=message):
        read(folder, data)


def test_a_file_must_be_coco(data: Path, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(ValueError, match="no COCO annotations or results"):
        read(tmp_path / "other.json", data)
    Image.fromarray(BOXES[0]).save(tmp_path / "case_0.png")
    assert len(read(tmp_path, data).masks) == 1
