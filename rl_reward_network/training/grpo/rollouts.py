"""Rollouts of both loops: what the policy samples, what the partner makes of it, what that is worth.

Loop 1: mask -> caption (sampled) -> mask' (partner, greedy). Loop 2: caption -> mask (sampled) -> caption' (partner,
greedy). The partner is the moving average of the policy, so that a reward is not the policy's agreement with itself.
Axes: P prompts, G generations of each.
"""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_reward_network.models.ema import EMA, swapped
from rl_reward_network.models.sa2va.generation_sa2va import Answer, Decoding
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.models.sa2va.templates import SEG_ANSWERS
from rl_reward_network.rewards.combine import Advantages, group_advantages
from rl_reward_network.rewards.functions import RewardFunction
from rl_reward_network.training.grpo.config import Sa2VAGRPOConfig
from rl_reward_network.training.grpo.features import FeatureCache, ImageFeatures
from rl_reward_network.training.grpo.generation import ImageContext, Question, ask, probabilities
from rl_reward_network.training.grpo.items import DESCRIBE, GRPOItem, segment_question
from rl_reward_network.training.grpo.mask_policies import MASK_POLICIES, SpreadController
from rl_reward_network.training.grpo.policy import Group


@dataclass(frozen=True)
class Reward:
    """A named term: its function and its weight; a weight of 0 is logged only."""

    function: RewardFunction
    weight: float


@dataclass
class Samples:
    """Columns of one loop, a list with P * G entries each; see `rewards.functions`."""

    columns: dict[str, list[Any]]
    terms: dict[str, np.ndarray] = field(default_factory=dict)
    advantages: Advantages | None = None


