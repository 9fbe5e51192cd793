from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from rl_reward_network.data.items import Sample, pseudonym
from rl_reward_network.data.masks import parse_polygon


@pytest.fixture
def sample(tmp_path):
    path = tmp_path / "Doe_John(1234567)_a_frame_000001.png"
    Image.new("L", (40, 32), 9).save(path)
    square = parse_polygon([10, 10, 20, 10, 20, 20, 10, 20], (32, 40))
    return Sample(path, "blood vessel", "a" * 12, "b" * 12, "c" * 12, (32, 40), square, group="Doe_John")


def test_labelled_sample_gives_image_and_mask(sample):
    image, mask = sample.load_image(), sample.load_mask()
    assert (image.dtype, image.shape, image.max()) == (np.uint8, (32, 40, 3), 9)
    assert (mask.dtype, mask.shape, mask.sum()) == (bool, (32, 40), 100)
    assert sample.labelled


def test_unlabelled_sample_has_no_mask(sample):
    bare = replace(sample, mask_parts=None)
    assert not bare.labelled
    assert bare.load_mask() is None


def test_printing_a_sample_shows_no_name(sample):
    for text in (repr(sample), str([sample]), f"{sample}"):
        assert "Doe" not in text
        assert "1234567" not in text


def test_pseudonyms_are_12_hex_digits_and_keep_kinds_apart():
    names = [("group", "P1"), ("series", "P1"), ("group", "P2"), ("series", "P1", "a"), ("series", "P1a")]
    assert len({pseudonym(*n) for n in names}) == len(names)
    assert all(len(pseudonym(*n)) == 12 and int(pseudonym(*n), 16) >= 0 for n in names)
    assert pseudonym("group", "chase_01") == "902a4c27706a"  # written in users' split files: it must never change


def test_image_that_changed_its_size_is_refused(sample):
    Image.new("L", (41, 32)).save(sample.image_path)
    with pytest.raises(ValueError, match=r"image is \(32, 41\).*\(32, 40\).*save it again"):
        sample.load_image()
