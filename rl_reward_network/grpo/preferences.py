"""Dense DPO: the model learns which of two masks of an image is preferred, pixel by pixel.

The masks of an image are candidates of the model itself: samples of the mask policy, thresholds of its soft mask, masks
mixed cell by cell from a strict and a lenient threshold, answers to other wordings, and the moving average's mask. A
judge prefers some of them; pairs whose difference is within the judge's noise are left out.

The log-probability of a mask is its negative cross-entropy under the model's logits z, a mean over pixels. Then

    log p(chosen) - log p(rejected) = mean over pixels of (chosen - rejected) * z

so that pixels on which both masks agree have no part in it, and the loss is -log sigmoid(beta * margin), margin being
this difference less the reference's.

Source: DPO (arXiv 2305.18290); RN-DPO (arXiv 2601.23222) for the division by the area of disagreement in place of that
of the image, without which a vessel's pixels weigh next to nothing; TopoDPO's dense form, whose non-linearity acts on
each pixel, where ours acts on their mean.
Axes: K candidates, H W image, h w logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.grpo.grpo_config import Sa2VAGRPOConfig
from rl_reward_network.grpo.image_context import Mask, PromptBatch, open_batch, seeded_generator
from rl_reward_network.grpo.logs import Metrics
from rl_reward_network.grpo.prompts import TrainingItem
from rl_reward_network.grpo.rollouts import (
    CELLS,
    MicroBatch,
    Pair,
    PromptImage,
    RolloutGenerator,
    Rollouts,
    prompt_images,
)
from rl_reward_network.models.sa2va.grounding_sa2va import mask_losses, soft_targets
from rl_reward_network.rewards.learned import ForegroundMaps
from rl_reward_network.rewards.metrics import dice

THRESHOLDS = (0.2, 0.35, 0.5, 0.65, 0.8)
MIXES = 4  # masks of cells from the lowest and the highest threshold
WORDINGS = 2  # other questions per image


@dataclass(frozen=True)
class PairMaker:
    """Makes a pair of masks for each prompt."""

    judge: str  # "truth", Dice with the true mask, or "learned", the reward network's score
    gap: float  # least difference in Dice, or in score, of a pair
    maps: ForegroundMaps | None = None  # of the reward network

    def pair(self, image: PromptImage, masks: np.ndarray, rng: np.random.Generator) -> Pair | None:
        """The best of the masks bool (K, H, W), and one that is worse, drawn at random; None where none is."""
        values, better = self.judged(image, masks)
        better = better & (values[:, None] > values)  # with a gap of 0, too
        order = np.argsort(-values, kind="stable")
        chosen = next((index for index in order if better[index].any()), None)
        if chosen is None:
            return None
        return Pair(masks[chosen], masks[rng.choice(np.flatnonzero(better[chosen]))])

    def judged(self, image: PromptImage, masks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Values float64 (K,), and bool (K, K): the row's mask is better than the column's beyond the judge's noise."""
        if self.judge == "truth":
            assert image.truth is not None
            values = dice(masks, np.broadcast_to(image.truth, masks.shape))
            return values, values[:, None] - values >= self.gap
        assert self.maps is not None
        quality = self.maps.scorer(image.image).quality(masks.astype(np.float32))
        values, members = quality["score"].astype(float), quality["member_scores"].astype(float)
        differences = members[:, None] - members
        certain = differences.mean(axis=2) > differences.std(axis=2)  # the noise of a difference, over the members
        return values, (values[:, None] - values >= self.gap) & certain


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
    answers = worded_masks(generator, batch, rng)
    teachers = [None] * len(answers) if generator.ema is None else generator.teacher_masks(batch)
    found: list[Mask] = []
    for row, (answer, taught) in enumerate(zip(answers, teachers, strict=True)):
        if answer is None:
            found.append(None)
            continue
        embedding, (soft, *reworded) = answer
        by_threshold = [soft > threshold for threshold in THRESHOLDS]
        features, seed = batch.features[batch.image_indices[row]], seeded_generator([int(rng.integers(2**31))])
        sampled = batch.mask_probabilities(row, generator.sample_actions(features, embedding, seed)[2])
        masks = by_threshold + [other > 0.5 for other in (*sampled, *reworded)]
        masks += [mixed_mask(by_threshold[0], by_threshold[-1], rng) for _ in range(MIXES)]
        masks += [] if taught is None else [taught > 0.5]
        found.append(np.stack(list({mask.tobytes(): mask for mask in masks}.values())))
    return found


