"""GRPO's loss as pure functions of tensors. Names and formulas are TRL's; tests compare them with it.

Axes: N completions, T tokens (right-padded). Source: TRL 1.16, GRPOTrainer._compute_loss; GRPO (arXiv 2402.03300),
DAPO (2503.14476), Dr. GRPO (2503.20783), GSPO (2507.18071); the k3 estimator of the KL: Schulman, "Approximating KL
Divergence", 2020.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_reward_network.grpo.grpo_config import LossSettings, Sa2VAGRPOConfig
from rl_reward_network.grpo.mask_policies import MaskPolicy
from rl_reward_network.grpo.rollouts import GroupOutput, RolloutGroup
from rl_reward_network.grpo.settings import Level
from rl_reward_network.models.sa2va.grounding_sa2va import mask_losses
from rl_reward_network.models.sa2va.pixels_sa2va import upsample_mask_logits
from rl_reward_network.rewards.learned import ForegroundMaps


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


GroupMasks = Sequence[tuple[RolloutGroup, Tensor]]  # with logits (h, w)
FINER = 2  # the grid of mask losses over the decoder's; SAM 2's square (4) is no better (docs/log.md)


class PathwiseReward:
    """The score of a reward network, differentiable in soft masks.

    Args:
        maps: of the frozen reward network.
        sam_image_size: side of SAM 2's square input, in pixels.
    """

    def __init__(self, maps: ForegroundMaps, sam_image_size: int) -> None:
        self.maps, self.side = maps, sam_image_size

    def scores(self, masks: GroupMasks) -> Tensor:
        """float32 (N,): scores of the soft masks of N groups, in [0, 1] up to the ensemble's penalty for its spread."""
        return torch.stack([self._score(group, logits) for group, logits in masks])

    def _score(self, group: RolloutGroup, logits: Tensor) -> Tensor:
        assert group.image is not None
        mask = upsample_mask_logits(logits[None], group.image.shape[:2], self.side).sigmoid()[None]
        score: Tensor = self.maps.network.mask_quality(mask, self.maps.probs(group.image).to(mask.device)).score
        return score.mean()


def direct_mask_loss(
    pairs: Pairs, config: Sa2VAGRPOConfig, counts: StepCounts, pathwise: PathwiseReward | None
) -> tuple[Tensor, dict[str, float]]:
    """Sum of the weighted losses on the masks of the mean actions, and the values to log by tag; 0 without masks."""
    total, values = torch.zeros((), device=config.device), {}
    masks = [(group, output.mask_logits) for group, output in pairs if output.mask_logits is not None]
    labelled = [(group, logits) for group, logits in masks if group.truth is not None]
    if labelled and config.objective == "supervised" and config.caption_to_mask_weight:
        losses = supervised_mask_losses(labelled, config.bce_weight, config.dice_weight)
        values["loss/mask"] = float(losses.detach().mean())
        total = total + config.supervised_mask_weight * losses.sum() / counts.true_masks
    if masks and config.pathwise_weight and pathwise is not None:
        scores = pathwise.scores(masks)
        values["loop2/pathwise_score"] = float(scores.detach().mean())
        total = total - config.pathwise_weight * scores.sum() / counts.masks
    return total, values


def supervised_mask_losses(masks: GroupMasks, bce_weight: float, dice_weight: float) -> Tensor:
    """float32 (N,): weighted sum of cross-entropy and Dice loss, for N groups with a true mask.

    Raises:
        ValueError: no group has a true mask.
    """
    labelled = [(group.truth, logits) for group, logits in masks if group.truth is not None]
    if not labelled:
        raise ValueError("supervised training needs true masks, and no prompt of this batch has one")
    losses = []
    for truth, logits in labelled:  # images differ in size
        size = [FINER * side for side in logits.shape]
        finer = F.interpolate(logits[None, None], size=size, mode="bilinear")[0]
        losses.append(sum(mask_losses(finer, torch.from_numpy(truth)[None], bce_weight, dice_weight).values()))
    return torch.stack([torch.as_tensor(loss) for loss in losses])


EVERY = 10  # optimisation steps between two measurements: each takes a backward pass for each loop
MEMORY = 0.5  # weight of the earlier norms in the running mean
BOUNDS = (0.25, 4.0)  # of the ratio of a weight to the configured one


class LoopWeights:
    """The current weights.

    Args:
        configured: loop -> weight from the settings.
        adaptive: whether the weights depend on the gradients; otherwise they are constant.
    """

    def __init__(self, configured: Mapping[str, float], adaptive: bool) -> None:
        self.configured, self.adaptive = dict(configured), adaptive
        self.norms: dict[str, float] = {}

    def __getitem__(self, loop: str) -> float:
        """The weight of a loop in this step."""
        if not self.norms:
            return self.configured[loop]
        balanced = {name: weight / self.norms[name] for name, weight in self.configured.items()}
        scale = sum(self.configured.values()) / sum(balanced.values())
        low, high = BOUNDS
        return self.configured[loop] * min(max(scale / self.norms[loop], low), high)

    def measures_at(self, step: int) -> bool:
        """Whether gradient norms are measured in this step."""
        return self.adaptive and step % EVERY == 0

    def update(self, norms: Mapping[str, float]) -> None:
        """Update with the norms of this step, equal on every process; ignored if a loop had no gradient."""
        if set(norms) == set(self.configured) and all(norms.values()):
            earlier = self.norms or norms
            self.norms = {name: MEMORY * earlier[name] + (1 - MEMORY) * norm for name, norm in norms.items()}

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"norms": self.norms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        self.norms = state["norms"]


def gradient_norm(loss: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
    """Norm of the gradient of the scalar `loss`; its graph is kept, and no `grad` is changed."""
    gradients = torch.autograd.grad(loss, list(parameters), retain_graph=True, allow_unused=True)
    norms = [gradient.norm() for gradient in gradients if gradient is not None]
    return torch.stack(norms).norm() if norms else torch.zeros((), device=loss.device)