@dataclass
class Scene:
    """One prompt with its image decoded."""

    item: GRPOItem
    place: int
    image: np.ndarray
    mask: np.ndarray | None


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
        """Groups of P prompts, and what was said and seen; all chance comes from `seed`."""
        generator = torch.Generator().manual_seed(int(np.random.SeedSequence(list(seed)).generate_state(1)[0]))
        scenes, features = self._open(items)
        groups = [
            Group(
                scene.item.image_id,
                features[scene.place],
                self._ask(scene.place, features, DESCRIBE).prefix_ids,
                image=scene.image,
                truth=scene.mask,
            )
            for scene in scenes
        ]
        policy = self._context(features)
        describing = self._sample_captions(policy, scenes, groups, features, generator)
        drawing = self._sample_masks(policy, scenes, groups, features, generator)
        with self._partner():
            partner = self._context(features)
            samples = {}
            if describing is not None:
                samples["loop1"] = self._draw_captions(partner, scenes, describing)
            if drawing is not None:
                samples["loop2"] = self._describe_masks(partner, scenes, drawing, features)
        self._reward(samples, groups, len(scenes), seed)
        return groups, samples

    def supervise(self, items: Sequence[GRPOItem]) -> list[Group]:
        """Groups that hold the reference caption and mask in place of samples: one completion, of advantage 1."""
        scenes, features = self._open(items)
        answer = self.processor.token_ids(SEG_ANSWERS[1])
        seg = answer[: answer.index(self.processor.seg_token_id) + 1]
        return [self._reference_group(scene, features, seg) for scene in scenes]

    def _reference_group(self, scene: Scene, features: Sequence[ImageFeatures], seg: list[int]) -> Group:
        drawing = self._ask(scene.place, features, scene.item.question)
        group = Group(
            scene.item.image_id, features[scene.place], drawing.prefix_ids, image=scene.image, truth=scene.mask
        )
        if self.config.caption_to_mask_weight or self.config.pathwise_weight:
            group.segment_ids = drawing.suffix_ids + seg
        if self.config.mask_to_caption_weight and scene.item.caption:
            describing = self._ask(scene.place, features, DESCRIBE, scene.mask)
            group.describe_ids, group.cells = describing.suffix_ids, describing.cells
            group.completions = [self.processor.token_ids(scene.item.caption + self.processor.template.suffix)]
            group.token_advantages = torch.ones(1)
        return group

    def _open(self, items: Sequence[GRPOItem]) -> tuple[list[Scene], list[ImageFeatures]]:
        """Decode images and masks; the features of each image once."""
        loaded = [item.load() for item in items]
        names = list(dict.fromkeys(item.image_id for item in items))
        images = {item.image_id: image for item, (image, _) in zip(items, loaded, strict=True)}
        features = self.cache.get(names, [images[name] for name in names])
        scenes = [
            Scene(item, names.index(item.image_id), image, mask)
            for item, (image, mask) in zip(items, loaded, strict=True)
        ]
        return scenes, features

    def _ask(
        self, place: int, features: Sequence[ImageFeatures], text: str, mask: np.ndarray | None = None
    ) -> Question:
        cells = None if mask is None else region_cells(self.processor, mask)
        return ask(self.processor, place, len(features[place].vision), text, cells)

    def _context(self, features: Sequence[ImageFeatures]) -> ImageContext:
        prefixes = [self._ask(place, features, DESCRIBE).prefix_ids for place in range(len(features))]
        return ImageContext(self.model, self.processor, features, prefixes, self.config.rows_at_once)

    def _partner(self) -> AbstractContextManager[None]:
        return nullcontext() if self.ema is None else swapped(self.model, self.ema.weights)

    # ---- loop 1 -------------------------------------------------------------------------------------------------

    def _sample_captions(
        self,
        policy: ImageContext,
        scenes: Sequence[Scene],
        groups: Sequence[Group],
        features: Sequence[ImageFeatures],
        generator: torch.Generator,
    ) -> list[list[str]] | None:
        """G captions of each region, noted in its group; None where this loop is off."""
        if not self.config.mask_to_caption_weight:
            return None
        questions = [self._ask(scene.place, features, DESCRIBE, scene.mask) for scene in scenes]
        how = Decoding(self.config.max_completion_length, self.config.temperature, generator=generator)
        answers = policy.answer(questions, how, self.config.num_generations)
        for group, question, own in zip(groups, questions, answers, strict=True):
            group.describe_ids, group.cells = question.suffix_ids, question.cells
            group.completions = [answer.token_ids for answer in own]
            whole = not self.config.mask_truncated_completions
            group.counts = torch.tensor([answer.finished or whole for answer in own])
        return [[caption_text(self.processor, answer) for answer in own] for own in answers]

    def _draw_captions(self, partner: ImageContext, scenes: Sequence[Scene], captions: list[list[str]]) -> Samples:
        """The partner's mask of each caption; equal captions of one region are drawn once."""
        wanted = list(dict.fromkeys((n, text) for n, own in enumerate(captions) for text in own if text))
        questions = [self._ask(scenes[n].place, partner.features, segment_question(text)) for n, text in wanted]
        embeddings = [embedding for _, embedding in partner.segment(questions)] if questions else []
        logits = partner.mask_logits([question.image for question in questions], embeddings)
        drawn = {
            key: None if one is None else probabilities(one[None], scenes[key[0]].image.shape[:2], self._side)[0]
            for key, one in zip(wanted, logits, strict=True)
        }
        rows = [(n, text) for n, own in enumerate(captions) for text in own]
        return Samples(
            _columns(scenes, [n for n, _ in rows], [DESCRIBE] * len(rows), [text for _, text in rows])
            | _mask_columns([drawn.get(row) for row in rows])
        )

    @property
    def _side(self) -> int:
        return self.processor.sam_image_size

    # ---- loop 2 -------------------------------------------------------------------------------------------------

    def _sample_masks(
        self,
        policy: ImageContext,
        scenes: Sequence[Scene],
        groups: Sequence[Group],
        features: Sequence[ImageFeatures],
        generator: torch.Generator,
    ) -> list[np.ndarray | None] | None:
        """Per prompt float32 (G, H, W) probabilities, None without `[SEG]`; None altogether where this loop is off."""
        if not self.config.caption_to_mask_weight and not self.config.pathwise_weight:
            return None
        questions = [self._ask(scene.place, features, scene.item.question) for scene in scenes]
        drawn: list[np.ndarray | None] = []
        for scene, group, question, (ids, embedding) in zip(
            scenes, groups, questions, policy.segment(questions), strict=True
        ):
            if embedding is None:
                drawn.append(None)
                continue
            group.segment_ids = question.suffix_ids + ids
            logits = self._act(group, embedding, generator)
            drawn.append(probabilities(logits, scene.image.shape[:2], self._side))
        return drawn

    @torch.no_grad()
    def _act(self, group: Group, embedding: Tensor, generator: torch.Generator) -> Tensor:
        """Sample G masks (G, h, w) and note the actions."""
        sam, policy = group.features.sam, self.mask_policy
        parameters = policy.parameters(self.model, sam, embedding)
        group.width = policy.width(parameters, self.controller.spread)
        group.actions = policy.sample(parameters, group.width, self.config.num_mask_generations, generator)
        return policy.mask_logits(self.model, sam, embedding, group.actions)

    def _describe_masks(
        self,
        partner: ImageContext,
        scenes: Sequence[Scene],
        drawn: Sequence[np.ndarray | None],
        features: Sequence[ImageFeatures],
    ) -> Samples:
        """The partner's caption of each sampled mask; an empty mask has none, which is a true 0 of caption rewards."""
        count = self.config.num_mask_generations
        rows = [(n, g) for n in range(len(scenes)) for g in range(count)]
        seen = [None if (own := drawn[n]) is None else own[g] for n, g in rows]
        said = [""] * len(rows)
        if any(scene.item.caption for scene in scenes):
            shown = [row for row, one in enumerate(seen) if one is not None and (one > 0.5).any()]
            questions = [
                self._ask(scenes[rows[row][0]].place, features, DESCRIBE, own > 0.5)
                for row in shown
                if (own := seen[row]) is not None
            ]
            answers = partner.answer(questions, Decoding(self.config.max_completion_length)) if questions else []
            for row, (answer,) in zip(shown, answers, strict=True):
                said[row] = caption_text(self.processor, answer)
        prompts = [scenes[n].item.question for n, _ in rows]
        return Samples(_columns(scenes, [n for n, _ in rows], prompts, said) | _mask_columns(seen))

    # ---- both ---------------------------------------------------------------------------------------------------

    def _reward(self, samples: dict[str, Samples], groups: Sequence[Group], prompts: int, seed: Sequence[int]) -> None:
        """Terms and advantages of each loop, the latter noted in the groups; groups without spread drop out."""
        for loop, own in samples.items():
            rewards = self.rewards[loop]
            own.terms = {name: _values(reward, own, prompts) for name, reward in rewards.items()}
            if self.shuffle:
                own.terms = {name: _shuffled(values, seed) for name, values in own.terms.items()}
            paid = {name: own.terms[name] for name, reward in rewards.items() if reward.weight}
            weights = {name: reward.weight for name, reward in rewards.items()}
            how, scale = self.config.multi_objective_aggregation, self.config.scale_rewards
            own.advantages = group_advantages(paid, weights, how, scale, self.config.reward_floor)
            for number, group in enumerate(groups):
                values = torch.tensor(own.advantages.values[number], dtype=torch.float32)
                if loop == "loop1":
                    group.token_advantages = values
                    group.describe_ids = group.describe_ids if own.advantages.spread[number] else []
                else:
                    group.mask_advantages = values
                    pathwise = bool(self.config.pathwise_weight)  # needs no spread
                    group.segment_ids = group.segment_ids if own.advantages.spread[number] or pathwise else []


