import json

import pytest

from rl_reward_network.env.prompts import PROMPTS, load_prompts


def test_embedded_prompts_are_the_eleven_of_the_specification():
    assert load_prompts() == PROMPTS
    assert len(PROMPTS) == 11
    assert len({prompt.casefold() for prompt in PROMPTS}) == 11
    assert PROMPTS[0] == "Please segment the blood vessel."
    assert "Please segment blood vessel and all its bifurcations." in PROMPTS


def test_a_users_file_may_be_lines_or_json(tmp_path):
    lines, listed = tmp_path / "prompts.txt", tmp_path / "prompts.json"
    lines.write_text("\ufeffSegment  the vessel. \r\n\r\nSegment the é catheter.\r\n", encoding="utf-8")
    listed.write_text(json.dumps(["Segment the vessel.", "Segment the é catheter."]))
    assert load_prompts(lines) == load_prompts(listed) == ("Segment the vessel.", "Segment the é catheter.")


@pytest.mark.parametrize(
    ("content", "place", "remedy"),
    [
        (b"", "0 prompts", "at least 2"),
        (b"\n only one \n\n", "1 prompts", "at least 2"),
        (b"one\ntwo\n\nOne \n", "line 4", "line 1; remove"),
        (b'["one", "two", "ONE"]', "entry 3", "entry 1; remove"),
        (b'["one", "  "]', "entry 2", "string with words"),
        (b'["one", 2]', "entry 2", "is 2, expected a string"),
        (b'["one",\n "two"', "line 2", "not a JSON list"),
        (b"one\n\xff\xfe\n", "UTF-8", "one prompt per line"),
    ],
)
def test_the_error_of_a_bad_file_names_file_place_and_remedy(tmp_path, content, place, remedy):
    path = tmp_path / "mine.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        load_prompts(path)
    assert all(part in str(caught.value) for part in (str(path), place, remedy))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.txt"):
        load_prompts(tmp_path / "nowhere.txt")
