"""The environment of both policies: observe an image, choose one of its masks, receive the reward of that mask."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np

from rl_reward_network.env.observation import (
    EPISODE_FEATURES,
    IMAGE_FEATURES,
    MASK_FEATURES,
    bounds,
    observation_table,
)
from rl_reward_network.rewards.table import RewardName, prompt_reward

TINT = (255, 160, 0)  # RGB of the mask in `render`, half and half with the image; as in reports


@dataclass(frozen=True, eq=False)
class PromptContext:
    """One image: its features, and the score of each action's mask.

    A frozen model that decodes greedily returns the same mask every time, so the reward is a table. The environment
    does not depend on what an action is: P prompts, P sequences of operations, or P masks made in another way.

    Args:
        sample_id: name of the image, in our runs a hash; unique among the contexts of an environment.
        features: float32 (F,), from `observe_image`, and with `mask_features` then from `observe_mask`.
        scores: float32 (P,) in [0, 1], the reward network's; all NaN where the image is outside its domain.
        metrics: name -> float (P,) in [0, 1], the rewards of `rewards.table` (`MASK_REWARDS` where labelled,
            `IMAGE_REWARDS`) of each action's mask.
        group_id: of the patient, over whom validation takes means; "" counts the image as one.
        mask_features: whether the features hold those of the default prompt's mask.
        own_dice: Dice of the reward network's own segmentation, for the report; None where it is unknown or the true
            mask is empty.
        image, masks: uint8 (H, W, 3) RGB and bool (P, H, W), for `render` alone.

    Raises:
        ValueError: a shape, a range, or a feature outside the bounds of `observation_table`; names sample and field.
    """

    sample_id: str
    features: np.ndarray = field(repr=False)  # an error of gymnasium.make lists all contexts
    scores: np.ndarray = field(repr=False)
    metrics: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)
    group_id: str = ""
    mask_features: bool = field(default=False, repr=False)
    own_dice: float | None = field(default=None, repr=False)
    image: np.ndarray | None = field(default=None, repr=False)
    masks: np.ndarray | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.features.ndim != 1 or self.vision_features < 0:
            least = IMAGE_FEATURES + MASK_FEATURES * self.mask_features
            raise ValueError(
                f"{self.sample_id}: features: got shape {self.features.shape}; expected (F,) with F >= {least}"
            )
        low, high = bounds(self.vision_features, self.mask_features)
        self._require("features", self.features, self.features.shape, low[:-EPISODE_FEATURES], high[:-EPISODE_FEATURES])
        if self.scores.ndim != 1 or len(self.scores) < 2:
            raise ValueError(
                f"{self.sample_id}: scores: got shape {self.scores.shape}; expected (P,) with P >= 2 actions"
            )
        scores = {"scores": self.scores} if self.judged else {}
        for name, values in {**scores, **self.metrics}.items():
            self._require(name, values, self.scores.shape, 0, 1)
        if self.image is not None and self.masks is not None:
            self._require("masks", self.masks == 1, (*self.scores.shape, *self.image.shape[:2]), 0, 1)

    @property
    def judged(self) -> bool:
        """Whether the reward network gives scores."""
        return not np.isnan(self.scores).all()

    @property
    def vision_features(self) -> int:
        """Number of pooled Sa2VA features among the features."""
        return len(self.features) - IMAGE_FEATURES - MASK_FEATURES * self.mask_features

    @property
    def labelled(self) -> bool:
        """Whether there is a true mask."""
        return "dice" in self.metrics

    def _require(self, name: str, values: np.ndarray, shape: tuple[int, ...], low: Any, high: Any) -> None:
        """Check shape and bounds; NaN is out of bounds."""
        if values.shape != shape:
            raise ValueError(f"{self.sample_id}: {name}: got shape {values.shape}; expected {shape}")
        outside = np.flatnonzero(~((values >= low) & (values <= high)))
        if outside.size:
            place = int(outside[0])
            names = [entry.name for entry in observation_table(self.vision_features, self.mask_features)]
            label = names[place] if name == "features" else f"action {place}"
            raise ValueError(f"{self.sample_id}: {name}: {label} is {values[place]}, outside its bounds")


def prompt_rewards(context: PromptContext, reward: RewardName) -> np.ndarray:
    """float32 (P,) in [0, 1]: the reward of each action's mask, one of `rewards.table.PROMPT_REWARDS`.

    Raises:
        ValueError: another reward, one that needs the ground truth of an unlabelled image, or a score where there is
            none; names the sample.
    """
    try:
        rewards = prompt_reward(reward, context.scores, context.metrics)
        if np.isnan(rewards).any():
            raise ValueError("it is outside the reward network's domain and has no score; leave it out")
        return rewards
    except ValueError as error:
        raise ValueError(f"{context.sample_id}: {error}") from None


def observations(
    contexts: Sequence[PromptContext], progress: float = 0.0, best_scores: np.ndarray | float = 0.0
) -> np.ndarray:
    """float32 (N, D): the observations of N images; by default the first of an episode.

    `progress` is the share of the episode's steps taken; `best_scores` the best so far, a number or float (N,).
    """
    episode = np.stack([np.full(len(contexts), progress), np.broadcast_to(best_scores, len(contexts))], axis=1)
    return np.concatenate([np.stack([context.features for context in contexts]), episode], axis=1, dtype=np.float32)


class Sa2VAFinetuneEnv(gym.Env[np.ndarray, np.int64]):
    """Choose the prompt with which a frozen Sa2VA segments an image best, or the operations that repair its mask.

    - Observation: `Box(D,)` float32: statistics and gradient features of the image, pooled Sa2VA features and
      statistics of the mask where the contexts have them, the share of the episode's steps, and the best score so far;
      `rl_reward_network.env.observation.observation_table` lists name, unit and bounds. It contains no ground truth:
      when the reward uses labels, the best score so far is always 0.
    - Action: `Discrete(P)`: the index of a prompt, or of a sequence of operations; 0 is the default prompt, without
      operations.
    - Reward: the increase of the best reward of the episode, which starts at 0; in [0, 1]. With one step per episode it
      is the reward of the mask. With more steps, the reward of a repeated prompt is 0 and the return is the best reward
      of the episode.
    - Start: the next image of a shuffled pass over all contexts: every image occurs once per pass. A seed starts a new
      pass.
    - End: terminated after `max_steps` steps; never truncated, so no value is bootstrapped after the last step.
    - Info: of `reset` `sample_id`; of `step` `sample_id`, `prompt` (the action), `score`, and, where labelled, the
      metrics (`dice`, `iou`, ...).

    Importing `rl_reward_network` registers the id. `rl_reward_network.ppo.contexts` builds contexts from
    the folder of a run, or from images, masks and scores:

        contexts = contexts_from_run("outputs/sa2va_rl_finetune_20250101_120000")
        gymnasium.make("rl_reward_network/Sa2VAFinetune-v0", contexts=contexts)

    Args:
        contexts: at least one, all with the same number of actions and features, each `sample_id` once.
        reward: see `rewards.table.PROMPT_REWARDS`.
        render_mode: None, or `rgb_array` where the contexts have image and masks, as those of `contexts_from_masks`:
            the image with the mask of the last action.

    Raises:
        ValueError: the arguments do not fit together, or an action is out of range.
        gymnasium.error.ResetNeeded: `step` before `reset`, or after the end of an episode.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 1}  # noqa: RUF012

    def __init__(
        self,
        contexts: Sequence[PromptContext] = (),
        max_steps: int = 1,
        reward: RewardName = "net",
        render_mode: str | None = None,
    ) -> None:
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f"render_mode is {render_mode!r}, expected None or 'rgb_array'")
        if render_mode and any(context.image is None or context.masks is None for context in contexts):
            raise ValueError(
                f"render_mode is {render_mode!r}, but the contexts have no image and masks; make them by "
                "contexts_from_masks of rl_reward_network.ppo.contexts, or leave render_mode out"
            )
        self.render_mode = render_mode
        self._action: int | None = None  # the last of the episode
        self.observation_space, self.action_space = spaces(contexts)
        if max_steps < 1:
            raise ValueError(f"max_steps is {max_steps}, expected 1 or more; an episode has at least one step")
        self.contexts, self.max_steps, self.reward = tuple(contexts), max_steps, reward
        self._rewards = [prompt_rewards(context, reward) for context in contexts]
        self._remaining: list[int] = []  # indices of the contexts still to come in this pass, last one next
        self._current: int | None = None
        self._steps, self._best = 0, 0.0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode with the next image."""
        super().reset(seed=seed)
        if seed is not None or not self._remaining:
            self._remaining = self.np_random.permutation(len(self.contexts)).tolist()
        self._current = self._remaining.pop()
        self._steps, self._best, self._action = 0, 0.0, None
        context = self.contexts[self._current]
        return self._observation(context), {"sample_id": context.sample_id}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Score one action on the image of this episode."""
        if self._current is None or self._steps >= self.max_steps:
            raise gym.error.ResetNeeded("step: no episode is running; call reset first")
        context, rewards = self.contexts[self._current], self._rewards[self._current]
        if not self.action_space.contains(action):
            raise ValueError(f"action is {action!r}, expected an integer from 0 to {len(rewards) - 1}")
        self._action = int(action)
        value = float(rewards[action])
        reward, self._best = max(0.0, value - self._best), max(self._best, value)
        self._steps += 1
        info: dict[str, Any] = {"sample_id": context.sample_id, "prompt": self._action}
        values = {"score": context.scores} if context.judged else {}
        info |= {name: float(of_prompts[action]) for name, of_prompts in (values | {**context.metrics}).items()}
        return self._observation(context), reward, self._steps == self.max_steps, False, info

    def render(self) -> np.ndarray | None:
        """uint8 (H, W, 3): the image of this episode, with the mask of the last action; None without a render mode."""
        if self.render_mode is None or self._current is None:
            return None
        context = self.contexts[self._current]
        assert context.image is not None
        assert context.masks is not None
        frame = context.image.copy()
        if self._action is not None:
            inside = context.masks[self._action] > 0
            frame[inside] = (0.5 * frame[inside] + 0.5 * np.array(TINT)).astype(np.uint8)
        return frame

    def _observation(self, context: PromptContext) -> np.ndarray:
        best = self._best if self.reward == "net" else 0.0
        return np.asarray(observations([context], self._steps / self.max_steps, best)[0])


