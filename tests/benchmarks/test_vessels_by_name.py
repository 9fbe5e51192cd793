"""Vessels by name: the task, what counts as empty, and the rival."""

import json
from pathlib import Path

import numpy as np
import torch

from benchmarks.named_unet import NamedImage, draw, make_unet, segment, take_step
from benchmarks.vessels_by_name import coco_content, make_task
from rl_reward_network.data.annotations import read_annotations
from rl_reward_network.data.names import read_classes
from tests.conftest import tube_image
from tests.data_import.sources import box_polygon, picture, save, truth

SEGMENTS = ["1", "2", "3", "4", "5", "6", "7", "8", "9", "9a", "10", "10a", "11", "12", "12a", "12b", "13", "14"]
SEGMENTS += ["14a", "14b", "15", "16", "16a", "16b", "16c"]


def test_segments_become_the_task(tmp_path: Path) -> None:
    drawn = {0: ["1", "2"], 1: ["5", "6"], 2: ["6", "7", "9"], 3: ["11"]}
    records = [
        {
            "image": f"images/{image}.png",
            "segments": [{"segment": one, "polygons": [box_polygon(n)]} for n, one in enumerate(own)],
        }
        for image, own in drawn.items()
    ]
    unused = {"image": "images/4.png", "segments": [{"segment": one, "polygons": []} for one in SEGMENTS]}
    for image in drawn:
        save(tmp_path / "arcade" / "images" / f"{image}.png", picture(image))
    (tmp_path / "arcade" / "segments.json").write_text(json.dumps([*records, unused]))
    groups = [{"image": f"{image}.png", "group": f"case {image}"} for image in range(5)]
    (tmp_path / "arcade" / "annotations.json").write_text(json.dumps(groups))
    make_task(tmp_path / "arcade", tmp_path / "out", most=4)
    samples = read_annotations(tmp_path / "out" / "task")
    asked: dict[str, dict[str, int]] = {}
    for sample in samples:
        mask = sample.load_mask()
        assert mask is not None
        asked.setdefault(sample.image_path.stem, {})[sample.text] = int(mask.sum())
    both, three = int((truth(0) | truth(1)).sum()), int((truth(0) | truth(1) | truth(2)).sum())
    lad, lcx = "left anterior descending artery", "left circumflex artery"
    main, right = "left main coronary artery", "right coronary artery"
    assert asked["0"] == {"blood vessel": both, right: both, main: 0, lad: 0, f"proximal {lad}": 0, lcx: 0}
    assert asked["1"] == {
        "blood vessel": both,
        right: 0,
        main: int(truth(0).sum()),
        f"proximal {lad}": int(truth(1).sum()),
    }
    assert asked["2"] == {"blood vessel": three, right: 0, lad: three}
    assert asked["3"] == {"blood vessel": int(truth(0).sum()), right: 0, lcx: int(truth(0).sum())}
    assert [sample.group for sample in samples[-3:]] == ["case 3"] * 3


def test_coco_files_hold_every_segment_as_a_category() -> None:
    content = coco_content([{"image": "images/a.png", "segments": [{"segment": "9a", "polygons": [[1]]}]}], ["9", "9a"])
    assert content["categories"] == [{"id": 1, "name": "9"}, {"id": 2, "name": "9a"}]
    assert content["annotations"] == [{"id": 0, "image_id": 0, "category_id": 2, "segmentation": [[1]]}]
    assert content["images"] == [{"id": 0, "file_name": "a.png"}]


def test_the_classes_of_the_benchmark_are_read() -> None:
    classes = read_classes(Path(__file__).parents[2] / "benchmarks" / "arcade_classes.json")
    assert len(classes) == 6
    used = {part for one in classes for part in (*one.ids, *one.asked_only_with, *one.asked_not_with, *one.absent_with)}
    assert used == {*SEGMENTS, "all"}


def test_windows_keep_left_and_right() -> None:
    image = np.zeros((64, 64, 3), np.uint8)
    image[:, :32] = 255
    one = NamedImage(image, image[None, ..., 0] > 0, np.ones(1, np.float32))
    pixels, truths, known = draw([one] * 16, np.random.default_rng(0))
    assert (truths[..., :16].mean(dim=(1, 2, 3)) > truths[..., -16:].mean(dim=(1, 2, 3))).all(), "none is mirrored"
    assert truths.std(dim=0).max() > 0, "poses differ"
    assert torch.equal(known, torch.ones(16, 1))
    assert ((pixels[:, :1] > 0.5) == (truths > 0)).float().mean() > 0.9, "image and truth move together"


def test_the_rival_learns_what_it_is_asked() -> None:
    images = []
    for seed in range(4):
        image, mask = tube_image(128, seed)
        images.append(NamedImage(image, np.stack([mask, mask & False, mask]), np.array([1, 1, 0], np.float32)))
    net, rng = make_unet(3, 0), np.random.default_rng(0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    losses = [take_step(net, optimizer, draw(images, rng), np.zeros((3, 3), bool), coarse=False) for _ in range(40)]
    assert losses[-1] < 0.5 * losses[0]
    masks = np.stack([segment(net, one.image) > 0.5 for one in images])
    truths = np.stack([one.truths for one in images])
    assert masks.shape == truths.shape
    overlap = (masks & truths).sum(axis=(0, 2, 3)) / (masks | truths).sum(axis=(0, 2, 3))
    assert overlap[0] > 0.4
    assert masks[:, 1].mean() < 0.01, "the absent class is empty"
    assert overlap[2] < 0.4, "a class that is not asked for has no loss"
