"""Which run is evaluated, and the tables on the terminal."""

import os

import numpy as np
import pytest

from rl_reward_network.atomic_io import write_json
from rl_reward_network.cli.evaluate import Args, main, newest
from rl_reward_network.report.before_after import BeforeAfter, show_changes
from rl_reward_network.report.table import Results, paired_rows
from rl_reward_network.run import run_folders


def test_a_pattern_names_the_newest_folder(tmp_path, capsys):
    for age, name in enumerate(("b", "a", "c")):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    assert newest((str(tmp_path / "?"),)) == tmp_path / "b"
    assert "3 folders" in capsys.readouterr().out
    assert newest((str(tmp_path / "a"), str(tmp_path / "c"))) == tmp_path / "a"
    assert newest((str(tmp_path / "c"),)) == tmp_path / "c"


def test_the_newest_run_is_the_one_that_began_last(tmp_path):
    """As for --resume: by its name, whatever was written into it since; the clock of the first was wrong."""
    names = ("2099", "2024", "2025")
    for written, year in enumerate(names):
        folder = tmp_path / f"sa2va_rl_finetune_{year}0101_120000" / "final_model"
        folder.mkdir(parents=True)
        write_json(folder.parent / "config.json", {})
        os.utime(folder, (1000 - written, 1000 - written))
    assert newest((str(tmp_path / "*" / "final_model"),)).parent.name == "sa2va_rl_finetune_20250101_120000"
    assert [path.name[-15:-11] for path in run_folders(tmp_path, "sa2va_rl_finetune")] == ["2025", "2024", "2099"]
    for written, step in enumerate((50, 100)):
        checkpoint = tmp_path / "sa2va_grpo_20240101_120000" / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        os.utime(checkpoint, (1000 + written, 1000 + written))
    assert newest((str(tmp_path / "sa2va_grpo_*" / "checkpoint-*"),)).name == "checkpoint-100"


def test_a_folder_may_have_brackets_in_its_name(tmp_path):
    (tmp_path / "run[1]").mkdir()
    assert newest((str(tmp_path / "run[1]"),)) == tmp_path / "run[1]"


def test_a_missing_folder_is_named_with_the_command_that_makes_one(tmp_path):
    with pytest.raises(ValueError, match=r"model_path .*nothing.*sa2va-rl prompts"):
        newest((str(tmp_path / "nothing"),))


def test_a_run_with_a_report_of_its_own_is_named(tmp_path):
    write_json(tmp_path / "config.json", {"stage": "improvement"})
    write_json(tmp_path / "improved" / "config.json", {"model_type": "sa2va"})
    for folder in (tmp_path, tmp_path / "improved"):
        with pytest.raises(ValueError, match=r"of a run \(improvement\) that has a report of its own"):
            main(Args(model_path=(str(folder),)))


def test_both_models_and_their_difference_are_shown(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    before, after = {"dice": np.array([0.5, 0.6, 0.4] * 2)}, {"dice": np.array([0.6, 0.7, 0.5] * 2)}
    rows, ids = paired_rows(before, after, list("abcdef")), tuple(zip("abcdef", "abcdef", strict=True))
    result = BeforeAfter(Results(rows, ids, "dice"), {"cIoU": (0.8, 0.75)}, {})
    show_changes(result)
    printed = " ".join(capsys.readouterr().out.split())
    assert "0.50 0.60 +0.10 [+0.10, +0.10]" in printed
    assert "0.80 0.75 -0.05" in printed
    assert result.verdict.sentence in printed
