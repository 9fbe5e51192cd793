"""Patients that names of folders and files show, and names that show none."""

from itertools import product

import pytest

from rl_reward_network.data.patients import propose_patients
from rl_reward_network.data.splits import patient_key


def many(form: str, *ranges: object) -> list[str]:
    return [form.format(*values) for values in product(*ranges)]  # type: ignore[call-overload]


N = range(6)


@pytest.mark.parametrize(
    ("paths", "patients"),
    [
        (many("Patient {:02}/img.png", N), 6),
        (many("{}/Patient {}/img.png", ("train", "test"), N), 6),  # a patient in both parts is one
        ([*many("pat-{}/{}.png", N, N), "Doe/1.png", "Doe/2.png"], 7),  # beside folders of patients
        (many("sub-{:02}/ses-{}/a.png", N, N), 6),
        (many("{:03}/{}.png", N, N), 6),
        (many("Doe {}/run_{}/{}.png", "ABCD", N, N), 4),
        (many("p{:02}_frame{}.png", N, N), 6),
        (many("angio_patient_{}_{}.png", "ABC", N), 3),
        (["patient_1.png", "PATIENT 01 b.png"], 1),
        (many("{:02}_run{}_frame_{}.png", N, "12", N), 6),
        (many("{}_{}.png", N, N), 6),
        (many("case_{}_slice{}.png", N, N), 6),
        (many("Image_{:02}{}.jpg", N, "LR"), 6),  # two eyes
        (many("p{}_frame1.rf.{}abc.jpg", N, N), 6),
        # Names that count pictures, parts and classes.
        (many("p{:02}.png", N), 0),
        (many("P10100{:02}.JPG", N), 0),
        (many("train_{:04}.png", N), 0),
        (many("case_{:03}_0000.png", N), 0),
        (many("angio_frame_{}.png", N), 0),
        (many("{}/{}.png", ("train", "val", "test"), N), 0),
        (many("{0}/{0} ({1}).png", ("benign", "malignant"), N), 0),
        (many("fold_{}/{}.png", N, N), 0),
        (many("patients/{}.png", N), 0),
    ],
)
def test_names_of_patients_are_found_and_others_are_not(paths: list[str], patients: int) -> None:
    found = propose_patients(paths)
    assert len({patient_key(patient) for patient, _ in found if patient}) == patients
    assert all(bool(patient) == bool(patients) for patient, _ in found)
