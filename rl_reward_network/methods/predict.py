"""How methods make a mask: from the masks of one or several prompts, or by edits of Sa2VA's mask."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from rl_reward_network.atomic_io import read_json
from rl_reward_network.methods.view import ImageView, Trained
from rl_reward_network.ppo.policy import EditingPolicy, deployed_prompt, edit, load_policy, read_policy_config
from rl_reward_network.report.deployment import AS_IT_IS, Deployment
from rl_reward_network.run import FINAL

LEAST_WEIGHT = 1e-4  # of a mask in a weighted mean
Predict = Callable[[ImageView, Trained, float | None], np.ndarray]
"""(image, runs, parameter) -> soft mask, float (H, W); above 0.5 is the mask. No method sees the true mask."""


def default_prompt(view: ImageView, trained: Trained, parameter: float | None = None) -> np.ndarray:
    """The soft mask of the default prompt."""
    return _of(0, view, trained)


def fixed_prompt(run: str, view: ImageView, trained: Trained, parameter: float | None) -> np.ndarray:
    """The prompt that a run found best for all images."""
    return _of(trained.load(run, deployment_of).best_fixed, view, trained)


def prompt_policy(run: str, view: ImageView, trained: Trained, parameter: float | None) -> np.ndarray:
    """The prompt that a run deploys for the image: its policy's, or one for all images."""
    return _of(trained.load(run, _chooser)(view, trained), view, trained)


def best_of_prompts(view: ImageView, trained: Trained, parameter: float | None) -> np.ndarray:
    """The soft mask with the highest score of the reward network."""
    soft = view.soft(trained.prompts)
    best: np.ndarray = soft[_scores(view, soft).argmax()]
    return best


def mean_of_prompts(view: ImageView, trained: Trained, parameter: float | None) -> np.ndarray:
    """The mean of the soft masks of all prompts."""
    return np.asarray(view.soft(trained.prompts).mean(axis=0))


def weighted_mean(view: ImageView, trained: Trained, parameter: float | None) -> np.ndarray:
    """The mean of the soft masks of all prompts, weighted by the reward network's score."""
    soft = view.soft(trained.prompts)
    weights = np.maximum(_scores(view, soft), LEAST_WEIGHT)
    return np.asarray(np.average(soft, axis=0, weights=weights), np.float32)


def threshold(run: str, view: ImageView, trained: Trained, parameter: float | None) -> np.ndarray:
    """The best single threshold in place of 0.5."""
    return edit(view.image, default_prompt(view, trained), trained.load(run, _editing_policy).sequence(1))


def fixed_sequence(run: str, view: ImageView, trained: Trained, parameter: float | None) -> np.ndarray:
    """The sequence of operations that a run found best for all images."""
    policy = trained.load(run, _editing_policy)
    return edit(view.image, default_prompt(view, trained), policy.sequence(policy.deployment.best_fixed))


def operations_policy(
    run: str, view: ImageView, trained: Trained, parameter: float | None, source: Predict = default_prompt
) -> np.ndarray:
    """The operations that a run deploys, on the soft mask of another method."""
    soft = source(view, trained, parameter)
    policy = trained.load(run, _editing_policy)
    return edit(view.image, soft, policy.deployed(view.image, soft, view.features(trained.prompts[0])))


def deployment_of(run: Path) -> Deployment:
    """What the run of a policy deploys."""
    return Deployment.from_json(read_json(run / FINAL / "config.json")["deployment"])


def _editing_policy(run: Path) -> EditingPolicy:
    return EditingPolicy(run / FINAL)


def _of(index: int, view: ImageView, trained: Trained) -> np.ndarray:
    return view.soft(trained.prompts[index : index + 1])[0]


def _scores(view: ImageView, soft: np.ndarray) -> np.ndarray:
    """float32 (P,): the reward network's score of the mask of each soft mask (P, H, W); 0 outside its domain."""
    return np.nan_to_num(view.scorer.quality((soft > 0.5).astype(np.float32))["score"])


def _chooser(run: Path) -> Callable[[ImageView, Trained], int]:
    """The policy of a run, or the one prompt that it deploys."""
    deployment = deployment_of(run)
    if deployment.choice != "policy":
        index = deployment.best_fixed if deployment.choice == "fixed" else AS_IT_IS
        return lambda view, trained: index
    config, policy = read_policy_config(run / FINAL), load_policy(run / FINAL)

    def choose(view: ImageView, trained: Trained) -> int:
        def score(index: int) -> float:
            return float(_scores(view, view.soft(trained.prompts[index : index + 1]))[0])

        return deployed_prompt(policy, config, view.image, view.features(trained.prompts[0]), score)

    return choose