def _values(reward: Reward, samples: Samples, prompts: int) -> np.ndarray:
    """float64 (P, G) of a reward function; NaN where it had none.

    Raises:
        ValueError: it returned another number of values, or none at all.
    """
    found = np.array(reward.function(**samples.columns), dtype=float)
    wanted = len(samples.columns["prompts"])
    if found.shape != (wanted,):
        raise ValueError(f"a reward function returned {found.shape} values for {wanted} generations")
    return found.reshape(prompts, -1)


def _shuffled(values: np.ndarray, seed: Sequence[int]) -> np.ndarray:
    """The same values (P, G), dealt out anew."""
    return np.random.default_rng(list(seed)).permutation(values.ravel()).reshape(values.shape)


def _columns(scenes: Sequence[Scene], numbers: list[int], prompts: list[str], said: list[str]) -> dict[str, list[Any]]:
    return {
        "prompts": prompts,
        "completions": said,
        "captions": [scenes[n].item.caption for n in numbers],
        "images": [scenes[n].image for n in numbers],
        "masks": [scenes[n].mask for n in numbers],
    }


def _mask_columns(probability: list[np.ndarray | None]) -> dict[str, list[Any]]:
    return {
        "mask_probabilities": probability,
        "predicted_masks": [None if one is None else one > 0.5 for one in probability],
    }


def region_cells(processor: Sa2VAProcessor, mask: np.ndarray) -> Tensor:
    """bool (1, g, g) of a region; one that lies between all cells gets the nearest, as at prediction."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"region \d+ .* misses every cell")
        return processor.region_cells(mask[None])


def caption_text(processor: Sa2VAProcessor, answer: Answer) -> str:
    """What was said, without the stop word."""
    text = processor.text(answer.token_ids).strip()
    for word in processor.template.stop_words:
        text = text.removesuffix(word).strip()
    return text
