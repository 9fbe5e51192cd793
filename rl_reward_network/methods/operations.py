"""Methods that edit Sa2VA's mask: a threshold, a fixed sequence of operations, and the policy of experiment 2."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from rl_reward_network.methods.prompts import Predict, default_prompt
from rl_reward_network.methods.view import ImageView, Trained
from rl_reward_network.ppo.operations import Edits
from rl_reward_network.ppo.policy import EditingPolicy, edit
from rl_reward_network.run import FINAL


def threshold(run: str) -> Predict:
    """The best single threshold in place of 0.5; both sides of it are stretched to the halves of [0, 1]."""
    return _edited(run, lambda policy, view, trained, soft: policy.sequence(1))


def fixed_sequence(run: str) -> Predict:
    """The sequence of operations that a run found best for all images."""
    return _edited(run, lambda policy, view, trained, soft: policy.sequence(policy.deployment.best_fixed))


def operations_policy(run: str, source: Predict = default_prompt) -> Predict:
    """The operations that a run deploys, on the soft mask of another method."""

    def deployed(policy: EditingPolicy, view: ImageView, trained: Trained, soft: np.ndarray) -> Edits:
        return policy.deployed(view.image, soft, view.features(trained.prompts[0]))

    return _edited(run, deployed, source)


def _edited(
    run: str,
    choose: Callable[[EditingPolicy, ImageView, Trained, np.ndarray], Edits],
    source: Predict = default_prompt,
) -> Predict:
    """The soft mask of a method after the operations that `choose` takes from a run."""

    def predict(view: ImageView, trained: Trained, parameter: float | None) -> np.ndarray:
        soft = source(view, trained, parameter)
        return edit(view.image, soft, choose(trained.load(run, _policy), view, trained, soft))

    return predict


def _policy(run: Path) -> EditingPolicy:
    return EditingPolicy(run / FINAL)
