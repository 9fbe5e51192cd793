"""The environment of the prompt policy: look at an image, choose a prompt, be paid the score of the mask it gives."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from rl_reward_network.env.observation import EPISODE_FEATURES, HIGH, IMAGE_FEATURES, LOW, OBSERVATION

ENV_ID = "rl_reward_network/Sa2VAFinetune-v0"


@dataclass(frozen=True, eq=False)
class PromptContext:
    """One image as the environment knows it: what the policy sees, and what each prompt would bring.

    A frozen model that answers greedily gives the same mask every time, so the whole reward is a table.

    Args:
        sample_id: hash that names the image; unique among the contexts of an environment.
        features: float32 (F,), from `observe_image`.
        scores: float32 (P,) in [0, 1], the reward of each prompt's mask.
        dice: float (P,) in [0, 1], Dice of each prompt's mask with the ground truth; None when unlabelled.
        iou: float (P,) in [0, 1], the same for IoU.

    Raises:
        ValueError: a shape, a range, or a feature outside the bounds of `OBSERVATION`; names the sample and the field.
    """

    sample_id: str
    features: np.ndarray
    scores: np.ndarray
    dice: np.ndarray | None = None
    iou: np.ndarray | None = None

    def __post_init__(self) -> None:
        """Refuse what would fail deep inside a run."""
        low, high = LOW[:IMAGE_FEATURES], HIGH[:IMAGE_FEATURES]
        self._require("features", self.features, (IMAGE_FEATURES,), low, high)
        if self.scores.ndim != 1 or len(self.scores) < 2:
            raise ValueError(
                f"{self.sample_id}: scores: got shape {self.scores.shape}; expected (P,) with P >= 2 prompts"
            )
        for name in ("scores", "dice", "iou"):
            values = getattr(self, name)
            if values is not None:
                self._require(name, values, self.scores.shape, 0, 1)

    def _require(self, name: str, values: np.ndarray, shape: tuple[int, ...], low: Any, high: Any) -> None:
        """Shape and bounds; a NaN is inside no bounds."""
        if values.shape != shape:
            raise ValueError(f"{self.sample_id}: {name}: got shape {values.shape}; expected {shape}")
        outside = np.flatnonzero(~((values >= low) & (values <= high)))
        if outside.size:
            place = int(outside[0])
            label = OBSERVATION[place].name if name == "features" else f"prompt {place}"
            raise ValueError(f"{self.sample_id}: {name}: {label} is {values[place]}, outside its bounds")


def start_observations(contexts: Sequence[PromptContext]) -> np.ndarray:
    """float32 (N, D): what the policy sees of each image before its first prompt."""
    features = np.stack([context.features for context in contexts])
    return np.concatenate([features, np.zeros((len(contexts), EPISODE_FEATURES))], axis=1).astype(np.float32)


class Sa2VAFinetuneEnv(gym.Env[np.ndarray, np.int64]):
    """Choose the prompt under which a frozen Sa2VA segments an image best.

    ## Observation
    `Box(D,)` float32: statistics and gradient features of the image, the share of the episode used, and the best score
    so far. `rl_reward_network.env.observation.OBSERVATION` lists index, name, unit and bounds. Nothing of the ground
    truth: when the reward uses labels, the best score so far stays 0.

    ## Action
    `Discrete(P)`: the index of a prompt; 0 is the default prompt.

    ## Reward
    The improvement of the best score of the episode, which starts at 0. With one step per episode (the default) that is
    the score itself; with more, a repeated prompt brings 0 and the return is the best score reached. In [0, 1].

    ## Start
    The next image of a shuffled pass over all contexts; every image comes once before any comes twice. A seed starts a
    new pass.

    ## End
    Terminated after `max_steps` prompts; never truncated, so nothing is bootstrapped beyond the last prompt.

    ## Info
    `reset`: `sample_id`. `step`: `sample_id`, `prompt` (index), `score`, and `dice` and `iou` where labelled.

    ## Arguments
    `contexts`: at least one, all with the same number of prompts, each `sample_id` once.
    `max_steps`: prompts per episode, default 1.
    `reward_uses_labels`: True when `scores` were made from the ground truth, default False.

    Importing `rl_reward_network.env` registers the id:

    ```python
    gymnasium.make("rl_reward_network/Sa2VAFinetune-v0", contexts=contexts)
    ```

    Raises:
        ValueError: the arguments do not fit together, or an action is no prompt.
        gymnasium.error.ResetNeeded: `step` before `reset`, or after the end of an episode.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (gymnasium's own declaration)

    def __init__(self, contexts: Sequence[PromptContext], max_steps: int = 1, reward_uses_labels: bool = False) -> None:
        check_contexts(contexts)
        if max_steps < 1:
            raise ValueError(f"max_steps: got {max_steps}; an episode has at least 1 prompt")
        self.contexts, self.max_steps, self.reward_uses_labels = tuple(contexts), max_steps, reward_uses_labels
        self.observation_space = gym.spaces.Box(LOW, HIGH, dtype=np.float32)
        self.action_space = gym.spaces.Discrete(len(contexts[0].scores))
        self._waiting: list[int] = []  # images still to come in this pass, last one next
        self._context: PromptContext | None = None
        self._steps, self._best = 0, 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Start an episode with the next image; see the class for what comes back."""
        super().reset(seed=seed)
        if seed is not None or not self._waiting:
            self._waiting = self.np_random.permutation(len(self.contexts)).tolist()
        self._context = self.contexts[self._waiting.pop()]
        self._steps, self._best = 0, 0.0
        return self._observation(self._context), {"sample_id": self._context.sample_id}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Try a prompt on the image of this episode; see the class for what comes back."""
        context = self._context
        if context is None or self._steps >= self.max_steps:
            raise gym.error.ResetNeeded("step: the episode has not begun or is over; call reset first")
        if not self.action_space.contains(action):
            raise ValueError(f"action: got {action!r}; expected the index of one of {len(context.scores)} prompts")
        score = float(context.scores[action])
        reward, self._best = max(0.0, score - self._best), max(self._best, score)
        self._steps += 1
        info: dict[str, Any] = {"sample_id": context.sample_id, "prompt": int(action), "score": score}
        labels = {"dice": context.dice, "iou": context.iou}
        info |= {name: float(values[action]) for name, values in labels.items() if values is not None}
        return self._observation(context), reward, self._steps == self.max_steps, False, info

    def _observation(self, context: PromptContext) -> np.ndarray:
        """A fresh array each time: users keep what they were given."""
        best = 0.0 if self.reward_uses_labels else self._best
        return np.concatenate([context.features, [self._steps / self.max_steps, best]]).astype(np.float32)


def check_contexts(contexts: Sequence[PromptContext]) -> None:
    """Refuse contexts that do not make one environment.

    Raises:
        ValueError: none at all, different numbers of prompts, or a `sample_id` that comes twice.
    """
    if not contexts:
        raise ValueError("contexts: got none; at least one image is needed")
    sizes = {len(context.scores) for context in contexts}
    if len(sizes) > 1:
        raise ValueError(f"contexts: scores of {sorted(sizes)} prompts; all images need the same prompts")
    if len({context.sample_id for context in contexts}) < len(contexts):
        raise ValueError("contexts: a sample_id comes twice; give each image and phrase once")


gym.register(id=ENV_ID, entry_point=f"{__name__}:Sa2VAFinetuneEnv")