def spaces(contexts: Sequence[PromptContext]) -> tuple[gym.spaces.Box, gym.spaces.Discrete]:
    """The observation and action space of an environment over these contexts.

    A ValueError if there are none, numbers of actions or features differ, or a `sample_id` occurs twice.
    """
    if not contexts:
        raise ValueError(
            "contexts is empty, expected at least one PromptContext; build them with contexts_from_run(run_dir) or "
            "contexts_from_masks(images, masks, scores) of rl_reward_network.ppo.contexts"
        )
    for name in ("scores", "features"):
        sizes = {len(getattr(context, name)) for context in contexts}
        if len(sizes) > 1:
            raise ValueError(f"contexts: {name} have lengths {sorted(sizes)}, expected one length for all images")
    if len({context.sample_id for context in contexts}) < len(contexts):
        raise ValueError("contexts: a sample_id occurs twice; give each image and phrase once")
    return spaces_of(contexts[0].vision_features, len(contexts[0].scores), contexts[0].mask_features)


def spaces_of(
    vision_features: int, actions: int, mask_features: bool = False
) -> tuple[gym.spaces.Box, gym.spaces.Discrete]:
    """The spaces of an environment with so many pooled features of Sa2VA and so many actions."""
    low, high = bounds(vision_features, mask_features)
    return gym.spaces.Box(low, high, dtype=np.float32), gym.spaces.Discrete(actions)
