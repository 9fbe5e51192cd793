"""The checks and updates around each optimisation step, besides forward and backward pass."""

import time
from typing import Any

import torch
from transformers import TrainerCallback

from rl_reward_network.grpo.failures import fail_not_finite
from rl_reward_network.grpo.ranks import any_rank, first_message
from rl_reward_network.models.ema import trainable_tensors


class StepCallback(TrainerCallback):
    """Check the gradients before each optimisation step; after it, update partner and loop weights, and may stop.

    Args:
        trainer: Sa2VAGRPOTrainer.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self.trainer.start_time = time.monotonic()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Refuse a gradient that is not finite, which a finite loss can have; record the tensors with a gradient."""
        tensors = trainable_tensors(self.trainer.sa2va)
        gradients = {name: p.grad for name, p in tensors.items() if p.grad is not None}
        norms = torch.stack(torch._foreach_norm(list(gradients.values()))) if gradients else torch.zeros(0)
        if not norms.isfinite().all():
            fail_not_finite(self.trainer, "a gradient is not finite")
        not_zero = (norms > 0).tolist()
        self.trainer.tensors_with_gradient.update(name for name, flag in zip(gradients, not_zero, strict=True) if flag)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Update loop weights and partner, and stop when the time is over or the judge has failed."""
        self._update_loop_weights()
        rollouts_used_up = state.global_step % args.num_iterations == 0  # a checkpoint holds no half-used rollouts
        if rollouts_used_up:
            self._stop_without_judge(control)
        if self.trainer.ema is not None:
            self.trainer.ema.update(self.trainer.sa2va)
        if args.max_minutes is not None:
            late = any_rank(self.trainer.accelerator, self.trainer.seconds > 60 * args.max_minutes)
            if late and rollouts_used_up:
                self.trainer.ended = control.should_training_stop = control.should_save = True
        # A resumed run begins a line of its own, so the whole one must do so there, too; and no step is left out.
        control.should_log |= control.should_save or state.global_step >= state.max_steps

    def _stop_without_judge(self, control: Any) -> None:
        """Stop, with a checkpoint, if the judge of some process fails for good; METEOR alone is another objective."""
        trainer = self.trainer
        if trainer.judge is not None:
            trainer.judge_failure = first_message(trainer.accelerator, trainer.judge.failing())
            if trainer.judge_failure:
                control.should_training_stop = control.should_save = True

    def _update_loop_weights(self) -> None:
        """Update the loop weights with the gradient norms of this step, if they were measured: means over processes."""
        trainer, norms = self.trainer, self.trainer.gradient_norms
        if norms:
            means = torch.tensor([sum(values) / len(values) for values in norms.values()], device=trainer.args.device)
            means = trainer.accelerator.reduce(means, "mean").tolist()
            trainer.loop_weights.update(dict(zip(norms, means, strict=True)))
            for loop, norm in zip(norms, means, strict=True):
                trainer.metrics.record({f"{loop}/gradient_norm": norm, f"{loop}/weight": trainer.loop_weights[loop]})
            norms.clear()
