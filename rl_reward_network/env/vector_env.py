"""Several environments side by side for PPO: the monitor sees raw scores, PPO sees them centred per image."""

from collections.abc import Sequence

import numpy as np
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecEnvWrapper, VecMonitor
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from rl_reward_network.env.sa2va_finetune_env import PromptContext, Sa2VAFinetuneEnv


class CentredReward(VecEnvWrapper):
    """Takes each image's mean score over all prompts from its reward.

    How easy an image is says nothing about which prompt suits it, yet it is most of the reward's spread. The mean does
    not depend on the action, so the best policy stays the same. Only for episodes of one prompt.

    Args:
        venv: environments whose step info names the image as `sample_id`.
        means: mean score of each image.
    """

    def __init__(self, venv: VecEnv, means: dict[str, float]) -> None:
        super().__init__(venv)
        self.means = means

    def reset(self) -> VecEnvObs:
        """The first observations."""
        return self.venv.reset()

    def step_wait(self) -> VecEnvStepReturn:
        """The step with each reward less the mean score of its image."""
        observations, rewards, dones, infos = self.venv.step_wait()
        means = np.array([self.means[info["sample_id"]] for info in infos], dtype=np.float32)
        return observations, rewards - means, dones, infos


def make_vector_env(
    contexts: Sequence[PromptContext],
    n_envs: int,
    seed: int,
    max_steps: int = 1,
    reward_uses_labels: bool = False,
) -> VecEnv:
    """`n_envs` environments over the same images, each with its own order (seeds `seed`, `seed` + 1, ...).

    The reward is centred per image when episodes have one prompt; `info["episode"]["r"]` and `info["score"]` stay raw.

    Raises:
        ValueError: `n_envs` < 1, or contexts that do not fit together.
    """
    if n_envs < 1:
        raise ValueError(f"n_envs: got {n_envs}; at least 1 environment is needed")
    make = [lambda: Sa2VAFinetuneEnv(contexts, max_steps, reward_uses_labels)] * n_envs
    venv: VecEnv = VecMonitor(DummyVecEnv(make))  # type: ignore[arg-type]  # SB3 declares gym.Env without parameters
    if max_steps == 1:
        venv = CentredReward(venv, {context.sample_id: float(context.scores.mean()) for context in contexts})
    venv.seed(seed)
    return venv
