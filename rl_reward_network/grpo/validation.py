"""Validation while GRPO trains: curves on items that are not trained on, and the stop against over-optimisation."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import TrainerCallback

from rl_reward_network.grpo.items import GRPOItem
from rl_reward_network.grpo.measure import Measured, measure, unpacked
from rl_reward_network.grpo.ranks import by_first
from rl_reward_network.models.ema import copied
from rl_reward_network.rewards.functions import learned_reward
from rl_reward_network.rewards.learned import MaskQualityModel
from rl_reward_network.runs.stop_rule import over_optimised

PROXY, GOLD = "val/score", "val/gt_dice"
SHOWN = {"dice": GOLD, "iou": "val/iou", "iou_of_drawn": "val/iou_of_drawn", "meteor": "val/meteor"} | {
    "cycle_meteor": "val/cycle_meteor"
}


class Watch(TrainerCallback):
    """Measures validation items every so many steps, and before the first.

    Where a reward network pays and items have a truth, its score there is the proxy and their Dice the gold: training
    stops when the former rises while the latter has fallen, and goes back to the weights of the best Dice.

    Args:
        trainer: Sa2VAGRPOTrainer.
        items: of the validation split.
        every: optimisation steps.
        network: the reward network that pays, if one does.
    """

    def __init__(
        self, trainer: Any, items: Sequence[GRPOItem], every: int, network: MaskQualityModel | None = None
    ) -> None:
        self.trainer, self.items, self.every, self.network = trainer, items, every, network
        self.proxy: list[float] = []
        self.gold: list[float] = []
        self.peak: dict[str, Tensor] = {}
        self.seen = -1

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The first point, unless a resumed run has it already."""
        if state.global_step == 0:
            self._look(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A point, and the rule."""
        if state.global_step % self.every == 0:
            self._look(state)
        if over_optimised(self.proxy, self.gold) and state.global_step % args.num_iterations == 0:
            self.trainer.ended = control.should_training_stop = control.should_save = True

    def finish(self, state: Any) -> bool:
        """Go back to the weights of the best Dice where the rule says so; whether it did."""
        if self.network is None:
            return False
        if self.seen != state.global_step:
            self._look(state)
        if not over_optimised(self.proxy, self.gold):
            return False
        with torch.no_grad():
            for name, tensor in self.peak.items():
                self.trainer.sa2va.get_parameter(name).copy_(tensor)
        return True

    def _look(self, state: Any) -> None:
        """The first process measures and tells the others: all of them must stop at the same step, or none."""
        self.seen = state.global_step
        points = by_first(self.trainer.accelerator, self._points)
        if PROXY in points and GOLD in points:
            self._compare(points[PROXY], points[GOLD])
        for tag, value in points.items():
            self.trainer.statistics[tag].append(value)

    def _points(self) -> dict[str, float]:
        """tag -> mean over the items."""
        longest, cache = self.trainer.args.max_completion_length, self.trainer.maker.cache
        found = measure(self.trainer.sa2va, self.items, cache, longest, quiet=True)
        points = {tag: float(np.nanmean(found.values[name])) for name, tag in SHOWN.items() if _known(found, name)}
        if self.network is not None:
            points[PROXY] = mean_score(self.network, self.items, found)
        return points

    def _compare(self, proxy: float, gold: float) -> None:
        if not self.gold or gold > max(self.gold):
            self.peak = copied(self.trainer.sa2va)
        self.proxy.append(proxy)
        self.gold.append(gold)


def mean_score(network: MaskQualityModel, items: Sequence[GRPOItem], measured: Measured) -> float:
    """Mean of the reward network's scores of the masks that the items' questions bring."""
    return float(np.mean(scores(network, items, measured)))


def scores(network: MaskQualityModel, items: Sequence[GRPOItem], measured: Measured) -> np.ndarray:
    """float64 (N,): the reward network's score of each item's mask; 0 without one."""
    pays = learned_reward(network)
    found = [
        pays(images=[item.load()[0]], predicted_masks=[unpacked(mask)])[0]
        for item, mask in zip(items, measured.masks, strict=True)
    ]
    return np.array(found, dtype=float)


def _known(measured: Measured, name: str) -> bool:
    return name in measured.values and bool(np.isfinite(measured.values[name]).any())
