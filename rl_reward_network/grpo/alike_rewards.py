"""A warning during training if the rewards of a loop do not differ for many steps: nothing is learned from them."""

import warnings
from collections.abc import Mapping, Sequence

from accelerate import Accelerator

from rl_reward_network.grpo.ranks import any_rank
from rl_reward_network.grpo.rollouts.rewards import LoopRollouts

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
