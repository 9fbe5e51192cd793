import io
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rl_reward_network.data.items import (
    KEY_BYTES,
    RegionSample,
    collect,
    image_key,
    make_region,
    report_left_out,
)
from rl_reward_network.data.masks import to_rle

IMAGE = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)  # not square, so that swapped axes show
MASK = np.zeros((6, 8), dtype=bool)
MASK[1:3, 4:7] = True


def region(
    caption: Any = "a dog", rle: Any = None, image_id: str = "aaaaaaaaaaaa", where: str = "x: row 1"
) -> RegionSample:
    return make_region(caption, to_rle(MASK) if rle is None else rle, image_id, where, lambda: IMAGE)


def test_a_region_gives_its_image_mask_and_stripped_caption() -> None:
    made = region(caption="  a dog\n")
    image, mask = made.load()
    assert image is IMAGE
    assert mask.dtype == bool
    assert (mask == MASK).all()
    assert made.caption == "a dog"
    assert made.group_id == made.series_id == made.image_id == "aaaaaaaaaaaa"
    assert len(made.sample_id) == 12


def test_of_a_video_the_group_is_the_video() -> None:
    made = make_region("a dog", to_rle(MASK), "aaaaaaaaaaaa", "x", lambda: IMAGE, "bbbbbbbbbbbb")
    assert (made.image_id, made.group_id, made.series_id) == ("aaaaaaaaaaaa", "bbbbbbbbbbbb", "bbbbbbbbbbbb")


def test_the_sample_id_is_of_the_content_not_of_the_place() -> None:
    same = [region(), region(where="y: row 2"), region(caption=" a dog ")]
    others = [region(caption="a cat"), region(rle=to_rle(~MASK)), region(image_id="bbbbbbbbbbbb")]
    assert len({made.sample_id for made in same}) == 1
    assert len({made.sample_id for made in same + others}) == 4


@pytest.mark.parametrize(
    ("caption", "found"),
    [
        (None, r"is missing \(NoneType\)"),
        (" \n", "is empty"),
        (7, r"is missing \(int\)"),
        (" ... ", r"'\.\.\.' has no word"),
    ],
)
def test_a_region_without_caption_is_an_error(caption: Any, found: str) -> None:
    with pytest.raises(ValueError, match=f"^x: row 1: the caption {found}; .*leave the region out"):
        region(caption=caption)


@pytest.mark.parametrize(
    ("rle", "message"),
    [
        ("abc", r"expected an RLE .*got str"),
        ({"size": [6, 8]}, "needs the keys"),
        ({"counts": [48]}, "needs the keys"),
        ({"size": [6], "counts": [48]}, r"RLE size is \[6\]"),
        ({"size": [6, -8], "counts": [48]}, "two numbers above 0"),
        ({"size": None, "counts": [48]}, "RLE size is None"),
        ({"size": [6, 8], "counts": [47]}, r"sum to H \* W = 48, got a sum of 47"),
        ({"size": [6, 8], "counts": "~~"}, "not a compressed COCO string"),
    ],
)
def test_a_damaged_rle_is_an_error_that_names_row_and_column(rle: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^x: row 1: mask_rle: .*{message}"):
        region(rle=rle)


def test_a_mask_of_another_size_than_the_image_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^x: row 1: mask_rle has size \[8, 6\].*image \[6, 8\]"):
        region(rle=to_rle(MASK.T)).load()


def test_a_mask_without_a_pixel_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^x: row 1: the region has no pixel; leave it out"):
        region(rle=to_rle(np.zeros((6, 8), dtype=bool))).load()


def test_an_image_that_cannot_be_read_is_an_error_that_names_the_row() -> None:
    def broken() -> np.ndarray:
        raise FileNotFoundError(2, "No such file", "gone.tar")

    with pytest.raises(ValueError, match=r"^x: row 1: .*cannot be decoded .*gone\.tar"):
        make_region("a dog", to_rle(MASK), "aaaaaaaaaaaa", "x: row 1", broken).load()


def test_equal_image_files_have_equal_keys_wherever_they_lie() -> None:
    picture = bytes(range(256)) * 40  # 10240 bytes: first and last part do not touch
    key = image_key(io.BytesIO(picture), 0, len(picture))
    assert image_key(io.BytesIO(b"header" + picture + b"rest"), 6, len(picture)) == key
    assert len(key) == 12
    for changed in (b"x" + picture[1:], picture[:-1] + b"x", picture + b"x"):
        assert image_key(io.BytesIO(changed), 0, len(changed)) != key
    assert image_key(io.BytesIO(bytes(10**4)), 0, 10**4) != image_key(io.BytesIO(bytes(10**4 + 1)), 0, 10**4 + 1)
    assert image_key(io.BytesIO(b"short"), 0, 5) != image_key(io.BytesIO(b"shore"), 0, 5)


def test_only_the_ends_of_a_compressed_file_are_read() -> None:
    class Counting(io.BytesIO):
        total = 0

        def read(self, size: int | None = -1, /) -> bytes:
            data = super().read(size)
            Counting.total += len(data)
            return data

    image_key(Counting(b"\x89PNG" + bytes(10**6)), 0, 10**6)
    assert Counting.total == 2 * KEY_BYTES


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "PPM", "PNG", "WEBP"])
def test_images_with_equal_margins_have_keys_of_their_own(kind: str) -> None:
    keys = []
    for value in (40, 200):
        picture, file = np.zeros((128, 128, 3), dtype=np.uint8), io.BytesIO()
        picture[40:88, 40:88] = value
        Image.fromarray(picture).save(file, kind)
        keys.append(image_key(file, 0, len(file.getvalue())))
    assert keys[0] != keys[1]


def test_collecting_leaves_out_repeats_and_empty_masks_and_counts_them() -> None:
    empty = region(rle=to_rle(np.zeros((6, 8), dtype=bool)))
    first, other, again = region(), region(caption="a cat"), region(where="y")
    left_out: Counter[str] = Counter()
    assert collect([first, empty, other, again, again], None, left_out) == [first, other]
    assert left_out == {"mask(s) without a pixel": 1, "exact repeat(s)": 2}


def test_collecting_reads_no_further_than_the_limit() -> None:
    def endless() -> Iterator[RegionSample]:
        for number in range(10):
            assert number < 3, "read beyond the limit"
            yield region(caption=f"dog {number}")

    collected = collect(endless(), 3, Counter())
    assert [made.caption for made in collected] == ["dog 0", "dog 1", "dog 2"]


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_an_error(limit: int) -> None:
    with pytest.raises(ValueError, match=f"limit is {limit}, expected at least 1"):
        collect([region()], limit, Counter())


def test_one_warning_counts_what_was_left_out() -> None:
    with pytest.warns(UserWarning, match="left out") as caught:
        report_left_out(Path("data"), [region()], Counter({"b": 2, "a": 1, "never": 0}))
    assert [str(warning.message) for warning in caught] == ["data: left out 1 a, 2 b"]


def test_nothing_left_out_is_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    report_left_out("data", [region()], Counter({"never": 0}))
    assert not recwarn.list


def test_no_region_at_all_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^data: no region with a mask and a caption \(left out: 3 rows\)"):
        report_left_out("data", [], Counter({"rows": 3}))
