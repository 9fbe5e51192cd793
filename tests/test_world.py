"""Which data are read, and which are rendered first."""

from pathlib import Path

import pytest
from conftest import write_tiny_data

import rl_reward_network.data.embedded as embedded
from rl_reward_network.training.world import WorldConfig, read_samples

NO_GAP = Path("data/angiograms_no_gap")


@pytest.fixture(autouse=True)
def four_patients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(embedded, "PATIENTS", 4)


@pytest.mark.parametrize("folder", [WorldConfig().data_root, NO_GAP])
def test_the_embedded_data_are_rendered_when_they_are_not_there(folder: Path) -> None:
    samples = read_samples(folder)
    assert len(samples) == 4 * embedded.SERIES * embedded.FRAMES
    assert [path.name for path in Path("data").iterdir()] == [folder.name]


def test_rendered_data_of_another_version_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    read_samples(NO_GAP)
    monkeypatch.setattr(embedded, "RECIPE", 99)
    with pytest.raises(ValueError, match=r"recipe\.json: made as .*delete the folder"):
        read_samples(NO_GAP)


def test_a_users_own_data_in_that_place_are_read_as_they_are() -> None:
    write_tiny_data(embedded.DEFAULT_DATA)
    assert len(read_samples(embedded.DEFAULT_DATA)) == 8


def test_any_other_folder_that_is_missing_is_an_error_and_stays_missing() -> None:
    with pytest.raises(ValueError, match=r"elsewhere.*annotations\.json"):
        read_samples(Path("elsewhere"))
    assert not Path("elsewhere").exists()
