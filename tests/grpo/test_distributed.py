"""Two gloo ranks against one process that accumulates two batches: the same rollouts, losses and weights; and FSDP2."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from rl_reward_network.embedded.regions import write_regions
from rl_reward_network.grpo.checkpoint import any_rank, first_message, from_first_rank
from rl_reward_network.grpo.policy import CANDIDATE_HEADS
from rl_reward_network.grpo.trainer import check_supported
from rl_reward_network.models.ema import copied
from tests.conftest import write_tiny_data
from tests.grpo.nano import make_trainer
from tests.grpo.rank import RANKS, candidates, train

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = [sys.executable, *["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]]
GRPO = [*LAUNCHER, *["rl_reward_network.cli", "grpo", "quick", "--data_root", "regions", "--gpu", "-1"]]
TOLERANCE = 1e-6  # of losses and weights; 2e-7 was measured


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All checks of two ranks, in one launch."""
    folder = tmp_path_factory.mktemp("ranks")
    start_ranks(folder, RANKS)
    return folder


def environment() -> dict[str, str]:
    """Of ranks on the CPU: two of them may not share a single GPU."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, "PYTHONPATH": str(ROOT), **hidden}


def start_ranks(folder: Path, processes: int, *checks: str) -> None:
    command = [sys.executable, "-m", "tests.grpo.rank", str(folder), str(processes), *checks]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process makes of the batches of both ranks."""
    folder = tmp_path_factory.mktemp("alone")
    train(folder, accumulation=RANKS)
    candidates(folder, accumulation=RANKS)
    return folder


def recorded(folder: Path, name: str, rank: int = 0) -> dict[str, Any]:
    """What a check of `rank` wrote."""
    result: dict[str, Any] = json.loads((folder / f"{name}_{rank}.json").read_text())
    return result


def weights(folder: Path, name: str, rank: int = 0) -> dict[str, torch.Tensor]:
    return load_file(folder / f"{name}_{rank}.safetensors")


def assert_close(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], tolerance: float) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], atol=tolerance, rtol=0, msg=name)


