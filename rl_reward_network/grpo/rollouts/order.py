"""Which prompts an optimisation step takes: a function of seed and step, never of a data loader's state.

A rollout is one sampling of all processes; it serves `num_iterations` optimisation steps.
"""

from functools import lru_cache

import torch


class PromptOrder:
    """Shuffled prompts, each once an epoch, in chunks of one rollout; an epoch's last, incomplete chunk is left out.

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

    @property
    def rollouts_per_epoch(self) -> int:
        """Chunks of one epoch."""
        return self.count // self.chunk

    def indices(self, rollout: int) -> list[int]:
        """The prompts of a rollout (0, 1, ...), those of the first process and first batch first."""
        epoch, place = divmod(rollout, self.rollouts_per_epoch)
        return list(_shuffled(self.count, self.seed, epoch)[place * self.chunk : (place + 1) * self.chunk])


@lru_cache(maxsize=2)
def _shuffled(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return tuple(torch.randperm(count, generator=generator).tolist())
