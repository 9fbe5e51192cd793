"""The environment of the prompt policy: look at an image, choose a prompt, be paid the score of the mask it gives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np

from rl_reward_network.env.observation import EPISODE_FEATURES, IMAGE_FEATURES, bounds, observation_table
from rl_reward_network.rewards.table import RewardName, prompt_reward

ENV_ID = "rl_reward_network/Sa2VAFinetune-v0"


@dataclass(frozen=True, eq=False)
class PromptContext:
    """One image as the environment knows it: what the policy sees, and what each prompt would bring.

    A frozen model that answers greedily gives the same mask every time, so the whole reward is a table.

    Args:
        sample_id: hash that names the image; unique among the contexts of an environment.
        features: float32 (F,), from `observe_image`.
        scores: float32 (P,) in [0, 1], the reward network's score of each prompt's mask.
        metrics: name -> float (P,) in [0, 1], the mask rewards (`rewards.table.MASK_REWARDS`) of each prompt's mask;
            empty when unlabelled.

    Raises:
        ValueError: a shape, a range, or a feature outside the bounds of `observation_table`; names sample and field.
    """

    sample_id: str
    features: np.ndarray
    scores: np.ndarray
    metrics: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what would fail deep inside a run."""
        if self.features.ndim != 1 or len(self.features) < IMAGE_FEATURES:
            raise ValueError(
                f"{self.sample_id}: features: got shape {self.features.shape}; expected (F,) with F >= {IMAGE_FEATURES}"
            )
        low, high = bounds(self.vision_features)
        self._require("features", self.features, self.features.shape, low[:-EPISODE_FEATURES], high[:-EPISODE_FEATURES])
        if self.scores.ndim != 1 or len(self.scores) < 2:
            raise ValueError(
                f"{self.sample_id}: scores: got shape {self.scores.shape}; expected (P,) with P >= 2 prompts"
            )
        for name, values in {"scores": self.scores, **self.metrics}.items():
            self._require(name, values, self.scores.shape, 0, 1)

    @property
    def vision_features(self) -> int:
        """How many of the features are Sa2VA's own."""
        return len(self.features) - IMAGE_FEATURES

    def _require(self, name: str, values: np.ndarray, shape: tuple[int, ...], low: Any, high: Any) -> None:
        """Shape and bounds; a NaN is inside no bounds."""
        if values.shape != shape:
            raise ValueError(f"{self.sample_id}: {name}: got shape {values.shape}; expected {shape}")
        outside = np.flatnonzero(~((values >= low) & (values <= high)))
        if outside.size:
            place = int(outside[0])
            label = observation_table(self.vision_features)[place].name if name == "features" else f"prompt {place}"
            raise ValueError(f"{self.sample_id}: {name}: {label} is {values[place]}, outside its bounds")


def prompt_rewards(context: PromptContext, reward: RewardName) -> np.ndarray:
    """float32 (P,) in [0, 1]: the reward of each prompt's mask; `reward` is one of `rewards.table.PROMPT_REWARDS`.

    Raises:
        ValueError: another reward, or one that needs the ground truth of an unlabelled image; names the sample.
    """
    try:
        return prompt_reward(reward, context.scores, context.metrics)
    except ValueError as error:
        raise ValueError(f"{context.sample_id}: {error}") from None


def observations(
    contexts: Sequence[PromptContext], progress: float = 0.0, best: np.ndarray | float = 0.0
) -> np.ndarray:
    """float32 (N, D): what the policy sees of each image; by default before its first prompt.

    Args:
        contexts: N images.
        progress: share of the episode's prompts used.
        best: float (N,), best score so far.
    """
    features = np.stack([context.features for context in contexts])
    episode = np.stack([np.full(len(contexts), progress), np.broadcast_to(best, len(contexts))], axis=1)
    return np.concatenate([features, episode], axis=1).astype(np.float32)


