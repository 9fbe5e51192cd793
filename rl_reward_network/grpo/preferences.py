"""Dense DPO: the model learns which of two masks of an image is preferred, pixel by pixel.

The masks of an image are candidates of the model itself: samples of the mask policy, thresholds of its soft mask, masks
mixed cell by cell from a strict and a lenient threshold, answers to other wordings, and the moving average's mask. One
of the judges of `JUDGES` prefers some of them; pairs whose difference is within the judge's noise are left out.

The log-probability of a mask is its negative cross-entropy under the model's logits z, a mean over pixels. Then

    log p(chosen) - log p(rejected) = mean over pixels of (chosen - rejected) * z

so that pixels on which both masks agree have no part in it, and the loss is -log sigmoid(beta * margin), margin being
this difference less the reference's.

Source: DPO (arXiv 2305.18290); RN-DPO (arXiv 2601.23222) for the division by the area of disagreement in place of that
of the image, without which a vessel's pixels weigh next to nothing; TopoDPO's dense form, whose non-linearity acts on
each pixel, where ours acts on their mean.
Axes: K candidates, H W image, h w logits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.grpo.grpo_config import Sa2VAGRPOConfig
from rl_reward_network.grpo.image_context import Mask, PromptBatch, open_batch, seeded_generator
from rl_reward_network.grpo.logs import Metrics
from rl_reward_network.grpo.mask_policies import CELLS
from rl_reward_network.grpo.prompts import TrainingItem
from rl_reward_network.grpo.rollouts import MicroBatch, Pair, PromptImage, RolloutGenerator, Rollouts, prompt_images
from rl_reward_network.models.ema import swapped
from rl_reward_network.models.sa2va.grounding_sa2va import mask_losses, soft_targets
from rl_reward_network.rewards.learned import ForegroundMaps
from rl_reward_network.rewards.metrics import dice

THRESHOLDS = (0.2, 0.35, 0.5, 0.65, 0.8)
MIXES = 4  # masks of cells from the lowest and the highest threshold
WORDINGS = 2  # other questions per image


class Judged(NamedTuple):
    """What a judge says of K masks.

    Args:
        values: float64 (K,), by which the chosen mask is the best.
        better: bool (K, K), whether the row's mask is preferred to the column's beyond the judge's noise.
    """

    values: np.ndarray
    better: np.ndarray


Judge = Callable[[PromptImage, np.ndarray, ForegroundMaps | None, float], Judged]
"""Judges masks bool (K, H, W) of an image, with a reward network or without, and the least difference that counts."""


def by_truth(image: PromptImage, masks: np.ndarray, maps: ForegroundMaps | None, gap: float) -> Judged:
    """Dice with the true mask."""
    assert image.truth is not None
    values = dice(masks, np.broadcast_to(image.truth, masks.shape))
    return Judged(values, values[:, None] - values >= gap)


def by_reward(image: PromptImage, masks: np.ndarray, maps: ForegroundMaps | None, gap: float) -> Judged:
    """The reward network's score; the noise of a difference is its standard deviation over the members."""
    assert maps is not None
    quality = maps.scorer(image.image).quality(masks.astype(np.float32))
    values, members = quality["score"].astype(float), quality["member_scores"].astype(float)
    differences = members[:, None] - members
    return Judged(values, (values[:, None] - values >= gap) & (differences.mean(axis=2) > differences.std(axis=2)))


JUDGES: dict[str, Judge] = {"truth": by_truth, "learned": by_reward}


@dataclass(frozen=True)
class PairMaker:
    """Makes a pair of masks for each prompt.

    Args:
        judge: a name of `JUDGES`.
        gap: least difference in Dice, or in score, of a pair.
        maps: of the reward network; None without one.
    """

    judge: str
    gap: float
    maps: ForegroundMaps | None = None

    def pair(self, image: PromptImage, masks: np.ndarray, rng: np.random.Generator) -> Pair | None:
        """The best of the masks bool (K, H, W), and one that is worse, drawn at random; None where none is."""
        judged = JUDGES[self.judge](image, masks, self.maps, self.gap)
        better = judged.better & (judged.values[:, None] > judged.values)  # with a gap of 0, too
        order = np.argsort(-judged.values, kind="stable")
        chosen = next((index for index in order if better[index].any()), None)
        if chosen is None:
            return None
        rejected = rng.choice(np.flatnonzero(better[chosen]))
        return Pair(masks[chosen], masks[rejected])


def compared_batch(
    generator: RolloutGenerator, prompts: Sequence[TrainingItem], seed: Sequence[int], maker: PairMaker
) -> MicroBatch:
    """The prompts with their pairs of masks, without the reference's logits; all randomness comes from `seed`."""
    batch, rng = open_batch(prompts, generator.cache), np.random.default_rng(list(seed))
    candidates = candidate_masks(generator, batch, rng)
    images = [
        image if masks is None else replace(image, pair=maker.pair(image, masks, rng))
        for image, masks in zip(prompt_images(batch), candidates, strict=True)
    ]
    return MicroBatch(Rollouts(len(prompts), [], generator.reference_answers(batch, images)), [], [])


