"""GRPO's loss as pure functions of tensors and settings; each returns its value and the numbers to log.

Names and formulas are TRL's; tests compare them with it. Losses on the mask of the mean action, which reach the mask
decoder, are the reward network's score and supervision. The loss of an optimisation step is the mean of the losses of
its micro-batches; `StepCounts` says what follows from it.

Axes: N completions or masks, G of them a group, T tokens (right-padded).
Source: TRL 1.16, GRPOTrainer._compute_loss; GRPO (arXiv 2402.03300), DAPO (2503.14476), Dr. GRPO (2503.20783), GSPO
(2507.18071); the k3 estimator of the KL: Schulman, "Approximating KL Divergence", 2020.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_reward_network.data.names import NamedClass
from rl_reward_network.grpo.competition import contested, rivals
from rl_reward_network.grpo.grpo_config import Sa2VAGRPOConfig
from rl_reward_network.grpo.logs import Metrics
from rl_reward_network.grpo.policy import PolicyOutputs
from rl_reward_network.grpo.preferences import preference_loss
from rl_reward_network.grpo.rollouts import (
    AnswerRollout,
    CaptionRollout,
    MaskPolicy,
    MicroBatch,
    PromptImage,
    Rollouts,
)
from rl_reward_network.grpo.settings import OF_LABELS, GRPOSettings, Level
from rl_reward_network.models.ema import consistency_losses
from rl_reward_network.models.sa2va.grounding_sa2va import (
    DecodedMasks,
    candidate_loss,
    mask_losses,
    soft_cldice,
    soft_targets,
)
from rl_reward_network.models.sa2va.pixels_sa2va import upsample_mask_logits
from rl_reward_network.rewards.learned import ForegroundMaps

CHOICE_WEIGHT = 0.01  # of SAM 2's guesses which candidate is best; AdamW's steps hardly depend on it, clipping does
FINER = 2  # the grid of mask losses over SAM 2's masks; its square (4) is no better (docs/log.md)
SHARED = 0.5  # of the smaller of two true masks, up to which outlines that overlap are a matter of their borders
CONTRAST_TEMPERATURE = 0.1  # of the paper
ALWAYS_LOGGED = ("loss", "policy_loss")
Numbers = Tensor | float
MeanMasks = Sequence[tuple[PromptImage, Tensor]]  # with logits (h, w)


@dataclass(frozen=True)
class Loss:
    """The loss of one loop, in two differentiable scalars."""

    rewarded: Tensor  # the policy loss less the entropy bonus, to which the weight of a loop applies
    kl: Tensor  # beta * KL, which counts whatever that weight is
    metrics: Metrics

    @property
    def value(self) -> Tensor:
        """The whole loss."""
        return self.rewarded + self.kl


class StepCounts(NamedTuple):
    """What the micro-batches of an optimisation step, of all processes, hold on average: the divisors of their losses.

    A micro-batch divides its sum over tokens or groups by the average, not by its own number, so that in the mean over
    micro-batches, which the step's loss is, each token and each group has the same weight.
    """

    tokens: Numbers  # that enter the loss of loop 1; with those of groups whose rewards are alike, as in TRL
    masks: Numbers  # groups with an answer of loop 2; below those of them with a true mask, a teacher's, a pair
    true_masks: Numbers
    taught: Numbers = 0.0
    pairs: Numbers = 0.0


class Objective(NamedTuple):
    """The loss of a micro-batch."""

    value: Tensor  # scalar, differentiable
    loops: dict[str, Loss]  # without a loop that no prompt takes part in
    metrics: Metrics


def grpo_objective(
    batch: MicroBatch,
    outputs: PolicyOutputs,
    config: Sa2VAGRPOConfig,
    counts: StepCounts,
    weights: Mapping[str, float],
    mask_policy: MaskPolicy,
    pathwise: "PathwiseReward | None" = None,
) -> Objective:
    """The sum of all enabled losses of a micro-batch; `weights` are those of the loops ("loop1", "loop2").

    `pathwise`, the reward network's score with gradient, is needed if `pathwise_weight` is not 0.
    """
    loops: dict[str, Loss] = {}
    if batch.rollouts.captions:
        loss = reference_loss if config.objective in OF_LABELS else caption_loss
        loops["loop1"] = loss(batch, outputs, config, counts.tokens)
    if batch.rollouts.masks:
        loops["loop2"] = mask_policy_loss(batch, outputs, config, counts.masks, mask_policy)
    total, metrics = torch.zeros((), device=config.device), dict[str, float | Tensor]()
    if config.objective == "grpo":  # a loop without groups is logged as 0, so that the mean of its curve has the step
        metrics = {f"{loop}/{name}": 0.0 for loop, weight in weights.items() if weight for name in ALWAYS_LOGGED}
    for loop, own in loops.items():
        total = total + (weights[loop] * own.rewarded + own.kl)
        metrics |= {f"{loop}/{name}": value for name, value in own.metrics.items()}
    for value, logged in mean_action_losses(batch, outputs, config, counts, pathwise):
        total, metrics = total + value, metrics | logged
    if config.seg_text_weight and outputs.answer_log_probs:
        answers = answer_loss(outputs.answer_log_probs, counts.masks)
        total, metrics["loss/answer"] = total + config.seg_text_weight * answers, answers.detach()
    return Objective(total, loops, metrics)


def mean_action_losses(
    batch: MicroBatch,
    outputs: PolicyOutputs,
    config: Sa2VAGRPOConfig,
    counts: StepCounts,
    pathwise: "PathwiseReward | None",
) -> Iterator[tuple[Tensor, Metrics]]:
    """The weighted losses on the mask of the mean action, each with what to log of it; arguments as above."""
    images = [answer.image for answer in batch.rollouts.answers]
    masks = list(zip(images, outputs.mask_logits, strict=True)) if outputs.mask_logits else []
    if config.objective in OF_LABELS and config.caption_to_mask_weight:
        from_labels, of_labels = labelled_loss(batch.rollouts.answers, masks, outputs.embeddings, config, counts)
        yield config.caption_to_mask_weight * from_labels, of_labels
        if choices := choice_losses(images, outputs.decoded):
            of_head = torch.stack(choices)  # trains its head alone, so its value stands beside the total
            no_value = (of_head - of_head.detach()).sum()
            yield CHOICE_WEIGHT * no_value / counts.true_masks, {"loss/choice": of_head.detach().mean()}
        if objects := object_losses(images, outputs.objects):
            of_objects = torch.stack(objects)
            yield of_objects.sum() / counts.true_masks, {"loss/object": of_objects.detach().mean()}
    if taught := [(image.taught, logits) for image, logits in masks if image.taught is not None]:
        losses = torch.stack([consistency_loss(logits, torch.from_numpy(mask), config) for mask, logits in taught])
        weight = config.consistency_weight * batch.consistency_weight
        yield weight * losses.sum() / counts.taught, {"loss/taught": losses.detach().mean()}
    if config.objective == "dpo":
        yield preference_loss(masks, batch.reference.mask_logits, config, counts.pairs)
    if masks and config.pathwise_weight and pathwise is not None:
        scores = pathwise.scores(masks, config.cldice_weight)
        value = -(config.pathwise_weight * scores.sum() / counts.masks)
        yield value, {"loop2/pathwise_score": scores.detach().mean()}


# ---- loop 1 ---------------------------------------------------------------------------------------------------------


def grpo_loss(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    settings: GRPOSettings,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    entropies: Tensor | None = None,
    num_items: Numbers | None = None,
) -> Loss:
    """The clipped policy loss of N completions.

    The metrics are `loss`, `policy_loss` (before KL and entropy bonus), `entropy` (mean over tokens, in nats), with a
    reference `kl_div` (mean over tokens of the estimate), and on rollouts that are used again `clip_fraction` (share of
    tokens, or completions, whose gradient is clipped away).

    Args:
        log_probs, advantages: float (N, T), of the sampled tokens, with gradient; float (N,).
        mask: (N, T), 1 on tokens that count.
        settings: hyperparameters.
        old_log_probs: (N, T), of the policy that sampled them; with None the ratio is exactly 1.
        ref_log_probs: (N, T) of the reference; needed when beta is not 0.
        entropies: (N, T); needed when entropy_coef is not 0.
        num_items: tokens, see `StepCounts`, the divisor of dapo; None counts `mask`.
    """
    mask = mask.to(log_probs.dtype)
    old = log_probs.detach() if old_log_probs is None else old_log_probs
    ratio = importance_ratio(log_probs, old, mask, settings.importance_sampling_level)
    high = settings.epsilon if settings.epsilon_high is None else settings.epsilon_high
    per_token, clipped = clipped_loss(ratio, advantages[:, None], settings.epsilon, high)
    policy_loss = aggregate(per_token.expand_as(mask), mask, settings, num_items)
    entropy = _token_mean(entropies, mask) if entropies is not None else log_probs.new_zeros(())
    metrics: Metrics = {"policy_loss": policy_loss.detach(), "entropy": entropy.detach()}
    kl_loss = torch.zeros_like(policy_loss)
    if settings.beta:
        assert ref_log_probs is not None
        kl = ratio * k3(log_probs, ref_log_probs)
        kl_loss = settings.beta * aggregate(kl, mask, settings, num_items)
        metrics["kl_div"] = _token_mean(kl, mask).detach()
    if old_log_probs is not None:
        metrics["clip_fraction"] = _token_mean(clipped.to(mask.dtype).expand_as(mask), mask)
    rewarded = policy_loss - settings.entropy_coef * entropy if settings.entropy_coef else policy_loss
    return Loss(rewarded, kl_loss, {"loss": (rewarded + kl_loss).detach(), **metrics})


def clipped_loss(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A), and where its gradient is clipped away."""
    loss = -torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    return loss, ((ratio < 1 - low) & (advantages < 0)) | ((ratio > 1 + high) & (advantages > 0))


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


