"""From the groups of a micro-batch and the policy's outputs for them to the loss of each loop."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_reward_network.grpo.config import Sa2VAGRPOConfig
from rl_reward_network.grpo.loss.losses import LossParts, LossSettings, aggregate, grpo_loss
from rl_reward_network.grpo.mask_policies import MaskPolicy
from rl_reward_network.grpo.rollout_group import GroupOutput, RolloutGroup

Pairs = Sequence[tuple[RolloutGroup, GroupOutput]]
Value = TypeVar("Value")


class StepCounts(NamedTuple):
    """Divisors of the losses of one optimisation step, per process and micro-batch.

    With them each token and each group of a step has the same weight, whatever its micro-batch and process.

    Args:
        tokens: that enter the loss of loop 1; those of groups without spread are included, as in TRL.
        masks: groups with an answer of loop 2.
        true_masks: those of them with a true mask.
    """

    tokens: Tensor | float
    masks: Tensor | float
    true_masks: Tensor | float


def loop_losses(
    pairs: Pairs, config: Sa2VAGRPOConfig, mask_policy: MaskPolicy, counts: StepCounts
) -> dict[str, LossParts]:
    """loop -> its loss; a loop that no group takes part in is left out, and so is loop 2 in supervised training."""
    if config.objective == "supervised":
        losses = {"loop1": reference_loss(pairs, config.loss_settings, counts.tokens)}
    else:
        losses = {
            "loop1": caption_loss(pairs, config.loss_settings, counts.tokens),
            "loop2": mask_policy_loss(pairs, mask_policy, config, counts.masks),
        }
    return {loop: parts for loop, parts in losses.items() if parts is not None}


def loss_metrics(losses: Mapping[str, LossParts], rewarded_loops: Sequence[str]) -> dict[str, float]:
    """The parts of the losses by tag, without those that were not computed; loop 2 has no entropy.

    The loss of a rewarded loop without groups is logged as 0, so that the mean of its curve includes the step.
    """
    values: dict[str, float] = {}
    for loop, parts in losses.items():
        values |= {f"{loop}/loss": float(parts.loss.detach()), f"{loop}/policy_loss": float(parts.policy_loss)}
        more = {"kl_div": parts.kl, "clip_fraction": parts.clip_fraction}
        values |= {f"{loop}/{name}": float(value) for name, value in more.items() if value is not None}
        if loop == "loop1":
            values["loop1/entropy"] = float(parts.entropy)
    for loop in rewarded_loops:
        if loop not in losses:
            values |= {f"{loop}/loss": 0.0, f"{loop}/policy_loss": 0.0}
    return values


def caption_loss(pairs: Pairs, settings: LossSettings, num_items: Tensor | float | None) -> LossParts | None:
    """Loss of loop 1 over all groups that take part in it; None if there is none."""
    pairs = [(group, output) for group, output in pairs if group.describe_ids]
    if not pairs:
        return None
    log_probs = torch.cat([_required(output.log_probs) for _, output in pairs])
    longest = log_probs.shape[1]
    advantages = torch.cat([_required(group.caption_advantages) for group, _ in pairs]).to(log_probs)
    mask = torch.cat([completion_mask(group, longest) for group, _ in pairs]).to(log_probs)
    old_log_probs = _stored_log_probs([group.old_output for group, _ in pairs], longest)
    ref_log_probs = _stored_log_probs([group.ref_output for group, _ in pairs], longest) if settings.beta else None
    entropies = [output.entropies for _, output in pairs if output.entropies is not None]  # or none has one
    return grpo_loss(
        log_probs,
        advantages,
        mask,
        settings,
        old_log_probs,
        ref_log_probs,
        torch.cat(entropies) if entropies else None,
        num_items,
    )


def reference_loss(pairs: Pairs, settings: LossSettings, num_items: Tensor | float | None) -> LossParts | None:
    """Cross-entropy of the reference captions, averaged as `settings` say; None if there is none.

    Its gradient is that of `caption_loss` with advantages of 1, whose value is -1 whatever the model says.
    """
    parts = caption_loss(pairs, settings, num_items)
    if parts is None:
        return None
    described = [(group, _required(output.log_probs)) for group, output in pairs if group.describe_ids]
    log_probs = torch.cat([rows for _, rows in described])
    mask = torch.cat([completion_mask(group, log_probs.shape[1]) for group, _ in described]).to(log_probs)
    loss = aggregate(-log_probs, mask, settings, num_items)
    return replace(parts, loss=loss, policy_loss=loss.detach())


def mask_policy_loss(
    pairs: Pairs, policy: MaskPolicy, config: Sa2VAGRPOConfig, num_groups: Tensor | float | None = None
) -> LossParts | None:
    """Loss of loop 2: the same clipped objective on the mask policy's log-probabilities, and its closed-form KL.

    A sum over the groups with sampled masks, divided by `num_groups` (None: by their number): a group whose answer has
    no `[SEG]` has the advantage 0 and counts, as one whose rewards are all alike.
    """
    pairs = [(group, output) for group, output in pairs if group.actions is not None]
    if not pairs:
        return None
    log_probs, old_log_probs = _mask_log_probs(pairs, policy)
    advantages = torch.cat([_required(group.mask_advantages) for group, _ in pairs]).to(log_probs)
    settings = LossSettings("grpo", "token", config.mask_epsilon, config.mask_epsilon, 0.0, 0.0, 1)
    parts = grpo_loss(log_probs, advantages, torch.ones_like(log_probs), settings, old_log_probs)
    kl = _mask_kl(pairs, policy) if config.mask_beta else None
    share = 1.0 if num_groups is None else len(pairs) / num_groups
    kl_loss = torch.zeros_like(parts.loss) if kl is None else share * config.mask_beta * kl
    return replace(
        parts,
        loss=share * parts.loss + kl_loss,
        kl_loss=kl_loss,
        policy_loss=share * parts.policy_loss,
        kl=None if kl is None else kl.detach(),
        clip_fraction=None if pairs[0][0].old_output is None else parts.clip_fraction,
    )


def answer_loss(pairs: Pairs, num_groups: Tensor | float) -> Tensor | None:
    """Cross-entropy of the answers of loop 2: mean over the tokens of each, sum over groups, divided by `num_groups`.

    Losses on masks change the text as well, up to answers without `[SEG]`, which have no mask. The reference answer,
    which their groups have in place of the model's, brings `[SEG]` back. None without answers.
    """
    answers = [output.answer_log_probs for group, output in pairs if group.answer_length]
    if not answers:
        return None
    return -torch.stack([_required(log_probs).mean() for log_probs in answers]).sum() / num_groups


def _mask_log_probs(pairs: Pairs, policy: MaskPolicy) -> tuple[Tensor, Tensor]:
    """Log-probabilities (N, 1) of all actions, now and when they were sampled."""
    log_probs, old_log_probs = [], []
    for group, output in pairs:
        parameters, width, actions = map(_required, (output.parameters, group.action_width, group.actions))
        old = parameters.detach() if group.old_output is None else _required(group.old_output.parameters)
        log_probs.append(policy.log_prob(parameters, width, actions))
        old_log_probs.append(policy.log_prob(old, width, actions))
    return torch.cat(log_probs)[:, None], torch.cat(old_log_probs)[:, None]


def _mask_kl(pairs: Pairs, policy: MaskPolicy) -> Tensor:
    """Mean over groups of KL(policy || reference)."""
    divergences = []
    for group, output in pairs:
        ref_parameters = _required(_required(group.ref_output).parameters)
        divergences.append(policy.kl(_required(output.parameters), ref_parameters, _required(group.action_width)))
    return torch.stack(divergences).mean()


def completion_mask(group: RolloutGroup, longest: int) -> Tensor:
    """float32 (G, longest): 1 on tokens that enter the loss."""
    lengths = torch.tensor([len(ids) for ids in group.completion_ids])
    mask = (torch.arange(longest) < lengths[:, None]).float()
    return mask if group.counted is None else mask * group.counted[:, None]


def count_step(micro_batches: Sequence[Sequence[RolloutGroup]]) -> StepCounts:
    """`StepCounts` of all micro-batches of this process together."""
    groups = [group for groups in micro_batches for group in groups]
    captioned = [group for group in groups if group.describe_ids]
    segmented = [group for group in groups if group.segment_ids]
    tokens = [completion_mask(group, max(map(len, group.completion_ids))).sum() for group in captioned]
    true_masks = sum(group.truth is not None for group in segmented)
    return StepCounts(float(sum(tokens)), float(len(segmented)), float(true_masks))


def _stored_log_probs(outputs: Sequence[GroupOutput | None], longest: int) -> Tensor | None:
    """Log-probabilities (N, longest) of earlier outputs, padded anew; None if there are none."""
    if outputs[0] is None:
        return None
    rows = [_required(_required(output).log_probs) for output in outputs]
    return torch.cat([F.pad(row, (0, longest - row.shape[1])) for row in rows])


def _required(value: Value | None) -> Value:
    assert value is not None
    return value
