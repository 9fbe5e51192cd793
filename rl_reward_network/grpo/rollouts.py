"""Rollouts of both loops: what the policy samples, the policies over masks, and the EMA teacher's answers to it.

Loop 1: mask -> caption (sampled) -> mask' (teacher, greedy). Loop 2: caption -> mask (sampled) -> caption' (teacher,
greedy). The teacher is a moving average of the policy, so that a reward does not measure the policy's agreement with
itself. With the objective mean_teacher it gives images without masks a mask to learn.

Each stage hands a frozen dataclass on: `Rollouts` (sampled) -> `rewards.Terms` (scored) -> `combine.Advantages`
-> `MicroBatch`, which is all that the loss reads.
Axes: P prompts, G generations of each, T tokens, A numbers of a mask action, D parameters of a mask policy, C SAM 2
width, h w the decoder's grid.

Source: Gaussian on a continuous prompt with a mean-reduced log-probability as in Flow-GRPO (arXiv 2505.05470).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_reward_network.data.names import NamedClass
from rl_reward_network.data.windows import augmented, strongly_augmented
from rl_reward_network.grpo.grpo_config import Sa2VAGRPOConfig
from rl_reward_network.grpo.image_context import (
    FeatureCache,
    ImageContext,
    ImageFeatures,
    Mask,
    PromptBatch,
    Question,
    make_batch,
    mirrored,
    open_batch,
    seeded_generator,
)
from rl_reward_network.grpo.prompts import TrainingItem
from rl_reward_network.models.ema import EMA, swapped
from rl_reward_network.models.sa2va.generation_sa2va import Answer, Decoding
from rl_reward_network.models.sa2va.grounding_sa2va import Sam2Features
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.models.sa2va.templates import SEG_ANSWERS

CELLS = 16  # side of the grid on which Sa2VA reads a region: finer Bernoulli noise would be lost
CERTAIN_LOGIT = 10.0  # magnitude of the logit of a sampled cell
Columns = dict[str, list[Any]]  # name -> P * G entries, the arguments of a reward function; see `rewards.table`


class Pair(NamedTuple):
    """Two masks of an image, bool (H, W), one of which is preferred."""

    chosen: np.ndarray
    rejected: np.ndarray


@dataclass(frozen=True, eq=False)
class PromptImage:
    """The image of a prompt, as both loops use it."""

    row: int  # number of the prompt in its micro-batch
    image_id: str  # digest of the image's pixels; texts about one image share its prefix
    features: ImageFeatures
    prefix_ids: list[int]  # token ids up to and including the end of the image
    image: np.ndarray  # uint8 (H, W, 3)
    truth: Mask  # bool (H, W), None for an unlabelled image
    taught: Mask = None  # of mean_teacher: the teacher's float32 (H, W) in [0, 1] for an unlabelled image
    pair: Pair | None = None  # of dpo; None where no mask is preferred


@dataclass(frozen=True, eq=False)
class CaptionRollout:
    """Loop 1: captions of the region of one prompt."""

    image: PromptImage
    question: Question  # where the region is drawn into the image, with features and prefix of that image
    completion_ids: list[list[int]]  # G lists, the stop token included
    counted: Tensor  # bool (G,), completions that enter the loss (not truncated)


@dataclass(frozen=True, eq=False)
class AnswerRollout:
    """Loop 2: the answer to the question of one prompt up to and including `[SEG]`.

    It is the model's, or without `[SEG]` in that the reference answer, so that the loss of answers brings `[SEG]` back.
    """

    image: PromptImage
    question_ids: list[int]  # behind the image
    answer_ids: list[int]
    name: str = ""  # of the class that is asked for, whatever the wording; "" for a described region
    named: NamedClass | None = None  # that class, of a file

    @property
    def token_ids(self) -> list[int]:
        """Question and answer."""
        return self.question_ids + self.answer_ids


@dataclass(frozen=True, eq=False)
class MaskRollout:
    """Loop 2: masks of one prompt whose answer has a `[SEG]`."""

    row: int  # number of the prompt, and of its answer
    actions: Tensor  # (G, A) of the mask policy
    width: Tensor  # scalar, of the mask policy when the actions were sampled


@dataclass(frozen=True, eq=False)
class Rollouts:
    """What was sampled for the P prompts of a micro-batch."""

    prompts: int  # P
    captions: list[CaptionRollout]  # of each prompt in loop 1; empty without that loop
    answers: list[AnswerRollout]  # of each prompt in loop 2; empty if neither masks nor answers are trained
    masks: list[MaskRollout] = field(default_factory=list)  # of the prompts whose answer has a `[SEG]`, if sampled
    columns: dict[str, Columns] = field(default_factory=dict)  # by loop ("loop1", "loop2"); none in supervised training


@dataclass(frozen=True)
class Stored:
    """Outputs of an earlier policy for the rollouts of a micro-batch, without gradient."""

    log_probs: list[Tensor]  # (G, T) of each caption rollout
    parameters: list[Tensor]  # (D,) of the mask policy for each answer
    mask_logits: list[Tensor] = field(default_factory=list)  # (h, w) of the mean action, where a loss reads them


NOTHING_STORED = Stored([], [])


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """All that the loss of one micro-batch reads, besides the policy's outputs."""

    rollouts: Rollouts  # without columns
    caption_advantages: list[Tensor]  # float32 (G,) of each caption rollout
    mask_advantages: list[Tensor]  # float32 (G,) of each mask rollout
    reference: Stored = NOTHING_STORED  # of the reference model, where a KL has a weight
    old: Stored = NOTHING_STORED  # of the policy that sampled; not on fresh rollouts, whose ratio is exactly 1
    consistency_weight: float = 0.0  # of the loss on the teacher's masks, which fades in