@torch.no_grad()
def candidate_masks(generator: RolloutGenerator, batch: PromptBatch, rng: np.random.Generator) -> list[Mask]:
    """Different candidates bool (K, H, W) of each prompt; None where the model's answer has no `[SEG]`."""
    model, config, rows = generator.model, generator.config, range(len(batch.prompts))
    texts = [[prompt.question, *_other_wordings(prompt.question, rng)] for prompt in batch.prompts]
    context = batch.context(model, config.rows_at_once)
    questions = [batch.question(row, text) for row, of_row in zip(rows, texts, strict=True) for text in of_row]
    embeddings = iter([embedding for _, embedding in context.segment(questions)])
    of_rows = [[next(embeddings) for _ in of_row] for of_row in texts]
    teachers: list[Mask] = [None] * len(rows)
    if generator.ema is not None:
        with swapped(model, generator.ema.weights):
            own = batch.context(model, config.rows_at_once)
            teachers = batch.masks(own, rows, [prompt.question for prompt in batch.prompts])
    found: list[Mask] = []
    for row, (first, *others), teacher in zip(rows, of_rows, teachers, strict=True):
        if first is None:
            found.append(None)
            continue
        logits = _logits(generator, batch, row, first, [other for other in others if other is not None], rng)
        soft = batch.mask_probabilities(row, logits)
        masks = [soft[0] > threshold for threshold in THRESHOLDS] + [one > 0.5 for one in soft[1:]]
        masks += [_mixed(masks[0], masks[len(THRESHOLDS) - 1], rng) for _ in range(MIXES)]
        masks += [] if teacher is None else [teacher > 0.5]
        found.append(np.stack(list({mask.tobytes(): mask for mask in masks}.values())))
    return found


def _logits(
    generator: RolloutGenerator,
    batch: PromptBatch,
    row: int,
    embedding: Tensor,
    others: Sequence[Tensor],
    rng: np.random.Generator,
) -> Tensor:
    """Logits (1 + G + W, h, w) of the mean action, of samples of the mask policy, and of other wordings."""
    model, policy, count = generator.model, generator.mask_policy, generator.config.num_mask_generations
    sam = batch.features[batch.image_indices[row]].sam
    parameters = policy.parameters(model, sam, embedding)
    width = policy.width(parameters, generator.sigma_controller.sigma)
    actions = policy.sample(parameters, width, count, seeded_generator([int(rng.integers(2**31))]))
    plain: Tensor = model.decode_masks(sam, torch.stack([embedding, *others])).mask_logits
    return torch.cat([plain[:1], policy.mask_logits(model, sam, embedding, actions), plain[1:]])


def _other_wordings(question: str, rng: np.random.Generator) -> list[str]:
    """Some of the built-in prompts, without the question itself."""
    others = [prompt for prompt in PROMPTS if prompt != question]
    return [others[number] for number in rng.choice(len(others), WORDINGS, replace=False)]


def _mixed(lenient: np.ndarray, strict: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Bool (H, W): each cell of a grid from one of two masks, with equal probability."""
    cells = (rng.random((CELLS, CELLS)) < 0.5).astype(np.uint8)
    height, width = lenient.shape
    of_pixels = cv2.resize(cells, (width, height), interpolation=cv2.INTER_NEAREST) > 0
    mixed: np.ndarray = np.where(of_pixels, lenient, strict)
    return mixed


# ---- loss -----------------------------------------------------------------------------------------------------------


def dpo_margin(logits: Tensor, ref_logits: Tensor, chosen: Tensor, rejected: Tensor) -> Tensor:
    """How much more the model prefers the chosen mask than the reference does: a scalar, differentiable in `logits`.

    Args:
        logits, ref_logits: float (h, w), of model and reference.
        chosen, rejected: bool (H, W), or float in [0, 1].
    """
    both = soft_targets(torch.stack([chosen, rejected]).float(), torch.stack([logits, logits]))
    difference = both[0] - both[1]
    moved = (difference * (logits.float() - ref_logits.float())).sum()
    return moved / difference.abs().sum().clamp(min=torch.finfo(moved.dtype).tiny)


def preference_loss(
    masks: Sequence[tuple[PromptImage, Tensor]], reference: Sequence[Tensor], config: Sa2VAGRPOConfig, pairs: Any
) -> tuple[Tensor, Metrics]:
    """DPO and the loss of supervision on the chosen masks, a sum over the prompts with a pair divided by `pairs`.

    Args:
        masks: images with logits (h, w) of the model.
        reference: logits (h, w) of the reference for each of them.
        config: settings.
        pairs: divisor, the pairs of the step per micro-batch.

    Returns:
        The loss, and what to log of it.
    """
    losses, margins, tuned = [], [], []
    for (image, logits), ref_logits in zip(masks, reference, strict=True):
        if image.pair is not None:
            chosen, rejected = (torch.from_numpy(mask).to(logits.device) for mask in image.pair)
            margin = dpo_margin(logits, ref_logits, chosen, rejected)
            margins.append(margin.detach())
            losses.append(-F.logsigmoid(config.dpo_beta * margin))
            of_chosen = mask_losses(logits[None], chosen[None], config.bce_weight, config.dice_weight)
            tuned.append(of_chosen["mask"] + of_chosen["dice"])
    metrics: Metrics = {"dpo/pair_share": len(losses) / max(1, len(masks))}
    total = torch.zeros((), device=config.device)
    if losses:
        metrics["dpo/loss"] = torch.stack(losses).detach().mean()
        metrics["dpo/margin"] = torch.stack(margins).mean()
        metrics["dpo/accuracy"] = (torch.stack(margins) > 0).float().mean()
        total = (torch.stack(losses).sum() + config.sft_weight * torch.stack(tuned).sum()) / pairs
    return total, metrics
