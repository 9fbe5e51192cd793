"""Which data are read, which are rendered first, and their levels."""

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import rl_reward_network.embedded.datasets as embedded
from rl_reward_network.data import annotations
from rl_reward_network.inputs import loading
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.inputs.loading import decode_files, describe_run, open_inputs, read_samples, saved_config
from rl_reward_network.run import REWARD_RUN, Run
from tests.conftest import write_deep_data, write_tiny_data

NO_GAP = Path("data/angiograms_no_gap")


@pytest.fixture(autouse=True)
def four_patients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(embedded, "PATIENTS", 4)


@pytest.mark.parametrize("folder", [RunConfig().data_root, NO_GAP])
def test_the_embedded_data_are_rendered_when_they_are_not_there(folder: Path) -> None:
    samples = read_samples(folder)
    assert len(samples) == 4 * embedded.SERIES * embedded.FRAMES
    assert [path.name for path in Path("data").glob("[!.]*")] == [folder.name]


def test_rendered_data_of_another_version_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    read_samples(NO_GAP)
    monkeypatch.setattr(embedded, "RECIPE", 99)
    with pytest.raises(ValueError, match=r"recipe\.json: .*recipe.*99"):
        read_samples(NO_GAP)


def test_a_users_own_data_in_that_place_are_read_as_they_are() -> None:
    write_tiny_data(embedded.DEFAULT_DATA)
    assert len(read_samples(embedded.DEFAULT_DATA)) == 8


def test_any_other_folder_that_is_missing_is_an_error_and_stays_missing() -> None:
    with pytest.raises(ValueError, match=r"elsewhere.*annotations\.json"):
        read_samples(Path("elsewhere"))
    assert not Path("elsewhere").exists()


@pytest.fixture
def without_model(monkeypatch: pytest.MonkeyPatch) -> None:
    segmenter = SimpleNamespace(segment=None, fingerprint="none")
    monkeypatch.setattr(loading, "load_segmenter", lambda *_: segmenter)


def test_the_levels_are_kept_with_the_run_and_used_again(without_model: None, monkeypatch: pytest.MonkeyPatch) -> None:
    data, run = write_deep_data(Path("bits10")), Path("outputs/run")
    inputs = open_inputs(RunConfig(data_root=data, output_dir=Path("outputs")))
    (levels,) = {sample.levels for sample in inputs.samples}
    assert levels is not None
    assert 600 < levels.white < 800, "the tubes are at 160 of 255"
    saved = describe_run(Run(run, REWARD_RUN), inputs, {})
    assert saved["world"]["grey_levels"] == {"data set": levels}
    Path("bits10").rename("moved")
    monkeypatch.setattr(annotations, "measured_levels", lambda _: pytest.fail("config.json has the levels"))
    config = json.loads((run / "config.json").read_text())
    again = open_inputs(*saved_config(run, config, Path("moved")), run / "split.json")
    assert again.split == inputs.split
    assert again.config.grey_levels == {"data set": levels}
    assert {sample.levels for sample in again.samples} == {levels}


def test_bit_depth_says_what_is_white(without_model: None) -> None:
    data = write_deep_data(Path("bits10"))
    given = open_inputs(RunConfig(data_root=data, bit_depth=10))
    assert given.config.grey_levels == {"data set": (0, 1023)}
    plain = read_samples(write_tiny_data(Path("bits8"), size=48))
    for deep, shallow in zip(given.samples[1:], plain[1:], strict=True):
        assert np.abs(deep.load_image().astype(int) - shallow.load_image()).max() <= 2, "10 bit is 8 bit times four"
    assert given.data_fingerprint != open_inputs(RunConfig(data_root=data)).data_fingerprint, "other pictures"
    with pytest.raises(ValueError, match="bit_depth: got 20; give 8 to 16"):
        RunConfig(bit_depth=20)


def test_8_bit_data_are_as_they_were_in_version_06(without_model: None) -> None:
    data = write_tiny_data(Path("bits8"))
    inputs = open_inputs(RunConfig(data_root=data, output_dir=Path("outputs"), bit_depth=10))
    assert inputs.config.grey_levels is None
    assert inputs.samples == read_samples(data)
    config = describe_run(Run(Path("outputs/run"), REWARD_RUN), inputs, {})
    for name in ("bit_depth", "grey_levels"):  # what 0.6 wrote
        del config["world"][name]
    old = open_inputs(*saved_config(Path("outputs/run"), config, data), Path("outputs/run/split.json"))
    assert asdict(old.config)["grey_levels"] is None
    assert old.data_fingerprint == inputs.data_fingerprint


def test_a_survey_keeps_what_was_seen_in_order_and_counts_the_damaged() -> None:
    assert decode_files([lambda n=n: n * n for n in range(50)]) == [n * n for n in range(50)]  # type: ignore[misc]

    def damaged(number: int) -> int:
        raise ValueError(f"{number}.png: damaged")

    with pytest.raises(ValueError, match=r"^1\.png: damaged \(and 1 more of 3 checked\)$"):
        decode_files([lambda: 0, lambda: damaged(1), lambda: damaged(2)])
