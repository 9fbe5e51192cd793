"""The measurement of a GPU, as far as a CPU can tell: each part's numbers, and what it says when something fails."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import GIB, Args
from benchmarks.segment import exact_float32
from rl_reward_network.models.sa2va.generation_sa2va import Segmentation


@pytest.fixture
def args(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Args:
    monkeypatch.setattr(gpu, "TOKENS", 16)  # more than the tiny model's answer
    monkeypatch.setattr(gpu, "ROWS", (1, 3))
    return Args(str(tiny_checkpoint), "cpu", images=1)


def test_a_part_that_fails_does_not_stop_the_next(
    args: Args, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(args: Args) -> Iterator[str]:
        yield "begun"
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(gpu, "PARTS", {"formats": broken, "recovery": gpu.recovery})
    with pytest.raises(SystemExit, match=r"formats$"):
        gpu.main(Args(args.model_path, "cpu", parts=("formats", "recovery")))
    told = capsys.readouterr()
    assert told.out.splitlines() == ["formats: begun", "recovery: out of memory: needs a GPU"]
    assert "no kernel image" in told.err


def test_formats_compare_texts_and_masks(args: Args, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = gpu.formats(args)
    assert "100.0% of 11 texts equal, mask IoU 0." in line
    assert "(bar 0.85" in line
    monkeypatch.setattr(gpu, "_answers", lambda args, dtype: [answer(dtype == "float32"), answer(True)])
    (line,) = gpu.formats(args)
    assert "50.0% of 2 texts equal, mask IoU 0.5000" in line


def answer(right: bool) -> Segmentation:
    """Text and mask of one of two kinds."""
    mask = torch.full((1, 4, 4), 9.0 if right else -9.0)
    return Segmentation("right" if right else "wrong", mask, torch.ones(1), torch.zeros(1), (4, 4), 4)


def test_a_gpu_too_small_for_float32_is_told(args: Args, monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(args: Args, dtype: str) -> list[Segmentation]:
        assert not torch.backends.cudnn.allow_tf32
        raise torch.OutOfMemoryError

    monkeypatch.setattr(gpu, "_answers", answers)
    assert list(gpu.formats(args)) == ["float32 of this model does not fit this GPU"]
    assert torch.backends.cudnn.allow_tf32, "as it was"


def test_float32_is_exact_inside_the_block_alone() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with exact_float32():
            assert not torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def test_decoding_counts_answers_that_cannot_end(args: Args, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = list(gpu.decoding(args))
    assert [line.split(": ")[0] for line in lines] == ["rows 1, 16 tokens each", "rows 3, 16 tokens each"]
    assert lines[0].endswith("batched decoding 1.0 x one row")
    monkeypatch.setattr(gpu, "_never_end", lambda processor: None)
    with pytest.raises(RuntimeError, match="expected 16"):
        list(gpu.decoding(args))


class TinyMemory:
    """In place of a model on a GPU: a batch of more than `most` prompts does not fit; `calls` are the batch sizes."""

    def __init__(self, most: int) -> None:
        self.most, self.calls = most, list[int]()

    def segment(self, images: Any, prompts: list[str], processor: Any, batch_size: int, **_: Any) -> Any:
        self.calls.append(batch_size)
        if batch_size > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.\nmore")
        found = SimpleNamespace(mask_logits=torch.ones(1, 4, 4), vision_features=torch.zeros(3))
        return [[found] * len(prompts)]


@pytest.mark.parametrize(
    ("most", "peaks", "told"),
    [
        (44, {88: 4 * GIB, 44: 2 * GIB}, "recovered, the batch was halved: halved True, 88 of 88 answers have a mask"),
        (88, {88: 4 * GIB, 44: 2 * GIB}, "NOT recovered: halved False, 88 of 88 answers have a mask"),
        (11, {88: 4 * GIB, 44: 2 * GIB}, "NOT recovered: out of memory with SEGMENT_BATCH=44"),
        (44, {88: 2 * GIB, 44: 2 * GIB}, "not tried, since no limit fits between; 88 prompts need 2.00 GiB"),
    ],
)
@pytest.mark.filterwarnings("ignore:out of memory with SEGMENT_BATCH")
def test_recovery_is_told_only_of_a_batch_that_was_halved(
    monkeypatch: pytest.MonkeyPatch, most: int, peaks: dict[int, int], told: str
) -> None:
    model, limits = TinyMemory(most), list[float]()
    monkeypatch.setattr(gpu, "_peak", lambda model, processor, image, rows: (peaks[rows], peaks[rows]))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=8 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)
    assert gpu._recovered(model, None, np.zeros((4, 4, 3), np.uint8)).startswith(told)
    assert limits == ([] if "not tried" in told else [3 / 8, 1.0]), "between the two, and lifted"


def test_a_compiler_that_fails_is_one_line() -> None:
    def encode() -> None:
        raise RuntimeError("no C compiler\nlong trace")

    assert gpu._compiled(encode, 1.0) == "not compiled: RuntimeError: no C compiler"
    assert gpu._compiled(lambda: None, 1.0).startswith("compiled ")