def worded_masks(
    generator: RolloutGenerator, batch: PromptBatch, rng: np.random.Generator
) -> list[tuple[Tensor, np.ndarray] | None]:
    """For each prompt the `[SEG]` embedding (C,) of its answer, and soft masks float32 (1 + W, H, W) of answers.

    The first is of the prompt's question, the others of other wordings, less those answered without `[SEG]`; None where
    the first has none.
    """
    asked = []
    for row, prompt in enumerate(batch.prompts):
        others = [wording for wording in PROMPTS if wording != prompt.question]
        texts = [prompt.question, *(others[n] for n in rng.choice(len(others), WORDINGS, replace=False))]
        asked += [batch.question(row, text) for text in texts]
    answers = batch.context(generator.model, generator.config.rows_at_once).segment(asked)
    found: list[tuple[Tensor, np.ndarray] | None] = []
    for row in range(len(batch.prompts)):
        embeddings = [embedding for _, embedding in answers[row * (1 + WORDINGS) : (row + 1) * (1 + WORDINGS)]]
        if embeddings[0] is None:
            found.append(None)
            continue
        stacked = torch.stack([embedding for embedding in embeddings if embedding is not None])
        sam = batch.features[batch.image_indices[row]].sam
        logits = generator.model.decode_masks(sam, stacked).mask_logits
        found.append((embeddings[0], batch.mask_probabilities(row, logits)))
    return found


def mixed_mask(lenient: np.ndarray, strict: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Bool (H, W): each cell of a grid from one of two masks, with equal probability."""
    cells = (rng.random((CELLS, CELLS)) < 0.5).astype(np.uint8)
    of_pixels = cv2.resize(cells, lenient.shape[::-1], interpolation=cv2.INTER_NEAREST) > 0
    mixed: np.ndarray = np.where(of_pixels, lenient, strict)
    return mixed


# ---- loss -----------------------------------------------------------------------------------------------------------


def dpo_margin(logits: Tensor, ref_logits: Tensor, chosen: Tensor, rejected: Tensor) -> Tensor:
    """How much more the model prefers the chosen mask than the reference does: a scalar, differentiable in `logits`.

    From float (h, w) of model and reference, and masks bool (H, W), or float in [0, 1].
    """
    both = soft_targets(torch.stack([chosen, rejected]).float(), torch.stack([logits, logits]))
    difference = both[0] - both[1]
    moved = (difference * (logits.float() - ref_logits.float())).sum()
    return moved / difference.abs().sum().clamp(min=torch.finfo(moved.dtype).tiny)


def preference_loss(
    masks: Sequence[tuple[PromptImage, Tensor]], reference: Sequence[Tensor], config: Sa2VAGRPOConfig, pairs: Any
) -> tuple[Tensor, Metrics]:
    """DPO and the loss of supervision on the chosen masks, a sum over the prompts with a pair divided by `pairs`.

    From images with logits (h, w) of the model, and those of the reference for each of them.
    """
    margins, tuned = [], []
    for (image, logits), ref_logits in zip(masks, reference, strict=True):
        if image.pair is not None:
            chosen, rejected = (torch.from_numpy(mask).to(logits.device) for mask in image.pair)
            margins.append(dpo_margin(logits, ref_logits, chosen, rejected))
            of_chosen = mask_losses(logits[None], chosen[None], config.bce_weight, config.dice_weight)
            tuned.append(of_chosen["mask"] + of_chosen["dice"])
    metrics: Metrics = {"dpo/pair_share": len(margins) / max(1, len(masks))}
    if not margins:
        return torch.zeros((), device=config.device), metrics
    margin = torch.stack(margins)
    losses = -F.logsigmoid(config.dpo_beta * margin)
    metrics |= {"dpo/loss": losses.detach().mean(), "dpo/margin": margin.detach().mean()}
    metrics["dpo/accuracy"] = (margin.detach() > 0).float().mean()
    return (losses.sum() + config.sft_weight * torch.stack(tuned).sum()) / pairs, metrics
