"""The environment of experiment 2: observe an image and its mask, choose an operation on the mask, or stop."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import gymnasium as gym
import numpy as np

OBSERVATION_LIMIT = 1e3  # bound of every number of the observation


class MaskState(NamedTuple):
    """An edited mask.

    Args:
        statistics: float32 (M,), of the mask on its image, without ground truth.
        reward: of the mask, in [0, 1].
        info: numbers for the curves, such as `dice`.
    """

    statistics: np.ndarray
    reward: float
    info: dict[str, float]


class EditableMask(Protocol):
    """An image with a mask that operations change.

    Attributes:
        sample_id: name of the image, in our runs a hash.
        features: float32 (F,), of the image.
    """

    sample_id: str
    features: np.ndarray

    def state(self, operations: tuple[int, ...]) -> MaskState:
        """The mask after a sequence of operations."""


class PostProcessEnv(gym.Env[np.ndarray, np.int64]):
    """Choose operations that improve the mask of an image.

    ## Observation
    `Box(D,)` float32: features of the image, statistics of the present mask, the share of the episode's steps taken,
    and for each operation the share of the steps that used it. It contains no ground truth.

    ## Action
    `Discrete(A)`: the index of an operation; the last one stops.

    ## Reward
    The change of the mask's reward, in [-1, 1]; the return is the reward of the last mask less that of the first.

    ## Start
    The unchanged mask of the next image of a shuffled pass over all images. A seed starts a new pass.

    ## End
    Terminated by the action stop, or after `max_steps` operations; never truncated.

    ## Info
    `sample_id`, and the numbers of the mask's state.

    Args:
        masks: at least one, all with the same number of features.
        actions: number of actions A, the last of which stops.
        max_steps: operations per episode.

    Raises:
        ValueError: no masks, features of different lengths, or numbers out of range.
        gymnasium.error.ResetNeeded: `step` before `reset`, or after the end of an episode.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (gymnasium's own declaration)

    def __init__(self, masks: Sequence[EditableMask] = (), actions: int = 12, max_steps: int = 5) -> None:
        if not masks:
            raise ValueError(
                "masks is empty, expected at least one; build them by post_processing.edits.editable_masks"
            )
        if len({len(mask.features) for mask in masks}) > 1:
            raise ValueError("masks: features have different lengths, expected one length for all images")
        if actions < 2 or max_steps < 1:
            raise ValueError(f"actions is {actions} and max_steps {max_steps}, expected at least 2 and 1")
        self.masks, self.actions, self.max_steps = tuple(masks), actions, max_steps
        size = len(self.observe(masks[0], ()))
        self.observation_space = gym.spaces.Box(-OBSERVATION_LIMIT, OBSERVATION_LIMIT, (size,), np.float32)
        self.action_space = gym.spaces.Discrete(actions)
        self._remaining: list[int] = []  # indices of the masks still to come in this pass, last one next
        self._current: int | None = None
        self._operations: tuple[int, ...] = ()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode with the next mask."""
        super().reset(seed=seed)
        if seed is not None or not self._remaining:
            self._remaining = self.np_random.permutation(len(self.masks)).tolist()
        self._current, self._operations = self._remaining.pop(), ()
        mask = self.masks[self._current]
        return self.observe(mask, ()), {"sample_id": mask.sample_id}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Apply one operation, or stop."""
        if self._current is None:
            raise gym.error.ResetNeeded("step: no episode is running; call reset first")
        if not self.action_space.contains(action):
            raise ValueError(f"action is {action!r}, expected an integer from 0 to {self.actions - 1}")
        mask, before = self.masks[self._current], self._operations
        stops = int(action) == self.actions - 1
        self._operations = before if stops else (*before, int(action))
        now = mask.state(self._operations)
        terminated = stops or len(self._operations) == self.max_steps
        if terminated:
            self._current = None
        reward = now.reward - mask.state(before).reward
        info = {"sample_id": mask.sample_id, **now.info}
        return self.observe(mask, self._operations), reward, terminated, False, info

    def observe(self, mask: EditableMask, operations: tuple[int, ...]) -> np.ndarray:
        """float32 (D,), the observation after a sequence of operations."""
        return observe(mask.features, mask.state(operations).statistics, operations, self.actions, self.max_steps)

    def state(self) -> dict[str, Any]:
        """The random state, the pass and the episode, as plain numbers and lists, for `restore`."""
        return {
            "generator": self.np_random.bit_generator.state,
            "remaining": list(self._remaining),
            "current": self._current,
            "operations": list(self._operations),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that `state` returned, in an environment with the same masks."""
        self.np_random.bit_generator.state = state["generator"]
        self._remaining, self._current = list(state["remaining"]), state["current"]
        self._operations = tuple(state["operations"])


def observe(
    features: np.ndarray, statistics: np.ndarray, operations: tuple[int, ...], actions: int, max_steps: int
) -> np.ndarray:
    """float32 (D,): an observation of `PostProcessEnv` from its parts."""
    used = np.bincount(np.array(operations, dtype=int), minlength=actions - 1) / max_steps
    progress = len(operations) / max_steps
    parts = np.concatenate([features, statistics, [progress], used]).astype(np.float32)
    return np.clip(parts, -OBSERVATION_LIMIT, OBSERVATION_LIMIT)
