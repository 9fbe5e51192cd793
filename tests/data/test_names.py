"""classes.json: which class is asked for where, in which words, and what is refused."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rl_reward_network.data.names import NamedClass, as_json, classes_of, read_classes, wordings_fingerprint

LEFT = {
    "name": "left artery",
    "phrases": ["the left artery", "the LA"],
    "held_out": "the artery of the left side",
    "ids": ["6", 7],
    "asked_only_with": "7",
    "asked_not_with": ["9"],
    "absent_with": ["1"],
}
RIGHT = {"name": "right artery", "phrases": "the right artery", "held_out": "the artery of the right side"}


def written(folder: Path, *classes: Any) -> Path:
    (folder / "classes.json").write_text(json.dumps(list(classes)))
    return folder / "classes.json"


@pytest.mark.parametrize(
    ("present", "categories"),
    [
        (["6", "7", "5"], ("6", "7")),
        (["7"], ("7",)),
        (["6"], None),  # not asked without 7
        (["7", "9"], None),  # not with 9
        (["1", "2"], ()),  # certainly absent
        (["1", "7"], ("7",)),  # an outline counts more than what makes an absence certain
        (["5"], None),  # perhaps absent
        ([], None),
    ],
)
def test_a_class_is_asked_for_where_the_answer_is_known(tmp_path, present, categories):
    (left,) = read_classes(written(tmp_path, LEFT))
    assert left.asked(present) == categories


def test_all_categories_are_one_class() -> None:
    assert NamedClass("vessel", ("the vessel",), "all", ("all",)).asked(["2", "1"]) == ("1", "2")


def test_the_wordings_of_a_class_are_shared_out() -> None:
    one = NamedClass("vessel", ("a", "b", "c", "d"), "e")
    counts = Counter(one.wording(str(number)) for number in range(400))
    assert set(counts) == set(one.phrases)
    assert min(counts.values()) > 70
    assert [one.wording(str(n)) for n in range(9)] == [one.wording(str(n)) for n in range(9)]


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    classes = read_classes(written(tmp_path, LEFT, RIGHT))
    assert classes[0].ids == ("6", "7"), "numbers are names"
    written(tmp_path, *as_json(classes))
    assert list(classes_of(tmp_path).values()) == classes
    assert list(classes_of(tmp_path)) == ["left artery", "right artery"]
    assert classes_of(tmp_path / "nowhere") == {}
    first, other = (wordings_fingerprint([NamedClass("v", phrases, "w")]) for phrases in (("a",), ("b",)))
    assert first != other
    assert wordings_fingerprint([]) is None


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ([], "expected a list of classes"),
        (["left artery"], "class 0 is 'left artery', expected an object"),
        ([LEFT | {"phrase": "x"}], r"class 0 \('left artery'\): field 'phrase' is not known; the fields are name"),
        ([LEFT | {"phrases": []}], r"\('left artery'\): `phrases` is missing or empty; give at least one wording"),
        ([LEFT | {"held_out": " . "}], r"\('left artery'\): `held_out` is ' . ', expected a phrase"),
        ([LEFT | {"ids": [True]}], r"\('left artery'\): `ids` is \[True\], expected a list of texts"),
        ([{"phrases": ["x"]}], "class 0: `name` is None, expected a phrase"),
        ([LEFT, RIGHT | {"name": "Left artery."}], "class 'Left artery.': another class has this `name`"),
        (
            [LEFT, RIGHT | {"phrases": ["The LA"]}],
            "class 'right artery': `phrases` has 'the la', which is a wording of",
        ),
        ([LEFT, RIGHT | {"held_out": "the LA"}], "`held_out` is 'the LA', but that wording trains 'left artery'"),
        ([RIGHT | {"held_out": "a right  artery."}], "'a right  artery.', but that wording trains 'right artery'"),
        ([LEFT, RIGHT | {"held_out": LEFT["held_out"]}], "`held_out` is .*, as of 'left artery'; give another"),
        ([LEFT | {"never_with": "aorta"}], r"'left artery': `never_with` has 'aorta', which is the `name` of no other"),
        ([LEFT | {"never_with": ["left artery"]}], "`never_with` has 'left artery', which is the `name` of no other"),
    ],
)
def test_a_bad_file_is_refused_with_class_field_and_remedy(tmp_path: Path, classes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        read_classes(written(tmp_path, *classes))
    assert str(refused.value).startswith(str(tmp_path / "classes.json"))
