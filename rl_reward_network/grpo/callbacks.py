"""What happens around each optimisation step besides forward and backward pass."""

import time
from typing import Any

import torch
from transformers import TrainerCallback

from rl_reward_network.grpo.ranks import by_any, told_by_any
from rl_reward_network.models.ema import trainable_tensors


class AroundEachStep(TrainerCallback):
    """Looks at the gradients before each optimisation step; moves the partner after it, and stops in time.

    Args:
        trainer: Sa2VAGRPOTrainer.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """The clock starts."""
        self.trainer.began = time.monotonic()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """A finite loss may have a gradient that is not: the weights must not get it. What has one at all is noted."""
        own = {name: p.grad for name, p in trainable_tensors(self.trainer.sa2va).items() if p.grad is not None}
        norms = torch.stack(torch._foreach_norm(list(own.values()))) if own else torch.zeros(0)
        if not norms.isfinite().all():
            self.trainer.stop("a gradient is not finite")
        reached = (norms > 0).tolist()
        self.trainer.reached.update(name for name, moves in zip(own, reached, strict=True) if moves)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the weights moved."""
        self._weigh_loops()
        self._look_after_judge(state, control)
        if self.trainer.ema is not None:
            self.trainer.ema.update(self.trainer.sa2va)
        if args.max_minutes is not None:
            late = by_any(self.trainer.accelerator, self.trainer.seconds > 60 * args.max_minutes)
            if late and state.global_step % args.num_iterations == 0:  # never between rollouts' uses
                self.trainer.ended = control.should_training_stop = control.should_save = True

    def _look_after_judge(self, state: Any, control: Any) -> None:
        """Stop, with a checkpoint, where a process has lost its judge: METEOR alone was not asked for."""
        trainer = self.trainer
        if trainer.judge is not None and state.global_step % trainer.args.num_iterations == 0:
            trainer.lost_judge = told_by_any(trainer.accelerator, trainer.judge.failing())
            if trainer.lost_judge:
                control.should_training_stop = control.should_save = True

    def _weigh_loops(self) -> None:
        """Tell the loop weights the norms of this step, if any were measured: the mean over all processes."""
        own, trainer = self.trainer.gradient_norms, self.trainer
        if own:
            means = torch.tensor([sum(norms) / len(norms) for norms in own.values()], device=trainer.args.device)
            means = trainer.accelerator.reduce(means, "mean").tolist()
            trainer.loop_weights.note(dict(zip(own, means, strict=True)))
            for loop, norm in zip(own, means, strict=True):
                trainer.statistics[f"{loop}/gradient_norm"].append(norm)
                trainer.statistics[f"{loop}/weight"].append(trainer.loop_weights[loop])
            own.clear()
