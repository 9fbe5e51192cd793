"""The state of SB3's PPO between two rollouts; SB3's `save` leaves out random states, environments and the logger."""

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv, VecMonitor

from rl_reward_network.curves import save_checkpoint

CHECKPOINT_SECONDS = 1.0  # minimum time between checkpoints: writing one takes as long as ten steps


def ppo_state(model: PPO) -> dict[str, Any]:
    """The state on which the next rollouts depend, as tensors and plain values."""
    assert model.env is not None
    name, keys, *rest = tuple(np.random.get_state(legacy=True))
    return {
        "policy": model.policy.state_dict(),
        "optimizer": model.policy.optimizer.state_dict(),
        "num_timesteps": model.num_timesteps,
        "updates": model._n_updates,
        "last_obs": torch.tensor(model._last_obs),
        "episode_starts": torch.tensor(model._last_episode_starts),
        "episodes": [{"r": float(e["r"]), "l": int(e["l"])} for e in model.ep_info_buffer or ()],
        "environments": _vector_state(model.env),
        "numpy": [name, torch.tensor(np.asarray(keys, dtype=np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "unwritten": {key: float(value) for key, value in model.logger.name_to_value.items()},
        "excluded": {key: list(value or ()) for key, value in model.logger.name_to_excluded.items()},
    }


def restore_ppo(model: PPO, state: dict[str, Any]) -> None:
    """Restore the state that `ppo_state` returned, in a model of the same settings; `learn` must not reset it."""
    assert model.env is not None
    model.policy.load_state_dict(state["policy"])
    model.policy.optimizer.load_state_dict(state["optimizer"])
    model.num_timesteps, model._n_updates = state["num_timesteps"], state["updates"]
    model._last_obs, model._last_episode_starts = state["last_obs"].numpy(), state["episode_starts"].numpy()
    episodes = [{"r": np.float32(e["r"]), "l": np.int32(e["l"])} for e in state["episodes"]]
    model.ep_info_buffer, model.ep_success_buffer = deque(episodes, maxlen=100), deque(maxlen=100)
    _restore_vector_state(model.env, state["environments"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    for key, value in state["unwritten"].items():
        model.logger.record(key, value, tuple(state["excluded"][key]) or None)


def _vector_state(monitor: VecEnv) -> dict[str, Any]:
    """The state of monitored environments, unfinished episodes included."""
    assert isinstance(monitor, VecMonitor)
    episodes = {"returns": monitor.episode_returns.tolist(), "lengths": monitor.episode_lengths.tolist()}
    return {"environments": monitor.env_method("state"), "monitor": episodes}


def _restore_vector_state(monitor: VecEnv, state: dict[str, Any]) -> None:
    assert isinstance(monitor, VecMonitor)
    for index, environment in enumerate(state["environments"]):
        monitor.env_method("restore", environment, indices=index)
    monitor.episode_returns = np.array(state["monitor"]["returns"], dtype=np.float32)
    monitor.episode_lengths = np.array(state["monitor"]["lengths"], dtype=np.int32)


class RolloutCheckpoint(BaseCallback):
    """Writes a checkpoint at the start of a rollout, at most one per `CHECKPOINT_SECONDS`.

    Args:
        path: the file.
        peak: the best weights so far, which are part of the checkpoint.
    """

    def __init__(self, path: Path, peak: Callable[[], Any]) -> None:
        super().__init__()
        self.path, self.peak, self.next_time = path, peak, 0.0

    def _on_rollout_start(self) -> None:
        if time.monotonic() < self.next_time:
            return
        assert isinstance(self.model, PPO)
        save_checkpoint(self.path, {**ppo_state(self.model), "peak": self.peak()})
        self.next_time = time.monotonic() + CHECKPOINT_SECONDS

    def _on_step(self) -> bool:
        return True
