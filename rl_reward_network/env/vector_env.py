"""Many environments side by side for PPO, stepped together: the monitor sees raw rewards, PPO sees them centred."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.utils import seeding
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, VecMonitor
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from rl_reward_network.env.sa2va_finetune_env import (
    PromptContext,
    observations,
    prompt_rewards,
    spaces,
    step_info,
)
from rl_reward_network.rewards.table import RewardName


class PromptVecEnv(VecEnv):
    """`n_envs` copies of `Sa2VAFinetuneEnv` over the same images, in one table: equal seeds give equal steps.

    Args:
        contexts, max_steps, reward: as `Sa2VAFinetuneEnv`.
        n_envs: environments; each has its own order of the images.
    """

    def __init__(self, contexts: Sequence[PromptContext], n_envs: int, max_steps: int, reward: RewardName) -> None:
        self.render_mode = None
        super().__init__(n_envs, *spaces(contexts))
        self.max_steps, self.hidden = max_steps, reward != "net"
        self.infos = [[step_info(c, prompt) for prompt in range(len(c.scores))] for c in contexts]  # N x P
        self.start = observations(contexts)  # (N, D), before the first prompt
        self.rewards = np.stack([prompt_rewards(context, reward) for context in contexts])  # (N, P)
        self._generators = [np.random.default_rng() for _ in range(n_envs)]
        self._waiting: list[list[int]] = [[] for _ in range(n_envs)]  # images still to come in this pass, last one next
        self._current = np.zeros(n_envs, dtype=np.int64)
        self._steps, self._best = np.zeros(n_envs, dtype=np.int64), np.zeros(n_envs, dtype=np.float32)

    def reset(self) -> VecEnvObs:
        """float32 (n_envs, D): the first image of each environment; seeds given before start a new pass."""
        for place, seed in enumerate(self._seeds):
            if seed is not None:
                self._generators[place], self._waiting[place] = seeding.np_random(seed)[0], []
        self._reset_seeds()
        self._begin(np.ones(self.num_envs, dtype=bool))
        return self._observations()

    def step_async(self, actions: np.ndarray) -> None:
        """int (n_envs,): the prompt each environment tries."""
        self._actions = np.asarray(actions)

    def step_wait(self) -> VecEnvStepReturn:
        """Observations, rewards, ends and infos of all environments; ended ones have begun their next episode."""
        paid = self.rewards[self._current, self._actions]
        rewards = np.maximum(paid - self._best, 0)
        self._best = np.maximum(self._best, paid)
        self._steps += 1
        done = self._steps == self.max_steps
        infos = [dict(self.infos[i][a]) for i, a in zip(self._current, self._actions, strict=True)]
        if done.any():
            last = self._observations()
            for place in np.flatnonzero(done):
                infos[place] |= {"terminal_observation": last[place], "TimeLimit.truncated": False}
            self._begin(done)
        return self._observations(), rewards, done, infos

    def state(self) -> dict[str, Any]:
        """Where the environments are: plain lists and numbers, for `restore`."""
        return {
            "generators": [generator.bit_generator.state for generator in self._generators],
            "waiting": [list(waiting) for waiting in self._waiting],
            "current": self._current.tolist(),
            "steps": self._steps.tolist(),
            "best": self._best.tolist(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to where `state` was taken."""
        for generator, saved in zip(self._generators, state["generators"], strict=True):
            generator.bit_generator.state = saved
        self._waiting = [list(waiting) for waiting in state["waiting"]]
        self._current, self._steps = np.array(state["current"]), np.array(state["steps"])
        self._best = np.array(state["best"], dtype=np.float32)

    def _begin(self, places: np.ndarray) -> None:
        """The next image in each of these environments (bool (n_envs,))."""
        for place in np.flatnonzero(places):
            if not self._waiting[place]:
                self._waiting[place] = self._generators[place].permutation(len(self.start)).tolist()
            self._current[place] = self._waiting[place].pop()
        self._steps[places], self._best[places] = 0, 0

    def _observations(self) -> np.ndarray:
        """float32 (n_envs, D), a fresh array."""
        seen = self.start[self._current]  # a copy
        seen[:, -2] = self._steps / self.max_steps
        if not self.hidden:
            seen[:, -1] = self._best
        return seen

    def close(self) -> None:
        """Nothing is held open."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """The same value for each environment: they share everything but their place."""
        return [getattr(self, attr_name) for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Refused: the environments share their table."""
        raise NotImplementedError("the environments share their table; make a new PromptVecEnv")

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        """Refused: there are no single environments inside."""
        raise NotImplementedError("there are no single environments inside; use Sa2VAFinetuneEnv")

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """No environment is wrapped."""
        return [False for _ in self._get_indices(indices)]


class CentredReward(VecEnvWrapper):
    """Takes each image's mean reward over all prompts from its reward.

    How easy an image is says nothing about which prompt suits it, yet it is most of the reward's spread. The mean does
    not depend on the action, so the best policy stays the same. Only for episodes of one prompt.

    Args:
        venv: environments whose step info names the image as `sample_id`.
        means: mean reward of each image.
    """

    def __init__(self, venv: VecEnv, means: dict[str, float]) -> None:
        super().__init__(venv)
        self.means = means

    def reset(self) -> VecEnvObs:
        """The first observations."""
        return self.venv.reset()

    def step_wait(self) -> VecEnvStepReturn:
        """The step with each reward less the mean reward of its image."""
        seen, rewards, dones, infos = self.venv.step_wait()
        means = np.array([self.means[info["sample_id"]] for info in infos], dtype=np.float32)
        return seen, rewards - means, dones, infos


def make_vector_env(
    contexts: Sequence[PromptContext], n_envs: int, seed: int, max_steps: int = 1, reward: RewardName = "net"
) -> VecEnv:
    """`n_envs` environments over the same images, each with its own order (seeds `seed`, `seed` + 1, ...).

    The reward is centred per image when episodes have one prompt; `info["episode"]["r"]` and `info["score"]` stay raw.

    Raises:
        ValueError: `n_envs` < 1, or contexts that do not fit together or to the reward.
    """
    if n_envs < 1:
        raise ValueError(f"n_envs: got {n_envs}; at least 1 environment is needed")
    venv: VecEnv = VecMonitor(PromptVecEnv(contexts, n_envs, max_steps, reward))
    if max_steps == 1:
        venv = CentredReward(venv, {c.sample_id: float(prompt_rewards(c, reward).mean()) for c in contexts})
    venv.seed(seed)
    return venv


def vector_state(venv: VecEnv) -> dict[str, Any]:
    """Where environments made by `make_vector_env` are, the monitor's open episodes included."""
    monitor, table = _parts(venv)
    episodes = {"returns": monitor.episode_returns.tolist(), "lengths": monitor.episode_lengths.tolist()}
    return {"table": table.state(), "monitor": episodes}


def restore_vector_state(venv: VecEnv, state: dict[str, Any]) -> None:
    """Go back to where `vector_state` was taken."""
    monitor, table = _parts(venv)
    table.restore(state["table"])
    monitor.episode_returns = np.array(state["monitor"]["returns"], dtype=np.float32)
    monitor.episode_lengths = np.array(state["monitor"]["lengths"], dtype=np.int32)


def _parts(venv: VecEnv) -> tuple[VecMonitor, PromptVecEnv]:
    """The monitor and the table inside the wrappers."""
    monitor = venv.venv if isinstance(venv, CentredReward) else venv
    assert isinstance(monitor, VecMonitor)
    assert isinstance(monitor.venv, PromptVecEnv)
    return monitor, monitor.venv
