"""Rollouts of both loops: what the policy samples, and the EMA teacher's answers to it.

Loop 1: mask -> caption (sampled) -> mask' (teacher, greedy). Loop 2: caption -> mask (sampled) -> caption' (teacher,
greedy). The teacher is a moving average of the policy, so that a reward does not measure the policy's agreement with
itself. With the objective mean_teacher it gives images without masks a mask to learn.

Each stage hands a frozen dataclass on: `Rollouts` (sampled) -> `rewards.Terms` (scored) -> `combine.Advantages`
-> `MicroBatch`, which is all that the loss reads.
Axes: P prompts, G generations of each, T tokens, A numbers of a mask action, D parameters of a mask policy.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

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
from rl_reward_network.grpo.mask_policies import MASK_POLICIES, SigmaController
from rl_reward_network.grpo.prompts import TrainingItem
from rl_reward_network.models.ema import EMA, swapped
from rl_reward_network.models.sa2va.generation_sa2va import Answer, Decoding
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.models.sa2va.templates import SEG_ANSWERS

Columns = dict[str, list[Any]]  # name -> P * G entries, the arguments of a reward function; see `rewards.table`


class Pair(NamedTuple):
    """Two masks of an image, bool (H, W), one of which is preferred."""

    chosen: np.ndarray
    rejected: np.ndarray


@dataclass(frozen=True, eq=False)
class PromptImage:
    """The image of a prompt, as both loops use it.

    Args:
        row: number of the prompt in its micro-batch.
        image_id: digest of the image's pixels; texts about one image share its prefix.
        features: of the image.
        prefix_ids: token ids up to and including the end of the image.
        image: uint8 (H, W, 3).
        truth: bool (H, W), None for an unlabelled image.
        taught: the teacher's soft mask of an unlabelled image, float32 (H, W) in [0, 1], with the objective
            mean_teacher; otherwise None.
        pair: with the objective dpo; None where no mask is preferred.
    """

    row: int
    image_id: str
    features: ImageFeatures
    prefix_ids: list[int]
    image: np.ndarray
    truth: Mask
    taught: Mask = None
    pair: Pair | None = None


@dataclass(frozen=True, eq=False)
class CaptionRollout:
    """Loop 1: captions of the region of one prompt.

    Args:
        image: of the prompt.
        question: for the caption; where the region is drawn into the image, with features and prefix of that image.
        completion_ids: G lists of token ids, the stop token included.
        counted: bool (G,), completions that enter the loss (not truncated).
    """

    image: PromptImage
    question: Question
    completion_ids: list[list[int]]
    counted: Tensor


@dataclass(frozen=True, eq=False)
class AnswerRollout:
    """Loop 2: the answer with `[SEG]` to the question of one prompt.

    Args:
        image: of the prompt.
        question_ids: token ids behind the image.
        answer_ids: up to and including `[SEG]`; the model's answer, or without `[SEG]` in that the reference answer, so
            that the loss of answers brings `[SEG]` back.
        name: what the prompt asks for, in its class's name whatever the wording; "" for a described region.
    """

    image: PromptImage
    question_ids: list[int]
    answer_ids: list[int]
    name: str = ""

    @property
    def token_ids(self) -> list[int]:
        """Question and answer."""
        return self.question_ids + self.answer_ids


@dataclass(frozen=True, eq=False)
class MaskRollout:
    """Loop 2: masks of one prompt whose answer has a `[SEG]`.

    Args:
        row: number of the prompt, and of its answer.
        actions: (G, A) of the mask policy.
        width: scalar, width of the mask policy when the actions were sampled.
    """

    row: int
    actions: Tensor
    width: Tensor


@dataclass(frozen=True, eq=False)
class Rollouts:
    """What was sampled for the P prompts of a micro-batch.

    Args:
        prompts: P.
        captions: of each prompt in loop 1; empty without that loop.
        answers: of each prompt in loop 2; empty if neither masks nor answers are trained.
        masks: of the prompts whose answer has a `[SEG]`; empty if no masks are sampled.
        columns: loop ("loop1", "loop2") -> the columns of its reward functions; empty in supervised training.
    """

    prompts: int
    captions: list[CaptionRollout]
    answers: list[AnswerRollout]
    masks: list[MaskRollout] = field(default_factory=list)
    columns: dict[str, Columns] = field(default_factory=dict)


@dataclass(frozen=True)
class Stored:
    """Outputs of an earlier policy for the rollouts of a micro-batch, without gradient.

    Args:
        log_probs: (G, T) of each caption rollout.
        parameters: (D,) of the mask policy for each answer.
        mask_logits: (h, w) of the mean action of each answer; empty unless a loss compares with them.
    """

    log_probs: list[Tensor]
    parameters: list[Tensor]
    mask_logits: list[Tensor] = field(default_factory=list)


NOTHING_STORED = Stored([], [])


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """All that the loss of one micro-batch reads, besides the policy's outputs.

    Args:
        rollouts: what was sampled; `columns` is empty.
        caption_advantages: float32 (G,) of each caption rollout.
        mask_advantages: float32 (G,) of each mask rollout.
        reference: of the reference model; `NOTHING_STORED` where no KL has a weight.
        old: of the policy that sampled; `NOTHING_STORED` on fresh rollouts, whose importance ratio is exactly 1.
        consistency_weight: of the loss on the teacher's masks, which fades in.
    """

    rollouts: Rollouts
    caption_advantages: list[Tensor]
    mask_advantages: list[Tensor]
    reference: Stored = NOTHING_STORED
    old: Stored = NOTHING_STORED
    consistency_weight: float = 0.0


class RolloutGenerator:
    """Sample rollouts from a model with its current weights."""

    ema: EMA | None = None  # the teacher's weights; None: the model itself is the teacher

    def __init__(self, model: Any, processor: Sa2VAProcessor, config: Sa2VAGRPOConfig) -> None:
        self.model, self.processor, self.config = model, processor, config
        self.cache = FeatureCache(model, processor, config.feature_cache_gib)
        self.mask_policy = MASK_POLICIES[config.mask_policy]
        self.sigma_controller = SigmaController(self.mask_policy.first_sigma)
        # For loop 2, or for the gradient of the reward network.
        self.has_masks = bool(config.caption_to_mask_weight or config.pathwise_weight)

    def generate(self, prompts: Sequence[TrainingItem], seed: Sequence[int]) -> Rollouts:
        """The rollouts of P prompts; all randomness comes from `seed`."""
        batch, rng = open_batch(prompts, self.cache), seeded_generator(seed)
        images = prompt_images(batch)
        policy = batch.context(self.model, self.config.rows_at_once)
        captions: list[list[Answer]] = []
        rollouts = Rollouts(len(prompts), [], self.reference_answers(batch, images))
        if self.config.mask_to_caption_weight:
            captions, sampled = self.sample_captions(batch, policy, images, rng)
            rollouts = replace(rollouts, captions=sampled)
        masks: list[Mask] = []
        if self.has_masks:
            masks, rollouts = self.sample_masks(batch, policy, rollouts, rng)
        columns = {}
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
        unlabelled = [row for row, (_, truth) in enumerate(loaded) if truth is None]
        plain = [prompts[row] for row in unlabelled]
        found = self.teacher_masks(open_batch(plain, self.cache)) if plain else []
        masks = dict(zip(unlabelled, found, strict=True))
        images, truths, taught = [], list[Mask](), list[Mask]()
        for row, (image, truth) in enumerate(loaded):
            mirror, soft = mirrored([prompts[row]]), masks.get(row)
            if truth is not None:
                image, (truth,) = augmented(image, truth[None], views, mirror)
            elif soft is not None:  # which turns with the view
                image, (soft,) = strongly_augmented(image, soft[None], views, mirror)
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
        pairs = zip(images, batch.prompts, strict=True)
        return [
            AnswerRollout(image, batch.question(image.row, prompt.question).suffix_ids, answer, prompt.name)
            for image, prompt in pairs
        ]

    # ---- loop 1 -------------------------------------------------------------------------------------------------

    def sample_captions(
        self, batch: PromptBatch, policy: ImageContext, images: Sequence[PromptImage], rng: torch.Generator
    ) -> tuple[list[list[Answer]], list[CaptionRollout]]:
        """G captions of each region.

        Raises:
            ValueError: a prompt has no region.
        """
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

    # ---- loop 2 -------------------------------------------------------------------------------------------------

    def sample_actions(
        self, features: ImageFeatures, embedding: Tensor, rng: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """G actions (G, A) of the mask policy at a `[SEG]` embedding (C,), its width, and logits (G, h, w)."""
        policy, count = self.mask_policy, self.config.num_mask_generations
        parameters = policy.parameters(self.model, features.sam, embedding)
        width = policy.width(parameters, self.sigma_controller.sigma)
        actions = policy.sample(parameters, width, count, rng)
        return actions, width, policy.mask_logits(self.model, features.sam, embedding, actions)

    @torch.no_grad()
    def sample_masks(
        self, batch: PromptBatch, context: ImageContext, rollouts: Rollouts, rng: torch.Generator
    ) -> tuple[list[Mask], Rollouts]:
        """G masks of each prompt, float32 (G, H, W) probabilities, None for an answer without `[SEG]`; the rollouts."""
        questions = [batch.question(row, prompt.question) for row, prompt in enumerate(batch.prompts)]
        probabilities, answers, masks = list[Mask](), [], []
        for reference, (ids, embedding) in zip(rollouts.answers, context.segment(questions), strict=True):
            if embedding is None:
                probabilities.append(None)
                answers.append(reference)
                continue
            row, features = reference.image.row, reference.image.features
            actions, width, logits = self.sample_actions(features, embedding, rng)
            probabilities.append(batch.mask_probabilities(row, logits))
            answers.append(replace(reference, answer_ids=ids))
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
    """Columns of a loop.

    Args:
        batch: prompts, images and true masks.
        rows, prompts, answers: of each generation: index of its prompt; question; caption, None if it has none.
        probabilities: float32 (H, W) in [0, 1] of each mask, or None.
    """
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
