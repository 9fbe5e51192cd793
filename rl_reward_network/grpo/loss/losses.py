"""GRPO's loss as pure functions of tensors. Names and formulas are TRL's; tests compare them with it.

Axes: N completions, T tokens (right-padded). Source: TRL 1.16, GRPOTrainer._compute_loss; GRPO (arXiv 2402.03300),
DAPO (2503.14476), Dr. GRPO (2503.20783), GSPO (2507.18071); the k3 estimator of the KL: Schulman, "Approximating KL
Divergence", 2020.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_reward_network.grpo.settings import Level, LossType


@dataclass(frozen=True)
class LossSettings:
    """Hyperparameters of the loss; fields are TRL's.

    Args:
        loss_type: how token losses are averaged; see `aggregate`.
        importance_sampling_level: whether each token or the whole completion has a ratio.
        epsilon, epsilon_high: the ratio is clipped to [1 - epsilon, 1 + epsilon_high].
        beta: weight of the KL to the reference.
        entropy_coef: weight of the entropy bonus.
        max_completion_length: tokens; dr_grpo divides by it.
    """

    loss_type: LossType = "dapo"
    importance_sampling_level: Level = "token"
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    beta: float = 0.04
    entropy_coef: float = 0.0
    max_completion_length: int = 64


@dataclass(frozen=True)
class LossParts:
    """The loss, differentiable, and its parts, detached scalars.

    Args:
        loss: policy + beta * KL - entropy bonus.
        kl_loss: beta * KL, differentiable, as part of `loss`.
        policy_loss: before KL and entropy bonus.
        kl: mean over tokens of the estimate; None without a reference.
        clip_fraction: share of tokens (or completions) whose gradient is clipped away; None on fresh rollouts.
        entropy: mean over tokens, in nats.
    """

    loss: Tensor
    kl_loss: Tensor
    policy_loss: Tensor
    kl: Tensor | None
    clip_fraction: Tensor | None
    entropy: Tensor

    @property
    def rewarded(self) -> Tensor:
        """The loss without KL, to which the weight of a loop applies: the KL counts whatever that weight is."""
        return self.loss - self.kl_loss


def grpo_loss(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    settings: LossSettings,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    entropies: Tensor | None = None,
    num_items: Tensor | float | None = None,
) -> LossParts:
    """The clipped policy loss of N completions.

    Args:
        log_probs: float (N, T), of the sampled tokens, with gradient.
        advantages: float (N,).
        mask: (N, T), 1 on tokens that count.
        settings: hyperparameters.
        old_log_probs: (N, T), of the policy that sampled them; with None the ratio is exactly 1.
        ref_log_probs: (N, T) of the reference; needed when beta is not 0.
        entropies: (N, T); needed when entropy_coef is not 0.
        num_items: tokens of the whole optimisation step per process, the divisor of dapo; None counts `mask`.
    """
    mask = mask.to(log_probs.dtype)
    old = log_probs.detach() if old_log_probs is None else old_log_probs
    ratio = importance_ratio(log_probs, old, mask, settings.importance_sampling_level)
    low, high = 1 - settings.epsilon, 1 + settings.epsilon_high
    rewarded = advantages[:, None]
    per_token = -torch.min(ratio * rewarded, ratio.clamp(low, high) * rewarded)
    policy_loss = aggregate(per_token.expand_as(mask), mask, settings, num_items)
    kl, kl_loss = torch.zeros_like(log_probs), torch.zeros_like(policy_loss)
    if settings.beta:
        assert ref_log_probs is not None
        kl = ratio * k3(log_probs, ref_log_probs)
        kl_loss = settings.beta * aggregate(kl, mask, settings, num_items)
    loss = policy_loss + kl_loss
    entropy = _token_mean(entropies, mask) if entropies is not None else log_probs.new_zeros(())
    clipped = ((ratio < low) & (rewarded < 0)) | ((ratio > high) & (rewarded > 0))
    return LossParts(
        loss - settings.entropy_coef * entropy if settings.entropy_coef else loss,
        kl_loss,
        policy_loss.detach(),
        _token_mean(kl, mask).detach() if settings.beta else None,
        None if old_log_probs is None else _token_mean(clipped.to(mask.dtype).expand_as(mask), mask).detach(),
        entropy.detach(),
    )


def importance_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, level: Level) -> Tensor:
    """new / old probability: (N, T) of tokens, or (N, 1), the geometric mean over each completion's tokens."""
    log_ratio = log_probs - old_log_probs
    if level == "sequence":
        log_ratio = ((log_ratio * mask).sum(1) / mask.sum(1).clamp(min=1))[:, None]
    return log_ratio.exp()


def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """The estimate exp(d) - d - 1 >= 0 of KL(policy || reference) at each sampled token, d = reference - policy.

    Its gradient is that of the reverse, KL(reference || policy), and its mean is right on tokens of the policy alone.
    Times the importance ratio, also where that is 1, value and gradient are those of KL(policy || reference).
    """
    difference = ref_log_probs - log_probs
    return difference.exp() - difference - 1


def aggregate(per_token: Tensor, mask: Tensor, settings: LossSettings, num_items: Tensor | float | None) -> Tensor:
    """Average token losses (N, T) to a scalar.

    grpo: mean over each completion's tokens, then over completions. bnpo: mean over the batch's tokens. dapo: sum over
    tokens / tokens of the whole step. dr_grpo: sum over tokens / (N x longest completion allowed).
    """
    if settings.loss_type == "grpo":
        return ((per_token * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()
    total = (per_token * mask).sum()
    if settings.loss_type == "dr_grpo":
        return total / (len(mask) * settings.max_completion_length)
    count = mask.sum() if settings.loss_type == "bnpo" or num_items is None else torch.as_tensor(num_items)
    return total / count.to(total).clamp(min=1)


def _token_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum().clamp(min=1)
