"""Several environments for PPO: SB3's monitor records raw rewards, PPO learns from rewards centred per image."""

from collections.abc import Sequence

import numpy as np
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecEnvWrapper, VecMonitor
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from rl_reward_network.env.sa2va_finetune_env import PromptContext, Sa2VAFinetuneEnv, prompt_rewards
from rl_reward_network.rewards.table import RewardName


class CentredReward(VecEnvWrapper):
    """Subtracts the mean reward of the image's actions from each reward.

    Most of the variance of the reward lies between images, not between prompts. The mean does not depend on the action,
    so the best policy stays the same. Only for episodes of one step.

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
        """The step, with each reward minus the mean reward of its image."""
        observations, rewards, dones, infos = self.venv.step_wait()
        means = np.array([self.means[info["sample_id"]] for info in infos], dtype=np.float32)
        return observations, rewards - means, dones, infos


def make_vector_env(
    contexts: Sequence[PromptContext],
    n_envs: int,
    seed: int,
    max_steps: int = 1,
    reward: RewardName = "net",
    stop: bool = False,
) -> VecEnv:
    """`n_envs` environments over the same images, each with a different order (seeds `seed`, `seed` + 1, ...).

    The reward is centred per image when episodes have one prompt and no action stop; `info["episode"]["r"]` and
    `info["score"]` stay raw.

    Raises:
        ValueError: `n_envs` < 1, or contexts that do not fit together or to the reward.
    """
    if n_envs < 1:
        raise ValueError(f"n_envs is {n_envs}, expected 1 or more")
    venv: VecEnv = VecMonitor(DummyVecEnv([lambda: Sa2VAFinetuneEnv(contexts, max_steps, reward, stop)] * n_envs))
    if max_steps == 1 and not stop:
        venv = CentredReward(venv, {c.sample_id: float(prompt_rewards(c, reward).mean()) for c in contexts})
    venv.seed(seed)
    return venv
