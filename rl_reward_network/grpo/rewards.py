"""From rollouts to advantages: reward functions are called with columns, and groups receive their advantages.

Rewards are computed by micro-batch, advantages from those of a whole optimisation step, of all processes.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator

from rl_reward_network.grpo.grpo_config import Sa2VAGRPOConfig
from rl_reward_network.grpo.image_context import Mask, PromptBatch
from rl_reward_network.grpo.ranks import any_rank, from_all_ranks
from rl_reward_network.grpo.settings import GRPOPlan
from rl_reward_network.models.sa2va.generation_sa2va import Answer
from rl_reward_network.rewards.combine import Advantages, ensemble_noise, group_advantages, whole_groups
from rl_reward_network.rewards.functions import (
    CaptionJudge,
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
from rl_reward_network.rewards.learned import ForegroundMaps
from rl_reward_network.rewards.metrics import iou
from rl_reward_network.rewards.table import IMAGE_REWARDS, MASK_REWARDS, WITH_OWN_FLAG


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


if TYPE_CHECKING:
    from rl_reward_network.grpo.rollouts import RolloutGroup
MicroBatch = tuple[Sequence["RolloutGroup"], Mapping[str, LoopRollouts]]


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
        ValueError: a name that is in neither `MASK_REWARDS` nor `IMAGE_REWARDS`, or iou, which has separate flags; or a
            negative weight.
    """
    for name, weight in weights.items():
        if not 0 <= weight < math.inf:
            raise ValueError(f"weight of the mask reward {name} is {weight}, expected 0 or more")
        if name not in MASK_REWARDS | IMAGE_REWARDS or name == WITH_OWN_FLAG:
            known = ", ".join(MASK_REWARDS | IMAGE_REWARDS)
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


MASK_IOU, ZERO_STD = "loop2/mask_iou_in_group", "loop2/frac_zero_std"  # inputs of the spread controller


def rollout_statistics(groups: Sequence["RolloutGroup"], rollouts: Mapping[str, LoopRollouts]) -> dict[str, float]:
    """Terms, lengths, the similarity of the masks of a group, and the share of answers without `[SEG]`.

    Args:
        groups: P of them.
        rollouts: loop -> its rollouts, with terms.
    """
    values: dict[str, float] = {}
    for loop, loop_rollouts in rollouts.items():
        values |= {f"{loop}/{name}": value for name, value in _term_means(loop_rollouts).items()}
    if "loop1" in rollouts:
        values |= {f"loop1/{name}": value for name, value in _lengths(groups).items()}
    if "loop2" in rollouts:
        masks = rollouts["loop2"].columns["predicted_masks"]
        values[MASK_IOU] = median_pair_iou(masks, len(groups))
        values["loop2/no_seg_share"] = float(np.mean([mask is None for mask in masks]))
    return values


def advantage_statistics(rollouts: Mapping[str, LoopRollouts]) -> dict[str, float]:
    """Mean and spread of the rewards of each loop, with advantages."""
    values = {}
    for loop, loop_rollouts in rollouts.items():
        advantages = loop_rollouts.advantages
        assert advantages is not None
        rewards = advantages.rewards[whole_groups(advantages.rewards)]
        if len(rewards):
            values[f"{loop}/reward_mean"] = float(rewards.mean())
            values[f"{loop}/reward_std"] = float(rewards.std(axis=1, ddof=1).mean())
        values[f"{loop}/frac_zero_std"] = float(1 - advantages.spread.mean())
        if advantages.below_noise is not None:
            values[f"{loop}/frac_below_noise"] = float(advantages.below_noise.mean())
    return values


def _term_means(rollouts: LoopRollouts) -> dict[str, float]:
    """Means over the generations whose reward is known."""
    values = {}
    for name, terms in rollouts.terms.items():
        present = terms[~np.isnan(terms)]
        if len(present):  # a reward that is missing everywhere has no mean
            values[f"reward/{name}"] = float(present.mean())
        values[f"missing/{name}"] = float(np.isnan(terms).mean())
    return values


