"""The made-up GPU finds planted mixes of devices, and no road of the product has one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.device_rehearsal import loaded_on_it, steps_of
from benchmarks.made_up_device import GPU, MadeUpGPU
from rl_reward_network.embedded.regions import make_scenes
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from tests.grpo.nano import make_trainer, nano, regions

STEP_WAITS = 60  # of one optimisation step with fresh rollouts: mostly one for each sampled token


def on_gpu(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device="cuda")


PLANTED: dict[str, Callable[[], Any]] = {
    "sum": lambda: on_gpu(3) + torch.ones(3),
    "matrix product": lambda: torch.ones(2, 3) @ on_gpu(3, 2),
    "numpy": lambda: on_gpu(3).numpy(),
    "numpy by np.asarray": lambda: np.asarray(on_gpu(3)),
    "generator": lambda: torch.rand(3, device="cuda", generator=torch.Generator()),
    "index on the GPU of a tensor on the CPU": lambda: torch.ones(3)[on_gpu(2).long()],
    "weights": lambda: nn.Linear(3, 2)(on_gpu(1, 3)),
    "in place": lambda: torch.ones(3).add_(on_gpu(3)),
    "where": lambda: torch.where(torch.ones(3).bool(), on_gpu(3), 0.0),
    "backward": lambda: (nn.Linear(3, 2).to("cuda")(on_gpu(1, 3)) * torch.ones(1, 2)).sum().backward(),
    "positions": lambda: on_gpu(3) * torch.arange(3),
}
ALLOWED: dict[str, Callable[[], Any]] = {
    "a number": lambda: on_gpu(3) * torch.tensor(2.0),
    "a copy": lambda: on_gpu(3).cpu().numpy(),
    "indices from the CPU": lambda: on_gpu(3)[torch.tensor([0])],
    "backward": lambda: nn.Linear(3, 2).to("cuda")(on_gpu(1, 3)).exp().sum().backward(),
    "padding in C++": lambda: nn.utils.rnn.pad_sequence([on_gpu(2), on_gpu(3)]) + on_gpu(3, 2),
    "a generator": lambda: torch.rand(3, device="cuda", generator=torch.Generator("cuda")),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mix_is_found_with_its_line(name: str) -> None:
    with MadeUpGPU() as gpu:
        PLANTED[name]()
    assert len(gpu.mixes) == 1, gpu.mixes
    assert all(where.startswith("tests/benchmarks/test_device_rehearsal.py:") for _, where in gpu.mixes)


@pytest.mark.parametrize("name", ALLOWED)
def test_what_cuda_allows_is_no_mix(name: str) -> None:
    with MadeUpGPU() as gpu:
        ALLOWED[name]()
    assert not gpu.mixes


def test_waits_and_devices_are_those_of_a_gpu() -> None:
    with MadeUpGPU() as gpu:
        tensor = torch.arange(4.0).to("cuda")
        assert tensor.device == (tensor * 2).sum().device == GPU
        assert tensor.cpu().device.type == "cpu"
        assert (tensor.sum().item(), tensor.tolist(), int(tensor[tensor > 1].numel())) == (6.0, [0.0, 1.0, 2.0, 3.0], 2)
    assert gpu.uploads.total() == 1
    assert sorted(what for what, _ in gpu.syncs) == [
        "aten._local_scalar_dense.default",
        "aten.index.Tensor",
        "cpu() CPU",
        "tolist",
    ]


def test_segmenting_mixes_no_devices_and_gives_the_same_masks() -> None:
    image = next(iter(make_scenes(1, 0, 96))).image
    prompts = ["<image>Please segment the blood vessel.", "<image>Could you segment the circle?"]

    def masks(device: str) -> list[Any]:
        model, processor = load_sa2va_model("sa2va-nano", device, dtype="float32")
        assert model.device == torch.device(device)
        return [(one.answer, one.masks()) for one in model.segment([image], prompts, processor)[0]]

    with MadeUpGPU() as gpu, loaded_on_it(gpu):
        found = masks("cuda:0")
    assert gpu.operations > 100
    assert not gpu.mixes
    for (answer, mask), (expected_answer, expected) in zip(found, masks("cpu"), strict=True):
        assert answer == expected_answer
        np.testing.assert_array_equal(mask, expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"mask_policy": "gaussian"},
        {"mask_policy": "bernoulli", "num_iterations": 2, "activation_checkpointing": True},
        {"objective": "supervised"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_an_optimisation_step_mixes_no_devices_and_waits_seldom(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    nano()  # read from its file on the CPU
    with MadeUpGPU() as gpu, steps_of(gpu) as steps:
        trainer = make_trainer(tmp_path, regions()[:2], max_steps=2, use_cpu=False, save_strategy="no", **settings)
        trainer.train()
    assert gpu.operations > 1000
    assert not gpu.mixes
    assert len(steps) == 2
    assert steps[-1].total() <= STEP_WAITS, steps[-1].most_common()
