"""Rollouts of both loops: completions sampled from the policy, the partner's answers to them, rewards and advantages.

Loop 1: mask -> caption (sampled) -> mask' (partner, greedy). Loop 2: caption -> mask (sampled) -> caption' (partner,
greedy). The partner is the moving average of the policy, so that a reward does not measure the policy's agreement with
itself. Axes: P prompts, G generations of each.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_reward_network.grpo.grpo_config import Sa2VAGRPOConfig
from rl_reward_network.grpo.image_context import (
    FeatureCache,
    ImageContext,
    ImageFeatures,
    Mask,
    PromptBatch,
    Question,
    open_batch,
    seeded_generator,
)
from rl_reward_network.grpo.mask_policies import MASK_POLICIES, SpreadController
from rl_reward_network.grpo.prompts import GRPOPrompt
from rl_reward_network.grpo.rewards import LoopRollouts, Reward, make_columns, score_rollouts
from rl_reward_network.models.ema import EMA, swapped
from rl_reward_network.models.sa2va.generation_sa2va import Answer, Decoding
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.models.sa2va.templates import SEG_ANSWERS


@dataclass
class GroupOutput:
    """The policy's outputs for a group.

    Args:
        log_probs, entropies: float32 (G, T), 0 behind the end of each completion; None without loop 1, and entropies
            also where no gradient is computed, as of the reference.
        parameters: float32 (D,) of the mask policy; None without loop 2.
        mask_logits: float32 (h, w) of the mean action; None unless requested.
        answer_log_probs: float32 (T,), of the answer's tokens of loop 2, `[SEG]` included; None without loop 2.
    """

    log_probs: Tensor | None = None
    entropies: Tensor | None = None
    parameters: Tensor | None = None
    mask_logits: Tensor | None = None
    answer_log_probs: Tensor | None = None

    def detached(self) -> "GroupOutput":
        """The same tensors without gradients."""
        parts = (self.log_probs, self.entropies, self.parameters, self.mask_logits, self.answer_log_probs)
        return GroupOutput(*(None if part is None else part.detach() for part in parts))

    def differentiable(self, samples_masks: bool, answers: bool = True) -> list[Tensor]:
        """The tensors that a loss depends on.

        Args:
            samples_masks: masks are sampled, so that a loss depends on the parameters of their policy.
            answers: the answers' text has a weight.
        """
        parameters, text = self.parameters if samples_masks else None, self.answer_log_probs if answers else None
        parts = (self.log_probs, parameters, self.mask_logits, text)
        return [part for part in parts if part is not None]


@dataclass
class RolloutGroup:
    """All rollouts of one prompt, in both loops.

    Args:
        image_id: digest of the image's pixels; groups of one image share its prefix.
        features: of the image.
        prefix_ids: token ids up to and including the end of the image.
        describe_ids: the question of loop 1, after the prefix; empty if the group takes no part in that loop.
        region_cells: bool (1, g, g), the region that the question of loop 1 refers to.
        drawn, drawn_prefix_ids: in place of it, the image with the region drawn into it: features and token ids up to
            its end, in place of `features` and `prefix_ids` in loop 1.
        completion_ids: G lists of token ids, the stop token included.
        counted: bool (G,), completions that enter the loss (not truncated).
        caption_advantages: float32 (G,).
        segment_ids: question and answer of loop 2, up to and including `[SEG]`; empty if neither masks nor answers are
            trained. The answer is the model's, or without `[SEG]` in that the reference answer.
        answer_length: tokens of that answer.
        actions: (G, A) of the mask policy; None if no mask was sampled.
        action_width: scalar, width of the mask policy when the actions were sampled.
        mask_advantages: float32 (G,).
        old_output: of the policy that sampled the group; None makes the importance ratio exactly 1.
        ref_output: of the reference model; needed where a KL has a weight.
        image: uint8 (H, W, 3), and truth: bool (H, W) or None; for losses on the mask itself.
    """

    image_id: str
    features: ImageFeatures
    prefix_ids: list[int]
    describe_ids: list[int] = field(default_factory=list)
    region_cells: Tensor | None = None
    drawn: ImageFeatures | None = None
    drawn_prefix_ids: list[int] = field(default_factory=list)
    completion_ids: list[list[int]] = field(default_factory=list)
    counted: Tensor | None = None
    caption_advantages: Tensor | None = None
    segment_ids: list[int] = field(default_factory=list)
    answer_length: int = 0
    actions: Tensor | None = None
    action_width: Tensor | None = None
    mask_advantages: Tensor | None = None
    old_output: GroupOutput | None = None
    ref_output: GroupOutput | None = None
    image: np.ndarray | None = None
    truth: np.ndarray | None = None


class RolloutGenerator:
    """Sample rollouts and score them.

    Args:
        model: Sa2VA with its current weights.
        processor: of the model.
        config: of the run.
        rewards: loop ("loop1", "loop2") -> name -> Reward.
        shuffle_rewards: control experiment: permute the values of each reward at random over all groups.
    """

    ema: EMA | None = None  # the partner's weights; None: the model itself is the partner

    def __init__(
        self,
        model: Any,
        processor: Sa2VAProcessor,
        config: Sa2VAGRPOConfig,
        rewards: Mapping[str, Mapping[str, Reward]],
        shuffle_rewards: bool = False,
    ) -> None:
        self.model, self.processor, self.config, self.rewards = model, processor, config, rewards
        self.shuffle_rewards = shuffle_rewards
        self.cache = FeatureCache(model, processor, config.feature_cache_gib)
        self.mask_policy = MASK_POLICIES[config.mask_policy]
        self.spread_controller = SpreadController(self.mask_policy.first_spread)

    def generate_and_score(
        self, prompts: Sequence[GRPOPrompt], seed: Sequence[int]
    ) -> tuple[list[RolloutGroup], dict[str, LoopRollouts]]:
        """P groups, and the rollouts of each loop with their terms; all randomness comes from `seed`.

        Advantages follow from the terms of a whole optimisation step; see `reward_step`.
        """
        groups, rollouts = self.generate(prompts, seed)
        score_rollouts(rollouts, len(groups), self.rewards, seed if self.shuffle_rewards else None)
        return groups, rollouts

    def generate(
        self, prompts: Sequence[GRPOPrompt], seed: Sequence[int]
    ) -> tuple[list[RolloutGroup], dict[str, LoopRollouts]]:
        """The same without rewards."""
        batch, rng = open_batch(prompts, self.cache), seeded_generator(seed)
        groups = self.groups_of(batch)
        policy = batch.context(self.model, self.config.rows_at_once)
        captions = self.sample_captions(batch, policy, groups, rng) if self.config.mask_to_caption_weight else None
        masks = self.sample_masks(batch, policy, groups, rng) if self._samples_masks else None
        rollouts = {}
        with nullcontext() if self.ema is None else swapped(self.model, self.ema.weights):
            partner = policy if self.ema is None else batch.context(self.model, self.config.rows_at_once)
            if captions is not None:
                rollouts["loop1"] = self.masks_of_captions(batch, partner, captions)
            if masks is not None:
                rollouts["loop2"] = self.captions_of_masks(batch, partner, masks)
        return groups, rollouts

    def groups_from_references(self, prompts: Sequence[GRPOPrompt]) -> list[RolloutGroup]:
        """Groups for supervised training: the reference caption and answer as one completion of advantage 1."""
        batch = open_batch(prompts, self.cache)
        groups = self.groups_of(batch)
        for row, (group, prompt) in enumerate(zip(groups, prompts, strict=True)):
            if self.config.mask_to_caption_weight and prompt.caption and (mask := batch.truths[row]) is not None:
                question = batch.caption_question(row, mask)
                describe_region(group, question)
                group.completion_ids = [self.processor.answer_ids(prompt.caption)]
                group.caption_advantages = torch.ones(1)
        return groups

    def groups_of(self, batch: PromptBatch) -> list[RolloutGroup]:
        """A group for each prompt, without completions and masks; the answer of loop 2 is the reference answer.

        It stays where the model's own answer has no `[SEG]`, so that the loss of answers brings `[SEG]` back.
        """
        answer = self.processor.token_ids(SEG_ANSWERS[1])
        seg_answer = answer[: answer.index(self.processor.seg_token_id) + 1]
        groups = []
        for row, prompt in enumerate(batch.prompts):
            index = batch.image_indices[row]
            group = RolloutGroup(batch.image_ids[row], batch.features[index], batch.prefix_ids(index))
            group.image, group.truth = batch.images[row], batch.truths[row]
            if self._samples_masks or self.config.answer_weight:
                group.segment_ids = batch.question(row, prompt.question).suffix_ids + seg_answer
                group.answer_length = len(seg_answer)
            groups.append(group)
        return groups

    @property
    def _samples_masks(self) -> bool:
        """Whether masks are sampled: for loop 2, or for the gradient of the reward network."""
        return bool(self.config.caption_to_mask_weight or self.config.pathwise_weight)

    # ---- loop 1 -------------------------------------------------------------------------------------------------

    def sample_captions(
        self, batch: PromptBatch, policy: ImageContext, groups: Sequence[RolloutGroup], rng: torch.Generator
    ) -> list[list[Answer]]:
        """G captions of each region; their token ids are stored in its group.

        Raises:
            ValueError: a prompt has no region.
        """
        masks = [mask for mask in batch.truths if mask is not None]
        if len(masks) < len(groups):
            raise ValueError("loop 1 describes regions, and a prompt has none; set mask_to_caption_weight to 0")
        questions = [batch.caption_question(row, mask) for row, mask in enumerate(masks)]
        decoding = Decoding(self.config.max_completion_length, self.config.temperature, generator=rng)
        answers = batch.answer_regions(policy, questions, decoding, self.config.num_generations)
        count_truncated = not self.config.mask_truncated_completions
        for group, question, completions in zip(groups, questions, answers, strict=True):
            describe_region(group, question)
            group.completion_ids = [answer.token_ids for answer in completions]
            group.counted = torch.tensor([answer.stopped or count_truncated for answer in completions])
        return answers

    def masks_of_captions(
        self, batch: PromptBatch, partner: ImageContext, captions: list[list[Answer]]
    ) -> LoopRollouts:
        """Loop 1, second half: the partner's mask of each caption."""
        rows = [row for row, group_captions in enumerate(captions) for _ in group_captions]
        flat = [caption for group_captions in captions for caption in group_captions]
        texts = [batch.text(caption) for caption in flat]
        by_caption = batch.masks_from_captions(partner, rows, texts)
        masks = [by_caption.get(key) for key in zip(rows, texts, strict=True)]
        return LoopRollouts(make_columns(batch, rows, [batch.prompts[row].describe for row in rows], flat, masks))

    # ---- loop 2 -------------------------------------------------------------------------------------------------

    def sample_masks(
        self, batch: PromptBatch, policy: ImageContext, groups: Sequence[RolloutGroup], rng: torch.Generator
    ) -> list[Mask]:
        """G masks of each prompt, float32 (G, H, W) probabilities; None for an answer without `[SEG]`."""
        questions = [batch.question(row, prompt.question) for row, prompt in enumerate(batch.prompts)]
        answers = policy.segment(questions)
        masks: list[Mask] = [None] * len(groups)
        for row, (group, question, (ids, embedding)) in enumerate(zip(groups, questions, answers, strict=True)):
            if embedding is not None:
                group.segment_ids, group.answer_length = question.suffix_ids + ids, len(ids)
                masks[row] = batch.mask_probabilities(row, self._sample_actions(group, embedding, rng))
        return masks

    @torch.no_grad()
    def _sample_actions(self, group: RolloutGroup, embedding: Tensor, rng: torch.Generator) -> Tensor:
        """Sample G actions of the mask policy, store them in the group, and return their mask logits (G, h, w)."""
        sam, policy = group.features.sam, self.mask_policy
        parameters = policy.parameters(self.model, sam, embedding)
        group.action_width = policy.width(parameters, self.spread_controller.spread)
        group.actions = policy.sample(parameters, group.action_width, self.config.num_mask_generations, rng)
        return policy.mask_logits(self.model, sam, embedding, group.actions)

    def captions_of_masks(self, batch: PromptBatch, partner: ImageContext, masks: Sequence[Mask]) -> LoopRollouts:
        """Loop 2, second half: the partner's caption of each sampled mask; none of an empty one, with a reward of 0."""
        count = self.config.num_mask_generations
        rows = [row for row in range(len(batch.prompts)) for _ in range(count)]
        flat = [mask for group_masks in masks for mask in (group_masks if group_masks is not None else [None] * count)]
        captions: list[Answer | None] = [None] * len(rows)
        if any(prompt.caption for prompt in batch.prompts):
            regions = {i: mask > 0.5 for i, mask in enumerate(flat) if mask is not None and (mask > 0.5).any()}
            region_rows, longest = [rows[i] for i in regions], self.config.max_completion_length
            answers = batch.caption_answers(partner, region_rows, list(regions.values()), longest)
            for i, answer in zip(regions, answers, strict=True):
                captions[i] = answer
        return LoopRollouts(make_columns(batch, rows, [batch.prompts[row].question for row in rows], captions, flat))


def describe_region(group: RolloutGroup, question: Question) -> None:
    """Store the question of loop 1 in its group."""
    group.describe_ids, group.region_cells = question.suffix_ids, question.region_cells
    if question.drawn is not None:
        group.drawn, group.drawn_prefix_ids = question.drawn, question.prefix_ids
