"""Logs of a run: curves, the same numbers as lines, pictures; a resumed run has no step twice."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers.trainer_callback import PrinterCallback

from rl_reward_network.atomic_io import read_json
from rl_reward_network.grpo import logs as logs_file
from rl_reward_network.grpo.logs import GRPOLogs, StepMetrics, picture_row
from rl_reward_network.grpo.rollouts import Rollouts
from rl_reward_network.report.overlays import AFTER, TRUTH
from tests.grpo.nano import make_trainer

SAVING = {"caption": 1.0, "loop2_iou": 1.0, "save_strategy": "steps", "save_steps": 1}
LOOP = {"reward_mean", "reward_std", "frac_zero_std", "loss", "policy_loss", "kl_div"}
CAPTIONS = {"completion_length", "frac_truncated", "entropy"}
MASKS = {"mask_iou_in_group", "sigma", "no_seg_share"}
OTHERS = {"total_loss", "loss/answer", "ema_distance", "ema_decay", "grad_norm", "learning_rate", "epoch"}


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


ARGS: Any = SimpleNamespace(objective="grpo")


def none() -> Rollouts:
    return Rollouts(0, [], [])


def curves(run: Path) -> EventAccumulator:
    return EventAccumulator(str(run / "logs"), size_guidance={"images": 0}).Reload()


def train(run: Path, checkpoint: Path | None = None, **changed: Any) -> Any:
    """A run of two steps, one checkpoint each, as the stage logs it."""
    own = make_trainer(run, per_device_train_batch_size=4, **SAVING | changed)
    own.remove_callback(PrinterCallback)
    own.add_callback(GRPOLogs(run, lambda: own.last_rollouts))
    own.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return own


def test_every_number_is_a_curve_and_a_line(resumed_run: Path) -> None:
    """A resumed run has no step twice."""
    result, written = curves(resumed_run), lines(resumed_run)
    wanted = OTHERS | {f"loop1/{name}" for name in LOOP | CAPTIONS} | {f"loop2/{name}" for name in LOOP | MASKS}
    terms = {"loop1": ("iou", "dice", "meteor"), "loop2": ("iou", "confidence", "meteor")}
    wanted |= {f"{loop}/{kind}/{term}" for loop in terms for kind in ("reward", "missing") for term in terms[loop]}
    assert [line["step"] for line in written] == [1, 2]
    for line in written:
        assert set(line) == wanted | {"step"}
    timings = [json.loads(line) for line in (resumed_run / "timings.jsonl").read_text().splitlines()]
    phases = {"seconds/rollouts", "seconds/learning", "tokens_per_second"}
    assert [set(line) for line in timings] == [phases | {"step"}] * len(timings)
    assert [line["step"] for line in timings][-1] == 2
    assert all(value > 0 for line in timings for value in line.values())
    assert set(result.Tags()["scalars"]) == wanted | phases
    for tag in wanted:
        points = [(point.step, point.value) for point in result.Scalars(tag)]
        assert points == [(line["step"], pytest.approx(line[tag], rel=1e-6)) for line in written], tag


def test_a_checkpoint_between_two_lines_changes_no_line_after_a_resume(tmp_path: Path) -> None:
    """Every number of the steps since the last line is written before the checkpoint that cannot hold it."""
    settings = {"max_steps": 4, "logging_steps": 3, "save_steps": 2}
    train(tmp_path / "whole", **settings)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    train(tmp_path / "cut", tmp_path / "cut" / "checkpoint-2", **settings)
    assert [line["step"] for line in lines(tmp_path / "whole")] == [2, 3, 4], "the last step, too"
    assert (tmp_path / "cut" / "metrics.jsonl").read_text() == (tmp_path / "whole" / "metrics.jsonl").read_text()


def test_numbers_pictures_and_captions_of_both_loops_are_there(grpo_run: Path) -> None:
    history = read_json(grpo_run / "checkpoint-2" / "trainer_state.json")["log_history"]
    assert lines(grpo_run) == [log for log in history if "total_loss" in log]
    result = curves(grpo_run)
    assert set(result.Tags()["images"]) == {"loop1/samples", "loop2/samples"}
    (shown, *_) = result.Images("loop2/samples")
    assert (shown.width, shown.height) == (2 * 192, 192), "one of each of the two groups"
    tensors = result.Tags()["tensors"]
    wanted = {f"{loop}/completions/text_summary" for loop in ("loop1", "loop2")}
    assert {tag for tag in tensors if "completions" in tag} == wanted
    text = result.Tensors("loop1/completions/text_summary")[0].tensor_proto.string_val[0].decode()
    reference, said = text.split("\n\n")[0].split(" -> ")
    assert reference.startswith("a ")
    assert said


def test_pictures_are_drawn_every_few_calls_and_the_summary_is_no_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs_file, "PICTURES_EVERY", 2)
    samples = columns() | {"prompts": ["?"] * 2, "captions": ["b"] * 2}
    rollouts, looks = Rollouts(1, [], [], columns={"loop1": samples}), [None, np.zeros((6, 9, 3), np.uint8)]
    own = GRPOLogs(tmp_path, lambda: rollouts, looks=looks.pop)
    state: Any = SimpleNamespace(is_world_process_zero=True, global_step=0, max_steps=3)
    own.on_train_begin(ARGS, state, None)
    for state.global_step in (1, 2, 3):
        own.on_step_end(None, state, None)
        own.on_log(None, state, None, {"total_loss": 1.0})
    for _ in range(2):
        own.on_log(None, state, None, {"val/gt_dice": 0.5})
    own.on_log(None, state, None, {"train_runtime": 1.0, "total_loss": 2.0})
    own.on_log(None, state, None, None)
    own.on_train_end(None, state, None)
    assert own.bar.n == 3
    assert [image.step for image in curves(tmp_path).Images("loop1/samples")] == [1, 3]
    assert [(image.step, image.width) for image in curves(tmp_path).Images("val/masks")] == [(3, 9)]
    expected = [{"step": step, "total_loss": 1.0} for step in (1, 2, 3)]
    assert lines(tmp_path) == [*expected, *[{"step": 3, "val/gt_dice": 0.5}] * 2]


def test_another_process_writes_nothing(tmp_path: Path) -> None:
    own, state = GRPOLogs(tmp_path, none), SimpleNamespace(is_world_process_zero=False, global_step=1, max_steps=3)
    own.on_train_begin(ARGS, state, None)
    own.on_log(None, state, None, {"total_loss": 1.0})
    own.on_step_end(None, state, None)
    own.on_train_end(None, state, None)
    assert list(tmp_path.iterdir()) == []


def columns() -> dict[str, list[Any]]:
    """Two samples: one with both masks, one that drew none and has no truth."""
    first, second = np.zeros((64, 64), dtype=bool), np.zeros((64, 64), dtype=bool)
    first[8:24, 8:24], second[40:56, 40:56] = True, True
    return {
        "images": [np.full((64, 64, 3), 90, np.uint8), np.full((32, 96, 3), 10, np.uint8)],
        "masks": [first, None],
        "predicted_masks": [second, None],
        "completions": ["", "ein größerer roter Kreis, 円 " * 5],
    }


def test_a_picture_shows_each_sample_with_its_outlines() -> None:
    own = columns()
    row = picture_row(own, [0, 1], side=64)
    assert row.shape == (64, 128, 3)
    assert row.dtype == np.uint8
    for colour, corner in ((TRUTH, 7), (AFTER, 39)):
        painted = (row[:, :64] == colour).all(axis=2)
        assert painted[corner, corner + 1 : corner + 16].all(), "around the mask"
        assert painted.sum() < 80, "an outline, not an area"
    assert (row[20, 20] == 90).all(), "inside, the image itself"
    assert (own["images"][0] == 90).all(), "the sample is not painted over"
    right = row[:, 64:]
    assert (right[:32] == 10).all()
    assert (right[48:] > 200).any(), "the caption is below"
    assert picture_row(columns(), [1]).shape == (192, 192, 3)


def test_failures_of_the_judge_are_printed_once_and_counted_beside_the_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = "HTTP 429: " + "slow down " * 10
    judge: Any = SimpleNamespace(last_failure=reason)
    own = GRPOLogs(tmp_path, none, judge=judge)
    state: Any = SimpleNamespace(is_world_process_zero=True, global_step=0, max_steps=4)
    own.on_train_begin(ARGS, state, None)
    shown = []
    for count in (0, 12, 12, 13):
        own.on_log(None, state, None, {"total_loss": 0.0, "loop1/reward_mean": 0.5, "judge/failures": float(count)})
        shown.append(own.bar.postfix)
    beside = f"x: {reason[:40]}, loop1=0.500"
    assert shown == ["loop1=0.500", f"judge failed 12{beside}", f"judge failed 12{beside}", f"judge failed 13{beside}"]
    judge.last_failure = ""
    own.on_log(None, state, None, {"total_loss": 0.0, "judge/failures": 14.0})
    own.on_log(None, state, None, {"val/iou": 0.5})
    assert own.bar.postfix == "judge failed 14x: in another process"
    own.on_train_end(None, state, None)
    warnings = [line for line in capsys.readouterr().err.replace("\r", "\n").splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert f"failed 12x, the last time by {reason}" in warnings[0]


def test_each_tag_has_the_mean_of_its_own_values() -> None:
    metrics = StepMetrics(world_size=1)
    for values in ({"a": 3.0, "b": 5.0}, {"a": 1.0}, {"a": 2.0}):
        metrics.record(values)
    assert metrics.means() == {"a": 2.0, "b": 5.0}
    assert list(metrics.means()) == ["a", "b"], "in the order of the first record"
    assert metrics.mean_of_last(("a",), 2) == [1.5]


def test_the_table_of_completions_is_written(tmp_path: Path) -> None:
    own = make_trainer(tmp_path, per_device_train_batch_size=8)
    own.remove_callback(PrinterCallback)
    own.add_callback(GRPOLogs(tmp_path, lambda: own.last_rollouts, sampled=lambda: own.sampled))
    own.train()
    files = sorted((tmp_path / "completions").iterdir())
    assert [file.name for file in files] == ["completions_00001.parquet", "completions_00002.parquet"]
    rows = pyarrow.parquet.read_table(files[-1]).to_pylist()
    captions, masks = ([row for row in rows if row["loop"] == loop] for loop in ("loop1", "loop2"))
    assert (len(captions), len(masks)) == (8, 8), "two prompts, 4 captions and 4 masks of each"
    for own_rows, term in ((captions, "reward/iou"), (masks, "reward/meteor")):
        for start in (0, 4):
            group = own_rows[start : start + 4]
            assert len({row["prompt"] for row in group}) == 1
            assert sum(row["advantage"] for row in group) == pytest.approx(0, abs=1e-6)
            assert all(0 <= row[term] <= 1 for row in group)
    assert masks[0]["reference"]


def test_each_part_has_its_learning_rate_and_the_schedule_and_optimiser_are_chosen(tmp_path: Path) -> None:
    rates = {"seg_learning_rate": 2e-4, "decoder_learning_rate": 3e-4, "learning_rate": 1e-3, "weight_decay": 0.1}
    own = make_trainer(tmp_path, optim="adamw_torch", mask_policy="bernoulli", objective="supervised", **rates)
    optimizer = own.create_optimizer()
    assert type(optimizer) is torch.optim.AdamW
    names = {id(parameter): name for name, parameter in own.sa2va.named_parameters()}
    seen = {}
    for parameter, group in ((parameter, own) for own in optimizer.param_groups for parameter in own["params"]):
        name = names[id(parameter)]
        seen[name] = group["lr"]
        decayed = parameter.dim() > 1 and "norm" not in name
        assert group["weight_decay"] in ((0.1,) if decayed else (0.0, 0.1)), name
    assert len(seen) == sum(parameter.requires_grad for parameter in own.sa2va.parameters())
    expected = {"lora_": 1e-3, "text_hidden_fcs": 2e-4, "mask_decoder": 3e-4, "multi_modal_projector": 1e-3}
    for part, rate in expected.items():
        found = {lr for name, lr in seen.items() if part in name}
        assert found == {rate}, part
