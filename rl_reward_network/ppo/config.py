"""Settings of PPO over prompts, under the names of Stable-Baselines3; presets are overrides."""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from rl_reward_network.flags import Rare

MIN_ROLLOUTS = 8  # with fewer, the curves have too few points and the policy too few updates
TEST_IMAGES = {"quick": 80}  # of the evaluation; all in other modes
Mode = Literal["quick", "full"]
Preset = Literal["default", "published"]


@dataclass(frozen=True)
class PPOSettings:
    """Settings of PPO on the command line: None stands for the value of the preset."""

    total_timesteps: int | None = None
    """Prompts tried in training, over all environments, rounded up to whole rollouts: quick 2000, full 10000."""
    n_envs: int | None = None
    """Environments side by side (N_ENVS): quick 2, full 4."""
    n_steps: Rare[int | None] = None
    """Steps of each environment per rollout: 128, fewer where the run would otherwise have less than 8 rollouts."""
    batch_size: Rare[int | None] = None
    """Largest mini-batch, 64; a rollout is cut into equal ones."""
    learning_rate: float | None = None
    """Learning rate of Adam: quick 1e-3, full and published 3e-4."""
    n_epochs: Rare[int] = 10
    """Passes over each rollout."""
    gamma: Rare[float | None] = None
    """Discount factor, 0.99; without effect while episodes have one prompt (max_steps 1)."""
    gae_lambda: Rare[float | None] = None
    """Bias-variance trade-off of the advantages, 0.95; without effect while episodes have one prompt."""
    clip_range: Rare[float] = 0.2
    """Clip range of the probability ratio of an action."""
    ent_coef: Rare[float] = 0.01
    """Weight of the entropy bonus."""
    vf_coef: Rare[float] = 0.5
    """Weight of the value loss."""
    max_steps: Rare[int | None] = None
    """Prompts per episode, all on one image: 1, with --stop 5. With more than one, the mask with the highest predicted
    score is used, with --stop that of the last prompt."""
    stop: bool = False
    """Experiment 1: add an action that ends the episode. A prompt is paid by the change of the reward against the mask
    before, at first that of the default prompt; for rewards of labels."""


@dataclass(frozen=True)
class PromptPPOConfig(PPOSettings):
    """Complete settings of PPO."""

    total_timesteps: int = 2000
    n_envs: int = 2
    n_steps: int = 128
    batch_size: int = 64
    learning_rate: float = 3e-4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    max_steps: int = 1
    seed: int = 0
    """Seed of the policy's weights, the sampled actions and the order of the images."""

    def __post_init__(self) -> None:
        """Check ranges; settings that Stable-Baselines3 would change silently are refused."""
        for name in ("total_timesteps", "n_envs", "n_steps", "n_epochs", "max_steps"):
            self._require(name, getattr(self, name) >= 1, "1 or more")
        for name in ("learning_rate", "clip_range"):
            self._require(name, 0 < getattr(self, name) < math.inf, "more than 0")
        for name in ("gamma", "gae_lambda"):
            self._require(name, 0 <= getattr(self, name) <= 1, "0 to 1")
        for name in ("ent_coef", "vf_coef", "seed"):
            self._require(name, 0 <= getattr(self, name) < math.inf, "0 or more")
        rollout = self.n_steps * self.n_envs
        self._require("batch_size", self.batch_size >= 2, "2 or more: advantages are normalised in it")
        expected = f"at most {rollout}, the rollout of n_steps x n_envs = {self.n_steps} x {self.n_envs}"
        self._require("batch_size", self.batch_size <= rollout, expected)
        expected = f"{self.max_steps} or more, the max_steps of an episode"
        self._require("n_steps", self.n_steps >= self.max_steps, expected)
        expected = f"{self.fewest_timesteps} or more, for {MIN_ROLLOUTS} rollouts of whole episodes in each environment"
        self._require("total_timesteps", self.total_timesteps >= self.fewest_timesteps, expected)

    def _require(self, field: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ValueError(f"{field} is {getattr(self, field)}, expected {expected}")

    @property
    def fewest_timesteps(self) -> int:
        """The least `total_timesteps`."""
        return MIN_ROLLOUTS * max(2, self.n_envs * self.max_steps)

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


PRESETS: dict[str, dict[str, Any]] = {
    "quick": {"total_timesteps": 2000, "n_envs": 2, "learning_rate": 1e-3},
    "full": {"total_timesteps": 10000, "n_envs": 4},
    "published": {"learning_rate": 3e-4},  # too low for the 8 rollouts of quick, see docs/log.md
}


STOP_PRESETS: dict[str, dict[str, Any]] = {  # longer episodes need more steps
    "quick": {"max_steps": 5, "total_timesteps": 12000},
    "full": {"max_steps": 5, "total_timesteps": 20000},
}


def with_preset(settings: PPOSettings, mode: Mode, preset: Preset = "default", seed: int = 0) -> PromptPPOConfig:
    """Settings of a mode and a preset, with the user's changes.

    If batch_size is not given, a rollout smaller than the preset's batch is one mini-batch.

    Raises:
        ValueError: a setting is out of range, or settings do not fit each other.
    """
    given = {field.name: getattr(settings, field.name) for field in fields(settings)}
    given = {name: value for name, value in given.items() if value is not None}
    values = {**PRESETS[mode], **PRESETS.get(preset, {}), **(STOP_PRESETS[mode] if settings.stop else {}), **given}
    if {"n_envs", "n_steps"} & given.keys() and "batch_size" not in given:
        rollout = values["n_envs"] * values.get("n_steps", PromptPPOConfig.n_steps)
        values["batch_size"] = max(2, min(PromptPPOConfig.batch_size, rollout))
    return PromptPPOConfig(seed=seed, **values)
