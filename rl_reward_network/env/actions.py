"""Actions and their masks: an action is a prompt of Sa2VA and a function of the mask of that prompt.

A line of the prompts file is an action. The environment, PPO and the evaluation work on indices and scores of actions;
only this file depends on what an action does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ActionKind:
    """One kind of action.

    Args:
        recognise: whether a line of the prompts file is an action of this kind.
        prompt: the prompt that Sa2VA answers for the action.
        mask: (action, mask of that prompt bool (H, W)) -> mask of the action, bool (H, W).
    """

    recognise: Callable[[str], bool]
    prompt: Callable[[str], str]
    mask: Callable[[str, np.ndarray], np.ndarray]


# the first kind that recognises an action is used; any line is a prompt
ACTIONS: dict[str, ActionKind] = {
    "prompt": ActionKind(lambda action: True, prompt=lambda action: action, mask=lambda action, mask: mask),
}


def kind_of(action: str) -> ActionKind:
    """The kind of an action."""
    return next(kind for kind in ACTIONS.values() if kind.recognise(action))


def prompt_of(action: str) -> str:
    """The prompt that Sa2VA answers for an action."""
    return kind_of(action).prompt(action)


def prompts_of(actions: Sequence[str]) -> tuple[str, ...]:
    """The prompts of the actions, each once, in the order of the actions."""
    return tuple(dict.fromkeys(prompt_of(action) for action in actions))


def action_mask(action: str, prompt_mask: np.ndarray) -> np.ndarray:
    """bool (H, W): the mask of an action, from the mask of its prompt, bool (H, W)."""
    return kind_of(action).mask(action, prompt_mask)


def action_masks(actions: Sequence[str], prompt_masks: np.ndarray) -> np.ndarray:
    """bool (P, H, W): the masks of P actions, from those of `prompts_of(actions)`, bool (Q, H, W)."""
    by_prompt = dict(zip(prompts_of(actions), prompt_masks, strict=True))
    return np.stack([action_mask(action, by_prompt[prompt_of(action)]) for action in actions])
