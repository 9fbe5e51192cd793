"""GRPO's loss against TRL's own `_compute_loss`, tensor by tensor, and its closed forms."""

from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_reward_network.grpo.grpo_config import LossSettings
from rl_reward_network.grpo.losses import aggregate, grpo_loss, importance_ratio, k3

COUNT, LENGTH, LONGEST = 6, 5, 9


def case(seed: int = 0) -> dict[str, Tensor]:
    """Log-probabilities near old and reference ones, advantages of both signs, completions of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(COUNT, LENGTH, generator=generator, dtype=torch.float64) * 3
    noise = torch.randn(2, COUNT, LENGTH, generator=generator, dtype=torch.float64) * 0.3
    lengths = torch.tensor([5, 3, 1, 4, 5, 2])
    return {
        "log_probs": log_probs.requires_grad_(),
        "old": log_probs.detach() + noise[0],
        "ref": log_probs.detach() + noise[1],
        "advantages": torch.randn(COUNT, generator=generator, dtype=torch.float64),
        "mask": (torch.arange(LENGTH) < lengths[:, None]).long(),
        "entropies": torch.rand(COUNT, LENGTH, generator=generator, dtype=torch.float64),
    }


def trl_loss(tensors: dict[str, Tensor], settings: LossSettings, num_items: float) -> Tensor:
    """What TRL makes of the same tensors, with a stand-in for everything that is not the loss."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    def reduce(value: Tensor, reduction: str = "sum") -> Tensor:
        return value

    stub = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (tensors["log_probs"], tensors["entropies"], None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=settings.importance_sampling_level,
        beta=settings.beta,
        loss_type=settings.loss_type,
        epsilon_low=settings.epsilon,
        epsilon_high=settings.epsilon_high,
        max_completion_length=settings.max_completion_length,
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        entropy_coef=settings.entropy_coef,
        _entropy_bonus_enabled=bool(settings.entropy_coef),
        use_adaptive_entropy=False,
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(use_bias_correction_kl=True, delta=None, steps_per_generation=1),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=reduce, sync_gradients=True, no_sync=nullcontext
        ),
        _metrics={"train": defaultdict(list)},
    )
    empty = torch.zeros(COUNT, 0, dtype=torch.long)
    inputs: dict[str, Any] = {
        "prompt_ids": empty,
        "prompt_mask": empty,
        "completion_ids": torch.zeros(COUNT, LENGTH, dtype=torch.long),
        "completion_mask": tensors["mask"],
        "advantages": tensors["advantages"],
        "old_per_token_logps": tensors["old"],
        "ref_per_token_logps": tensors["ref"],
        "num_items_in_batch": torch.tensor(num_items, dtype=torch.float64),
    }
    return GRPOTrainer._compute_loss(stub, None, inputs)


def our_loss(tensors: dict[str, Tensor], settings: LossSettings, num_items: float | None = None) -> Any:
    return grpo_loss(
        tensors["log_probs"],
        tensors["advantages"],
        tensors["mask"],
        settings,
        tensors["old"],
        tensors["ref"] if settings.beta else None,
        tensors["entropies"],
        num_items,
    )


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("beta", "entropy_coef"), [(0.0, 0.0), (0.04, 0.0), (0.04, 0.01)])
def test_loss_and_gradient_are_those_of_trl(loss_type: Any, level: Any, beta: float, entropy_coef: float) -> None:
    pytest.importorskip("trl", reason="trl is in the `test` extra")
    settings = LossSettings(loss_type, level, 0.2, 0.28, beta, entropy_coef, LONGEST)
    theirs, ours = case(), case()
    expected, result = trl_loss(theirs, settings, 37.0), our_loss(ours, settings, 37.0)
    expected.backward()
    result.loss.backward()
    assert result.loss.item() == pytest.approx(expected.item(), abs=1e-9)
    torch.testing.assert_close(ours["log_probs"].grad, theirs["log_probs"].grad, atol=1e-9, rtol=0)
    assert ours["log_probs"].grad.abs().max() > 1e-3, "a gradient that is 0 everywhere would prove nothing"


