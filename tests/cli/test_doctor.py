"""The pre-flight table, as its user reads it, and the exit status."""

from pathlib import Path

import pytest

from rl_reward_network.cli import doctor
from tests.conftest import write_tiny_data

LINES = ("packages", "model", "data and split", "reward network", "device", "disk, 5 GB free")


def examined(capsys: pytest.CaptureFixture[str], **flags: object) -> tuple[object, str]:
    """Exit status and table, the latter in one line."""
    status: object = 0
    try:
        doctor.main(doctor.Args(**flags))  # type: ignore[arg-type]
    except SystemExit as stop:
        status = stop.code
    return status, " ".join(capsys.readouterr().out.replace("│", " ").split())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("rl_reward_network.inputs.doctor.FREE_DISK_GB", 0)
    write_tiny_data(Path("data"), 8, 48)


def test_every_line_is_there_and_the_status_is_0(capsys: pytest.CaptureFixture[str]) -> None:
    code, table = examined(capsys, data_root=Path("data"), gpu=-1)
    assert code == 0
    for line in ("packages OK torch ", "model OK our layout", "data and split OK 8 annotated images", "device OK CPU"):
        assert line in table
    assert "a rehearsal model" in table, "the embedded model on images of a user"


def test_a_missing_line_is_shown_beside_the_others_and_the_status_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    code, table = examined(capsys, model_path="no_model", data_root=Path("nowhere"), gpu=-1)
    assert code == 1
    assert "model missing no_model: " in table
    assert "data and split missing nowhere/annotations.json: " in table
    assert "device OK" in table


def test_a_folder_may_stand_in_place_of_the_name_of_a_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert examined(capsys, dataset_name="data", gpu=-1) == examined(capsys, data_root=Path("data"), gpu=-1)
