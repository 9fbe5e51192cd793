"""Settings of experiment 2, under the names of Stable-Baselines3; presets are overrides."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from rl_reward_network.flags import Rare
from rl_reward_network.ppo.config import Mode, PromptPPOConfig

PostReward = Literal["dice", "dice+recall", "net"]


@dataclass(frozen=True)
class PostSettings:
    """Settings of PPO on the command line: None stands for the value of the preset."""

    total_timesteps: int | None = None
    """Operations tried in training, rounded up to whole rollouts: quick 24000, full 60000."""
    max_steps: int = 5
    """Most operations on one mask."""
    n_envs: int | None = None
    """Environments side by side: 8."""
    n_steps: Rare[int | None] = None
    """Steps of each environment per rollout: 64."""
    batch_size: Rare[int | None] = None
    """Largest mini-batch: 128."""
    learning_rate: float | None = None
    """Learning rate of Adam: 1e-3."""
    n_epochs: Rare[int] = 10
    """Passes over each rollout."""
    gamma: Rare[float] = 0.5
    """Discount factor: with 0.99 the noise of later operations hides what one operation is worth; see docs/log.md."""
    gae_lambda: Rare[float] = 0.95
    """Bias-variance trade-off of the advantages."""
    clip_range: Rare[float] = 0.2
    """Clip range of the probability ratio of an action."""
    ent_coef: Rare[float] = 0.01
    """Weight of the entropy bonus."""
    vf_coef: Rare[float] = 0.5
    """Weight of the value loss."""


PRESETS: dict[str, dict[str, Any]] = {
    "quick": {"total_timesteps": 24000},
    "full": {"total_timesteps": 60000},
}
COMMON = {"n_envs": 8, "n_steps": 64, "batch_size": 128, "learning_rate": 1e-3}


def with_preset(settings: PostSettings, mode: Mode, seed: int = 0) -> PromptPPOConfig:
    """Settings of a mode, with the user's changes.

    Raises:
        ValueError: a setting is out of range, or settings do not fit each other.
    """
    given = {field.name: getattr(settings, field.name) for field in fields(settings)}
    given = {name: value for name, value in given.items() if value is not None}
    return PromptPPOConfig(seed=seed, **{**COMMON, **PRESETS[mode], **given})