def test_the_ratio_is_exactly_one_before_the_first_step() -> None:
    tensors = case()
    ratio = importance_ratio(tensors["log_probs"], tensors["log_probs"].detach(), tensors["mask"], "token")
    assert (ratio == 1).all()
    settings = LossSettings("bnpo", beta=0.0)
    parts = grpo_loss(tensors["log_probs"], tensors["advantages"], tensors["mask"], settings)
    mask, advantages = tensors["mask"].double(), tensors["advantages"][:, None]
    assert parts.loss.item() == pytest.approx((-(advantages * mask).sum() / mask.sum()).item())
    parts.loss.backward()
    torch.testing.assert_close(tensors["log_probs"].grad, -advantages * mask / mask.sum())
    assert parts.clip_fraction is None, "nothing could be clipped"
    assert parts.kl is None


def test_equal_rewards_give_no_policy_gradient() -> None:
    tensors = case()
    parts = grpo_loss(tensors["log_probs"], torch.zeros(COUNT).double(), tensors["mask"], LossSettings(beta=0.0))
    parts.loss.backward()
    assert not tensors["log_probs"].grad.any()


def test_clipping_stops_the_gradient_and_is_counted() -> None:
    log_probs = torch.tensor([[0.5], [-0.5], [0.5], [-0.5]], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0])
    settings = LossSettings("bnpo", beta=0.0, epsilon=0.2, epsilon_high=0.2)
    parts = grpo_loss(log_probs, advantages, torch.ones(4, 1), settings, torch.zeros(4, 1))
    parts.loss.backward()
    assert log_probs.grad.squeeze(1).bool().tolist() == [False, False, True, True]
    assert parts.clip_fraction == 0.5


def test_k3_is_zero_at_the_reference_and_positive_elsewhere() -> None:
    values = torch.tensor([0.0, -1.0, 0.7])
    assert k3(values, values).tolist() == [0, 0, 0]
    assert k3(torch.tensor([-1.0]), torch.tensor([-2.0])).item() == pytest.approx(2.718281828**-1 + 1 - 1, abs=1e-6)
    assert (k3(values, values + torch.tensor([0.1, -0.2, 3.0])) > 0).all()


def test_padding_changes_no_loss_type() -> None:
    for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo"):
        settings = LossSettings(loss_type, beta=0.04, max_completion_length=LONGEST)  # type: ignore[arg-type]
        plain, padded = case(), case()
        for name in ("log_probs", "old", "ref", "mask", "entropies"):
            padded[name] = torch.nn.functional.pad(padded[name].detach(), (0, 3), value=0)
        assert our_loss(padded, settings).loss.item() == pytest.approx(our_loss(plain, settings).loss.item())


def test_aggregation_by_hand() -> None:
    losses, mask = torch.tensor([[1.0, 2.0], [4.0, 9.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    expected = {"grpo": (1.5 + 4) / 2, "bnpo": 7 / 3, "dr_grpo": 7 / (2 * 10), "dapo": 7 / 5}
    for loss_type, value in expected.items():
        settings = LossSettings(loss_type, max_completion_length=10)  # type: ignore[arg-type]
        assert aggregate(losses, mask, settings, 5.0).item() == pytest.approx(value)


def test_the_gradient_of_the_kl_is_that_of_policy_against_reference() -> None:
    """In expectation over sampled tokens, also over those of an older policy: k3 alone has the reverse one's."""
    generator = torch.Generator().manual_seed(0)
    logits, old, ref = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    log_probs, old_log_probs, ref_log_probs = (values.log_softmax(0) for values in (logits, old, ref))
    (expected,) = torch.autograd.grad((log_probs.exp() * (log_probs - ref_log_probs)).sum(), logits, retain_graph=True)
    settings = LossSettings("bnpo", beta=1.0)

    def kl_loss(n: int, sampled_from: Tensor) -> Tensor:
        one, old, ref = (values[n].reshape(1, 1) for values in (log_probs, sampled_from, ref_log_probs))
        return grpo_loss(one, torch.zeros(1), torch.ones(1, 1), settings, old, ref).kl_loss

    for sampled_from in (log_probs.detach(), old_log_probs):
        loss = sum(p * kl_loss(n, sampled_from) for n, p in enumerate(sampled_from.exp()))
        (result,) = torch.autograd.grad(loss, logits, retain_graph=True)
        torch.testing.assert_close(result, expected, atol=1e-12, rtol=0)
    (plain,) = torch.autograd.grad((log_probs.detach().exp() * k3(log_probs, ref_log_probs)).sum(), logits)
    assert (plain - expected).abs().max() > 0.01
