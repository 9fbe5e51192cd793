import json
import math
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from rl_reward_network.atomic_io import write_json
from rl_reward_network.curves import Best, Curves, keep_rows, load_checkpoint, over_optimised, save_checkpoint


def lines(run_dir: Path) -> list[str]:
    return (run_dir / "metrics.jsonl").read_text().splitlines()


def points(run_dir: Path, tag: str) -> list[int]:
    return [point.step for point in EventAccumulator(str(run_dir / "logs")).Reload().Scalars(tag)]


def test_lines_of_later_steps_and_one_that_was_cut_off_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = [json.dumps({"step": step, "loss": 0.5}) + "\n" for step in (1, 2, 2, 3)]
    path.write_text("".join(whole) + '{"step": 4, "lo')
    assert keep_rows(path, {"step": 2}) == [{"step": step, "loss": 0.5} for step in (1, 2, 2)]
    assert path.read_text() == "".join(whole[:3])
    assert keep_rows(path, {"step": 0}) == []
    assert path.read_text() == ""
    assert keep_rows(tmp_path / "none.jsonl", {"step": 5}) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_the_first_field_of_a_position_counts_most(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"stage": stage, "step": step, "loss": 1 / 3} for stage in (1, 2) for step in (20, 40, 60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert keep_rows(path, {"stage": 2, "step": 40}) == rows[:5]
    assert keep_rows(path, {"stage": 2, "step": 0}) == rows[:3]


def train(run_dir: Path, done: int, last: int) -> None:
    with closing(Curves(run_dir, {"step": done}, board_step=done)) as curves:
        for step in range(done + 1, last + 1):
            curves.add_scalars({"loss": 1 / step}, step)
            curves.add_row({"step": step, "loss": 1 / step})


def test_a_resumed_run_has_the_lines_and_points_of_a_whole_one(tmp_path: Path) -> None:
    train(tmp_path / "whole", 0, 9)
    train(tmp_path / "cut", 0, 7)
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    train(tmp_path / "cut", 4, 9)
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
    assert points(tmp_path / "cut", "loss") == points(tmp_path / "whole", "loss") == list(range(1, 10))


def test_a_column_has_the_rows_before_and_after_a_resume(tmp_path: Path) -> None:
    train(tmp_path, 0, 3)
    with closing(Curves(tmp_path, {"step": 2})) as curves:
        curves.add_row({"step": 3, "dice": 0.5})
        assert curves.column("loss") == [1, 1 / 2]
        assert curves.column("dice") == [0.5]


def test_a_number_that_is_not_finite_is_null(tmp_path: Path) -> None:
    with closing(Curves(tmp_path, {"step": 0})) as curves:
        curves.add_row({"step": 1, "dice": math.nan, "loss": math.inf})
        curves.add_row({"step": 2, "dice": 0.5, "loss": 1e300})
        assert curves.column("dice") == [0.5]
    assert lines(tmp_path) == ['{"step": 1, "dice": null, "loss": null}', '{"step": 2, "dice": 0.5, "loss": 1e+300}']
    assert Curves(tmp_path, {"step": 2}).column("loss") == [1e300]


def test_without_a_board_step_there_is_no_event_file(tmp_path: Path) -> None:
    curves = Curves(tmp_path / "run", {"step": 0})
    curves.add_scalars({"loss": 1.0}, 1)
    curves.add_row({"step": 1})
    curves.close()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


class FakeTracker:
    """In place of wandb: how its run was begun, and whether it ended."""

    def __init__(self) -> None:
        self.begun: list[dict[str, Any]] = []
        self.finished = 0

    def init(self, **how: Any) -> "FakeTracker":
        self.begun.append(how)
        return self

    def finish(self) -> None:
        self.finished += 1


@pytest.mark.parametrize("report_to", ["tensorboard", "wandb", "none", None])  # None: of a run before 1.0
def test_a_run_reports_to_what_its_settings_name(
    report_to: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, fake = tmp_path / "run", FakeTracker()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    settings = {"mode": "quick", "training": {"learning_rate": 0.5, "optim": None}, "prompts": ["a"]}
    write_json(run / "config.json", {"settings": settings, "inputs": {"report_to": report_to}})
    with closing(Curves(run, {"step": 0}, board_step=0)) as curves:
        curves.add_picture("val/masks", np.zeros((4, 6, 3), np.uint8), 0)
        curves.add_picture("val/masks", None, 1)
        curves.add_text("words", "a", 0)
    assert (run / "logs").exists() == (report_to != "none")
    expected = {"project": "rl_reward_network", "name": "run", "dir": str(run), "sync_tensorboard": True}
    assert fake.begun == ([expected | {"config": settings}] if report_to == "wandb" else [])
    assert fake.finished == len(fake.begun)
    if report_to != "none":
        events = EventAccumulator(str(run / "logs")).Reload()
        assert [(image.step, image.width, image.height) for image in events.Images("val/masks")] == [(0, 6, 4)]
        table = events.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()
        assert "| training.learning_rate | 0.5 |" in table
        assert "optim" not in table
        begun = HParamsPluginData.FromString(
            events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
        )
        hyperparameters = begun.session_start_info.hparams
        assert hyperparameters["training.learning_rate"].number_value == 0.5
        assert hyperparameters["mode"].string_value == "quick"


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """A folder has the name of the file, or a file that of the run folder."""
    taken = tmp_path / "metrics.jsonl" if make is Path.mkdir else tmp_path / "run"
    curves = Curves(tmp_path if make is Path.mkdir else taken, {"step": 0})
    make(taken)
    with pytest.raises(ValueError, match=r"metrics\.jsonl: cannot be written.*OUTPUT_DIR"):
        curves.add_row({"step": 1})


def test_tensors_and_plain_values_come_back(tmp_path: Path) -> None:
    state = {"weights": {"a": torch.randn(3)}, "step": 7, "rows": [{"loss": 0.5}], "best": None}
    save_checkpoint(tmp_path / "checkpoint.pt", state)
    loaded = load_checkpoint(tmp_path / "checkpoint.pt")
    assert torch.equal(loaded.pop("weights")["a"], state.pop("weights")["a"])
    assert loaded == state
    assert load_checkpoint(tmp_path / "none.pt") == {}


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    """What a pickle would call on loading."""

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "touched",)  # type: ignore[return-value]

    torch.save({"x": Evil()}, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match=r"checkpoint\.pt: damaged \(.*delete it"):
        load_checkpoint(tmp_path / "checkpoint.pt")
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 cut off"])
def test_a_damaged_checkpoint_is_named_with_the_remedy(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"checkpoint\.pt: damaged \("):
        load_checkpoint(tmp_path / "checkpoint.pt")


@pytest.mark.parametrize(
    ("proxy", "gold", "stop"),
    [
        ([0.5, 0.6, 0.7, 0.8, 0.9], [0.5, 0.6, 0.57, 0.57, 0.57], True),
        ([0.5, 0.6, 0.7, 0.8, 0.9], [0.5, 0.6, 0.57, 0.59, 0.57], False),  # not three times in a row
        ([0.5, 0.6, 0.7, 0.8, 0.9], [0.5, 0.6, 0.585, 0.585, 0.585], False),  # too little
        ([0.5, 0.6, 0.5, 0.4, 0.4], [0.5, 0.6, 0.57, 0.57, 0.57], False),  # the proxy fell too: no over-optimisation
        ([0.5, 0.6, 0.7], [0.6, 0.5, 0.5], False),  # too early
        ([0.5] * 9, [], False),  # unlabelled
        ([], [], False),
    ],
)
def test_over_optimisation_is_a_rising_proxy_and_a_fallen_truth(
    proxy: list[float], gold: list[float], stop: bool
) -> None:
    assert over_optimised(proxy, gold) is stop


def test_the_best_weights_are_copies_of_the_first_with_the_highest_score() -> None:
    best, weight = Best(), torch.zeros(1)
    for step, score in enumerate([(math.nan, 1.0), (0.1, 0.2), (0.1, 0.3), (0.1, 0.3), (0.0, 9.0), (math.nan, 9.0)]):
        weight += 1
        best.offer(score, step, {"w": weight})
    assert (best.score, best.step, best.weights["w"].item()) == ((0.1, 0.3), 2, 3)
