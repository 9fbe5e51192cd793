"""The prompt policy: its network, how it chooses prompts, and its folder."""

import io
import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.policies import ActorCriticPolicy, BasePolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

from rl_reward_network.artefacts import read_json, whole_folder, write_json
from rl_reward_network.env.observation import (
    EPISODE_FEATURES,
    IMAGE_FEATURES,
    bounds,
    observation_table,
    observe_image,
)
from rl_reward_network.env.sa2va_finetune_env import PromptContext, observations, spaces_of
from rl_reward_network.models.sa2va.checkpoint_sa2va import refuse_unmerged

NET_ARCH = (128, 64)  # hidden units of the policy, and the same again for the value
STANDARDISED_LIMIT = 10.0  # standard deviations; limits the input of the network for unusual images
LEAST_STD = 1e-4  # of a feature's range: a feature that is constant in training must not amplify rounding noise


class Standardise(BaseFeaturesExtractor):
    """Standardises observations by a fixed mean and standard deviation, and clips them; saved with the policy."""

    def __init__(self, observation_space: gym.spaces.Box, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__(observation_space, features_dim=len(mean))
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32))

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        """float32 (B, D) in, the same shape out, within +-`STANDARDISED_LIMIT`."""
        standard = (observations - self.get_buffer("mean")) / self.get_buffer("std")
        return standard.clamp_(-STANDARDISED_LIMIT, STANDARDISED_LIMIT)


def architecture(contexts: Sequence[PromptContext], stop: bool = False) -> dict[str, Any]:
    """SB3's `policy_kwargs` for a policy that standardises by these images, except the state of the episode."""
    features = np.stack([context.features for context in contexts]).astype(np.float64)
    low, high = (side[:-EPISODE_FEATURES] for side in bounds(contexts[0].vision_features))
    std = np.maximum(features.std(axis=0), LEAST_STD * (high - low))
    episode = EPISODE_FEATURES + (len(contexts[0].scores) if stop else 0)
    mean = [*features.mean(axis=0).tolist(), *([0.0] * episode)]
    return policy_kwargs(mean, [*std.tolist(), *([1.0] * episode)], NET_ARCH)


def policy_kwargs(mean: Sequence[float], std: Sequence[float], net_arch: Sequence[int]) -> dict[str, Any]:
    """SB3's `policy_kwargs` of a policy that standardises by `mean` and `std`, for training and for loading."""
    return {
        "net_arch": list(net_arch),
        "features_extractor_class": Standardise,
        "features_extractor_kwargs": {"mean": list(mean), "std": list(std)},
        "optimizer_kwargs": {"eps": 1e-5, "fused": True},  # SB3's own eps; fused is Adam in one pass over the weights
    }


def try_prompts(
    policy: PPO | BasePolicy,
    contexts: Sequence[PromptContext],
    score: Callable[[np.ndarray], np.ndarray],
    max_steps: int = 1,
    observe_scores: bool = True,
) -> np.ndarray:
    """int64 (N,): the prompt chosen for each image.

    With one step it is the most probable prompt. With more steps, the most probable prompt is tried at each step, and
    the first one with the best score is chosen.

    Args:
        policy: a trained policy.
        contexts: N images; only their features are used.
        score: int (N,) prompts -> float (N,) the reward network's score of their masks; called only when max_steps > 1.
        max_steps: prompts tried per image.
        observe_scores: whether the observation includes the best score so far, as in training.
    """
    tried, scores, best = [], [], np.zeros(len(contexts))
    for step in range(max_steps):
        batch = observations(contexts, step / max_steps, best if observe_scores else 0.0)
        tried.append(policy.predict(batch, deterministic=True)[0].astype(np.int64))
        if max_steps > 1:
            scores.append(score(tried[-1]))
            best = np.maximum(best, scores[-1])
    best_step = np.argmax(scores, axis=0) if max_steps > 1 else np.zeros(len(contexts), dtype=np.int64)
    return np.stack(tried)[best_step, np.arange(len(contexts))]


def try_until_stop(policy: PPO | BasePolicy, contexts: Sequence[PromptContext], max_steps: int) -> np.ndarray:
    """int64 (N,): the last of the most probable prompts before a policy with the action stop ends the episode.

    Nothing in its observation depends on the masks, so Sa2VA must answer the last prompt alone.

    Args:
        policy: a policy trained with the action stop.
        contexts: N images; only their features and the number of prompts are used.
        max_steps: prompts per image at most.
    """
    current = np.zeros(len(contexts), dtype=np.int64)  # the default prompt
    running = np.ones(len(contexts), dtype=bool)
    for step in range(max_steps):
        batch = observations(contexts, step / max_steps, current=current.tolist())
        actions = policy.predict(batch, deterministic=True)[0].astype(np.int64)
        running &= actions < len(contexts[0].scores)
        current = np.where(running, actions, current)
    return current


def choose_prompts(
    policy: PPO | BasePolicy,
    contexts: Sequence[PromptContext],
    max_steps: int = 1,
    observe_scores: bool = True,
    stop: bool = False,
) -> np.ndarray:
    """`try_prompts` on images with known scores; with the action `stop`, `try_until_stop`."""
    if stop:
        return try_until_stop(policy, contexts, max_steps)
    table = np.stack([context.scores for context in contexts])
    return try_prompts(policy, contexts, lambda tried: table[np.arange(len(table)), tried], max_steps, observe_scores)


