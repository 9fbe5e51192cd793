"""A curriculum: prompts whose groups have spread are drawn more often, and easy ones before hard ones.

A prompt is easy where its groups were paid well. The share of the prompts that are open grows from the easiest third to
all of them, as the square root of progress (competence-based curriculum, arXiv 1903.09848); a prompt that was never
drawn counts as open and as having spread.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rl_reward_network.grpo.config import Sa2VAGRPOConfig
from rl_reward_network.grpo.rollouts.order import PromptOrder

FIRST_SHARE = 1 / 3  # of the prompts, the easiest, that are open at the start
CLOSED = 0.05  # weight of a prompt that is not open yet, and of one without spread: none is lost for good
MEMORY = 0.5  # how much of what was known of a prompt stays when it is drawn again


class CurriculumOrder:
    """Chooses the prompts of each rollout by what earlier ones were paid; otherwise as `PromptOrder`.

    Chance follows from seed and rollout. What was paid is told by `note`, with the same numbers on every process.

    Args:
        count: number of prompts.
        chunk: prompts of one rollout of all processes.
        seed: equal seeds and equal rewards give equal orders.
        rollouts: of the whole run; progress is counted by them.
    """

    def __init__(self, count: int, chunk: int, seed: int, rollouts: int) -> None:
        self.count, self.chunk, self.seed, self.rollouts = count, chunk, seed, rollouts
        self.reward, self.spread = torch.full((count,), torch.nan), torch.ones(count)

    @property
    def rollouts_per_epoch(self) -> int:
        """Rollouts that take as many prompts as there are."""
        return self.count // self.chunk

    def indices(self, rollout: int) -> list[int]:
        """The prompts of a rollout, no prompt twice."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + rollout)
        weights = self.weights(rollout)
        return torch.multinomial(weights, self.chunk, replacement=False, generator=generator).tolist()

    def weights(self, rollout: int) -> Tensor:
        """float32 (count,): how likely each prompt is drawn, up to a constant."""
        progress = min(1.0, rollout / max(1, self.rollouts))
        share = (FIRST_SHARE**2 + (1 - FIRST_SHARE**2) * progress) ** 0.5
        known = self.reward[~self.reward.isnan()]
        least = known.quantile(1 - share) if len(known) else -torch.inf
        opened = self.reward.isnan() | (self.reward >= least)
        return torch.where(opened, 1.0, CLOSED) * self.spread.clamp(min=CLOSED)

    def note(self, paid: Sequence[tuple[int, float, bool]]) -> None:
        """What was seen of some prompts: index, mean reward (NaN where unknown), whether its group had spread."""
        for index, reward, spread in paid:
            before = self.reward[index]
            if reward == reward:
                self.reward[index] = reward if before.isnan() else MEMORY * before + (1 - MEMORY) * reward
            self.spread[index] = MEMORY * self.spread[index] + (1 - MEMORY) * float(spread)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"reward": self.reward, "spread": self.spread}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        self.reward, self.spread = state["reward"], state["spread"]


def prompt_order(count: int, args: Sa2VAGRPOConfig) -> PromptOrder | CurriculumOrder:
    """The order of `count` prompts; a ValueError where they are fewer than one optimisation step takes."""
    chunk = args.prompts_per_step * args.gradient_accumulation_steps * args.world_size
    order = PromptOrder(count, chunk, args.seed)
    if not args.curriculum:
        return order
    return CurriculumOrder(count, chunk, args.seed, args.planned_steps(order.rollouts_per_epoch) // args.num_iterations)
