"""The same picture is found in another format, size, brightness and orientation, and another picture is not."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.ndimage import gaussian_filter

from rl_reward_network.data import identity
from rl_reward_network.data.annotations import read_annotations
from tests.conftest import SHARED, write_tiny_data

Change = Callable[[Image.Image], Image.Image]


def scene(number: int) -> Image.Image:
    """Soft structures of two sizes on a bright disc, which all scenes share, as photographs of a retina do."""
    rng = np.random.default_rng(number)
    fine, coarse = (gaussian_filter(rng.normal(size=(180, 240)), sigma) * sigma for sigma in (6, 15))
    rows, columns = np.mgrid[-1:1:180j, -1:1:240j]
    disc = np.hypot(rows, columns) < 0.9
    return Image.fromarray(np.clip(20 + disc * (90 + 60 * fine + 60 * coarse), 0, 255).astype(np.uint8)).convert("RGB")


def small(image: Image.Image) -> np.ndarray:
    return identity.thumbnail(np.asarray(image))


def as_jpeg(image: Image.Image) -> Image.Image:
    data = io.BytesIO()
    image.save(data, "JPEG", quality=40)
    return Image.open(data)


CHANGES: dict[str, Change] = {
    "JPEG": as_jpeg,
    "half the size": lambda image: image.resize((120, 90)),
    "twice, another shape": lambda image: image.resize((500, 300)),
    "mirrored": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "upside down JPEG": lambda image: as_jpeg(image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)),
    "quarter turn": lambda image: image.transpose(Image.Transpose.ROTATE_90),
    "three quarters, mirrored": lambda image: image.transpose(Image.Transpose.TRANSVERSE),
    "brighter": lambda image: image.point(lambda value: value * 0.7 + 60),
    "darker": lambda image: image.point(lambda value: value * 0.4),
    "gamma": lambda image: image.point(lambda value: 255 * (value / 255) ** 0.7),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_copy_is_the_same_picture(change: Change) -> None:
    others = np.stack([small(scene(number)) for number in range(3)])
    copies = np.stack([small(change(scene(number))) for number in (2, 9)])
    assert identity.among(copies, others).tolist() == [True, False]
    deep = identity.thumbnail(np.asarray(change(scene(2)).convert("L")).astype(np.uint16) * 200)
    assert identity.among(deep[None], others).all(), "grey of more than 8 bit"
    assert identity.among(copies[:0], others).tolist() == [], "a split without images"
    assert identity.among(copies, others[:0]).tolist() == [False, False]


def test_blank_and_nearly_blank_pictures_are_like_no_other() -> None:
    rng = np.random.default_rng(0)
    blank: list[np.ndarray] = [
        np.zeros((64, 64), np.uint8),
        np.full((64, 64, 3), 255, np.uint8),
        rng.integers(0, 3, (512, 512)),
    ]
    found = np.stack([identity.thumbnail(image.astype(np.uint8)) for image in blank])
    assert not found.any()
    assert not identity.among(found, found).any()
    assert not identity.same_in_two_groups(found, ["a", "b", "c"])


def test_pairs_of_two_groups_alone_are_listed_the_most_similar_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "BLOCK", 2)  # pairs lie in one block and in two
    found = np.stack([small(image) for image in (scene(0), scene(1), as_jpeg(scene(0)), scene(2), scene(1))])
    pairs = identity.same_in_two_groups(found, ["a", "b", "c", "d", "e"])
    assert [pair[:2] for pair in pairs] == [(1, 4), (0, 2)]
    assert pairs[0][2] == pytest.approx(1, abs=1e-5)
    assert identity.SAME < pairs[1][2] < 1
    assert [pair[:2] for pair in identity.same_in_two_groups(found, ["a", "b", "a", "d", "e"])] == [(1, 4)]
    assert identity.among(found, found[:1]).tolist() == [True, False, True, False, False]


def test_groups_that_share_a_picture_are_one(tmp_path: Path) -> None:
    samples = read_annotations(write_tiny_data(tmp_path, 8, 64))
    assert identity.join_groups(samples) == samples
    assert identity.joined_note(samples) == ""
    image = Image.open(samples[0].image_path)
    image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).resize((64, 64)).save(samples[5].image_path)
    image.save(samples[3].image_path, compress_level=0)
    samples[7].image_path.write_bytes(b"damaged")  # whoever uses it says so
    joined = identity.join_groups(samples)
    kept = min(samples[index].group_id for index in (0, 3, 5))
    assert [joined[index].group_id for index in (0, 3, 5)] == [kept] * 3
    assert [joined[index] for index in (1, 2, 4, 6, 7)] == [samples[index] for index in (1, 2, 4, 6, 7)]
    assert identity.joined_note(joined) == "3 groups that share pictures, taken for 1"
    spelled = [replace(sample, group=sample.group.upper()) for sample in samples[:1]] + samples
    assert identity.joined_note(spelled) == "", "two spellings of one patient"


def test_weights_that_have_seen_an_image_are_refused_with_its_name(tmp_path: Path) -> None:
    samples = read_annotations(write_tiny_data(tmp_path, 6, 64))
    seen = identity.thumbnails(samples)
    parts = {"the val split": samples[:2], "the test split": samples[2:4]}
    for known, message in (
        ({"train": seen[[1]]}, r"net was trained on 1 of the 2 images of the val split.*\(P0001.*png\); do"),
        ({"train": seen[4:], "val": seen[2:]}, r"net was chosen on 2 of the 2 images of the test split"),
        ({"unlabelled": seen[:3]}, "trained without masks on 2 of the 2 images of the val split"),
    ):
        with pytest.raises(ValueError, match=message):
            identity.check_apart(known, parts, "net", "do something")
    for known in ({}, {"train": seen[4:]}, {"val": seen[:2]}):
        identity.check_apart(known, parts, "net", "do something")
    both = identity.together({"train": seen[:3]}, {"train": seen[2:], "val": seen[:1]}, {})
    assert {use: len(one) for use, one in both.items()} == {"train": 6, "val": 1}, "each picture once"


@pytest.mark.parametrize("name", ["dca1/images", "stare/images", "chase_db1/images"])
def test_real_images_of_different_patients_are_told_apart(name: str) -> None:
    folder = SHARED / "realdata" / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is missing: real images lie beside the repository")
    images = [Image.open(path).convert("RGB") for path in sorted(folder.iterdir())[:20]]
    found = np.stack([small(image) for image in images])
    assert identity.same_in_two_groups(found, [str(number) for number in range(len(found))]) == []
    copies = [as_jpeg(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)).resize((400, 400)) for image in images[:5]]
    assert identity.among(np.stack([small(copy) for copy in copies]), found).all()
