"""Samples of images and regions: what they give, their ids, and what is refused."""

import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rl_reward_network.data import items
from rl_reward_network.data.masks import parse_polygon, to_rle

IMAGE = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)  # not square, so that swapped axes show
MASK = np.zeros((6, 8), dtype=bool)
MASK[1:3, 4:7] = True


@pytest.fixture
def sample(tmp_path: Path) -> items.Sample:
    path = tmp_path / "Doe_John(1234567)_a_frame_000001.png"
    Image.new("L", (40, 32), 9).save(path)
    square = parse_polygon([10, 10, 20, 10, 20, 20, 10, 20], (32, 40))
    return items.Sample(path, "blood vessel", "a" * 12, "b" * 12, "c" * 12, (32, 40), square, group="Doe_John")


def test_a_sample_gives_image_and_mask_and_shows_no_name(sample: items.Sample):
    image, mask = sample.load_image(), sample.load_mask()
    assert (image.dtype, image.shape, image.max()) == (np.uint8, (32, 40, 3), 9)
    assert (mask.dtype, mask.shape, mask.sum()) == (bool, (32, 40), 100)
    bare = replace(sample, mask_parts=None)
    assert (sample.labelled, bare.labelled, bare.load_mask()) == (True, False, None)
    for text in (repr(sample), str([sample]), f"{sample}"):
        assert "Doe" not in text
        assert "1234567" not in text


def test_image_that_changed_its_size_is_refused(sample):
    Image.new("L", (41, 32)).save(sample.image_path)
    with pytest.raises(ValueError, match=r"image is \(32, 41\).*\(32, 40\).*save it again"):
        sample.load_image()


def test_pseudonyms_are_12_hex_digits_and_keep_kinds_apart() -> None:
    names = [("group", "P1"), ("series", "P1"), ("group", "P2"), ("series", "P1", "a"), ("series", "P1a")]
    assert len({items.pseudonym(*n) for n in names}) == len(names)
    assert all(len(items.pseudonym(*n)) == 12 and int(items.pseudonym(*n), 16) >= 0 for n in names)
    assert items.pseudonym("group", "chase_01") == "902a4c27706a"  # written in users' split files: it must never change


def region(
    caption: Any = "a dog", rle: Any = None, image_id: str = "aaaaaaaaaaaa", where: str = "x: row 1", **more: Any
) -> items.RegionSample:
    return items.make_region(caption, to_rle(MASK) if rle is None else rle, image_id, where, lambda: IMAGE, **more)