def assert_same_training(alone: Path, ranks: Path, count: int) -> None:
    """The same rollouts, curves, weights and teacher; the weights are equal on all ranks."""
    one, all_ranks = recorded(alone, "trained"), [recorded(ranks, "trained", rank) for rank in range(count)]
    assert len(one["rollouts"]) == 2 * count, "two steps"
    for number, expected in enumerate(one["rollouts"]):
        result = all_ranks[number % count]["rollouts"][number // count]
        assert result["seed"] == expected["seed"] == [42, number // count, number % count]
        assert all(result[name] == expected[name] for name in ("prompts", "completions"))
        torch.testing.assert_close(torch.tensor(result["actions"]), torch.tensor(expected["actions"]))
    for expected, result in zip(one["logs"], all_ranks[0]["logs"], strict=True):
        assert result == pytest.approx(expected, abs=TOLERANCE, rel=TOLERANCE)
    for name in ("trained", "ema"):
        first = weights(ranks, name)
        assert_close(first, weights(alone, name), TOLERANCE)
        for rank in range(1, count):
            assert_close(weights(ranks, name, rank), first, 0)
    assert {own["sigma"] for own in all_ranks} == {one["sigma"]}


def test_two_ranks_train_as_one_process(alone: Path, ranks: Path, tmp_path: Path) -> None:
    assert_same_training(alone, ranks, RANKS)
    assert sorted(path.name for path in (ranks / "run_0").iterdir()) == ["checkpoint-1", "checkpoint-2"]
    assert not (ranks / "run_1").exists(), "only the first rank writes checkpoints"
    one = recorded(alone, "trained")
    assert one["rollouts"][0]["completions"] != one["rollouts"][1]["completions"], "streams are not each other's copies"
    first, second = one["logs"]
    assert [first["step"], second["step"]] == [1, 2]
    losses = (first["loop1/loss"], second["loop1/loss"], second["loop2/loss"])
    assert min(map(abs, losses)) > 100 * TOLERANCE, "or equal losses would prove nothing"
    parts = sum(first[name] for name in ("loop1/loss", "loop2/loss", "loss/answer"))
    assert first["total_loss"] == pytest.approx(parts, abs=1e-6)
    start = copied(make_trainer(tmp_path).sa2va)
    moved = weights(alone, "trained")
    assert max(float((moved[name] - start[name]).abs().max()) for name in moved) > 1000 * TOLERANCE
    for trained in (recorded(ranks, "trained", rank) for rank in range(RANKS)):
        assert trained["wrapped"] == "DistributedDataParallel"
        assert trained["longest_wait"] == 24 * 3600, "ranks wait for one with a slow judge"


@pytest.mark.slow
def test_four_ranks_are_one_process(tmp_path: Path) -> None:
    alone, four = tmp_path / "alone", tmp_path / "four"
    for folder in (alone, four):
        folder.mkdir()
    train(alone, accumulation=4)
    start_ranks(four, 4, "train")
    assert_same_training(alone, four, 4)


@pytest.mark.slow
def test_a_process_that_dies_ends_all_and_is_named(tmp_path: Path) -> None:
    write_regions(tmp_path / "regions", 8, 5)
    command = [*GRPO, *["--batch_size", "4", "--save_steps", "1", "--max_steps", "500", "--run_folder", "run"]]
    with (tmp_path / "log").open("w") as log:
        parent = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=log, stderr=log)
    wait_for(lambda: list((tmp_path / "run").glob("checkpoint-*")), 180)
    children = [child for child in psutil.Process(parent.pid).children() if "grpo" in child.cmdline()]
    victim = next(child for child in children if child.environ()["RANK"] == "1")
    victim.kill()
    start = time.monotonic()
    assert parent.wait(timeout=60) != 0
    assert time.monotonic() - start < 60
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    told = (tmp_path / "log").read_text()
    assert re.search(r"rank\s*: 1 \(local_rank: 1\)", told)
    assert "Signal 9 (SIGKILL)" in told


def wait_for(found: Callable[[], Any], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, "not found in time"
        time.sleep(0.2)


def test_two_ranks_interrupted_inside_a_later_epoch_resume_with_the_same_prompts(ranks: Path) -> None:
    prompts_of_ranks = []
    for rank in range(RANKS):
        whole, resumed = (recorded(ranks, name, rank) for name in ("whole", "resumed"))
        assert len(whole["prompts"]) == 4
        assert resumed["prompts"] == whole["prompts"][3:], "the prompts of step 4, the second of epoch 1"
        assert resumed["logs"][-1] == whole["logs"][-1]
        assert_close(weights(ranks, "whole", rank), weights(ranks, "resumed", rank), 0)
        prompts_of_ranks.append(whole["prompts"])
    assert all(not set(one) & set(other) for one, other in zip(*prompts_of_ranks, strict=True)), "each rank has its own"


def test_all_ranks_take_the_decision_of_one(ranks: Path) -> None:
    first, second = (recorded(ranks, "validated", rank) for rank in range(RANKS))
    assert first == second
    assert first["shared"], "they measure together"
    assert first["steps"] == 4, "three validations after the best Dice"
    assert (first["outcome"]["kept_step"], first["outcome"]["best"], first["has_warned"]) == (1, 0.6, True)
    assert first["gold"] == [0.5, 0.6, 0.5, 0.5, 0.5]
    assert (first["first"], first["any"], first["messages"]) == (0, [True, False], ["the second", None])
    assert_close(weights(ranks, "validated"), weights(ranks, "validated", 1), 0)


def test_heads_that_only_one_rank_reaches_train_on_both(alone: Path, ranks: Path) -> None:
    one, *both = (recorded(*place) for place in ((alone, "candidates"), *((ranks, "candidates", r) for r in (0, 1))))
    seen = [set(own["chosen"]) for own in both]
    assert len(seen[0]) == len(seen[1]) == 1
    assert seen[0] != seen[1], "or nothing would be proved"
    heads = {
        kind: {name.split(CANDIDATE_HEADS)[1][0] for name in both[0][kind] if CANDIDATE_HEADS in name}
        for kind in ("moved", "trains")
    }
    assert heads["moved"] == {str(candidate) for own in seen for candidate in own}, "the third gets a gradient of 0"
    assert heads["trains"] == set("123")
    assert both[0]["moved"] == both[1]["moved"] == one["moved"]
    assert both[0]["frozen"] == both[1]["frozen"] == one["frozen"]
    assert_close(weights(ranks, "candidates"), weights(ranks, "candidates", 1), 0)
    assert_close(weights(ranks, "candidates"), weights(alone, "candidates"), TOLERANCE)


def test_a_model_split_over_two_ranks_gives_the_same_outputs_and_gradients(ranks: Path) -> None:
    """FSDP2 on the policy itself; accelerate ignores FSDP on CPUs, so the Trainer under it cannot be tested here."""
    result = [recorded(ranks, "sharded", rank) for rank in range(RANKS)]
    assert sum(one["held"] for one in result) == pytest.approx(1, abs=1e-3), "each parameter lies on one rank"
    for one in result:
        assert one["held"] == pytest.approx(1 / RANKS, abs=0.02)
        assert len(one["gap"]) == 8, "log-probabilities, parameters, mask and answer of two groups"
        assert max(one["gap"]) <= 1e-5
        assert one["same"], "each tensor that gets a gradient whole gets one when split"
        assert one["gradients"] <= 1e-5, "of the largest; means over ranks of other groups"


def test_the_deepspeed_configuration_leaves_to_the_trainer_what_the_trainer_knows() -> None:
    """Sizes of buckets are numbers: transformers works `auto` out of a `config`, which the policy does not have."""
    result = json.loads((ROOT / "scripts" / "deepspeed_zero2.json").read_text())
    zero = result["zero_optimization"]
    assert zero["stage"] == 2
    assert all(isinstance(zero[name], int) for name in ("reduce_bucket_size", "allgather_bucket_size"))
    assert "optimizer" not in result, "AdamW and schedule are the Trainer's"
    trainers = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert {result[name] for name in (*trainers, "gradient_clipping")} == {result["bf16"]["enabled"]} == {"auto"}


@pytest.mark.slow
def test_the_command_line_runs_in_two_processes_and_goes_on(tmp_path: Path) -> None:
    write_regions(tmp_path / "regions", 8, 5)
    command = [*GRPO, "--batch_size", "4", "--save_steps", "1", "--max_steps"]
    for steps, more in (("2", []), ("2", ["--resume"])):
        done = subprocess.run([*command, steps, *more], cwd=tmp_path, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (run,) = (tmp_path / "outputs").glob("sa2va_grpo_*")
        assert done.stdout.count(f"fine-tuned model: {run.relative_to(tmp_path) / 'final_model'}") == 1
    assert "nothing to resume" in done.stdout
    assert load_file(run / "final_model" / "trainable" / "trainable.safetensors")


@pytest.mark.slow
def test_an_improvement_in_two_processes_has_one_report_and_goes_on(tmp_path: Path) -> None:
    data = write_tiny_data(tmp_path / "data", images=18, size=64)
    records = json.loads((data / "annotations.json").read_text())
    for record in records[6:]:
        del record["mask_png"]
    (data / "annotations.json").write_text(json.dumps(records))
    command = [*LAUNCHER, *["rl_reward_network.cli", "improve", "full", "--data_root", "data", "--gpu", "-1"]]
    command += ["--steps", "1", "--run_folder", "run"]
    for more in ([], ["--resume"]):
        done = subprocess.run([*command, *more], cwd=tmp_path, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("report: run/report.html") == 1
        (tmp_path / "run" / "done.json").unlink()
        shutil.rmtree(tmp_path / "run" / "all" / "mean_teacher")  # its base is written again, by the first process
    assert len(list((tmp_path / "run").glob("*/side_network/final_model"))) == 4, "three folds, and all"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed: pip install deepspeed")
def test_deepspeed_resumes_with_the_same_weights(tmp_path: Path) -> None:
    on_cpu = environment() | {"DS_ACCELERATOR": "cpu"}
    command = [*GRPO, "--batch_size", "4", "--save_steps", "2", "--max_steps", "4", "--resume"]
    command += ["--deepspeed", str(ROOT / "scripts" / "deepspeed_zero2.json")]
    whole, cut_off = tmp_path / "whole", tmp_path / "cut_off"
    write_regions(whole / "regions", 8, 5)
    subprocess.run([word for word in command if word != "--resume"], cwd=whole, env=on_cpu, check=True)
    shutil.copytree(whole, cut_off)
    for part in ("final_model", "checkpoint-4"):
        shutil.rmtree(next(cut_off.glob(f"outputs/sa2va_grpo_*/{part}")))
    subprocess.run(command, cwd=cut_off, env=on_cpu, check=True)
    name = "outputs/sa2va_grpo_*/checkpoint-4/trainable/trainable.safetensors"
    weights = [load_file(next(folder.glob(name))) for folder in (whole, cut_off)]
    assert_close(*weights, tolerance=0.0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"fsdp": "full_shard"}, r"FSDP.*torchrun"),
        ({"deepspeed_plugin": SimpleNamespace(zero_stage=3)}, r"zero\.json: zero_optimization\.stage is 3, exp"),
        ({"bf16": True}, "would round trained tensors to bfloat16; give --dtype float32"),
        ({"pathwise_weight": 1.0}, r"pathwise_weight is 1\.0.*--reward_net"),
        ({}, ""),
    ],
)
def test_what_the_trainer_cannot_run_is_refused(changed: dict[str, Any], message: str) -> None:
    plugin = {"deepspeed": "zero.json", "deepspeed_plugin": SimpleNamespace(zero_stage=2)}
    args = SimpleNamespace(**({"fsdp": "", "pathwise_weight": 0.0, "bf16": False} | plugin | changed))
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        check_supported(args, None)


def test_one_process_decides_by_itself() -> None:
    accelerator = Accelerator(cpu=True)
    assert from_first_rank(accelerator, lambda: {"a": 1}) == {"a": 1}
    assert [any_rank(accelerator, flag) for flag in (True, False)] == [True, False]
    assert [first_message(accelerator, words) for words in ("why", "", None)] == ["why", None, None]
