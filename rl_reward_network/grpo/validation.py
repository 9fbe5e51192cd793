"""Validation during GRPO: curves on prompts of the validation split, and the stop rule against over-optimisation."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import TrainerCallback

from rl_reward_network.grpo.measure import Measured, measure, unpacked
from rl_reward_network.grpo.prompts import GRPOPrompt
from rl_reward_network.grpo.ranks import from_first_rank
from rl_reward_network.models.ema import copied
from rl_reward_network.rewards.foreground_maps import ForegroundMaps
from rl_reward_network.rewards.functions import learned_reward
from rl_reward_network.runs.stop_rule import over_optimised

PROXY, GOLD = "val/score", "val/gt_dice"
TAGS = {
    "dice": GOLD,
    "iou": "val/iou",
    "iou_of_drawn": "val/iou_of_drawn",
    "meteor": "val/meteor",
    "cycle_meteor": "val/cycle_meteor",
}


class ValidationCallback(TrainerCallback):
    """Measure the validation prompts every few steps, and before the first.

    With a reward network and true masks, the network's score is the proxy and Dice is the gold standard: training stops
    when the proxy rises while the gold standard has fallen, and the weights with the best Dice are restored.

    Args:
        trainer: Sa2VAGRPOTrainer.
        prompts: of the validation split.
        every: optimisation steps.
        maps: of the reward network of the run, if there is one.
    """

    def __init__(
        self, trainer: Any, prompts: Sequence[GRPOPrompt], every: int, maps: ForegroundMaps | None = None
    ) -> None:
        self.trainer, self.prompts, self.every, self.maps = trainer, prompts, every, maps
        self.proxy: list[float] = []
        self.gold: list[float] = []
        self.best_weights: dict[str, Tensor] = {}
        self.last_step = -1

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The first point, unless a resumed run has it already."""
        if state.global_step == 0:
            self._validate(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Add a point, and apply the stop rule."""
        if state.global_step % self.every == 0:
            self._validate(state)
        if over_optimised(self.proxy, self.gold) and state.global_step % args.num_iterations == 0:
            self.trainer.ended = control.should_training_stop = control.should_save = True

    def finish(self, state: Any) -> bool:
        """Restore the weights with the best Dice if the stop rule applies; returns whether it does."""
        if self.maps is None:
            return False
        if self.last_step != state.global_step:
            self._validate(state)
        if not over_optimised(self.proxy, self.gold):
            return False
        with torch.no_grad():
            for name, tensor in self.best_weights.items():
                self.trainer.sa2va.get_parameter(name).copy_(tensor)
        return True

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"proxy": self.proxy, "gold": self.gold, "peak": self.best_weights, "seen": self.last_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        self.proxy, self.gold = state["proxy"], state["gold"]
        self.best_weights, self.last_step = state["peak"], state["seen"]

    def _validate(self, state: Any) -> None:
        """Rank 0 measures and broadcasts: all processes must stop at the same step, or none."""
        self.last_step = state.global_step
        points = from_first_rank(self.trainer.accelerator, self._points)
        if PROXY in points and GOLD in points:
            if not self.gold or points[GOLD] > max(self.gold):
                self.best_weights = copied(self.trainer.sa2va)
            self.proxy.append(points[PROXY])
            self.gold.append(points[GOLD])
        self.trainer.metrics.record(points)

    def _points(self) -> dict[str, float]:
        """tag -> mean over the prompts."""
        longest, cache = self.trainer.args.max_completion_length, self.trainer.rollout_generator.cache
        measured = measure(self.trainer.sa2va, self.prompts, cache, longest, quiet=True)
        columns = {tag: measured.values[name] for name, tag in TAGS.items() if name in measured.values}
        points = {tag: float(np.nanmean(column)) for tag, column in columns.items() if np.isfinite(column).any()}
        if self.maps is not None:
            points[PROXY] = float(scores(self.maps, self.prompts, measured).mean())
        return points


def scores(maps: ForegroundMaps, prompts: Sequence[GRPOPrompt], measured: Measured) -> np.ndarray:
    """float64 (N,): the reward network's score of each prompt's mask; 0 without a mask."""
    reward = learned_reward(maps)
    values = [
        reward(images=[prompt.load()[0]], predicted_masks=[unpacked(mask)])[0]
        for prompt, mask in zip(prompts, measured.masks, strict=True)
    ]
    return np.array(values, dtype=float)
