"""Methods that edit Sa2VA's mask: a threshold, a fixed sequence of operations, and the policy of experiment 2."""

from pathlib import Path

import numpy as np

from rl_reward_network.methods.prompts import Predict, default_prompt
from rl_reward_network.methods.view import ImageView, Trained
from rl_reward_network.ppo.deploy import PostPolicy, load_post_policy
from rl_reward_network.run import FINAL


def threshold(run: str) -> Predict:
    """The best single threshold in place of 0.5; both sides of it are stretched to the halves of [0, 1]."""

    def predict(view: ImageView, trained: Trained, parameter: float | None) -> np.ndarray:
        best = float(np.float32(trained.load(run, _policy).config["best_threshold"]))  # as float32 masks are compared
        soft = default_prompt(view, trained).astype(np.float64)
        return np.where(soft > best, 0.5 + (soft - best) / (1 - best) / 2, soft / best / 2)

    return predict


def fixed_sequence(run: str) -> Predict:
    """The sequence of operations that a run found best for all images."""

    def predict(view: ImageView, trained: Trained, parameter: float | None) -> np.ndarray:
        return trained.load(run, _policy).edit_by_sequence(view.image, default_prompt(view, trained))

    return predict


def operations_policy(run: str, source: Predict = default_prompt) -> Predict:
    """The operations that a run deploys, on the soft mask of another method."""

    def predict(view: ImageView, trained: Trained, parameter: float | None) -> np.ndarray:
        soft = source(view, trained, parameter)
        return trained.load(run, _policy).edit(view.image, soft, view.features(trained.prompts[0]))

    return predict


def _policy(run: Path) -> PostPolicy:
    return load_post_policy(run / FINAL)