# ---- policies over masks --------------------------------------------------------------------------------------------


class GaussianMaskPolicy:
    """Normal noise on the `[SEG]` embedding: masks stay on SAM 2's manifold and change as a whole.

    A policy over masks is the action of loop 2, whose text ("Sure, [SEG].") is certain and has no gradient (see
    docs/explanation/mask-policies.md). Each has these six functions; a `sigma` (one number, adapted to the similarity
    of a group's masks) widens it. Here the width is relative to the embedding's root mean square; log-probability and
    KL are means over the C numbers. The gradient ends at the embedding, i.e. at `text_hidden_fcs`: the mask decoder
    gets none.
    """

    first_sigma = 0.3

    def parameters(self, model: Any, features: Sam2Features, embedding: Tensor) -> Tensor:
        """The distribution's parameters (D,) of one `[SEG]` embedding (C,), with gradient: the embedding itself."""
        return embedding.float()

    def width(self, parameters: Tensor, sigma: float) -> Tensor:
        """The standard deviation in the embedding's unit, a scalar without gradient; stored with the actions."""
        return sigma * parameters.detach().pow(2).mean().sqrt()

    def sample(self, parameters: Tensor, width: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Actions (count, A); here A = C."""
        noise = torch.randn(count, len(parameters), generator=generator, device=generator.device)
        return parameters + width * noise.to(parameters)

    def mask_logits(self, model: Any, features: Sam2Features, embedding: Tensor, actions: Tensor) -> Tensor:
        """float32 (G, h, w) of each action: masks of the noisy embeddings."""
        logits: Tensor = model.decode_masks(features, actions).mask_logits
        return logits

    def log_prob(self, parameters: Tensor, width: Tensor, actions: Tensor) -> Tensor:
        """float32 (G,), with gradient in the parameters, up to a constant: -(a - e)^2 / (2 width^2), mean over C."""
        return -(actions - parameters).pow(2).mean(dim=1) / (2 * width**2)

    def kl(self, parameters: Tensor, ref_parameters: Tensor, width: Tensor) -> Tensor:
        """KL(policy || reference) >= 0, a scalar reduced as `log_prob` is: (e - e_ref)^2 / (2 width^2), mean over C."""
        return (parameters - ref_parameters).pow(2).mean() / (2 * width**2)


class BernoulliMaskPolicy:
    """One Bernoulli variable per cell of a 16 x 16 grid: the mask's mean logit there; the width is a temperature."""

    first_sigma = 1.0

    def parameters(self, model: Any, features: Sam2Features, embedding: Tensor) -> Tensor:
        """Mean logit of each cell (256,); the gradient also reaches the mask decoder."""
        logits = model.decode_masks(features, embedding[None]).mask_logits
        return F.adaptive_avg_pool2d(logits[None], CELLS).flatten()

    def width(self, parameters: Tensor, sigma: float) -> Tensor:
        """The temperature."""
        return parameters.new_tensor(sigma)

    def sample(self, parameters: Tensor, width: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """0 or 1 (count, 256)."""
        probs = (parameters / width).sigmoid().to(generator.device).expand(count, -1)
        return torch.bernoulli(probs, generator=generator).to(parameters)

    def mask_logits(self, model: Any, features: Sam2Features, embedding: Tensor, actions: Tensor) -> Tensor:
        """The sampled cells, as blocks."""
        cells = (actions * 2 - 1).reshape(-1, 1, CELLS, CELLS) * CERTAIN_LOGIT
        return F.interpolate(cells, size=features.decoder_grid, mode="nearest")[:, 0].float()

    def log_prob(self, parameters: Tensor, width: Tensor, actions: Tensor) -> Tensor:
        """Mean over cells of log p(cell)."""
        logits = (parameters / width).expand_as(actions)
        return -F.binary_cross_entropy_with_logits(logits, actions, reduction="none").mean(dim=1)

    def kl(self, parameters: Tensor, ref_parameters: Tensor, width: Tensor) -> Tensor:
        """Mean over cells of p log(p / q) + (1 - p) log((1 - p) / (1 - q))."""
        logits, ref_logits = parameters / width, ref_parameters / width
        p = logits.sigmoid()
        on, off = F.logsigmoid(logits) - F.logsigmoid(ref_logits), F.logsigmoid(-logits) - F.logsigmoid(-ref_logits)
        return (p * on + (1 - p) * off).mean()


MaskPolicy = GaussianMaskPolicy | BernoulliMaskPolicy
MASK_POLICIES: dict[str, MaskPolicy] = {"gaussian": GaussianMaskPolicy(), "bernoulli": BernoulliMaskPolicy()}


class SigmaController:
    """Adapt `sigma`, from which a mask policy makes its width, to the similarity of the masks of a group."""

    TARGET, SLACK = 0.85, 0.05  # median IoU of masks of one group; no change within this distance on both sides
    MAX_EQUAL_GROUPS = 0.2  # share of groups with equal rewards above which the sigma grows
    STEP = 1.05  # factor of one correction
    LIMITS = (0.02, 5.0)

    def __init__(self, sigma: float) -> None:
        self.sigma = sigma

    def update(self, median_iou: float, share_equal: float) -> None:
        """Widen if masks are too similar or rewards are equal, narrow if masks have too little in common."""
        if median_iou < self.TARGET - self.SLACK:
            self.sigma /= self.STEP
        elif median_iou > self.TARGET + self.SLACK or share_equal > self.MAX_EQUAL_GROUPS:
            self.sigma *= self.STEP
        self.sigma = min(max(self.sigma, self.LIMITS[0]), self.LIMITS[1])


# ---- what is sampled ------------------------------------------------------------------------------------------------


class RolloutGenerator:
    """Sample rollouts from a model with its current weights."""

    ema: EMA | None = None  # the teacher's weights; None: the model itself is the teacher

    def __init__(self, model: Any, processor: Sa2VAProcessor, config: Sa2VAGRPOConfig) -> None:
        self.model, self.processor, self.config = model, processor, config
        self.cache = FeatureCache(model, processor, config.feature_cache_gib)
        self.mask_policy = MASK_POLICIES[config.mask_policy]
        self.sigma_controller = SigmaController(self.mask_policy.first_sigma)
        self.has_masks = bool(config.caption_to_mask_weight or config.pathwise_weight)

    def generate(self, prompts: Sequence[TrainingItem], seed: Sequence[int]) -> Rollouts:
        """The rollouts of P prompts; all randomness comes from `seed`."""
        batch, rng = open_batch(prompts, self.cache), seeded_generator(seed)
        images, policy = prompt_images(batch), batch.context(self.model, self.config.rows_at_once)
        captions, sampled, masks = list[list[Answer]](), list[CaptionRollout](), list[Mask]()
        columns: dict[str, Columns] = {}
        if self.config.mask_to_caption_weight:
            captions, sampled = self.sample_captions(batch, policy, images, rng)
        rollouts = Rollouts(len(prompts), sampled, self.reference_answers(batch, images))
        if self.has_masks:
            masks, rollouts = self.sample_masks(batch, policy, rollouts, rng)
        with self.teacher_weights():
            teacher = policy if self.ema is None else batch.context(self.model, self.config.rows_at_once)
            if captions:
                columns["loop1"] = self.masks_of_captions(batch, teacher, captions)
            if masks:
                columns["loop2"] = self.captions_of_masks(batch, teacher, masks)
        return replace(rollouts, columns=columns)

    def teacher_weights(self) -> AbstractContextManager[None]:
        """The model with the teacher's weights inside the block."""
        return nullcontext() if self.ema is None else swapped(self.model, self.ema.weights)

    def references(self, prompts: Sequence[TrainingItem], views: np.random.Generator | None = None) -> MicroBatch:
        """For supervised training: the reference caption as one completion of advantage 1, the reference answer.

        With `views`, on random views of the images.
        """
        batch = open_batch(prompts, self.cache, views)
        images, captions = prompt_images(batch), []
        for image, prompt in zip(images, prompts, strict=True):
            if self.config.mask_to_caption_weight and prompt.caption and image.truth is not None:
                question = batch.caption_question(image.row, image.truth)
                ids = [self.processor.answer_ids(prompt.caption)]
                captions.append(CaptionRollout(image, question, ids, torch.ones(1, dtype=torch.bool)))
        rollouts = Rollouts(len(prompts), captions, self.reference_answers(batch, images))
        return MicroBatch(rollouts, [torch.ones(1) for _ in captions], [])

    def taught(self, prompts: Sequence[TrainingItem], views: np.random.Generator, weight: float) -> MicroBatch:
        """For mean_teacher: random views, strong ones of images without masks, which the teacher segments as they are.

        `weight` is that of the loss on the teacher's masks; all randomness comes from `views`.
        """
        loaded = [prompt.load() for prompt in prompts]
        plain = [prompt for prompt, (_, truth) in zip(prompts, loaded, strict=True) if truth is None]
        found = iter(self.teacher_masks(open_batch(plain, self.cache)) if plain else ())
        images, truths, taught = [], list[Mask](), list[Mask]()
        for prompt, (image, truth) in zip(prompts, loaded, strict=True):
            soft = next(found) if truth is None else None
            if truth is not None:
                image, (truth,) = augmented(image, truth[None], views, mirrored([prompt]))
            elif soft is not None:  # which turns with the view
                image, (soft,) = strongly_augmented(image, soft[None], views, mirrored([prompt]))
            images.append(image)
            truths.append(truth)
            taught.append(soft)
        batch = make_batch(prompts, images, truths, self.cache, repeated=False)
        shown = [replace(image, taught=mask) for image, mask in zip(prompt_images(batch), taught, strict=True)]
        rollouts = Rollouts(len(prompts), [], self.reference_answers(batch, shown))
        return MicroBatch(rollouts, [], [], consistency_weight=weight)

    @torch.no_grad()
    def teacher_masks(self, batch: PromptBatch) -> list[Mask]:
        """float32 (H, W) in [0, 1] of each prompt, by the teacher; None without `[SEG]`."""
        with self.teacher_weights():
            context = batch.context(self.model, self.config.rows_at_once)
            return batch.masks(context, range(len(batch.prompts)), [prompt.question for prompt in batch.prompts])

    def reference_answers(self, batch: PromptBatch, images: Sequence[PromptImage]) -> list[AnswerRollout]:
        """For each prompt its question of loop 2 with the reference answer; none if nothing trains them."""
        if not (self.has_masks or self.config.seg_text_weight):
            return []
        answer = self.processor.token_ids(SEG_ANSWERS[1])
        answer = answer[: answer.index(self.processor.seg_token_id) + 1]
        return [
            AnswerRollout(
                image, batch.question(image.row, prompt.question).suffix_ids, answer, prompt.name, prompt.named
            )
            for image, prompt in zip(images, batch.prompts, strict=True)
        ]

    def sample_captions(
        self, batch: PromptBatch, policy: ImageContext, images: Sequence[PromptImage], rng: torch.Generator
    ) -> tuple[list[list[Answer]], list[CaptionRollout]]:
        """G captions of each region; a ValueError if a prompt has none."""
        masks = [mask for mask in batch.truths if mask is not None]
        if len(masks) < len(images):
            raise ValueError("loop 1 describes regions, and a prompt has none; set mask_to_caption_weight to 0")
        questions = [batch.caption_question(row, mask) for row, mask in enumerate(masks)]
        decoding = Decoding(self.config.max_completion_length, self.config.temperature, generator=rng)
        answers = batch.answer_regions(policy, questions, decoding, self.config.num_generations)
        count_truncated = not self.config.mask_truncated_completions
        rollouts = []
        for image, question, completions in zip(images, questions, answers, strict=True):
            counted = torch.tensor([answer.stopped or count_truncated for answer in completions])
            rollouts.append(CaptionRollout(image, question, [answer.token_ids for answer in completions], counted))
        return answers, rollouts

    def masks_of_captions(self, batch: PromptBatch, teacher: ImageContext, captions: list[list[Answer]]) -> Columns:
        """Loop 1, second half: the teacher's mask of each caption."""
        rows = [row for row, of_prompt in enumerate(captions) for _ in of_prompt]
        flat = [caption for of_prompt in captions for caption in of_prompt]
        texts = [batch.text(caption) for caption in flat]
        by_caption = batch.masks_from_captions(teacher, rows, texts)
        masks = [by_caption.get(key) for key in zip(rows, texts, strict=True)]
        return make_columns(batch, rows, [batch.prompts[row].describe for row in rows], flat, masks)

    def sample_actions(
        self, features: ImageFeatures, embedding: Tensor, rng: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """G actions (G, A) of the mask policy at a `[SEG]` embedding (C,), its width, and logits (G, h, w)."""
        policy = self.mask_policy
        parameters = policy.parameters(self.model, features.sam, embedding)
        width = policy.width(parameters, self.sigma_controller.sigma)
        actions = policy.sample(parameters, width, self.config.num_mask_generations, rng)
        return actions, width, policy.mask_logits(self.model, features.sam, embedding, actions)

    @torch.no_grad()
    def sample_masks(
        self, batch: PromptBatch, context: ImageContext, rollouts: Rollouts, rng: torch.Generator
    ) -> tuple[list[Mask], Rollouts]:
        """G masks of each prompt, float32 (G, H, W) probabilities, None for an answer without `[SEG]`; the rollouts."""
        questions = [batch.question(row, prompt.question) for row, prompt in enumerate(batch.prompts)]
        probabilities: list[Mask] = [None] * len(questions)
        answers, masks = list(rollouts.answers), []
        for row, (ids, embedding) in enumerate(context.segment(questions)):
            if embedding is not None:
                actions, width, logits = self.sample_actions(answers[row].image.features, embedding, rng)
                probabilities[row] = batch.mask_probabilities(row, logits)
                answers[row] = replace(answers[row], answer_ids=ids)
                masks.append(MaskRollout(row, actions, width))
        return probabilities, replace(rollouts, answers=answers, masks=masks)

    def captions_of_masks(self, batch: PromptBatch, teacher: ImageContext, masks: Sequence[Mask]) -> Columns:
        """Loop 2, second half: the teacher's caption of each sampled mask; none of an empty one, with a reward of 0."""
        count = self.config.num_mask_generations
        rows = [row for row in range(len(batch.prompts)) for _ in range(count)]
        flat = [mask for of_prompt in masks for mask in (of_prompt if of_prompt is not None else [None] * count)]
        captions: list[Answer | None] = [None] * len(rows)
        if any(prompt.caption for prompt in batch.prompts):
            regions = {i: mask > 0.5 for i, mask in enumerate(flat) if mask is not None and (mask > 0.5).any()}
            region_rows, longest = [rows[i] for i in regions], self.config.max_completion_length
            answers = batch.caption_answers(teacher, region_rows, list(regions.values()), longest)
            for i, answer in zip(regions, answers, strict=True):
                captions[i] = answer
        return make_columns(batch, rows, [batch.prompts[row].question for row in rows], captions, flat)


def prompt_images(batch: PromptBatch) -> list[PromptImage]:
    """The image of each prompt."""
    rows = zip(batch.image_indices, batch.image_ids, batch.images, batch.truths, strict=True)
    return [
        PromptImage(row, image_id, batch.features[index], batch.prefix_ids(index), image, truth)
        for row, (index, image_id, image, truth) in enumerate(rows)
    ]


def make_columns(
    batch: PromptBatch,
    rows: Sequence[int],
    prompts: Sequence[str],
    answers: Sequence[Answer | None],
    probabilities: Sequence[Mask],
) -> Columns:
    """Columns of a loop, from what each generation has: the row of its prompt, the question, a caption, a soft mask."""
    return {
        "prompts": list(prompts),
        "completions": ["" if answer is None else batch.text(answer) for answer in answers],
        "completion_ids": [[] if answer is None else answer.token_ids for answer in answers],
        "captions": [batch.prompts[row].caption for row in rows],
        "images": [batch.images[row] for row in rows],
        "masks": [batch.truths[row] for row in rows],
        "mask_probabilities": list(probabilities),
        "predicted_masks": [None if soft is None else soft > 0.5 for soft in probabilities],
    }
