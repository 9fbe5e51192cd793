"""One patient in several spellings."""

import pytest

from rl_reward_network.data.patients import doubtful, one_spelling, patient_key, spellings

ONE = [
    ["Patient 7", "patient_07", "PATIENT  7", "patient-007", "Patient7", "\uff30atient \uff17", " patient.7 "],
    ["M\u00fcller", "Mu\u0308ller", "M\u00dcLLER", "mu\u0308ller"],
    ["0000012345", "12345"],
    ["Stra\u00dfe", "STRASSE"],
    ["DOE^JANE", "Doe Jane", "doe_jane"],
]


@pytest.mark.parametrize("names", ONE)
def test_spellings_of_one_patient_have_one_key(names: list[str]) -> None:
    assert len({patient_key(name) for name in names}) == 1


def test_patients_have_keys_of_their_own() -> None:
    names = [group[0] for group in ONE] + ["Patient 70", "Patient 17", "7", "1.2", "12", "***", "%", "p7a"]
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
