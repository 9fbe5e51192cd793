"""The measurement of real sizes: its stages on a tiny checkpoint; at 1 B parameters its limits, and the prediction."""

from pathlib import Path

import pytest

from benchmarks import real_size
from benchmarks.random_checkpoint import official_config
from rl_reward_network.memory.predict import load_stage, merge_stage, segment_stage, training_stage
from rl_reward_network.memory.settings import MemorySettings
from rl_reward_network.models.sa2va.configuration_sa2va import HIERA_L, config_from_original

WITHIN = 0.2  # of the measured memory
MOST_GIB, MOST_SECONDS = 12e9 / 2**30, 15 * 60


def test_the_stages_run_on_a_tiny_checkpoint_and_clean_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").touch()
    args = real_size.Args("tiny", "cpu", folder=tmp_path, keep=True)
    results = {name: real_size.STAGES[name](args) for name in ("write", "load", "segment", "mask bank")}
    assert results["segment"].note == "11 prompts, 1 image", "each answer has a mask"
    assert "parameters" in results["write"].note
    assert all(result.peak_gib > 0.1 and result.seconds > 0 for result in results.values())
    again = real_size.STAGES["mask bank"](args)
    assert again.note == results["mask bank"].note, "computed again, not read"
    real_size.main(real_size.Args("tiny", "cpu", stages=("merge",), folder=tmp_path))
    assert "failed, see above" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"], "only its own folders are deleted"


@pytest.mark.slow
def test_a_billion_parameters_fit_and_are_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    real_size.main(real_size.Args("1b", "cpu", folder=tmp_path / "real_size"))
    lines = [line for line in capsys.readouterr().out.splitlines() if " s, " in line and " GiB" in line]
    measured = {line.split(": ")[0]: line.split(": ")[1].split() for line in lines}
    assert measured.keys() == set(real_size.ALL)
    assert sum(float(words[0]) for words in measured.values()) < MOST_SECONDS
    config = config_from_original(official_config("1b"), HIERA_L, "config.json")
    settings = MemorySettings(device="cpu", max_completion_length=24).of_model(small=False)
    stages = {"load": load_stage, "segment": segment_stage, "GRPO step": training_stage, "merge": merge_stage}
    for name, stage in stages.items():
        peak = float(measured[name][2])
        assert peak < MOST_GIB
        assert stage(config, settings).gib == pytest.approx(peak, rel=WITHIN), name
