"""Items: the words that ask for a mask, and what is kept of a region and of an annotated image."""

from pathlib import Path

import numpy as np
import pytest

from rl_reward_network.data.annotations import read_annotations
from rl_reward_network.data.items import make_region
from rl_reward_network.data.masks import to_rle
from rl_reward_network.grpo.prompts import GRPOPrompt, image_prompt, region_prompt, segment_question
from tests.conftest import tube_image, write_tiny_data


@pytest.mark.parametrize(
    ("caption", "question"),
    [
        ("a red circle.", "Please segment the red circle."),
        ("A red circle", "Please segment the red circle."),
        ("An orange cross at the top.", "Please segment the orange cross at the top."),
        ("the left vessel.", "Please segment the left vessel."),
        ("apples and an orange", "Please segment apples and an orange."),
        ("Two dogs. One barks.", "Please segment Two dogs. One barks."),
        ("a  small\n red\tcircle ...", "Please segment the small red circle."),
        ("A .", "Please segment A."),
        ("cross", "Please segment cross."),
        ("a <image> red <p>circle</p> [SEG].", "Please segment the red circle."),
        ("smaller than 3 < 4 > 2", "Please segment smaller than 3 < 4 > 2."),
    ],
)
def test_a_caption_becomes_a_question(caption: str, question: str) -> None:
    """An article alone is no phrase, and only the first word can be the article."""
    assert segment_question(caption) == question


def test_a_question_is_not_changed_by_asking_for_its_own_phrase() -> None:
    phrase = segment_question("a small cross.").removeprefix("Please segment ")
    assert segment_question(phrase) == "Please segment the small cross."


def test_a_region_takes_part_in_both_loops() -> None:
    image, mask = tube_image(64, 0)
    region = make_region(" A bright tube. ", to_rle(mask), "0" * 12, "here", lambda: image, group_id="1" * 12)
    item = region_prompt(region)
    assert (item.caption, item.question, item.labelled) == ("A bright tube.", "Please segment the bright tube.", True)
    assert (item.group_id, item.series_id) == ("1" * 12, "1" * 12)
    assert item.sample_id == region.sample_id
    loaded, truth = item.load()
    assert loaded is image
    assert truth is not None
    np.testing.assert_array_equal(truth, mask)


def test_an_annotated_image_is_asked_the_question_of_all_and_decoded_late(tmp_path: Path) -> None:
    (sample, *_) = read_annotations(write_tiny_data(tmp_path, images=4, size=64))
    item = image_prompt(sample, "Please segment the vessel.")
    assert (item.caption, item.question, item.labelled) == ("", "Please segment the vessel.", True)
    assert (item.group_id, item.series_id, item.sample_id) == (sample.group_id, sample.series_id, sample.sample_id)
    image, truth = item.load()
    assert truth is not None
    np.testing.assert_array_equal(image, sample.load_image())
    np.testing.assert_array_equal(truth, sample.load_mask())
    sample.image_path.unlink()
    assert image_prompt(sample, "?").question == "?", "nothing is read before it is asked for"
    with pytest.raises(ValueError, match=sample.image_path.name.split("(")[0]):
        item.load()


def test_pictures_do_not_fill_a_message() -> None:
    item = GRPOPrompt("g", "s", "n", "", "?", False, lambda: (np.zeros((2, 2, 3), np.uint8), None))
    assert "lambda" not in repr(item)
    assert item.load()[1] is None