def _lengths(groups: Sequence["RolloutGroup"]) -> dict[str, float]:
    """Tokens of a caption, and the share of truncated captions."""
    lengths = [len(ids) for group in groups for ids in group.completion_ids]
    truncated = [not counted for group in groups if group.counted is not None for counted in group.counted.tolist()]
    return {
        "completion_length": float(np.mean(lengths)),
        "frac_truncated": float(np.mean(truncated)) if truncated else 0.0,
    }


def median_pair_iou(masks: Sequence[np.ndarray | None], prompts: int) -> float:
    """Median over groups of the mean IoU of all pairs of masks in a group; 1 if no group has a pair.

    Args:
        masks: bool (H, W) or None, the groups one after another.
        prompts: number of groups.
    """
    count = len(masks) // prompts
    means = []
    for start in range(0, len(masks), count):
        group_masks = [mask for mask in masks[start : start + count] if mask is not None]
        pairs = list(combinations(group_masks, 2))
        if pairs:
            left, right = (np.stack([pair[side] for pair in pairs]) for side in (0, 1))
            means.append(float(iou(left, right).mean()))
    return float(np.median(means)) if means else 1.0


LONGEST = 20  # optimisation steps in a row
REMEDIES = {
    "loop1": "raise temperature or num_generations, or weigh a reward that differs between captions",
    "loop2": "raise num_mask_generations, or weigh a reward that differs between masks",
}


class AlikeRewards:
    """Counts the steps in a row in which the rewards of every group of a loop were alike.

    Args:
        loops: those that have a weight, and rewards with one.

    Attributes:
        steps: loop -> optimisation steps in a row; part of a checkpoint.
    """

    def __init__(self, loops: Sequence[str]) -> None:
        self.loops, self.steps = loops, dict.fromkeys(loops, 0)
        self._differed: dict[str, bool] = {}  # of the loops that took part in this step, on this process

    def note(self, rollouts: Mapping[str, LoopRollouts]) -> None:
        """Take in the rollouts of a micro-batch."""
        for loop, loop_rollouts in rollouts.items():
            if loop in self.loops and loop_rollouts.advantages is not None:
                self._differed[loop] = self._differed.get(loop, False) or bool(loop_rollouts.advantages.spread.any())

    def end_step(self, accelerator: Accelerator, step: int, uses: int) -> None:
        """Count, and warn once the limit is reached; every process must call this.

        Args:
            accelerator: of all processes.
            step: optimisation steps so far.
            uses: optimisation steps on these rollouts.
        """
        for loop, differed in sorted(self._differed.items()):
            before = self.steps[loop]
            self.steps[loop] = 0 if any_rank(accelerator, differed) else before + uses
            if before < LONGEST <= self.steps[loop] and accelerator.is_main_process:
                last = step + uses
                warnings.warn(
                    f"steps {last - self.steps[loop] + 1} to {last}: the rewards of every group of {loop} were alike, "
                    f"so nothing was learned from them; {REMEDIES[loop]}",
                    stacklevel=2,
                )
        self._differed.clear()


def loop_rewards(
    plan: GRPOPlan, kind: str, judge: CaptionJudge | None, maps: ForegroundMaps | None
) -> dict[str, dict[str, Reward]]:
    """The rewards of both loops; every term that can be computed is included, so that it is logged.

    Raises:
        ValueError: a weight of the reward network without one, or a judge in only one of `plan` and `judge`.
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
        terms |= mask_reward_terms((plan.mask_rewards or {}).get(loop, {}))
    return {"loop1": loop1, "loop2": loop2}


def _caption_rewards(weight: float, judge: CaptionJudge | None) -> dict[str, Reward]:
    """METEOR is the caption reward, or with a judge the sum of both; each is also logged alone."""
    if judge is None:
        return {"meteor": Reward(meteor_reward, weight)}
    return {
        "meteor": Reward(meteor_reward, 0.0),
        "judge": Reward(judge_reward(judge), 0.0),
        "caption": Reward(judged_caption_reward(judge), weight, of=("meteor", "judge")),
    }
