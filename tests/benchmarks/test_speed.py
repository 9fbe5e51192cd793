"""The measurements of speed, each at its smallest; both layouts of a GRPO step have the same gradients."""

from pathlib import Path

import pytest
import torch

from benchmarks import speed
from benchmarks.common import exact_float32
from benchmarks.speed import BAR, Gpu, GpuTraining, GrpoStep, RealSize, gradient_difference, main, measured_stage
from rl_reward_network.embedded.regions import LAMPLIGHT, write_regions


@pytest.fixture(scope="module")
def few_regions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "regions_lamplight"
    write_regions(folder, 12, seed=1, side=96, light=LAMPLIGHT)
    return folder


@pytest.fixture
def step(tiny_checkpoint: Path, few_regions: Path) -> GrpoStep:
    return GrpoStep(str(tiny_checkpoint), few_regions, 2, 2, 2, repeats=1, device="cpu")


def test_both_layouts_have_the_same_gradients(step: GrpoStep, tmp_path: Path) -> None:
    assert gradient_difference(*step.step(str(tmp_path))) < BAR


def test_a_step_of_bfloat16_weights_runs_in_both_layouts(step: GrpoStep, tmp_path: Path) -> None:
    """As on a GPU: frozen weights are bfloat16, trainable ones float32."""
    trainer, items, batch = step.step(str(tmp_path), "bfloat16")
    assert trainer.sa2va.dtype == torch.bfloat16
    for layout in (speed.ours, speed.usual):
        layout(trainer, items, batch)
        gradients = {p.grad.dtype for p in trainer.sa2va.parameters() if p.grad is not None}
        assert gradients == {torch.float32}


def test_float32_is_exact_inside_the_block_alone() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with exact_float32():
            assert not torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def test_what_a_gpu_shows_runs_at_its_smallest_and_a_part_that_fails_does_not_stop_the_next(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(speed, "LENGTH", 16)  # more than the tiny model's answer
    monkeypatch.setattr(speed, "ROWS", (1, 3))
    main(Gpu(str(tiny_checkpoint), "cpu", images=1))
    formats, *rows = capsys.readouterr().out.splitlines()
    assert "100.0% of 11 texts equal, mask IoU 0." in formats
    assert [row.split(": ")[0] for row in rows] == ["rows 1, 16 tokens each", "rows 3, 16 tokens each"]
    monkeypatch.setitem(speed.WAYS, "9 bit", ({}, "9bit"))
    with pytest.raises(SystemExit, match=r"failed, see above: tiny, 9 bit$"):
        main(GpuTraining(("tiny",), "cpu", ("9 bit", "GRPO", "supervised")))
    printed = capsys.readouterr().out.splitlines()
    for way in ("GRPO", "supervised"):
        (line,) = (line for line in printed if line.startswith(f"tiny, {way}: "))
        seconds, rollouts, peak, _ = map(float, line.removeprefix(f"tiny, {way}: ").split(";")[0].split(","))
        assert 0 < rollouts < seconds
        assert peak > 0


def test_stages_of_real_size_run_on_a_tiny_checkpoint_and_leave_the_files_of_others(tmp_path: Path) -> None:
    args = RealSize("tiny", "cpu", folder=tmp_path / "own", keep=True)
    notes = {name: measured_stage(args, name)[2] for name in ("write", "load", "segment")}
    assert notes["segment"] == "11 prompts, 1 image"
    assert "parameters" in notes["write"]
    (tmp_path / "mine" / "data").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"folder is .*mine, which holds \['data'\]"):
        main(RealSize("tiny", "cpu", folder=tmp_path / "mine"))
    assert (tmp_path / "mine" / "data").is_dir()