def aggregate(per_token: Tensor, mask: Tensor, settings: GRPOSettings, num_items: Numbers | None) -> Tensor:
    """Average token losses (N, T) to a scalar.

    grpo: mean over each completion's tokens, then over completions. bnpo: mean over the batch's tokens. dapo: sum over
    tokens / `num_items`. dr_grpo: sum over tokens / (N x longest completion allowed).
    """
    if settings.loss_type == "grpo":
        return ((per_token * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()
    total = (per_token * mask).sum()
    if settings.loss_type == "dr_grpo":
        assert settings.max_completion_length is not None
        return total / (len(mask) * settings.max_completion_length)
    count = mask.sum() if settings.loss_type == "bnpo" or num_items is None else torch.as_tensor(num_items)
    return total / count.to(total).clamp(min=1)


def _token_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum().clamp(min=1)


def caption_loss(
    batch: MicroBatch, outputs: PolicyOutputs, settings: GRPOSettings, num_items: Numbers | None = None
) -> Loss:
    """Loss of loop 1 over all caption rollouts."""
    log_probs = torch.cat(outputs.log_probs)
    longest = log_probs.shape[1]
    return grpo_loss(
        log_probs,
        torch.cat(batch.caption_advantages).to(log_probs),
        completion_mask(batch.rollouts.captions, longest).to(log_probs),
        settings,
        _padded(batch.old.log_probs, longest),
        _padded(batch.reference.log_probs, longest),
        torch.cat(outputs.entropies) if outputs.entropies else None,
        num_items,
    )


def reference_loss(
    batch: MicroBatch, outputs: PolicyOutputs, settings: GRPOSettings, num_items: Numbers | None = None
) -> Loss:
    """Cross-entropy of the reference captions, averaged as `settings` say.

    Its gradient is that of `caption_loss` with advantages of 1, whose value is -1 whatever the model says.
    """
    log_probs = torch.cat(outputs.log_probs)
    mask = completion_mask(batch.rollouts.captions, log_probs.shape[1]).to(log_probs)
    loss = aggregate(-log_probs, mask, settings, num_items)
    value, entropies = loss.detach(), outputs.entropies
    entropy = _token_mean(torch.cat(entropies), mask).detach() if entropies else torch.zeros(())
    return Loss(loss, torch.zeros_like(loss), {"loss": value, "policy_loss": value, "entropy": entropy})


def completion_mask(rollouts: Sequence[CaptionRollout], longest: int) -> Tensor:
    """float32 (N, longest): 1 on tokens that enter the loss."""
    lengths = torch.tensor([len(ids) for rollout in rollouts for ids in rollout.completion_ids])
    counted = torch.cat([rollout.counted for rollout in rollouts])
    return (torch.arange(longest) < lengths[:, None]).float() * counted[:, None]


def _padded(log_probs: Sequence[Tensor], longest: int) -> Tensor | None:
    """Stored log-probabilities (N, longest), padded anew; None if there are none."""
    if not log_probs:
        return None
    return torch.cat([F.pad(rows, (0, longest - rows.shape[1])) for rows in log_probs])


# ---- loop 2 ---------------------------------------------------------------------------------------------------------


def mask_policy_loss(
    batch: MicroBatch, outputs: PolicyOutputs, config: Sa2VAGRPOConfig, num_groups: Numbers, policy: MaskPolicy
) -> Loss:
    """Loss of loop 2: the same clipped objective on the mask policy's log-probabilities, and its closed-form KL.

    A sum over the groups with sampled masks, divided by `num_groups`: a group whose answer has no `[SEG]` has the
    advantage 0 and counts, as one whose rewards are all alike.
    """
    log_probs, old_log_probs, divergences = [], [], []
    for mask in batch.rollouts.masks:
        parameters = outputs.parameters[mask.row]
        old = batch.old.parameters[mask.row] if batch.old.parameters else parameters.detach()
        log_probs.append(policy.log_prob(parameters, mask.width, mask.actions))
        old_log_probs.append(policy.log_prob(old, mask.width, mask.actions))
        if config.mask_beta:
            divergences.append(policy.kl(parameters, batch.reference.parameters[mask.row], mask.width))
    ratio, epsilon = (torch.cat(log_probs) - torch.cat(old_log_probs)).exp(), config.mask_epsilon
    losses, clipped = clipped_loss(ratio, torch.cat(batch.mask_advantages).to(ratio), epsilon, epsilon)
    share = len(log_probs) / num_groups  # of the groups of an average micro-batch: all groups have the same size
    policy_loss = share * losses.mean()
    kl_loss, metrics = torch.zeros_like(policy_loss), {"policy_loss": policy_loss.detach()}
    if config.mask_beta:
        kl = torch.stack(divergences).mean()
        kl_loss, metrics["kl_div"] = share * config.mask_beta * kl, kl.detach()
    if batch.old.parameters:
        metrics["clip_fraction"] = clipped.float().mean()
    return Loss(policy_loss, kl_loss, {"loss": (policy_loss + kl_loss).detach(), **metrics})


def answer_loss(log_probs: Sequence[Tensor], num_groups: Numbers) -> Tensor:
    """Cross-entropy of the answers of loop 2: mean over the tokens of each, sum over groups, divided by `num_groups`.

    Losses on masks change the text as well, up to answers without `[SEG]`, which have no mask. The reference answer,
    which such a prompt has in place of the model's, brings `[SEG]` back.
    """
    return -torch.stack([of_answer.mean() for of_answer in log_probs]).sum() / num_groups


def labelled_loss(
    answers: Sequence[AnswerRollout],
    masks: "MeanMasks",
    embeddings: Sequence[Tensor],
    config: Sa2VAGRPOConfig,
    counts: StepCounts,
) -> tuple[Tensor, Metrics]:
    """The losses of supervised training on masks and names, weighted and summed, and what to log of them."""
    total, metrics = torch.zeros((), device=config.device), dict[str, float | Tensor]()
    pairs = zip(masks, answers, strict=False)  # no masks where none trains
    if labelled := [(mask, answer.named) for mask, answer in pairs if mask[0].truth is not None]:
        weights = config.bce_weight, config.dice_weight, config.cldice_weight
        own = [mask for mask, _ in labelled]
        by_name = any(answer.name for answer in answers)
        losses = supervised_mask_losses(own, *weights, by_name)
        if against := against_rivals(own, [named for _, named in labelled]):
            losses = (losses + supervised_mask_losses(against, *weights, by_name)) / 2
        total, metrics["loss/mask"] = total + losses.sum() / counts.true_masks, losses.detach().mean()
    names = [answer.name for answer in answers]
    if config.contrast_weight and len(set(names)) > 1:
        contrasts = name_contrast_losses(torch.stack(list(embeddings)), names)
        metrics["loss/contrast"] = contrasts.detach().mean()
        total = total + config.contrast_weight * contrasts.sum() / counts.masks
    return total, metrics


def against_rivals(masks: MeanMasks, classes: Sequence[NamedClass | None]) -> list[tuple[PromptImage, Tensor]]:
    """The masks `contested` by their rivals in the image; [] where no class has one. All have a true mask.

    Rivals whose truths share more than half of the smaller one are none there, whatever their categories.
    """
    of_image: dict[str, list[int]] = {}
    for row, (image, _) in enumerate(masks):
        of_image.setdefault(image.image_id, []).append(row)
    found: dict[int, Tensor] = {}
    for rows in of_image.values():
        if not (rival := rivals([classes[row] for row in rows])).any():
            continue
        truths = np.array([np.ravel(masks[row][0].truth) for row in rows], dtype=np.float32)  # type: ignore[arg-type]
        areas = truths.sum(axis=1)
        rival &= truths @ truths.T <= np.minimum(areas[:, None], areas) * SHARED
        if rival.any():
            found |= zip(rows, contested(torch.stack([masks[row][1] for row in rows]), rival), strict=True)
    return [(image, found.get(row, logits)) for row, (image, logits) in enumerate(masks)] if found else []


def choice_losses(images: Sequence[PromptImage], decoded: Sequence[DecodedMasks]) -> list[Tensor]:
    """`candidate_loss` of each image with a true mask: SAM 2 selects among candidates that move in training.

    Not beside a side network, which refines the selected one: there it was no gain (docs/log.md).
    """
    return [
        candidate_loss(masks, torch.from_numpy(image.truth)[None])
        for image, masks in zip(images, decoded, strict=True)
        if image.truth is not None and image.features.sam.side_pixels is None
    ]


def object_losses(images: Sequence[PromptImage], scores: Sequence[Tensor]) -> list[Tensor]:
    """Cross-entropy of SAM 3's score (1,) that there is an object, of each true mask; none where SAM 2 has no scores.

    The masks of SAM 3's answers are empty where it is negative.
    """
    pairs = [(image.truth, score) for image, score in zip(images, scores, strict=False) if image.truth is not None]
    return [
        F.binary_cross_entropy_with_logits(score, torch.full_like(score, float(truth.any()))) for truth, score in pairs
    ]


def name_contrast_losses(embeddings: Tensor, names: Sequence[str]) -> Tensor:
    """float32 (N,): the supervised contrastive loss of N `[SEG]` embeddings (N, C), equal names pulled together.

    Losses on masks alone teach a language model new names slowly: as long as the decoder makes the same mask of all of
    them, nothing tells them apart (docs/log.md). An answer whose name is alone has 0. Khosla et al., "Supervised
    Contrastive Learning" (arXiv 2004.11362), equation 2.
    """
    directions = F.normalize(embeddings.float(), dim=1)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    of_row = torch.tensor([numbers[name] for name in names], device=embeddings.device)
    itself = torch.eye(len(names), dtype=torch.bool, device=embeddings.device)
    similar = (directions @ directions.T / CONTRAST_TEMPERATURE).masked_fill(itself, -torch.inf)
    positive = (of_row[:, None] == of_row) & ~itself
    log_shares = similar.log_softmax(dim=1).masked_fill(~positive, 0)
    return -log_shares.sum(dim=1) / positive.sum(dim=1).clamp(min=1)


def count_step(micro_batches: Sequence[Rollouts]) -> StepCounts:
    """`StepCounts` of all micro-batches of this process together."""
    captions = [caption for rollouts in micro_batches for caption in rollouts.captions]
    images = [answer.image for rollouts in micro_batches for answer in rollouts.answers]
    kept = [zip(caption.completion_ids, caption.counted.tolist(), strict=True) for caption in captions]
    tokens = sum(len(ids) for of_caption in kept for ids, counted in of_caption if counted)
    kinds = (sum(getattr(image, kind) is not None for image in images) for kind in ("truth", "taught", "pair"))
    return StepCounts(*map(float, (tokens, len(images), *kinds)))


# ---- the mask of the mean action ------------------------------------------------------------------------------------


class PathwiseReward:
    """The score of a frozen reward network, differentiable in soft masks; `sam_image_size` is SAM 2's, in pixels."""

    def __init__(self, maps: ForegroundMaps, sam_image_size: int) -> None:
        self.maps, self.side = maps, sam_image_size

    def scores(self, masks: MeanMasks, cldice_weight: float = 0.0) -> Tensor:
        """float32 (N,): scores of N soft masks, in [0, 1] up to the ensemble's penalty for its spread.

        With `cldice_weight` that times the soft clDice with the network's map is added.
        """
        scores: list[Tensor] = []
        for image, logits in masks:
            mask = upsample_mask_logits(logits[None], image.image.shape[:2], self.side).sigmoid()[None]
            probs = self.maps.probs(image.image).to(mask.device)
            scores.append(self.maps.network.mask_quality(mask, probs).score.mean())
            if cldice_weight:
                scores[-1] = scores[-1] + cldice_weight * soft_cldice(mask, probs.mean(dim=0)).mean()
        return torch.stack(scores)


def supervised_mask_losses(
    masks: MeanMasks, bce_weight: float, dice_weight: float, cldice_weight: float = 0.0, by_name: bool = False
) -> Tensor:
    """float32 (N,): weighted sum of cross-entropy, Dice loss and soft clDice loss, for N prompts with a true mask.

    `by_name` an absent object has no Dice loss: it may empty small objects where they are (docs/log.md).
    """
    losses = []
    for image, logits in masks:  # images differ in size
        assert image.truth is not None
        finer = logits[None]
        if image.features.sam.side_pixels is None:
            finer = F.interpolate(finer[None], scale_factor=FINER, mode="bilinear")[0]
        true_mask = torch.from_numpy(image.truth)[None]
        own_dice = dice_weight if image.truth.any() or not by_name else 0.0
        loss: Any = sum(mask_losses(finer, true_mask, bce_weight, own_dice).values())
        if cldice_weight:
            target = soft_targets(true_mask, finer)[None]
            loss = loss + cldice_weight * (1 - soft_cldice(finer.sigmoid()[None], target)[0])
        losses.append(loss)
    return torch.stack(losses)


def consistency_loss(logits: Tensor, taught: Tensor, config: Sa2VAGRPOConfig) -> Tensor:
    """The loss of a mask (h, w) against the teacher's float32 (H, W) in [0, 1]: a scalar, see `consistency_losses`."""
    cross_entropy, dice_loss = consistency_losses(logits[None], soft_targets(taught[None], logits[None]))
    return config.bce_weight * cross_entropy + config.dice_weight * dice_loss


# ---- weights of the loops -------------------------------------------------------------------------------------------

EVERY = 10  # optimisation steps between two measurements: each takes a backward pass for each loop
MEMORY = 0.5  # weight of the earlier norms in the running mean
BOUNDS = (0.25, 4.0)  # of the ratio of a weight to the configured one


class LoopWeights:
    """Weights of the two loops, balanced by the norms of their gradients once these were measured.

    Each loop's configured weight is divided by the norm of its gradient in the LoRA layers, which both loops share, and
    both are scaled so that their sum stays as configured. No weight leaves `BOUNDS`, even if the sum then differs: a
    gradient may be noise alone, however small or large. As GradNorm (arXiv 1711.02257), without its training rates.
    """

    def __init__(self, configured: Mapping[str, float]) -> None:
        self.configured, self.norms = dict(configured), dict[str, float]()

    def __getitem__(self, loop: str) -> float:
        """The weight of a loop in this step."""
        if not self.norms:
            return self.configured[loop]
        balanced = sum(weight / self.norms[name] for name, weight in self.configured.items())
        scale = sum(self.configured.values()) / balanced
        return self.configured[loop] * min(max(scale / self.norms[loop], BOUNDS[0]), BOUNDS[1])

    def update(self, norms: Mapping[str, float]) -> None:
        """Update with the norms of this step, equal on every process; ignored if a loop had no gradient."""
        if set(norms) == set(self.configured) and all(norms.values()):
            earlier = self.norms or norms
            self.norms = {name: MEMORY * earlier[name] + (1 - MEMORY) * norm for name, norm in norms.items()}


def gradient_norm(loss: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
    """Norm of the gradient of the scalar `loss`; its graph is kept, and no `grad` is changed."""
    gradients = torch.autograd.grad(loss, list(parameters), retain_graph=True, allow_unused=True)
    norms = [gradient.norm() for gradient in gradients if gradient is not None]
    return torch.stack(norms).norm() if norms else torch.zeros((), device=loss.device)
