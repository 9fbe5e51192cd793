"""SB3 callbacks of step 2: the curves of each rollout, validation with the stop rule."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import KVWriter, filter_excluded_keys
from tqdm import tqdm

from rl_reward_network.curves import Curves, over_optimised
from rl_reward_network.env.sa2va_finetune_env import PromptContext
from rl_reward_network.ppo.policy import choose_prompts
from rl_reward_network.rewards.table import RewardName


class CurvesWriter(KVWriter):
    """Output format of SB3's logger that writes each rollout to `Curves`.

    Clock times and numbers that are not finite are left out of metrics.jsonl, so that equal runs give equal files.
    """

    def __init__(self, curves: Curves) -> None:
        self.curves = curves

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        """Add the rollout that ended at `step`."""
        self.curves.add_scalars(filter_excluded_keys(key_values, key_excluded, "tensorboard"), step)
        numbers = {name: float(value) for name, value in key_values.items() if not name.startswith("time/")}
        self.curves.add_row({"step": step, **{name: value for name, value in numbers.items() if math.isfinite(value)}})

    def close(self) -> None:
        """Close the event file."""
        self.curves.close()


class RolloutCurves(BaseCallback):
    """Logs the raw scores and Dice of each rollout, and moves the progress bar.

    Args:
        curves: the curves so far.
        bar: progress in steps of all environments.
    """

    def __init__(self, curves: Curves, bar: "tqdm[Any]") -> None:
        super().__init__()
        self.curves, self.bar = curves, bar

    def _on_rollout_start(self) -> None:
        self.infos: list[dict[str, Any]] = []

    def _on_step(self) -> bool:
        self.infos += self.locals["infos"]
        return True

    def _on_rollout_end(self) -> None:
        self.bar.update(self.num_timesteps - self.bar.n)
        mean_return = float(np.mean([episode["r"] for episode in self.model.ep_info_buffer or ()]))
        self.logger.record("custom/best_reward", max([mean_return, *self.curves.column("custom/best_reward")]))
        record_mean(self, "custom/reward_net_score", [info["score"] for info in self.infos])
        record_mean(self, "custom/gt_dice", [info["dice"] for info in self.infos if "dice" in info])


class ValidationCallback(BaseCallback):
    """Logs score and Dice of the greedy policy on the validation images, and applies the stop rule.

    Args:
        contexts: validation images; may be empty.
        max_steps: steps per episode.
        reward: the reward of training.
        curves: the curves so far.
        stop: whether there is an action that ends the episode.

    Attributes:
        peak: `dice` and `policy`, the best mean Dice so far and the weights that reached it; empty before the first.
        stopped: whether the stop rule ended the run.
    """

    def __init__(
        self,
        contexts: Sequence[PromptContext],
        max_steps: int,
        reward: RewardName,
        curves: Curves,
        stop: bool = False,
    ) -> None:
        super().__init__()
        self.contexts, self.max_steps, self.reward, self.curves = contexts, max_steps, reward, curves
        self.stop = stop
        self.peak: dict[str, Any] = {}
        self.stopped = False

    def _on_rollout_start(self) -> None:
        self.stopped = self._fallen()

    def _on_step(self) -> bool:
        return not self.stopped

    def _on_rollout_end(self) -> None:
        if not len(self.contexts):
            return
        scores, dices = self._greedy()
        record_mean(self, "custom/val_score", scores)
        record_mean(self, "custom/val_gt_dice", dices)
        if dices and np.mean(dices) > self.peak.get("dice", -1):
            weights = {name: tensor.clone() for name, tensor in self.model.policy.state_dict().items()}
            self.peak = {"dice": float(np.mean(dices)), "policy": weights}

    def over_optimised(self) -> bool:
        """Whether the reward was over-optimised when training ended.

        No rollout follows the last update, so its weights are validated here.
        """
        return bool(self.peak) and (self.stopped or self._fallen(*self._greedy()))

    def _fallen(self, scores: Sequence[float] = (), dices: Sequence[float] = ()) -> bool:
        """The stop rule on the curves so far and one more validation; False for a reward of labels alone."""
        proxy, gold = (self.curves.column(tag) for tag in ("custom/val_score", "custom/val_gt_dice"))
        if len(dices):
            proxy, gold = [*proxy, float(np.mean(scores))], [*gold, float(np.mean(dices))]
        return self.reward in ("net", "mix") and over_optimised(proxy, gold)

    def _greedy(self) -> tuple[list[float], list[float]]:
        """Score of each validation image under the greedy policy, and Dice of each labelled one."""
        actions = choose_prompts(self.model.policy, self.contexts, self.max_steps, self.reward == "net", self.stop)
        pairs = list(zip(self.contexts, actions, strict=True))
        dices = [float(context.metrics["dice"][action]) for context, action in pairs if context.metrics]
        return [float(context.scores[action]) for context, action in pairs], dices


def record_mean(callback: BaseCallback, tag: str, values: Sequence[float]) -> None:
    """Log the mean of the values; nothing when there are none, such as Dice of unlabelled images."""
    if len(values):
        callback.logger.record(tag, float(np.mean(values)))
