"""From rollouts to advantages: reward functions are called with columns, and groups receive their advantages.

Rewards are computed by micro-batch, advantages from those of a whole optimisation step, of all processes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from rl_reward_network.grpo.config import Sa2VAGRPOConfig
from rl_reward_network.grpo.ranks import from_all_ranks
from rl_reward_network.grpo.rollout_group import RolloutGroup
from rl_reward_network.grpo.rollouts.batch import Mask, PromptBatch
from rl_reward_network.models.sa2va.generation_sa2va import Answer
from rl_reward_network.rewards.combine import Advantages, ensemble_noise, group_advantages
from rl_reward_network.rewards.functions import EnsembleScores, GroupFunction, RewardFunction, mask_reward
from rl_reward_network.rewards.table import MASK_REWARDS, WITH_OWN_FLAG


@dataclass(frozen=True)
class Reward:
    """A named reward of a loop.

    Args:
        function: a function of the loop's columns, or of other terms if `of` names them.
        weight: weight of the term; a term of weight 0 is only logged.
        of: names of terms of the same loop that are functions of columns, in the order of the arguments.
    """

    function: RewardFunction | GroupFunction
    weight: float
    of: tuple[str, ...] = ()


@dataclass
class LoopRollouts:
    """The rollouts of one loop.

    Args:
        columns: name -> list of P * G entries; see `rewards.functions`.
        terms: name -> float64 (P, G), NaN where missing; empty before they are computed.
        advantages: advantages from all terms; None before they are computed.
        noise: name -> float64 (P,), standard deviation of the errors of a term in each group; of some terms.
    """

    columns: dict[str, list[Any]]
    terms: dict[str, np.ndarray] = field(default_factory=dict)
    advantages: Advantages | None = None
    noise: dict[str, np.ndarray] = field(default_factory=dict)


MicroBatch = tuple[Sequence[RolloutGroup], Mapping[str, LoopRollouts]]


def make_columns(
    batch: PromptBatch,
    rows: Sequence[int],
    prompts: Sequence[str],
    answers: Sequence[Answer | None],
    probabilities: Sequence[Mask],
) -> dict[str, list[Any]]:
    """Columns of a loop.

    Args:
        batch: prompts, images and true masks.
        rows: index of the prompt of each generation.
        prompts: question of each generation.
        answers: caption of each generation, by the policy or its partner; None for one that was not asked for.
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


def score_rollouts(
    rollouts: Mapping[str, LoopRollouts],
    prompts: int,
    rewards: Mapping[str, Mapping[str, Reward]],
    shuffled_by: Sequence[int] | None = None,
) -> None:
    """Compute the terms of the rollouts of one micro-batch, and the noise of those that know it.

    Args:
        rollouts: loop -> its rollouts, which receive the terms.
        prompts: P.
        rewards: loop -> name -> Reward.
        shuffled_by: seed of a random permutation of the values (the control `--shuffle_rewards`), which have no noise
            then; None without.

    Raises:
        ValueError: the number of values of a reward function differs from the number of generations.
    """
    for loop, loop_rollouts in rollouts.items():
        terms, noise = _terms(rewards[loop], loop_rollouts.columns, prompts)
        if shuffled_by is not None:
            terms, noise = {name: _shuffled(values, shuffled_by) for name, values in terms.items()}, {}
        loop_rollouts.terms, loop_rollouts.noise = terms, noise


def reward_step(
    step: Sequence[MicroBatch],
    rewards: Mapping[str, Mapping[str, Reward]],
    config: Sa2VAGRPOConfig,
    accelerator: Accelerator | None = None,
) -> None:
    """Compute the advantages of one optimisation step; rollouts and groups receive them.

    A group without spread has advantages of 0. It still counts in the averages, as in TRL, and in the KL.

    Args:
        step: the micro-batches of this process, with terms.
        rewards: loop -> name -> Reward.
        config: how terms are combined.
        accelerator: of all processes, each of which must call this; None without others.

    Raises:
        ValueError: a reward is infinite; names it.
    """
    for loop in step[0][1]:
        own = tuple(_joined([getattr(rollouts[loop], part) for _, rollouts in step]) for part in ("terms", "noise"))
        of_ranks = [own] if accelerator is None else from_all_ranks(accelerator, own)
        terms, noise = (_joined(parts) for parts in zip(*of_ranks, strict=True))
        weights = {name: reward.weight for name, reward in rewards[loop].items() if reward.weight}
        advantages = _advantages(terms, noise, weights, config)
        rank = 0 if accelerator is None else accelerator.process_index
        start = sum(len(next(iter(of_rank.values()))) for of_rank, _ in of_ranks[:rank])
        for groups, rollouts in step:
            rollouts[loop].advantages = part = advantages.of(slice(start, start + len(groups)))
            start += len(groups)
            attribute = "caption_advantages" if loop == "loop1" else "mask_advantages"
            for group, values in zip(groups, part.values, strict=True):
                setattr(group, attribute, torch.tensor(values).float())


