"""The network of both policies, how it chooses on many images, and its files."""

import io
import pickle
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.policies import ActorCriticPolicy, BasePolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

from rl_reward_network.atomic_io import whole_folder, write_json
from rl_reward_network.env.operations import EditedImage, Operations
from rl_reward_network.env.post_process_env import STOP_ACTION, observe
from rl_reward_network.env.sa2va_finetune_env import PromptContext, observations
from rl_reward_network.models.weights import check_finite

NET_ARCH = (128, 64)  # hidden units of the policy, and the same again for the value
STANDARDISED_LIMIT = 10.0  # standard deviations; limits the input of the network for unusual images


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


def policy_kwargs(mean: np.ndarray, std: np.ndarray, net_arch: Sequence[int] = NET_ARCH) -> dict[str, Any]:
    """SB3's `policy_kwargs` of a policy that standardises by `mean` and `std`, float (D,) each."""
    return {
        "net_arch": list(net_arch),
        "features_extractor_class": Standardise,
        "features_extractor_kwargs": {"mean": mean.tolist(), "std": std.tolist()},
        "optimizer_kwargs": {"eps": 1e-5, "fused": True},  # SB3's own eps; fused is Adam in one pass over the weights
    }


def choose_prompts(
    policy: PPO | BasePolicy,
    contexts: Sequence[PromptContext],
    max_steps: int = 1,
    observe_scores: bool = True,
    score: Callable[[np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """int64 (N,): the prompt chosen for each image.

    With one step it is the most probable prompt. With more steps, the most probable prompt is tried at each step, and
    the first one with the best score is chosen.

    Args:
        policy: a trained policy.
        contexts: N images.
        max_steps: prompts tried per image.
        observe_scores: whether the observation includes the best score so far, as in training.
        score: int (N,) prompts -> float (N,) the reward network's score of their masks, by default that of the
            contexts; called only when max_steps > 1.
    """

    def of_contexts(prompts: np.ndarray) -> np.ndarray:
        return np.array([context.scores[prompt] for context, prompt in zip(contexts, prompts, strict=True)])

    tried, scores, best = [], [], np.zeros(len(contexts))
    for step in range(max_steps):
        batch = observations(contexts, step / max_steps, best if observe_scores else 0.0)
        tried.append(policy.predict(batch, deterministic=True)[0].astype(np.int64))
        if max_steps > 1:
            scores.append(np.nan_to_num((score or of_contexts)(tried[-1])))  # 0 where the network gives no number
            best = np.maximum(best, scores[-1])
    best_step = np.argmax(scores, axis=0) if max_steps > 1 else np.zeros(len(contexts), dtype=np.int64)
    return np.stack(tried)[best_step, np.arange(len(contexts))]


def choose_operations(policy: PPO | BasePolicy, images: Sequence[EditedImage], max_steps: int) -> list[Operations]:
    """The most probable operations for each image, until the policy stops or `max_steps` are reached."""
    chosen: list[Operations] = [()] * len(images)
    running = list(range(len(images)))
    for _ in range(max_steps):
        if not running:
            break
        batch = np.stack([observe(images[index], chosen[index], max_steps) for index in running])
        actions = dict(zip(running, policy.predict(batch, deterministic=True)[0].tolist(), strict=True))
        running = [index for index in running if actions[index] != STOP_ACTION]
        for index in running:
            chosen[index] = (*chosen[index], actions[index])
    return chosen


def save_network(model: PPO, folder: Path, config: dict[str, Any]) -> None:
    """Write policy.zip and config.json, atomically."""
    with whole_folder(folder) as temporary:
        model.save(temporary / "policy.zip")
        write_json(temporary / "config.json", {**config, "net_arch": list(NET_ARCH)})


def load_network(
    archive: Path, spaces: tuple[gym.spaces.Box, gym.spaces.Discrete], net_arch: Sequence[int]
) -> ActorCriticPolicy:
    """The policy in SB3's `policy.zip`, rebuilt for inference from its weights alone: nothing is unpickled.

    Raises:
        ValueError: the file is missing, damaged, or of another policy.
    """
    zeros = np.zeros(spaces[0].shape)
    policy = ActorCriticPolicy(*spaces, lambda _: 0.0, **policy_kwargs(zeros, zeros, net_arch))
    load_weights(policy, archive)
    return policy


def load_weights(policy: ActorCriticPolicy, archive: Path) -> None:
    """Read the weights in `policy.zip` into a policy; as `load_network`."""
    try:
        with zipfile.ZipFile(archive) as file:
            weights = torch.load(io.BytesIO(file.read("policy.pth")), map_location="cpu", weights_only=True)
        check_finite(weights, archive)
        policy.load_state_dict(weights)
    except (OSError, KeyError, RuntimeError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise ValueError(f"{archive}: not the weights of this policy ({error}); train the policy again") from None
    policy.set_training_mode(False)