def test_a_region_gives_its_image_mask_and_stripped_caption() -> None:
    made = region(caption="  a dog\n")
    image, mask = made.load()
    assert image is IMAGE
    assert (mask == MASK).all()
    assert made.caption == "a dog"
    assert made.group_id == made.series_id == made.image_id == "aaaaaaaaaaaa"
    of_video = region(group_id="bbbbbbbbbbbb")
    assert (of_video.image_id, of_video.group_id, of_video.series_id) == ("a" * 12, "b" * 12, "b" * 12)
    same = [region(), region(where="y: row 2"), region(caption=" a dog ")]
    others = [region(caption="a cat"), region(rle=to_rle(~MASK)), region(image_id="bbbbbbbbbbbb")]
    assert len({made.sample_id for made in same}) == 1, "the id is of the content, not of the place"
    assert len({made.sample_id for made in same + others}) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"caption": None}, r"the caption is missing \(NoneType\); .*leave the region out"),
        ({"caption": " \n"}, "the caption is empty; .*leave the region out"),
        ({"caption": 7}, r"the caption is missing \(int\)"),
        ({"caption": " ... "}, r"the caption '\.\.\.' has no word"),
        ({"rle": "abc"}, "mask_rle: expected an RLE .*got str"),
        ({"rle": {"size": [6, 8]}}, "mask_rle: .*needs the keys"),
        ({"rle": {"counts": [48]}}, "mask_rle: .*needs the keys"),
        ({"rle": {"size": [6], "counts": [48]}}, r"mask_rle: RLE size is \[6\]"),
        ({"rle": {"size": [6, -8], "counts": [48]}}, "two numbers above 0"),
        ({"rle": {"size": None, "counts": [48]}}, "RLE size is None"),
        ({"rle": {"size": [6, 8], "counts": [47]}}, r"sum to H \* W = 48, got a sum of 47"),
        ({"rle": {"size": [6, 8], "counts": "~~"}}, "not a compressed COCO string"),
        ({"rle": to_rle(MASK.T)}, r"mask_rle has size \[8, 6\].*image \[6, 8\]"),
        ({"rle": to_rle(MASK & False)}, "the region has no pixel; leave it out"),
    ],
)
def test_a_damaged_region_is_an_error_that_names_its_place(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^x: row 1: .*{message}"):
        region(**changes).load()


def test_an_image_that_cannot_be_read_is_an_error_that_names_the_row() -> None:
    def broken() -> np.ndarray:
        raise FileNotFoundError(2, "No such file", "gone.tar")

    with pytest.raises(ValueError, match=r"^x: row 1: .*cannot be decoded .*gone\.tar"):
        items.make_region("a dog", to_rle(MASK), "aaaaaaaaaaaa", "x: row 1", broken).load()


def test_equal_image_files_have_equal_keys_wherever_they_lie() -> None:
    picture = bytes(range(256)) * 40  # 10240 bytes: first and last part do not touch
    key = items.image_key(io.BytesIO(picture), 0, len(picture))
    assert items.image_key(io.BytesIO(b"header" + picture + b"rest"), 6, len(picture)) == key
    others = [
        b"x" + picture[1:],
        picture[:-1] + b"x",
        picture + b"x",
        bytes(10**4),
        bytes(10**4 + 1),
        b"short",
        b"shor",
    ]
    assert len({key, *(items.image_key(io.BytesIO(other), 0, len(other)) for other in others)}) == 8

    class Counting(io.BytesIO):
        total = 0

        def read(self, size: int | None = -1, /) -> bytes:
            Counting.total += size or 0
            return super().read(size)

    items.image_key(Counting(b"\x89PNG" + bytes(10**6)), 0, 10**6)
    assert Counting.total == 2 * items.KEY_BYTES, "only the ends of a compressed file are read"


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "PNG", "WEBP"])
def test_images_with_equal_margins_have_keys_of_their_own(kind: str) -> None:
    keys = set()
    for value in (40, 200):
        picture, file = np.zeros((128, 128, 3), dtype=np.uint8), io.BytesIO()
        picture[40:88, 40:88] = value
        Image.fromarray(picture).save(file, kind)
        keys.add(items.image_key(file, 0, len(file.getvalue())))
    assert len(keys) == 2


def test_collecting_leaves_out_repeats_and_empty_masks_and_stops_at_the_limit() -> None:
    empty = region(rle=to_rle(np.zeros((6, 8), dtype=bool)))
    first, other, again = region(), region(caption="a cat"), region(where="y")
    left_out: Counter[str] = Counter()
    assert items.collect([first, empty, other, again, again], None, left_out) == [first, other]
    assert left_out == {"mask(s) without a pixel": 1, "exact repeat(s)": 2}

    def endless() -> Iterator[items.RegionSample]:
        for number in range(10):
            assert number < 3, "read beyond the limit"
            yield region(caption=f"dog {number}")

    assert [made.caption for made in items.collect(endless(), 3, Counter())] == ["dog 0", "dog 1", "dog 2"]
    for limit in (0, -1):
        with pytest.raises(ValueError, match=f"limit is {limit}, expected at least 1"):
            items.collect([region()], limit, Counter())


def test_one_warning_counts_what_was_left_out(recwarn: pytest.WarningsRecorder) -> None:
    items.report_left_out("data", [region()], Counter({"never": 0}))
    assert not recwarn.list
    items.report_left_out(Path("data"), [region()], Counter({"b": 2, "a": 1, "never": 0}))
    assert [str(warning.message) for warning in recwarn.list] == ["data: left out 1 a, 2 b"]
    with pytest.raises(ValueError, match=r"^data: no region with a mask and a caption \(left out: 3 rows\)"):
        items.report_left_out("data", [], Counter({"rows": 3}))
