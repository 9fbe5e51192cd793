import numpy as np
import pytest

from rl_reward_network.env import actions
from rl_reward_network.env.actions import ActionKind, action_mask, action_masks, prompt_of, prompts_of
from rl_reward_network.env.prompts import PROMPTS

MASKS = np.random.default_rng(0).random((11, 6, 5)) > 0.5


def test_a_prompt_stands_for_the_mask_of_sa2va() -> None:
    assert prompts_of(PROMPTS) == PROMPTS
    assert prompt_of(PROMPTS[3]) == PROMPTS[3]
    np.testing.assert_array_equal(action_masks(PROMPTS, MASKS), MASKS)
    np.testing.assert_array_equal(action_mask(PROMPTS[3], MASKS[3]), MASKS[3])


def test_another_kind_of_action_needs_one_entry_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt of each action is answered once, and each action has a mask of its own."""
    inverted = ActionKind(lambda action: action.endswith("~"), lambda action: action[:-1], lambda _, mask: ~mask)
    monkeypatch.setattr(actions, "ACTIONS", {"inverted": inverted, **actions.ACTIONS})
    lines = ["a vessel", "a vessel~", "a rib~"]
    assert prompts_of(lines) == ("a vessel", "a rib")
    vessel, rib = MASKS[:2]
    np.testing.assert_array_equal(action_masks(lines, MASKS[:2]), [vessel, ~vessel, ~rib])


def test_as_many_masks_as_prompts_are_needed() -> None:
    with pytest.raises(ValueError, match="zip"):
        action_masks(PROMPTS, MASKS[:3])
