"""From rollouts to advantages: reward functions are called with columns, and terms become advantages.

Terms are computed by micro-batch, advantages from those of a whole optimisation step, of all processes. The statistics
of both are for the curves; every tag is explained in docs/reference/tensorboard.md.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from accelerate import Accelerator

from rl_reward_network.grpo.checkpoint import from_all_ranks
from rl_reward_network.grpo.grpo_config import Sa2VAGRPOConfig
from rl_reward_network.grpo.rollouts import Columns, Rollouts
from rl_reward_network.grpo.settings import GRPOPlan
from rl_reward_network.rewards.combine import Advantages, ensemble_noise, group_advantages, whole_groups
from rl_reward_network.rewards.judge import Judge
from rl_reward_network.rewards.learned import ForegroundMaps
from rl_reward_network.rewards.metrics import iou
from rl_reward_network.rewards.table import (
    IMAGE_REWARDS,
    MASK_REWARDS,
    WITH_OWN_FLAG,
    EnsembleScores,
    GroupFunction,
    RewardFunction,
    confidence_reward,
    iou_reward,
    judge_reward,
    judged_caption_reward,
    learned_reward,
    mask_reward,
    meteor_reward,
)

MASK_IOU, FRAC_REWARD_ZERO_STD = "loop2/mask_iou_in_group", "loop2/frac_zero_std"  # inputs of the sigma controller


@dataclass(frozen=True)
class Reward:
    """A named reward of a loop."""

    function: RewardFunction | GroupFunction  # of the loop's columns, or of other terms if `of` names them
    weight: float  # of the term; one of weight 0 is only logged
    of: tuple[str, ...] = ()  # terms of the same loop that are functions of columns, in the order of the arguments


LoopRewards = Mapping[str, Mapping[str, Reward]]  # loop -> name -> Reward


@dataclass(frozen=True)
class Terms:
    """The scored rollouts of one loop, by name of the term."""

    values: dict[str, np.ndarray]  # float64 (P, G), NaN where missing
    noise: dict[str, np.ndarray]  # float64 (P,), standard deviation of its errors in each group; of some terms

    @property
    def groups(self) -> int:
        """P."""
        return len(next(iter(self.values.values())))

    @staticmethod
    def joined(parts: Sequence["Terms"]) -> "Terms":
        """The groups of all parts, one part after another."""
        kinds = ([vars(part)[kind] for part in parts] for kind in ("values", "noise"))
        return Terms(*({name: np.concatenate([one[name] for one in own]) for name in own[0]} for own in kinds))


def score(rollouts: Rollouts, rewards: LoopRewards, shuffled_by: Sequence[int] | None = None) -> dict[str, Terms]:
    """loop -> terms of the rollouts, with columns, of one micro-batch.

    With a seed, `shuffled_by`, the values are permuted at random and have no noise (the control `--shuffle_rewards`).
    """
    terms = {loop: _terms(rewards[loop], columns, rollouts.prompts) for loop, columns in rollouts.columns.items()}
    if shuffled_by is None:
        return terms

    def shuffled(values: np.ndarray) -> np.ndarray:
        return np.random.default_rng(list(shuffled_by)).permutation(values.ravel()).reshape(values.shape)

    return {loop: Terms({name: shuffled(v) for name, v in own.values.items()}, {}) for loop, own in terms.items()}


def step_advantages(
    step: Sequence[Mapping[str, Terms]],
    rewards: LoopRewards,
    config: Sa2VAGRPOConfig,
    accelerator: Accelerator | None = None,
) -> list[dict[str, Advantages]]:
    """For each micro-batch of this process loop -> its advantages, from the terms of a whole optimisation step.

    A group whose rewards are alike has advantages of 0. It still counts in the averages, as in TRL, and in the KL. With
    an `accelerator` the step is that of all its processes, each of which must call this.
    """
    result: list[dict[str, Advantages]] = [{} for _ in step]
    for loop in step[0]:
        own = Terms.joined([terms[loop] for terms in step])
        of_ranks = [own] if accelerator is None else from_all_ranks(accelerator, own)
        advantages = _advantages(Terms.joined(of_ranks), rewards[loop], config)
        start = sum(of_rank.groups for of_rank in of_ranks[: accelerator.process_index if accelerator else 0])
        for part, terms in zip(result, step, strict=True):
            part[loop] = advantages.of(slice(start, start + terms[loop].groups))
            start += terms[loop].groups
    return result


def prompt_outcomes(prompts: Sequence[int], advantages: Mapping[str, Advantages]) -> list[tuple[int, float, bool]]:
    """For P prompts: (index, mean reward over all loops and generations, whether rewards of a group differ).

    The mean is NaN if a loop has no value of a reward.
    """
    means = np.mean([loop.rewards.mean(axis=1) for loop in advantages.values()], axis=0)
    differ = np.any([loop.differ for loop in advantages.values()], axis=0)
    return list(zip(prompts, means.tolist(), differ.tolist(), strict=True))


def loop_rewards(
    plan: GRPOPlan, kind: str, judge: Judge | None, maps: ForegroundMaps | None
) -> dict[str, dict[str, Reward]]:
    """The rewards of both loops; every term that can be computed is included, so that it is logged.

    Raises:
        ValueError: a weight of the reward network without one, a judge in only one of `plan` and `judge`, or a mask
            reward of `plan` with a negative weight or an unknown name.
    """
    if (judge is None) != (plan.judge is None):
        raise ValueError(f"judge is {judge}, but the plan's judge is {plan.judge}; give both or neither")
    weights = plan.weights
    loop1 = {"iou": Reward(iou_reward, weights.iou), "dice": Reward(mask_reward("dice"), 0.0)}
    loop2 = {"iou": Reward(iou_reward, weights.loop2_iou), "confidence": Reward(confidence_reward, weights.confidence)}
    if kind == "regions":
        judged = plan.judge["loops"] if plan.judge else ()
        loop1 |= _caption_rewards(weights.caption, judge if "loop1" in judged else None)
        loop2 |= _caption_rewards(weights.loop2_caption, judge if "loop2" in judged else None)
    if maps is not None:
        loop2["learned"] = Reward(learned_reward(maps), weights.learned)
    elif weights.learned:
        raise ValueError(f"learned_weight is {weights.learned}, but there is no reward network; give --reward_net")
    for loop, terms in (("loop1", loop1), ("loop2", loop2)):
        terms |= _mask_reward_terms((plan.mask_rewards or {}).get(loop, {}))
    return {"loop1": loop1, "loop2": loop2}


def _caption_rewards(weight: float, judge: Judge | None) -> dict[str, Reward]:
    """METEOR is the caption reward, or with a judge the sum of both; each is also logged alone."""
    if judge is None:
        return {"meteor": Reward(meteor_reward, weight)}
    both = Reward(judged_caption_reward(judge), weight, of=("meteor", "judge"))
    return {"meteor": Reward(meteor_reward, 0.0), "judge": Reward(judge_reward(judge), 0.0), "caption": both}


def _mask_reward_terms(weights: Mapping[str, float]) -> dict[str, Reward]:
    """Those of `MASK_REWARDS` and `IMAGE_REWARDS` by name, but for iou, which has separate flags."""
    for name, weight in weights.items():
        if not 0 <= weight < math.inf:
            raise ValueError(f"weight of the mask reward {name} is {weight}, expected 0 or more")
        if name not in MASK_REWARDS | IMAGE_REWARDS or name == WITH_OWN_FLAG:
            known = ", ".join(MASK_REWARDS | IMAGE_REWARDS)
            raise ValueError(f"mask reward {name!r}: expected one of {known}; iou is there, see --loop2_iou_weight")
    return {name: Reward(mask_reward(name), weight) for name, weight in weights.items()}


def check_weights(rewards: LoopRewards, config: Sa2VAGRPOConfig) -> None:
    """Raise a ValueError if an enabled loop has no reward with a weight, and no pathwise gradient either."""
    of_masks = config.caption_to_mask_weight and not config.pathwise_weight
    for loop, weight in (("loop1", config.mask_to_caption_weight), ("loop2", of_masks)):
        if weight and not any(reward.weight for reward in rewards[loop].values()):
            raise ValueError(
                f"{loop}: the weights of its rewards ({', '.join(rewards[loop])}) are all 0; give one a weight, "
                "or leave the loop out (mask_to_caption_weight, caption_to_mask_weight)"
            )


def _advantages(terms: Terms, rewards: Mapping[str, Reward], config: Sa2VAGRPOConfig) -> Advantages:
    """Advantages of the weighted terms; 0 without weights, for a loop with the pathwise gradient alone."""
    weights = {name: reward.weight for name, reward in rewards.items() if reward.weight}
    if not weights:
        zeros = np.zeros_like(next(iter(terms.values.values())))
        return Advantages(zeros, np.full_like(zeros, np.nan), np.zeros(len(zeros), dtype=bool))
    weighted = {name: terms.values[name] for name in weights}
    noise = {name: terms.noise[name] for name in weights if name in terms.noise}
    how, scale = config.multi_objective_aggregation, config.scale_rewards
    return group_advantages(weighted, weights, how, scale, config.reward_floor, noise)


def _terms(rewards: Mapping[str, Reward], columns: Columns, prompts: int) -> Terms:
    """Functions of columns first, then functions of other terms."""
    terms, noise, generations = dict[str, np.ndarray](), dict[str, np.ndarray](), len(columns["prompts"])
    for name, reward in rewards.items():
        if not reward.of:
            values: Any = reward.function(**columns)
            if isinstance(values, EnsembleScores):
                values, members = values
                if (count := members.shape[1]) > 1:
                    noise[name] = ensemble_noise(members.reshape(prompts, -1, count))
            found = np.array(values, dtype=float)  # None is NaN
            if found.shape != (generations,):
                raise ValueError(f"reward {name}: {found.shape} values for {generations} generations")
            terms[name] = found.reshape(prompts, -1)
    for name, reward in rewards.items():
        if reward.of:
            terms[name] = np.asarray(reward.function(*(terms[part] for part in reward.of)))
    return Terms(terms, noise)


# ---- statistics -----------------------------------------------------------------------------------------------------


def rollout_statistics(rollouts: Rollouts, terms: Mapping[str, Terms]) -> dict[str, float]:
    """Means of the terms, lengths, the similarity of the masks of a group, and the share of answers without `[SEG]`."""
    values: dict[str, float] = {}
    for loop, of_loop in terms.items():
        for name, of_term in of_loop.values.items():
            present = of_term[~np.isnan(of_term)]
            if len(present):  # a reward that is missing everywhere has no mean
                values[f"{loop}/reward/{name}"] = float(present.mean())
            values[f"{loop}/missing/{name}"] = float(np.isnan(of_term).mean())
    if captions := rollouts.captions:
        lengths = [len(ids) for rollout in captions for ids in rollout.completion_ids]
        values["loop1/completion_length"] = float(np.mean(lengths))
        values["loop1/frac_truncated"] = float(np.mean([not one for own in captions for one in own.counted.tolist()]))
    if "loop2" in rollouts.columns:
        masks = rollouts.columns["loop2"]["predicted_masks"]
        values[MASK_IOU] = median_pair_iou(masks, rollouts.prompts)
        values["loop2/no_seg_share"] = float(np.mean([mask is None for mask in masks]))
    return values


def advantage_statistics(advantages: Mapping[str, Advantages]) -> dict[str, float]:
    """Mean and standard deviation of the rewards of each loop."""
    values = {}
    for loop, own in advantages.items():
        rewards = own.rewards[whole_groups(own.rewards)]
        if len(rewards):
            values[f"{loop}/reward_mean"] = float(rewards.mean())
            values[f"{loop}/reward_std"] = float(rewards.std(axis=1, ddof=1).mean())
        values[f"{loop}/frac_zero_std"] = float(1 - own.differ.mean())
        if own.below_noise is not None:
            values[f"{loop}/frac_below_noise"] = float(own.below_noise.mean())
    return values


def median_pair_iou(masks: Sequence[np.ndarray | None], prompts: int) -> float:
    """Median over `prompts` groups of the mean IoU of all pairs of masks in a group; 1 if no group has a pair.

    The masks, bool (H, W) or None, come one group after another.
    """
    means, count = [], len(masks) // prompts
    for start in range(0, len(masks), count):
        if pairs := list(combinations([mask for mask in masks[start : start + count] if mask is not None], 2)):
            left, right = (np.stack([pair[side] for pair in pairs]) for side in (0, 1))
            means.append(float(iou(left, right).mean()))
    return float(np.median(means)) if means else 1.0
