"""The settings of PPO, under the names of Stable-Baselines3: the flags of the commands, and what the training reads."""

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

import tyro

from rl_reward_network.flags import Rare, check_at_least, check_range

MIN_ROLLOUTS = 8  # with fewer, the curves have too few points and the policy too few updates
TEST_IMAGES = {"quick": 80}  # of the evaluation; all in other modes
Mode = Literal["quick", "full"]
Preset = Literal["default", "published"]


@dataclass(frozen=True)
class PPOSettings:
    """Settings of PPO; the defaults are those of the mode, see `prompt_settings` and `operation_settings`."""

    total_timesteps: int = 2000
    """Actions tried in training, over all environments; rounded up to whole rollouts."""
    n_envs: int = 2
    """Environments side by side (N_ENVS)."""
    n_steps: Rare[int] = 128
    """Steps of each environment per rollout; fewer where the run would otherwise have less than 8 rollouts."""
    batch_size: Rare[int] = 64
    """Largest mini-batch; a rollout is cut into equal ones."""
    learning_rate: float = 1e-3
    """Learning rate of Adam."""
    n_epochs: Rare[int] = 10
    """Passes over each rollout."""
    gamma: Rare[float] = 0.99
    """Discount factor; without effect while episodes have one step (max_steps 1)."""
    gae_lambda: Rare[float] = 0.95
    """Bias-variance trade-off of the advantages; without effect while episodes have one step."""
    clip_range: Rare[float] = 0.2
    """Clip range of the probability ratio of an action."""
    ent_coef: Rare[float] = 0.01
    """Weight of the entropy bonus."""
    vf_coef: Rare[float] = 0.5
    """Weight of the value loss."""
    max_steps: int = 1
    """Most prompts tried on an image, of which the one whose mask has the highest predicted score is used; in
    experiment 2, operations in the longest sequence."""
    seed: Annotated[int, tyro.conf.Fixed, tyro.conf.Suppress] = 0
    """Seed of the policy's weights, the sampled actions and the order of the images; the seed of the run."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "total_timesteps", "n_envs", "n_steps", "n_epochs", "max_steps")
        check_at_least(self, 2, "batch_size")  # advantages are normalised in it
        check_range(self, "learning_rate", "clip_range", above=True)
        check_range(self, "ent_coef", "vf_coef", "seed")
        for name in ("gamma", "gae_lambda"):
            self._require(name, 0 <= getattr(self, name) <= 1, "0 to 1")

    def of_run(self, seed: int) -> "PPOSettings":
        """These settings with the seed of a run; a ValueError if they do not fit each other."""
        self._require("n_steps", self.n_steps >= self.max_steps, f"{self.max_steps} or more, the steps of an episode")
        fewest = MIN_ROLLOUTS * max(2, self.n_envs * self.max_steps)
        expected = f"{fewest} or more, for {MIN_ROLLOUTS} rollouts of whole episodes in each environment"
        self._require("total_timesteps", self.total_timesteps >= fewest, expected)
        return replace(self, seed=seed)

    def _require(self, field: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ValueError(f"{field} is {getattr(self, field)}, expected {expected}")

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "PPOSettings":
        """The settings in config.json of a run; fields of other versions are left out."""
        return cls(**{field.name: saved[field.name] for field in fields(cls) if field.name in saved})

    @property
    def rollout_steps(self) -> int:
        """Steps of each environment per rollout, after shrinking to `MIN_ROLLOUTS` rollouts."""
        return min(self.n_steps, self.total_timesteps // (MIN_ROLLOUTS * self.n_envs))

    @property
    def whole_timesteps(self) -> int:
        """`total_timesteps` rounded up to whole rollouts."""
        rollout = self.rollout_steps * self.n_envs
        return -(-self.total_timesteps // rollout) * rollout

    @property
    def even_batch(self) -> int:
        """Mini-batch size that cuts a rollout into equal parts of at most `batch_size`."""
        rollout = self.rollout_steps * self.n_envs
        return max(2, -(-rollout // -(-rollout // self.batch_size)))


def prompt_settings(mode: Mode, preset: Preset = "default") -> PPOSettings:
    """The settings of the prompt policy (experiments 1 and 3)."""
    quick = PPOSettings()
    settings = quick if mode == "quick" else replace(quick, total_timesteps=10000, n_envs=4, learning_rate=3e-4)
    # the published rate is too low for the 8 rollouts of quick, see docs/log.md
    return replace(settings, learning_rate=3e-4) if preset == "published" else settings


def operation_settings(mode: Mode) -> PPOSettings:
    """The settings of the post-processing policy (experiment 2)."""
    return PPOSettings({"quick": 24000, "full": 60000}[mode], n_envs=8, n_steps=64, batch_size=128, max_steps=5)
