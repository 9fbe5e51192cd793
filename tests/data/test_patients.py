"""One patient in several spellings."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rl_reward_network.data.annotations import read_annotations
from rl_reward_network.data.items import Sample
from rl_reward_network.data.splits import doubtful, one_spelling, patient_key, spellings

ONE = [
    ["Patient 7", "patient_07", "PATIENT  7", "patient-007", "Patient7", "\uff30atient \uff17", " patient.7 "],
    ["M\u00fcller", "Mu\u0308ller", "M\u00dcLLER", "mu\u0308ller"],
    ["0000012345", "12345"],
    ["Stra\u00dfe", "STRASSE"],
    ["DOE^JANE", "Doe Jane", "doe_jane"],
    ["\u0930\u093e\u092e 1", "\u0930\u093e\u092e_01"],
]


@pytest.mark.parametrize("names", ONE)
def test_spellings_of_one_patient_have_one_key(names: list[str]) -> None:
    assert len({patient_key(name) for name in names}) == 1


def test_patients_have_keys_of_their_own() -> None:
    names = [group[0] for group in ONE] + [
        "Patient 70",
        "Patient 17",
        "7",
        "1.2",
        "12",
        "***",
        "%",
        "p7a",
        "\u0930\u0940\u092e 1",
    ]
    assert len({patient_key(name) for name in names}) == len(names)


def test_the_first_spelling_stands_for_all_whatever_the_order() -> None:
    names = ["patient 7", "Patient 7", "p8"]
    assert (
        one_spelling(names)
        == one_spelling(names[::-1])
        == {
            "patient 7": "Patient 7",
            "Patient 7": "Patient 7",
            "p8": "p8",
        }
    )
    assert spellings(names) == {"patient 7": ["Patient 7", "patient 7"], "p 8": ["p8"]}


def test_names_that_differ_little_are_in_doubt() -> None:
    accents = [("M\u00fcller", "Mueller"), ("Jos\u00e9", "Jose")]
    for pair in (("7", "Patient 7"), ("P7", "case 07"), ("Doe Jane", "Jane Doe"), *accents):
        assert len(doubtful(pair)) == 1, pair
    for pair in (("Patient 7", "patient_07"), ("7", "8"), ("Meier", "Maier"), ("a 7", "b 7")):
        assert doubtful(pair) == [], pair


def read(folder: Path, names: list[str]) -> dict[str, Sample]:
    """The samples by name, each with an image of its own."""
    records = [{"image": f"{n}.png", "text": "x", "series": "1", "group": name} for n, name in enumerate(names)]
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for record in records:
        Image.fromarray(np.zeros((9, 9), np.uint8)).save(folder / "images" / record["image"])
    (folder / "annotations.json").write_text(json.dumps(records))
    return dict(zip(names, read_annotations(folder), strict=True))


@pytest.mark.parametrize("names", ONE)
def test_spellings_of_one_patient_are_one_group_with_its_series(tmp_path: Path, names: list[str]) -> None:
    found = read(tmp_path, [*names, "P99"])
    other = found.pop("P99")
    assert len({(sample.group_id, sample.series_id) for sample in found.values()}) == 1
    assert other.group_id not in {sample.group_id for sample in found.values()}
    again = read(tmp_path, ["P99", *reversed(names)])
    assert {name: sample.group_id for name, sample in again.items() if name != "P99"} == {
        name: sample.group_id for name, sample in found.items()
    }, "whatever the order"


def test_numbers_of_patients_in_file_names_are_compared_as_numbers(tmp_path: Path) -> None:
    names = [f"DOE({number})_1_frame_000001.png" for number in ("0000012345", "012345")]
    (tmp_path / "images").mkdir()
    for name in names:
        Image.fromarray(np.zeros((9, 9), np.uint8)).save(tmp_path / "images" / name)
    (tmp_path / "annotations.json").write_text(json.dumps([{"image": name, "text": "x"} for name in names]))
    assert len({sample.group_id for sample in read_annotations(tmp_path)}) == 1


def test_a_patient_with_one_spelling_keeps_the_id_that_users_have_stored(tmp_path: Path) -> None:
    assert read(tmp_path, ["chase_01"])["chase_01"].group_id == "902a4c27706a"
