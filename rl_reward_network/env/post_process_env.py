"""The environment of experiment 2: observe an image and its mask, choose an operation on the mask, or stop."""

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from rl_reward_network.env.operations import OPERATIONS, STOP, EditedImage, Operations
from rl_reward_network.env.render import METADATA, check_render_mode, tinted

OBSERVATION_LIMIT = 1e3  # bound of every number of the observation
STOP_ACTION = OPERATIONS.index(STOP)


class PostProcessEnv(gym.Env[np.ndarray, np.int64]):
    """Choose operations that improve the mask of an image.

    ## Observation
    `Box(D,)` float32: features of the image, statistics of the present mask, the share of the episode's steps taken,
    and for each operation the share of the steps that used it. It contains no ground truth.

    ## Action
    `Discrete(12)`: the index of an operation in `env.operations.OPERATIONS`; the last one stops.

    ## Reward
    The change of the mask's reward, in [-1, 1]; the return is the reward of the last mask less that of the first.

    ## Start
    The unchanged mask of the next image of a shuffled pass over all images. A seed starts a new pass.

    ## End
    Terminated by the action stop, or after `max_steps` operations; never truncated.

    ## Info
    `sample_id`, and, of a labelled image, `dice` of the present mask.

    Args:
        images: at least one, all with the same number of features; `ppo.operations.edited_images` makes them.
        max_steps: operations per episode.
        render_mode: None, or "rgb_array": the image with the present mask.

    Raises:
        ValueError: no images, features of different lengths, or `max_steps` out of range.
        gymnasium.error.ResetNeeded: `step` before `reset`, or after the end of an episode.
    """

    metadata: dict[str, Any] = METADATA

    def __init__(self, images: Sequence[EditedImage] = (), max_steps: int = 5, render_mode: str | None = None) -> None:
        check_render_mode(render_mode)
        self.render_mode = render_mode
        if not images:
            raise ValueError("images is empty, expected at least one; rl_reward_network.ppo.operations makes them")
        if len({len(image.features) for image in images}) > 1:
            raise ValueError("images: features have different lengths, expected one length for all images")
        if max_steps < 1:
            raise ValueError(f"max_steps is {max_steps}, expected 1 or more")
        self.images, self.max_steps = tuple(images), max_steps
        self.observation_space, self.action_space = spaces_of(len(observe(images[0], (), max_steps)))
        self._remaining: list[int] = []  # indices of the images still to come in this pass, last one next
        self._current: int | None = None
        self._operations: Operations = ()
        self._shown: EditedImage | None = None  # the last episode's too, which has no current image at its end

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode with the next image."""
        super().reset(seed=seed)
        if seed is not None or not self._remaining:
            self._remaining = self.np_random.permutation(len(self.images)).tolist()
        self._current, self._operations = self._remaining.pop(), ()
        image = self._shown = self.images[self._current]
        return observe(image, (), self.max_steps), {"sample_id": image.sample_id}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Apply one operation, or stop."""
        if self._current is None:
            raise gym.error.ResetNeeded("step: no episode is running; call reset first")
        if not self.action_space.contains(action):
            raise ValueError(f"action is {action!r}, expected an integer from 0 to {STOP_ACTION}")
        image, before = self.images[self._current], self._operations
        stops = int(action) == STOP_ACTION
        self._operations = now = before if stops else (*before, int(action))
        terminated = stops or len(now) == self.max_steps
        if terminated:
            self._current = None
        info = {"sample_id": image.sample_id} | ({} if image.truth is None else {"dice": image.dice(now)})
        return observe(image, now, self.max_steps), image.worth(now) - image.worth(before), terminated, False, info

    def render(self) -> np.ndarray | None:
        """uint8 (H, W, 3): the image with the present mask; None without a render mode."""
        if self.render_mode is None or self._shown is None:
            return None
        return tinted(self._shown.guide.image, self._shown.mask(self._operations))

    def state(self) -> dict[str, Any]:
        """The random state, the pass and the episode, as plain numbers and lists, for `restore`."""
        return {
            "generator": self.np_random.bit_generator.state,
            "remaining": list(self._remaining),
            "current": self._current,
            "operations": list(self._operations),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that `state` returned, in an environment with the same images."""
        self.np_random.bit_generator.state = state["generator"]
        self._remaining, self._current = list(state["remaining"]), state["current"]
        self._operations = tuple(state["operations"])
        self._shown = None if self._current is None else self.images[self._current]


def observe(image: EditedImage, operations: Operations, max_steps: int) -> np.ndarray:
    """float32 (D,): the observation after a sequence of operations, of `max_steps` at most."""
    used = np.bincount(np.array(operations, dtype=int), minlength=STOP_ACTION) / max_steps
    progress = len(operations) / max_steps
    parts = np.concatenate([image.features, image.statistics(operations), [progress], used]).astype(np.float32)
    return np.clip(parts, -OBSERVATION_LIMIT, OBSERVATION_LIMIT)


def spaces_of(size: int) -> tuple[gym.spaces.Box, gym.spaces.Discrete]:
    """The spaces of an environment with so many numbers in an observation."""
    observations = gym.spaces.Box(-OBSERVATION_LIMIT, OBSERVATION_LIMIT, (size,), np.float32)
    return observations, gym.spaces.Discrete(len(OPERATIONS))
