"""PPO of experiment 2: curves, validation, checkpoints, and the weights that are best on validation images."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor
from tqdm import tqdm

from rl_reward_network.curves import Curves, load_checkpoint
from rl_reward_network.env.edits import EditedImage
from rl_reward_network.env.operations import OPERATIONS
from rl_reward_network.env.post_process_env import PostProcessEnv
from rl_reward_network.ppo.callbacks import CurvesWriter, record_mean
from rl_reward_network.ppo.checkpoint import RolloutCheckpoint, restore_ppo
from rl_reward_network.ppo.config import PromptPPOConfig
from rl_reward_network.ppo.post_policy import architecture, choose_operations
from rl_reward_network.ppo.ppo import new_ppo, one_thread
from rl_reward_network.run import CHECKPOINT


def train_post_policy(
    train: Sequence[EditedImage], val: Sequence[EditedImage], config: PromptPPOConfig, run_dir: Path
) -> PPO:
    """Train a post-processing policy with SB3's PPO; it ends with the weights of the highest validation reward.

    Writes `run_dir`/logs (TensorBoard), metrics.jsonl and, at the start of a rollout, checkpoint.pt. If a checkpoint
    exists, training continues from it and ends with the weights of an uninterrupted run.

    Args:
        train: training images with their rewards; observations are standardised by them.
        val: images for validating the greedy policy after each rollout.
        config: settings of PPO.
        run_dir: run folder; made when missing.
    """
    venv = VecMonitor(DummyVecEnv([lambda: PostProcessEnv(train, len(OPERATIONS), config.max_steps)] * config.n_envs))
    venv.seed(config.seed)
    model = _new_ppo(venv, train, config)
    state = load_checkpoint(run_dir / CHECKPOINT)
    done = state.get("num_timesteps", 0)
    curves = Curves(run_dir, {"step": done}, board_step=done)
    model.set_logger(Logger(str(run_dir / "logs"), [CurvesWriter(curves)]))
    if state:
        restore_ppo(model, state)
    validation = Validation(val, config.max_steps, state.get("peak"))
    bar = tqdm(total=config.whole_timesteps, initial=done, desc="PPO", unit="step")
    with closing(venv), closing(curves), bar, one_thread():
        callbacks = [PostCurves(bar), validation, RolloutCheckpoint(run_dir / CHECKPOINT, lambda: validation.peak)]
        model.learn(config.whole_timesteps - done, callbacks, reset_num_timesteps=not state)
        validation.finish()
    return model


def _new_ppo(venv: Any, train: Sequence[EditedImage], config: PromptPPOConfig) -> PPO:
    """SB3's PPO on the CPU; its policy standardises by the unchanged masks."""
    environment = PostProcessEnv(train, len(OPERATIONS), config.max_steps)
    observations = np.stack([environment.observe(image, ()) for image in train])
    return new_ppo(venv, architecture(observations), config)


class PostCurves(BaseCallback):
    """Logs the Dice of the masks at the end of episodes, and moves the progress bar."""

    def __init__(self, bar: "tqdm[Any]") -> None:
        super().__init__()
        self.bar = bar

    def _on_rollout_start(self) -> None:
        self.dices: list[float] = []

    def _on_step(self) -> bool:
        ended = [info for info, done in zip(self.locals["infos"], self.locals["dones"], strict=True) if done]
        self.dices += [info["dice"] for info in ended if "dice" in info]
        return True

    def _on_rollout_end(self) -> None:
        self.bar.update(self.num_timesteps - self.bar.n)
        record_mean(self, "custom/gt_dice", self.dices)


class Validation(BaseCallback):
    """Logs reward and Dice of the greedy policy on validation images, and keeps the weights of the best reward.

    Args:
        images: validation images.
        max_steps: operations per episode.
        peak: the attribute of that name, of a resumed run.

    Attributes:
        peak: `reward` and `policy`, the best mean reward so far and its weights; None before the first.
    """

    def __init__(self, images: Sequence[EditedImage], max_steps: int, peak: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.images, self.max_steps, self.peak = images, max_steps, peak

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        chosen = choose_operations(self.model.policy, self.images, self.max_steps)
        states = [image.state(operations) for image, operations in zip(self.images, chosen, strict=True)]
        record_mean(self, "custom/val_reward", [state.reward for state in states])
        record_mean(self, "custom/val_gt_dice", [state.info["dice"] for state in states if "dice" in state.info])
        self._remember(float(np.mean([state.reward for state in states])))

    def _remember(self, reward: float) -> None:
        if self.peak is None or reward > self.peak["reward"]:
            weights = {name: tensor.clone() for name, tensor in self.model.policy.state_dict().items()}
            self.peak = {"reward": reward, "policy": weights}

    def finish(self) -> None:
        """Validate the last update, which no rollout follows, and restore the weights of the best reward."""
        chosen = choose_operations(self.model.policy, self.images, self.max_steps)
        pairs = zip(self.images, chosen, strict=True)
        self._remember(float(np.mean([image.state(operations).reward for image, operations in pairs])))
        assert self.peak is not None
        self.model.policy.load_state_dict(self.peak["policy"])