def prompt_outcomes(prompts: Sequence[int], rollouts: Mapping[str, LoopRollouts]) -> list[tuple[int, float, bool]]:
    """For P prompts: (index, mean reward over all loops and generations, whether rewards of a group differ).

    The mean is NaN if a loop has no value of a reward.
    """
    advantages = [loop.advantages for loop in rollouts.values() if loop.advantages is not None]
    means = np.mean([loop.rewards.mean(axis=1) for loop in advantages], axis=0)
    spread = np.any([loop.spread for loop in advantages], axis=0)
    return list(zip(prompts, means.tolist(), spread.tolist(), strict=True))


def mask_reward_terms(weights: Mapping[str, float]) -> dict[str, Reward]:
    """Terms of mask rewards by name.

    Raises:
        ValueError: a name that is not in `MASK_REWARDS`, or iou, which has separate flags; or a negative weight.
    """
    for name, weight in weights.items():
        if not 0 <= weight < math.inf:
            raise ValueError(f"weight of the mask reward {name} is {weight}, expected 0 or more")
        if name not in MASK_REWARDS or name == WITH_OWN_FLAG:
            known = ", ".join(MASK_REWARDS)
            raise ValueError(f"mask reward {name!r}: expected one of {known}; iou has separate flags, --iou_weight")
    return {name: Reward(mask_reward(name), weight) for name, weight in weights.items()}


def check_weights(rewards: Mapping[str, Mapping[str, Reward]], config: Sa2VAGRPOConfig) -> None:
    """Raise a ValueError if an enabled loop has no reward with a weight, and no pathwise gradient either."""
    loops = {
        "loop1": config.mask_to_caption_weight,
        "loop2": config.caption_to_mask_weight and not config.pathwise_weight,
    }
    for loop, weight in loops.items():
        if weight and not any(reward.weight for reward in rewards[loop].values()):
            raise ValueError(
                f"{loop}: the weights of its rewards ({', '.join(rewards[loop])}) are all 0; give one a weight, "
                "or leave the loop out (mask_to_caption_weight, caption_to_mask_weight)"
            )


def _joined(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Arrays by name, those of all parts one after another."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _advantages(
    terms: Mapping[str, np.ndarray],
    noise: Mapping[str, np.ndarray],
    weights: Mapping[str, float],
    config: Sa2VAGRPOConfig,
) -> Advantages:
    """Advantages of the weighted terms; 0 without weights, for a loop with the pathwise gradient alone."""
    if not weights:
        zeros = np.zeros_like(next(iter(terms.values())))
        return Advantages(zeros, np.full_like(zeros, np.nan), np.zeros(len(zeros), dtype=bool))
    weighted, known = ({name: part[name] for name in weights if name in part} for part in (terms, noise))
    how, scale = config.multi_objective_aggregation, config.scale_rewards
    return group_advantages(weighted, weights, how, scale, config.reward_floor, known)


def _terms(
    rewards: Mapping[str, Reward], columns: dict[str, list[Any]], prompts: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """float64 (P, G) of each term, functions of columns first, then functions of other terms; noise (P,) of some."""
    terms: dict[str, np.ndarray] = {}
    noise: dict[str, np.ndarray] = {}
    for name, reward in rewards.items():
        if not reward.of:
            values: Any = reward.function(**columns)
            if isinstance(values, EnsembleScores):
                values, members = values
                if (count := members.shape[1]) > 1:
                    noise[name] = ensemble_noise(members.reshape(prompts, -1, count))
            terms[name] = _by_prompt(values, len(columns["prompts"]), prompts)
    for name, reward in rewards.items():
        if reward.of:
            terms[name] = np.asarray(reward.function(*(terms[part] for part in reward.of)))
    return terms, noise


def _by_prompt(rewards: Sequence[float | None], generations: int, prompts: int) -> np.ndarray:
    """float64 (P, G), the values of a reward function; NaN where they are missing."""
    values = np.array(rewards, dtype=float)
    if values.shape != (generations,):
        raise ValueError(f"a reward function returned {values.shape} values for {generations} generations")
    return values.reshape(prompts, -1)


def _shuffled(values: np.ndarray, seed: Sequence[int]) -> np.ndarray:
    """A random permutation of the values (P, G)."""
    return np.random.default_rng(list(seed)).permutation(values.ravel()).reshape(values.shape)
