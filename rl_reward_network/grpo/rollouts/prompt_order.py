"""The prompts of each optimisation step: a function of seed and step, never of a data loader's state.

A rollout is one sampling of all processes; it serves `num_iterations` optimisation steps. With a curriculum the choice
depends on earlier rewards, too: prompts whose groups have spread are drawn more often, and easy ones before hard ones.
A prompt is easy if the mean reward of its groups is high. The share of eligible prompts grows from the easiest third to
all of them, as the square root of progress (competence-based curriculum, arXiv 1903.09848); a prompt that was never
drawn counts as eligible and as having spread.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rl_reward_network.grpo.config import Sa2VAGRPOConfig

FIRST_SHARE = 1 / 3  # of the prompts, the easiest, that are eligible at the start
LOW_WEIGHT = 0.05  # of a prompt that is not eligible yet, and of one without spread: all can still be drawn
MEMORY = 0.5  # weight of earlier observations when a prompt is drawn again


class PromptOrder:
    """Shuffled prompts, each once per epoch, in chunks of one rollout; an incomplete last chunk is left out.

    Args:
        count: number of prompts.
        chunk: prompts of one rollout of all processes.
        seed: equal seeds give equal orders.

    Raises:
        ValueError: there are fewer prompts than one rollout takes.
    """

    def __init__(self, count: int, chunk: int, seed: int) -> None:
        if count < chunk:
            raise ValueError(
                f"{count} training prompts, but one optimisation step takes {chunk}; lower batch_size or add data"
            )
        self.count, self.chunk, self.seed = count, chunk, seed
        self.rollouts_per_epoch = count // chunk

    def indices(self, rollout: int) -> list[int]:
        """The prompts of a rollout (0, 1, ...), those of the first process and first batch first."""
        epoch, place = divmod(rollout, self.rollouts_per_epoch)
        return list(_shuffled(self.count, self.seed, epoch)[place * self.chunk : (place + 1) * self.chunk])


@lru_cache(maxsize=2)
def _shuffled(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return tuple(torch.randperm(count, generator=generator).tolist())


class CurriculumOrder:
    """The prompts of each rollout, drawn by the rewards of earlier ones; otherwise as `PromptOrder`.

    Random numbers depend on seed and rollout alone. `update` must get the same numbers on every process.

    Args:
        count: number of prompts.
        chunk: prompts of one rollout of all processes.
        seed: equal seeds and equal rewards give equal orders.
        rollouts: of the whole run, which progress is relative to.
    """

    def __init__(self, count: int, chunk: int, seed: int, rollouts: int) -> None:
        self.count, self.chunk, self.seed, self.rollouts = count, chunk, seed, rollouts
        self.rollouts_per_epoch = count // chunk
        self.reward, self.spread = torch.full((count,), torch.nan), torch.ones(count)

    def indices(self, rollout: int) -> list[int]:
        """The prompts of a rollout, none twice."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + rollout)
        weights = self.weights(rollout)
        return torch.multinomial(weights, self.chunk, replacement=False, generator=generator).tolist()

    def weights(self, rollout: int) -> Tensor:
        """float32 (count,): probability of each prompt, up to a constant."""
        progress = min(1.0, rollout / max(1, self.rollouts))
        share = (FIRST_SHARE**2 + (1 - FIRST_SHARE**2) * progress) ** 0.5
        known = self.reward[~self.reward.isnan()]
        threshold = known.quantile(1 - share) if len(known) else -torch.inf
        eligible = self.reward.isnan() | (self.reward >= threshold)
        return torch.where(eligible, 1.0, LOW_WEIGHT) * self.spread.clamp(min=LOW_WEIGHT)

    def update(self, outcomes: Sequence[tuple[int, float, bool]]) -> None:
        """Record (index, mean reward, NaN if unknown, whether a group had spread) of some prompts."""
        for index, reward, spread in outcomes:
            earlier = self.reward[index]
            if reward == reward:
                self.reward[index] = reward if earlier.isnan() else MEMORY * earlier + (1 - MEMORY) * reward
            self.spread[index] = MEMORY * self.spread[index] + (1 - MEMORY) * float(spread)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"reward": self.reward, "spread": self.spread}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        self.reward, self.spread = state["reward"], state["spread"]


def prompt_order(count: int, args: Sa2VAGRPOConfig) -> PromptOrder | CurriculumOrder:
    """The order of `count` prompts.

    Raises:
        ValueError: there are fewer prompts than one optimisation step takes.
    """
    chunk = args.prompts_per_step * args.gradient_accumulation_steps * args.world_size
    order = PromptOrder(count, chunk, args.seed)
    if not args.curriculum:
        return order
    return CurriculumOrder(count, chunk, args.seed, args.planned_steps(order.rollouts_per_epoch) // args.num_iterations)
