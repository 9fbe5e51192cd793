"""The comparison of two layouts of a GRPO step: equal gradients, and a step with the dtypes of a GPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import grpo_step
from rl_reward_network.embedded.regions import LAMPLIGHT, write_regions


@pytest.fixture(scope="module")
def few_regions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "regions_lamplight"
    write_regions(folder, 12, seed=1, side=96, light=LAMPLIGHT)
    return folder


@pytest.fixture
def args(tiny_checkpoint: Path, few_regions: Path, monkeypatch: pytest.MonkeyPatch) -> grpo_step.Args:
    monkeypatch.setattr(grpo_step, "embedded_regions", lambda: few_regions)
    return grpo_step.Args(
        str(tiny_checkpoint), prompts=2, num_generations=2, num_mask_generations=2, repeats=1, device="cpu"
    )


def test_both_layouts_have_the_same_gradients(args: grpo_step.Args, tmp_path: Path) -> None:
    assert grpo_step.float32_difference(args, tmp_path) < grpo_step.BAR


def test_a_step_of_bfloat16_weights_runs_in_both_layouts(args: grpo_step.Args, tmp_path: Path) -> None:
    """As on a GPU: frozen weights are bfloat16, trainable ones float32."""
    trainer, prompts = grpo_step.make_trainer(replace(args, prompts=1), tmp_path, "bfloat16")
    assert trainer.sa2va.dtype == torch.bfloat16
    groups = grpo_step.samples(trainer, prompts)
    for layout in (grpo_step.ours, grpo_step.usual):
        seconds = layout(trainer, prompts, groups)
        gradients = {p.grad.dtype for p in trainer.sa2va.parameters() if p.grad is not None}
        assert gradients == {torch.float32}
        assert seconds.parts.keys() >= {"sampling captions", "reference", "loss and gradients"}