def save_policy(model: PPO, folder: Path, description: dict[str, Any]) -> None:
    """Write the folder that `load_policy` reads, atomically; `description` goes into its config.json."""
    prompts = len(description["prompts"]) if has_stop(description) else 0
    vision = model.observation_space.shape[0] - IMAGE_FEATURES - EPISODE_FEATURES - prompts  # type: ignore[index]
    network = {
        "observation": observation_names(vision, prompts),
        "vision_features": vision,
        "net_arch": list(NET_ARCH),
    }
    with whole_folder(folder) as temporary:
        model.save(temporary / "policy.zip")
        write_json(temporary / "config.json", {**description, **network})


def load_policy(folder: Path) -> ActorCriticPolicy:
    """The policy of a `final_model` folder, rebuilt from its weights alone: nothing is unpickled.

    Raises:
        ValueError: config.json or policy.zip is missing or damaged, or the policy was trained on other observations.
    """
    config, archive = read_policy_config(folder), folder / "policy.zip"
    stop, prompts = has_stop(config), len(config["prompts"])
    names = observation_names(config["vision_features"], prompts if stop else 0)
    if config["observation"] != names:
        raise ValueError(f"{folder / 'config.json'}: observation: made for other observations; train the policy again")
    zeros = [0.0] * len(names)
    policy = ActorCriticPolicy(
        *spaces_of(config["vision_features"], prompts, stop),
        lambda _: 0.0,
        **policy_kwargs(zeros, zeros, config["net_arch"]),
    )
    load_weights(policy, archive)
    return policy


def has_stop(config: Mapping[str, Any]) -> bool:
    """Whether the policy of a run has the action stop; runs of 0.9 and earlier have not."""
    return bool(config["plan"].get("ppo", {}).get("stop", False))


def observation_names(vision_features: int, prompts: int = 0) -> list[str]:
    """Names of the numbers of an observation; `prompts` is their number with the action stop, else 0."""
    present = [f"present_mask_of_prompt_{index}" for index in range(prompts)]
    return [*(entry.name for entry in observation_table(vision_features)), *present]


def load_weights(policy: ActorCriticPolicy, archive: Path) -> None:
    """Read the weights in SB3's `policy.zip` into a policy for inference; nothing is unpickled.

    Raises:
        ValueError: the file is missing, damaged, or of another policy.
    """
    try:
        with zipfile.ZipFile(archive) as file:
            weights = torch.load(io.BytesIO(file.read("policy.pth")), map_location="cpu", weights_only=True)
        policy.load_state_dict(weights)
    except (OSError, KeyError, RuntimeError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise ValueError(f"{archive}: not the weights of this policy ({error}); train the policy again") from None
    policy.set_training_mode(False)


def policy_folder(path: Path) -> Path:
    """The final_model folder of a run of step 2, given its path or that of the run.

    Raises:
        ValueError: the folder is of a GRPO run, which has no policy.
    """
    refuse_unmerged(path)
    return path / "final_model" if (path / "final_model" / "config.json").exists() else path


def deployed_prompt(
    policy: ActorCriticPolicy,
    trained: dict[str, Any],
    image: np.ndarray,
    vision_features: np.ndarray | None,
    score: Callable[[int], float],
) -> int:
    """The index of the prompt that a policy chooses for a new image.

    Args:
        policy: as `load_policy` returns it.
        trained: its config.json.
        image: uint8 (H, W, 3).
        vision_features: float32 (C,), Sa2VA's pooled features; used only if the policy was trained with them.
        score: the reward network's score of a prompt's mask; called only if the policy tries several.

    Raises:
        ValueError: the policy was trained with features of another model.
    """
    plan, prompts, stop = trained["plan"], trained["prompts"], has_stop(trained)
    features = observe_image(image, vision_features if plan["vision_features"] else None)
    if len(features) + EPISODE_FEATURES + stop * len(prompts) != len(trained["observation"]):
        raise ValueError("--policy: trained on a Sa2VA with features of another width; leave --model_path out")
    context = PromptContext("new image", features, np.zeros(len(prompts), dtype=np.float32))
    max_steps, observe_scores = plan["ppo"]["max_steps"], plan["reward"] == "net"
    if stop:
        return int(try_until_stop(policy, [context], max_steps)[0])
    return int(
        try_prompts(policy, [context], lambda tried: np.array([score(int(tried[0]))]), max_steps, observe_scores)[0]
    )


def read_policy_config(folder: Path) -> dict[str, Any]:
    """config.json of a `final_model` folder.

    Raises:
        ValueError: the file or a field is missing; names the remedy.
    """
    path = folder / "config.json"
    remedy = "name the final_model folder of a run of this version, or train one: sa2va-rl prompts quick"
    try:
        config = read_json(path)
    except ValueError as error:
        raise ValueError(f"{error}; {remedy}") from None
    for field in ("prompts", "world", "observation", "vision_features", "net_arch", "plan", "deployment"):
        if not isinstance(config, dict) or field not in config:
            raise ValueError(f"{path}: field {field} is missing; {remedy}")
    return dict(config)
