"""Settings of PPO over prompts, named as in Stable-Baselines3, and how a short run is cut into rollouts."""

import math
from dataclasses import dataclass

MIN_ROLLOUTS = 8  # fewer points are no curve, and fewer updates hardly move the policy


@dataclass(frozen=True)
class PromptPPOConfig:
    """Settings of PPO, named as in Stable-Baselines3."""

    total_timesteps: int = 2000
    """Prompts tried in training, over all environments; rounded up to whole rollouts."""
    n_envs: int = 2
    """Environments side by side."""
    n_steps: int = 128
    """Steps of each environment per rollout; fewer where the run would otherwise have less than 8 rollouts."""
    batch_size: int = 64
    """Largest mini-batch; a rollout is cut into equal ones."""
    n_epochs: int = 10
    """Passes over each rollout."""
    learning_rate: float = 3e-4
    """Step size of Adam."""
    gamma: float = 0.99
    """Discount; without effect while episodes have one prompt."""
    gae_lambda: float = 0.95
    """Bias-variance trade-off of the advantages; without effect while episodes have one prompt."""
    clip_range: float = 0.2
    """Largest change of an action's probability ratio that is still rewarded."""
    ent_coef: float = 0.01
    """Weight of the entropy bonus."""
    vf_coef: float = 0.5
    """Weight of the value loss."""
    max_steps: int = 1
    """Prompts per episode."""
    seed: int = 0
    """Seed of the policy's weights, the sampled actions and the order of the images."""

    def __post_init__(self) -> None:
        """Refuse settings that would fail, or silently do something else, inside a run."""
        for name in ("total_timesteps", "n_envs", "n_steps", "n_epochs", "max_steps"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "give 1 or more")
        for name in ("learning_rate", "clip_range"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "give a number above 0")
        for name in ("gamma", "gae_lambda"):
            _require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "give a number from 0 to 1")
        for name in ("ent_coef", "vf_coef", "seed"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "give 0 or more")
        rollout = self.n_steps * self.n_envs
        _require(self.batch_size >= 2, "batch_size", self.batch_size, "give 2 or more: advantages are normalised in it")
        remedy = f"give at most {rollout}, the rollout of n_steps x n_envs = {self.n_steps} x {self.n_envs}"
        _require(self.batch_size <= rollout, "batch_size", self.batch_size, remedy)
        _require(self.n_steps >= self.max_steps, "n_steps", self.n_steps, f"give max_steps = {self.max_steps} or more")
        fewest = MIN_ROLLOUTS * max(2, self.n_envs * self.max_steps)
        remedy = f"give {fewest} or more, for {MIN_ROLLOUTS} rollouts of whole episodes in each environment"
        _require(self.total_timesteps >= fewest, "total_timesteps", self.total_timesteps, remedy)

    @property
    def rollout_steps(self) -> int:
        """Steps of each environment per rollout, after shrinking to `MIN_ROLLOUTS` rollouts."""
        return min(self.n_steps, self.total_timesteps // (MIN_ROLLOUTS * self.n_envs))

    @property
    def whole_timesteps(self) -> int:
        """`total_timesteps` rounded up to whole rollouts."""
        rollout = self.rollout_steps * self.n_envs
        return math.ceil(self.total_timesteps / rollout) * rollout

    @property
    def even_batch(self) -> int:
        """Mini-batch size that cuts a rollout into equal parts of at most `batch_size`."""
        rollout = self.rollout_steps * self.n_envs
        return max(2, math.ceil(rollout / math.ceil(rollout / self.batch_size)))


def _require(holds: bool, field: str, value: object, remedy: str) -> None:
    """One wording for every refused setting."""
    if not holds:
        raise ValueError(f"{field}: got {value}; {remedy}")
