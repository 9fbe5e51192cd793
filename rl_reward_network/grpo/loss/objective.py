"""From a batch of groups and what the policy says of them to one loss, and the numbers that are logged beside it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_reward_network.grpo.config import Sa2VAGRPOConfig
from rl_reward_network.grpo.loss.losses import LossParts, LossSettings, grpo_loss
from rl_reward_network.grpo.loss.mask_policies import MaskPolicy
from rl_reward_network.grpo.loss.policy import Group, GroupOutput

Pairs = list[tuple[Group, GroupOutput]]


class StepCounts(NamedTuple):
    """What one optimisation step's losses are divided by, per process and micro-batch.

    So each token and each group of a step weighs the same, whatever shares its micro-batch or process.

    Args:
        tokens: that count in loop 1; those of groups without spread are among them, as in TRL.
        masks: groups that answered with a mask.
        true_masks: those of them with a true mask.
    """

    tokens: Tensor | float
    masks: Tensor | float
    true_masks: Tensor | float


def caption_loss(pairs: Pairs, settings: LossSettings, num_items: Tensor | float | None) -> LossParts | None:
    """Loop 1's loss over all groups that take part in it; None when there is none."""
    own = [(group, output) for group, output in pairs if group.describe_ids]
    if not own:
        return None
    log_probs = torch.cat([_required(output.log_probs) for _, output in own])
    advantages = torch.cat([_required(group.token_advantages) for group, _ in own]).to(log_probs)
    mask = torch.cat([completion_mask(group, log_probs.shape[1]) for group, _ in own]).to(log_probs)
    old = _kept([group.old for group, _ in own], log_probs.shape[1])
    reference = _kept([group.reference for group, _ in own], log_probs.shape[1]) if settings.beta else None
    entropies = torch.cat([_required(output.entropies) for _, output in own])
    return grpo_loss(log_probs, advantages, mask, settings, old, reference, entropies, num_items)


def mask_loss(
    pairs: Pairs, policy: MaskPolicy, config: Sa2VAGRPOConfig, groups: Tensor | float | None = None
) -> LossParts | None:
    """Loop 2's loss: the same clipped objective on the mask policy's log-probabilities, and its closed-form KL.

    A sum over the groups of the micro-batch, divided by `groups`; without it by their own number.
    """
    own = [(group, output) for group, output in pairs if group.segment_ids]
    if not own:
        return None
    log_probs, old, divergences = [], [], []
    for group, output in own:
        parameters, width, actions = _required(output.parameters), _required(group.width), _required(group.actions)
        log_probs.append(policy.log_prob(parameters, width, actions))
        before = parameters.detach() if group.old is None else _required(group.old.parameters)
        old.append(policy.log_prob(before, width, actions))
        if config.mask_beta:
            reference = _required(_required_output(group.reference).parameters)
            divergences.append(policy.kl(parameters, reference, width))
    new = torch.cat(log_probs)[:, None]
    advantages = torch.cat([_required(group.mask_advantages) for group, _ in own]).to(new)
    settings = LossSettings("grpo", "token", config.mask_epsilon, config.mask_epsilon, 0.0, 0.0, 1)
    parts = grpo_loss(new, advantages, torch.ones_like(new), settings, torch.cat(old)[:, None])
    share = 1.0 if groups is None else len(own) / groups
    kl = torch.stack(divergences).mean() if divergences else new.new_zeros(())
    loss = share * (parts.loss + config.mask_beta * kl)
    return replace(parts, loss=loss, policy_loss=share * parts.policy_loss, kl=kl.detach())


def completion_mask(group: Group, longest: int) -> Tensor:
    """float32 (G, longest): 1 on tokens that count."""
    rows = [torch.ones(len(completion)) for completion in group.completions]
    mask = torch.stack([F.pad(row, (0, longest - len(row))) for row in rows])
    return mask if group.counts is None else mask * group.counts[:, None]


def count_step(batches: Sequence[Sequence[Group]]) -> StepCounts:
    """`StepCounts` of all micro-batches of this process together."""
    groups = [group for batch in batches for group in batch]
    lengths = [completion_mask(group, max(map(len, group.completions))).sum() for group in groups if group.describe_ids]
    drawn = [group for group in groups if group.segment_ids]
    return StepCounts(float(sum(lengths)), float(len(drawn)), float(sum(group.truth is not None for group in drawn)))


def _kept(outputs: Sequence[GroupOutput | None], longest: int) -> Tensor | None:
    """Log-probabilities (N, longest) of earlier outputs, whatever batch they were padded for; None without any."""
    if outputs[0] is None:
        return None
    rows = [_required(_required_output(output).log_probs) for output in outputs]
    return torch.cat([F.pad(row, (0, longest - row.shape[1])) for row in rows])


def _required(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


def _required_output(value: GroupOutput | None) -> GroupOutput:
    assert value is not None
    return value
