"""Rollouts of both loops: what the policy samples, what the partner makes of it, what that is worth.

Loop 1: mask -> caption (sampled) -> mask' (partner, greedy). Loop 2: caption -> mask (sampled) -> caption' (partner,
greedy). The partner is the moving average of the policy, so that a reward is not the policy's agreement with itself.
Axes: P prompts, G generations of each.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_reward_network.grpo.config import Sa2VAGRPOConfig
from rl_reward_network.grpo.items import GRPOItem
from rl_reward_network.grpo.loss.mask_policies import MASK_POLICIES, SpreadController
from rl_reward_network.grpo.loss.policy import Group
from rl_reward_network.grpo.rollouts.batch import Batch, open_batch, random_stream
from rl_reward_network.grpo.rollouts.features import FeatureCache
from rl_reward_network.grpo.rollouts.generation import ImageContext
from rl_reward_network.grpo.rollouts.rewards import Reward, Samples, make_columns, reward_groups
from rl_reward_network.models.ema import EMA, swapped
from rl_reward_network.models.sa2va.generation_sa2va import Decoding
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.models.sa2va.templates import SEG_ANSWERS


class RolloutMaker:
    """Makes groups for the loss.

    Args:
        model: Sa2VA with its current weights.
        processor: its processor.
        config: of the run.
        rewards: loop ("loop1", "loop2") -> name -> Reward.
        shuffle: deal out the values of each term at random over all groups: a control.
    """

    ema: EMA | None = None  # the partner's weights; None is the model itself

    def __init__(
        self,
        model: Any,
        processor: Sa2VAProcessor,
        config: Sa2VAGRPOConfig,
        rewards: Mapping[str, Mapping[str, Reward]],
        shuffle: bool = False,
    ) -> None:
        self.model, self.processor, self.config, self.rewards, self.shuffle = model, processor, config, rewards, shuffle
        self.cache = FeatureCache(model, processor, config.feature_cache_gib)
        self.mask_policy = MASK_POLICIES[config.mask_policy]
        self.controller = SpreadController(self.mask_policy.first_spread)

    def make(self, items: Sequence[GRPOItem], seed: Sequence[int]) -> tuple[list[Group], dict[str, Samples]]:
        """Groups of P prompts with their advantages, and what was said and seen; all chance comes from `seed`."""
        groups, samples = self.sample(items, seed)
        reward_groups(samples, groups, self.rewards, self.config, seed if self.shuffle else None)
        return groups, samples

    def sample(self, items: Sequence[GRPOItem], seed: Sequence[int]) -> tuple[list[Group], dict[str, Samples]]:
        """The same before any reward."""
        batch, chance = open_batch(items, self.cache), random_stream(seed)
        groups = self._groups(batch)
        policy = batch.context(self.model, self.config.rows_at_once)
        captions = self._sample_captions(batch, policy, groups, chance)
        masks = self._sample_masks(batch, policy, groups, chance)
        samples = {}
        with self._partner():
            partner = policy if self.ema is None else batch.context(self.model, self.config.rows_at_once)
            if captions is not None:
                samples["loop1"] = self._draw_captions(batch, partner, captions)
            if masks is not None:
                samples["loop2"] = self._describe_masks(batch, partner, masks)
        return groups, samples

    def supervise(self, items: Sequence[GRPOItem]) -> list[Group]:
        """Groups that hold the reference caption and answer in place of samples: one completion, of advantage 1."""
        batch = open_batch(items, self.cache)
        answer = self.processor.token_ids(SEG_ANSWERS[1])
        seg = answer[: answer.index(self.processor.seg_token_id) + 1]
        groups = self._groups(batch)
        for row, (group, item) in enumerate(zip(groups, items, strict=True)):
            if self._draws:
                group.segment_ids = batch.drawing(row, item.question).suffix_ids + seg
            if self.config.mask_to_caption_weight and item.caption and (mask := batch.truths[row]) is not None:
                question = batch.describing(row, mask)
                group.describe_ids, group.cells = question.suffix_ids, question.cells
                group.completions = [self.processor.token_ids(item.caption + self.processor.template.suffix)]
                group.token_advantages = torch.ones(1)
        return groups

    def _groups(self, batch: Batch) -> list[Group]:
        """One for each item, without any sample."""
        return [
            Group(
                item.image_id,
                batch.features[batch.places[row]],
                batch.prefix_ids(batch.places[row]),
                image=batch.images[row],
                truth=batch.truths[row],
            )
            for row, item in enumerate(batch.items)
        ]

    @property
    def _draws(self) -> bool:
        """Whether masks are sampled: for loop 2, or for the learned reward's own gradient."""
        return bool(self.config.caption_to_mask_weight or self.config.pathwise_weight)

    def _partner(self) -> AbstractContextManager[None]:
        return nullcontext() if self.ema is None else swapped(self.model, self.ema.weights)

    # ---- loop 1 -------------------------------------------------------------------------------------------------

    def _sample_captions(
        self, batch: Batch, policy: ImageContext, groups: Sequence[Group], chance: torch.Generator
    ) -> list[list[str]] | None:
        """G captions of each region, noted in its group; None where this loop is off.

        Raises:
            ValueError: an item has no region.
        """
        if not self.config.mask_to_caption_weight:
            return None
        masks = [mask for mask in batch.truths if mask is not None]
        if len(masks) < len(batch.items):
            raise ValueError("loop 1 describes regions, and an item has none; set mask_to_caption_weight to 0")
        questions = [batch.describing(row, mask) for row, mask in enumerate(masks)]
        how = Decoding(self.config.max_completion_length, self.config.temperature, generator=chance)
        answers = policy.answer(questions, how, self.config.num_generations)
        for group, question, own in zip(groups, questions, answers, strict=True):
            group.describe_ids, group.cells = question.suffix_ids, question.cells
            group.completions = [answer.token_ids for answer in own]
            cut_off_too = not self.config.mask_truncated_completions
            group.counts = torch.tensor([answer.stopped or cut_off_too for answer in own])
        return [[batch.text(answer) for answer in own] for own in answers]

    def _draw_captions(self, batch: Batch, partner: ImageContext, captions: list[list[str]]) -> Samples:
        """The partner's mask of each caption."""
        rows = [row for row, own in enumerate(captions) for _ in own]
        said = [caption for own in captions for caption in own]
        drawn = batch.draw_captions(partner, rows, said)
        masks = [drawn.get(key) for key in zip(rows, said, strict=True)]
        return Samples(make_columns(batch, rows, [batch.items[row].describe for row in rows], said, masks))

    # ---- loop 2 -------------------------------------------------------------------------------------------------

    def _sample_masks(
        self, batch: Batch, policy: ImageContext, groups: Sequence[Group], chance: torch.Generator
    ) -> list[np.ndarray | None] | None:
        """Per prompt float32 (G, H, W) probabilities, None without `[SEG]`; None altogether where this loop is off."""
        if not self._draws:
            return None
        questions = [batch.drawing(row, item.question) for row, item in enumerate(batch.items)]
        drawn: list[np.ndarray | None] = []
        answers = policy.segment(questions)
        for row, (group, question, (ids, embedding)) in enumerate(zip(groups, questions, answers, strict=True)):
            if embedding is None:
                drawn.append(None)
            else:
                group.segment_ids = question.suffix_ids + ids
                drawn.append(batch.probabilities(row, self._act(group, embedding, chance)))
        return drawn

    @torch.no_grad()
    def _act(self, group: Group, embedding: Tensor, chance: torch.Generator) -> Tensor:
        """Sample G masks (G, h, w) and note the actions."""
        sam, policy = group.features.sam, self.mask_policy
        parameters = policy.parameters(self.model, sam, embedding)
        group.width = policy.width(parameters, self.controller.spread)
        group.actions = policy.sample(parameters, group.width, self.config.num_mask_generations, chance)
        return policy.mask_logits(self.model, sam, embedding, group.actions)

    def _describe_masks(self, batch: Batch, partner: ImageContext, drawn: Sequence[np.ndarray | None]) -> Samples:
        """The partner's caption of each sampled mask; an empty mask has none, which is a true 0 of caption rewards."""
        rows = [row for row in range(len(batch.items)) for _ in range(self.config.num_mask_generations)]
        masks = [
            one for own in drawn for one in (own if own is not None else [None] * self.config.num_mask_generations)
        ]
        said = [""] * len(rows)
        shown = [n for n, mask in enumerate(masks) if mask is not None and (mask > 0.5).any()]
        if any(item.caption for item in batch.items):
            seen = [mask > 0.5 for n in shown if (mask := masks[n]) is not None]
            captions = batch.caption(partner, [rows[n] for n in shown], seen, self.config.max_completion_length)
            for n, caption in zip(shown, captions, strict=True):
                said[n] = caption
        return Samples(make_columns(batch, rows, [batch.items[row].question for row in rows], said, masks))
