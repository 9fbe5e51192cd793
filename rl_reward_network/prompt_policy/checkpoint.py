"""The state of SB3's PPO between two rollouts; SB3's `save` leaves out random states, environments and the logger."""

from collections import deque
from typing import Any

import numpy as np
import torch
from stable_baselines3 import PPO

from rl_reward_network.env.vector_env import restore_vector_state, vector_state


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
        "environments": vector_state(model.env),
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
    restore_vector_state(model.env, state["environments"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    for key, value in state["unwritten"].items():
        model.logger.record(key, value, tuple(state["excluded"][key]) or None)
