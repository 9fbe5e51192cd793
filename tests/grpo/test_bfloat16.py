"""In bfloat16, on the CPU: masks, log-probabilities and gradients stay near those in float32, and no copy is made."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_reward_network.embedded.regions import make_scenes
from rl_reward_network.grpo.policy import mixed_precision
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from tests.grpo.nano import make_trainer, regions, shake

PIXELS, LOG_PROBS, COSINE = 0.01, 2e-2, 0.99  # of masks that differ; mean distance; of the gradients of a loss


class Formats(TorchDispatchMode):
    """Counts operations with float64 results, and float32 copies of frozen bfloat16 weights."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.frozen = {p.untyped_storage()._cdata for p in model.parameters() if p.dtype == torch.bfloat16}
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
            if tensor.dtype == torch.float64:
                self.found[f"float64 of {func}"] += 1
            source = args[0] if args and isinstance(args[0], Tensor) else None
            copied = source is not None and source.dim() > 1 and source.dtype == torch.bfloat16
            if copied and tensor.dtype == torch.float32 and source.untyped_storage()._cdata in self.frozen:
                self.found[f"float32 copy of {tuple(tensor.shape)} by {func}"] += 1
        return result


def segmented(dtype: Any) -> tuple[list[str], np.ndarray, Formats]:
    model, processor = load_sa2va_model("sa2va-nano", dtype=dtype)
    scenes = list(make_scenes(6, 0, 128))
    with Formats(model) as formats:
        asked = [([scene.image], [f"Please segment the {scene.objects[0].caption}."]) for scene in scenes]
        answers = [model.segment(*one, processor)[0][0] for one in asked]
    return [one.answer for one in answers], np.stack([one.masks()[0] for one in answers]), formats


def test_masks_differ_in_less_than_one_percent_of_pixels() -> None:
    answers, masks, formats = segmented("bfloat16")
    expected_answers, expected, _ = segmented("float32")
    assert answers == expected_answers
    assert expected.any(axis=(1, 2)).all()
    assert (masks != expected).mean() < PIXELS
    assert not formats.found


@pytest.fixture(scope="module", params=["gaussian", "bernoulli", "supervised"])
def compared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Outputs and gradients of the policy for the reference captions of a few regions, in both formats."""
    how = {"objective": request.param} if request.param == "supervised" else {"mask_policy": request.param}
    return [outputs_in(dtype, tmp_path_factory.mktemp("run"), how) for dtype in (torch.float32, torch.bfloat16)]


def outputs_in(dtype: torch.dtype, folder: Path, how: dict[str, Any]) -> Any:
    trainer = make_trainer(folder, regions()[:4], dtype=dtype, pathwise_weight=0.0, **how)
    model = trainer.sa2va
    shake(model)
    trainer.sa2va.train()
    batch = trainer.rollout_generator.references(list(trainer.prompts))
    with Formats(model) as formats:
        with mixed_precision(model):
            outputs, anchor = trainer.policy(batch.rollouts, True)
        log_probs = torch.cat([part.flatten() for part in outputs.log_probs]).float()
        masks = torch.cat([part.flatten() for part in outputs.mask_logits]).float()
        losses = {"log-probabilities": log_probs.mean(), "masks": F.softplus(masks).mean()}
        tensors = [parameter for parameter in model.parameters() if parameter.requires_grad]
        how = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        gradients = {name: torch.autograd.grad(anchor + loss, tensors, **how) for name, loss in losses.items()}
    flat = {name: torch.cat([gradient.flatten() for gradient in found]) for name, found in gradients.items()}
    return {"log_probs": log_probs.detach(), "masks": masks.detach(), "gradients": flat, "formats": formats.found}


def test_log_probabilities_stay_near_those_in_float32(compared: Any) -> None:
    full, half = compared
    assert (full["log_probs"] - half["log_probs"]).abs().mean() < LOG_PROBS
    assert ((full["masks"] > 0) != (half["masks"] > 0)).float().mean() < PIXELS


def test_gradients_point_where_those_in_float32_point(compared: Any) -> None:
    full, half = compared
    for name, gradient in full["gradients"].items():
        assert gradient.norm() > 0
        assert torch.cosine_similarity(gradient, half["gradients"][name], dim=0) > COSINE, name


def test_training_makes_no_float64_and_no_float32_copy_of_a_frozen_weight(compared: Any) -> None:
    assert not compared[1]["formats"]


def test_planted_formats_are_found() -> None:
    layer = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    with Formats(layer) as formats:
        layer.weight.float()
        torch.ones(2, dtype=torch.float64)
    assert len(formats.found) == 2
