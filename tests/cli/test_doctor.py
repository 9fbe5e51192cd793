"""The pre-flight table, as its user reads it, and the exit status."""

from pathlib import Path

import pytest

from rl_reward_network.cli import doctor
from rl_reward_network.cli.main import main
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
    assert "it knows rendered images alone" in table, "the embedded model on images of a user"


def test_the_next_command_comes_last_but_not_in_a_shell_file_nor_where_a_line_is_missing(capsys, monkeypatch):
    _, said = examined(capsys, data_root=Path("data"), gpu=-1)
    assert said.endswith("next: sa2va-rl improve quick --data_root data")
    _, said = examined(capsys, data_root=Path("data"), gpu=-1, reward_net="nowhere")
    assert said.endswith("of 6")
    monkeypatch.setenv("SA2VA_RL_CALLED_AS", "bash run_step2_finetune.sh")
    _, said = examined(capsys, data_root=Path("data"), gpu=-1)
    assert said.endswith("of 6")


@pytest.mark.parametrize("words", [["doctor"], ["data", "import"]])
def test_the_flags_for_patients_and_classes_have_an_example_in_the_help(capsys, words):
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for example in ("--patients_csv patients.csv", "--group_regex '", "--label vessel"):
        assert example in said.replace("-csv", "_csv").replace("-regex", "_regex"), example


def test_a_missing_line_is_shown_beside_the_others_and_the_status_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    code, table = examined(capsys, model_path="no_model", data_root=Path("nowhere"), gpu=-1)
    assert code == 1
    assert "model missing no_model: " in table
    assert "data and split missing nowhere: no such folder" in table
    assert "device OK" in table


def test_a_folder_may_stand_in_place_of_the_name_of_a_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert examined(capsys, dataset_name="data", gpu=-1) == examined(capsys, data_root=Path("data"), gpu=-1)
