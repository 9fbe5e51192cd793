"""The measurement of real sizes: its stages on a tiny checkpoint; at 1 B parameters its limits."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import real_size
from benchmarks.random_checkpoint import write_random_checkpoint
from rl_reward_network.grpo.trainer import StepCallback
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from tests.conftest import smooth_image

MOST_GIB, MOST_SECONDS = 12e9 / 2**30, 15 * 60


@pytest.mark.slow
def test_the_stages_run_on_a_tiny_checkpoint_and_clean_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(real_size.IMAGES, "cpu", 1)
    (tmp_path / "notes.txt").touch()
    args = real_size.Args("tiny", "cpu", folder=tmp_path, keep=True)
    results = {name: real_size.STAGES[name](args) for name in ("write", "load", "segment", "mask bank")}
    assert results["segment"].note == "11 prompts, 1 image", "each answer has a mask"
    assert "parameters" in results["write"].note
    assert all(result.peak_gib > 0.1 and result.seconds > 0 for result in results.values())
    again = real_size.STAGES["mask bank"](args)
    assert again.note.split(",")[:2] == results["mask bank"].note.split(",")[:2], "computed again, not read"
    assert " images/s" in again.note
    with pytest.raises(SystemExit, match="1"):
        real_size.main(real_size.Args("tiny", "cpu", stages=("merge",), folder=tmp_path))
    assert "failed, see above" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"], "only its own folders are deleted"


def test_a_checkpoint_with_internlm2_answers_with_a_mask(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "model", "tiny-internlm2")
    model, processor = load_sa2va_model(tmp_path / "model")
    assert model.config.text_config.model_type == "llama"
    (answer,) = model.segment([smooth_image(40, 40)], ["the vessel"], processor)[0]
    assert answer.answer.startswith("[SEG]")


def test_a_folder_of_others_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.txt").touch()
    for run in (real_size.main, real_size.STAGES["write"]):
        with pytest.raises(ValueError, match=r"folder is .* holds data, not written by this .* give a new folder"):
            run(real_size.Args("tiny", "cpu", folder=tmp_path))
    assert [path.name for path in tmp_path.rglob("*")] == ["data", "mine.txt"]


def test_the_table_is_printed_of_stages_that_fail_and_after_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = iter([None, real_size.Measured(1.5, 0.5, "as told")])

    def in_process(args: real_size.Args, name: str) -> real_size.Measured | None:
        try:
            return next(results)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(real_size, "_in_process", in_process)
    with pytest.raises(SystemExit, match="130"):
        real_size.main(real_size.Args("tiny", "cpu", stages=("merge", "write", "load"), folder=tmp_path / "a"))
    rows = [line.split("│")[1:] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [row[0].strip() for row in rows] == ["merge", "write", "interrupted"]
    assert ["failed" in rows[0][-2], "as told" in rows[1][-2]] == [True, True]
    assert not (tmp_path / "a").exists()


def test_the_seconds_of_a_step_are_those_of_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def command(words: list[str]) -> None:
        callback, settings = StepCallback(SimpleNamespace(gradient_norms={}, ema=None, judge=None)), SimpleNamespace()
        settings.num_iterations, settings.max_minutes = 1, None
        for pause in (0.5, 0.1):  # the first step, with loading before it
            time.sleep(pause)
            control = SimpleNamespace(should_log=False, should_save=False)
            callback.on_step_end(settings, SimpleNamespace(global_step=1, max_steps=2), control)
        time.sleep(0.5)  # checkpoint and checks

    monkeypatch.setattr(real_size, "command", command)
    assert 0.1 <= real_size._train(real_size.Args("tiny", "cpu", folder=tmp_path), "grpo", []).seconds < 0.4


@pytest.mark.slow
def test_a_billion_parameters_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = real_size.Args("1b", "cpu", folder=tmp_path / "real_size")
    real_size.main(args)
    lines = [line for line in capsys.readouterr().out.splitlines() if " s, " in line and " GiB" in line]
    measured = {line.split(": ")[0]: line.split(": ")[1].split() for line in lines}
    assert measured.keys() == set(real_size.ALL)
    assert sum(float(words[0]) for words in measured.values()) < MOST_SECONDS
    assert all(float(words[2]) < MOST_GIB for words in measured.values())
