"""From samples to advantages: reward functions get columns, groups learn what each of their generations is worth."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rl_reward_network.grpo.config import Sa2VAGRPOConfig
from rl_reward_network.grpo.loss.policy import Group
from rl_reward_network.grpo.rollouts.batch import Batch, Mask
from rl_reward_network.rewards.combine import Advantages, group_advantages
from rl_reward_network.rewards.functions import GroupFunction, RewardFunction, mask_reward
from rl_reward_network.rewards.table import MASK_REWARDS, WITH_OWN_FLAG


@dataclass(frozen=True)
class Reward:
    """A named term.

    Args:
        function: of a loop's columns; of other terms, where `of` names them.
        weight: of the term; 0 is logged only.
        of: names of terms of the same loop that are made of columns, in the order of the function's arguments.
    """

    function: RewardFunction | GroupFunction
    weight: float
    of: tuple[str, ...] = ()


@dataclass
class Samples:
    """What one loop has sampled.

    Args:
        columns: name -> list of P * G entries; see `rewards.functions`.
        terms: name -> float64 (P, G), NaN where missing.
        advantages: of all terms together; None before they are paid.
    """

    columns: dict[str, list[Any]]
    terms: dict[str, np.ndarray] = field(default_factory=dict)
    advantages: Advantages | None = None


def make_columns(
    batch: Batch, rows: Sequence[int], prompts: Sequence[str], said: Sequence[str], drawn: Sequence[Mask]
) -> dict[str, list[Any]]:
    """Columns of a loop.

    Args:
        batch: what the samples are about.
        rows: the item of each generation.
        prompts, said: what was asked, and which caption was said (by policy or partner).
        drawn: float32 (H, W) in [0, 1] of each mask, or None.
    """
    return {
        "prompts": list(prompts),
        "completions": list(said),
        "completion_ids": [batch.processor.token_ids(text) for text in said],
        "captions": [batch.items[row].caption for row in rows],
        "images": [batch.images[row] for row in rows],
        "masks": [batch.truths[row] for row in rows],
        "mask_probabilities": list(drawn),
        "predicted_masks": [None if one is None else one > 0.5 for one in drawn],
    }


def reward_groups(
    samples: Mapping[str, Samples],
    groups: Sequence[Group],
    rewards: Mapping[str, Mapping[str, Reward]],
    config: Sa2VAGRPOConfig,
    shuffled_by: Sequence[int] | None = None,
) -> None:
    """Note terms and advantages in the samples, and the latter in the groups.

    A group without spread keeps its place with advantages of 0: it counts in the averages, as in TRL, and the KL holds
    it, too.

    Args:
        samples: loop -> what was sampled.
        groups: P of them.
        rewards: loop -> name -> Reward.
        config: how terms are put together.
        shuffled_by: seed by which values are dealt out anew, for the control.

    Raises:
        ValueError: a reward function returned another number of values than there are generations.
    """
    for loop, own in samples.items():
        own.terms = _terms(rewards[loop], own, len(groups))
        if shuffled_by is not None:
            own.terms = {name: _shuffled(values, shuffled_by) for name, values in own.terms.items()}
        weights = {name: reward.weight for name, reward in rewards[loop].items()}
        paid = {name: own.terms[name] for name, weight in weights.items() if weight}
        how, scale = config.multi_objective_aggregation, config.scale_rewards
        own.advantages = (
            group_advantages(paid, weights, how, scale, config.reward_floor) if paid else _nothing_paid(own)
        )
        for number, group in enumerate(groups):
            values = torch.tensor(own.advantages.values[number]).float()
            if loop == "loop1":
                group.token_advantages = values
            else:
                group.mask_advantages = values


def paid_of_prompts(prompts: Sequence[int], samples: Mapping[str, Samples]) -> list[tuple[int, float, bool]]:
    """Of P prompts: (number, mean reward over all loops and generations, whether a group of theirs had spread).

    A mean is NaN where a loop misses a reward altogether.
    """
    paid = [own.advantages for own in samples.values() if own.advantages is not None]
    means = np.mean([own.rewards.mean(axis=1) for own in paid], axis=0)
    spread = np.any([own.spread for own in paid], axis=0)
    return [(number, float(mean), bool(any_)) for number, mean, any_ in zip(prompts, means, spread, strict=True)]


def mask_reward_terms(weights: Mapping[str, float]) -> dict[str, Reward]:
    """Terms of mask rewards by name.

    Raises:
        ValueError: a name that is not in `MASK_REWARDS`, or iou, which has a flag of its own.
    """
    for name in weights:
        if name not in MASK_REWARDS or name == WITH_OWN_FLAG:
            known = ", ".join(MASK_REWARDS)
            raise ValueError(f"mask reward {name!r}: expected one of {known}; iou has flags of its own, --iou_weight")
    return {name: Reward(mask_reward(name), weight) for name, weight in weights.items()}


def check_paid(rewards: Mapping[str, Mapping[str, Reward]], config: Sa2VAGRPOConfig) -> None:
    """Raise a ValueError where a loop that counts pays nothing; the learned reward's own gradient is pay enough."""
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


def _nothing_paid(samples: Samples) -> Advantages:
    """No advantage for anybody, where only the learned reward's own gradient is followed."""
    zeros = np.zeros_like(next(iter(samples.terms.values())))
    return Advantages(zeros, np.full_like(zeros, np.nan), np.zeros(len(zeros), dtype=bool), {})


def _terms(rewards: Mapping[str, Reward], samples: Samples, prompts: int) -> dict[str, np.ndarray]:
    """float64 (P, G) of each term; those of columns are known before those that are made of them."""
    found = {name: _values(reward, samples, prompts) for name, reward in rewards.items() if not reward.of}
    for name, reward in rewards.items():
        if reward.of:
            found[name] = np.asarray(reward.function(*(found[part] for part in reward.of)))
    return found


def _values(reward: Reward, samples: Samples, prompts: int) -> np.ndarray:
    """float64 (P, G) of a reward function; NaN where it had none."""
    found = np.array(reward.function(**samples.columns), dtype=float)
    wanted = len(samples.columns["prompts"])
    if found.shape != (wanted,):
        raise ValueError(f"a reward function returned {found.shape} values for {wanted} generations")
    return found.reshape(prompts, -1)


def _shuffled(values: np.ndarray, seed: Sequence[int]) -> np.ndarray:
    """The same values (P, G), dealt out anew."""
    return np.random.default_rng(list(seed)).permutation(values.ravel()).reshape(values.shape)