class Sa2VAFinetuneEnv(gym.Env[np.ndarray, np.int64]):
    """Choose the prompt under which a frozen Sa2VA segments an image best.

    ## Observation
    `Box(D,)` float32: statistics and gradient features of the image, Sa2VA's pooled features where the contexts have
    them, the share of the episode used, and the best score so far.
    `rl_reward_network.env.observation.observation_table` lists name, unit and bounds. Nothing of the ground truth: when
    the reward uses labels, the best score so far stays 0.

    ## Action
    `Discrete(P)`: the index of a prompt; 0 is the default prompt.

    ## Reward
    The improvement of the best reward of the episode, which starts at 0. With one step per episode (the default) that
    is the reward of the mask itself; with more, a repeated prompt brings 0 and the return is the best reward reached.
    In [0, 1].

    ## Start
    The next image of a shuffled pass over all contexts; every image comes once before any comes twice. A seed starts a
    new pass.

    ## End
    Terminated after `max_steps` prompts; never truncated, so nothing is bootstrapped beyond the last prompt.

    ## Info
    `reset`: `sample_id`. `step`: `sample_id`, `prompt` (index), `score`, and where labelled
    the metrics of the mask (`dice`, `iou`, ...).

    ## Arguments
    `contexts`: at least one, all with the same number of prompts and features, each `sample_id` once.
    `max_steps`: prompts per episode, default 1.
    `reward`: `net` (default), `mix`, `dice`, `cldice`, ..., see `rewards.table.PROMPT_REWARDS`.

    Importing `rl_reward_network.env` registers the id:

    ```python
    gymnasium.make("rl_reward_network/Sa2VAFinetune-v0", contexts=contexts)
    ```

    Raises:
        ValueError: the arguments do not fit together, or an action is no prompt.
        gymnasium.error.ResetNeeded: `step` before `reset`, or after the end of an episode.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (gymnasium's own declaration)

    def __init__(self, contexts: Sequence[PromptContext], max_steps: int = 1, reward: RewardName = "net") -> None:
        self.observation_space, self.action_space = spaces(contexts)
        if max_steps < 1:
            raise ValueError(f"max_steps: got {max_steps}; an episode has at least 1 prompt")
        self.contexts, self.max_steps, self.reward = tuple(contexts), max_steps, reward
        self._rewards = [prompt_rewards(context, reward) for context in contexts]
        self._waiting: list[int] = []  # images still to come in this pass, last one next
        self._current: int | None = None
        self._steps, self._best = 0, 0.0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode with the next image; see the class for what comes back."""
        super().reset(seed=seed)
        if seed is not None or not self._waiting:
            self._waiting = self.np_random.permutation(len(self.contexts)).tolist()
        self._current = self._waiting.pop()
        self._steps, self._best = 0, 0.0
        return self._observation(self._current), {"sample_id": self.contexts[self._current].sample_id}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Try a prompt on the image of this episode; see the class for what comes back."""
        if self._current is None or self._steps >= self.max_steps:
            raise gym.error.ResetNeeded("step: the episode has not begun or is over; call reset first")
        context, paid = self.contexts[self._current], self._rewards[self._current]
        if not self.action_space.contains(action):
            raise ValueError(f"action: got {action!r}; expected the index of one of {len(paid)} prompts")
        value = float(paid[action])
        reward, self._best = max(0.0, value - self._best), max(self._best, value)
        self._steps += 1
        done = self._steps == self.max_steps
        return self._observation(self._current), reward, done, False, step_info(context, int(action))

    def _observation(self, current: int) -> np.ndarray:
        """A fresh array each time: users keep what they were given."""
        best = self._best if self.reward == "net" else 0.0
        return observations([self.contexts[current]], self._steps / self.max_steps, best)[0]


def step_info(context: PromptContext, action: int) -> dict[str, Any]:
    """What a step tells besides its reward."""
    info: dict[str, Any] = {"sample_id": context.sample_id, "prompt": action, "score": float(context.scores[action])}
    return info | {name: float(values[action]) for name, values in context.metrics.items()}


def spaces(contexts: Sequence[PromptContext]) -> tuple[gym.spaces.Box, gym.spaces.Discrete]:
    """The spaces of observations and actions of one environment over these contexts.

    Raises:
        ValueError: none at all, different numbers of prompts or features, or a `sample_id` that comes twice.
    """
    if not contexts:
        raise ValueError("contexts: got none; at least one image is needed")
    for name in ("scores", "features"):
        sizes = {len(getattr(context, name)) for context in contexts}
        if len(sizes) > 1:
            raise ValueError(f"contexts: {name} of {sorted(sizes)} numbers; all images need as many")
    if len({context.sample_id for context in contexts}) < len(contexts):
        raise ValueError("contexts: a sample_id comes twice; give each image and phrase once")
    low, high = bounds(contexts[0].vision_features)
    return gym.spaces.Box(low, high, dtype=np.float32), gym.spaces.Discrete(len(contexts[0].scores))


gym.register(id=ENV_ID, entry_point=f"{__name__}:Sa2VAFinetuneEnv")
