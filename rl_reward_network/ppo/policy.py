"""The network of a policy, how it chooses, its files, and what a finished run deploys on a new image."""

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
from rl_reward_network.env.observation import EPISODE_FEATURES, EdgeFeatures, features_of, observation_table
from rl_reward_network.env.sa2va_finetune_env import PromptContext, observations, spaces_of
from rl_reward_network.models.sa2va.checkpoint_sa2va import refuse_unmerged
from rl_reward_network.models.weights import check_finite
from rl_reward_network.ppo.operations import EditedImage, Edits
from rl_reward_network.report.deployment import AS_IT_IS, Deployment
from rl_reward_network.run import FINAL, read_model_config

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
    """int64 (N,): the most probable prompt of each of N images, or the best of `max_steps` most probable ones.

    Of several, the first with the best score is chosen: `score`, int (N,) prompts -> float (N,), by default the scores
    of the contexts. `observe_scores`: whether the observation includes the best score so far, as in training.
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


def save_network(model: PPO, folder: Path, config: dict[str, Any]) -> None:
    """Write policy.zip and config.json, atomically."""
    with whole_folder(folder) as temporary:
        model.save(temporary / "policy.zip")
        write_json(temporary / "config.json", {**config, "net_arch": list(NET_ARCH)})


def load_weights(policy: ActorCriticPolicy, archive: Path) -> None:
    """Read the weights in SB3's `policy.zip` into a policy; nothing is unpickled. Another file is a ValueError."""
    try:
        with zipfile.ZipFile(archive) as file:
            weights = torch.load(io.BytesIO(file.read("policy.pth")), map_location="cpu", weights_only=True)
        check_finite(weights, archive)
        policy.load_state_dict(weights)
    except (OSError, KeyError, RuntimeError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise ValueError(f"{archive}: not the weights of this policy ({error}); train the policy again") from None
    policy.set_training_mode(False)


def policy_folder(path: Path) -> Path:
    """The final_model folder of a run of step 2, given its path or that of the run; a run of GRPO is a ValueError."""
    refuse_unmerged(path)
    return path / FINAL if (path / FINAL / "config.json").exists() else path


def read_policy_config(folder: Path, edits: bool = False) -> dict[str, Any]:
    """config.json of the `final_model` of a policy that chooses prompts, or with `edits` operations.

    Raises:
        ValueError: the file or a field is missing, or it is of the other kind or of another version; names the remedy.
    """
    path, command = folder / "config.json", "operations" if edits else "prompts"
    remedy = f"name the final_model folder of a run of this version, or train one: sa2va-rl {command} quick"
    try:
        config = read_model_config(path)
    except ValueError as error:
        raise ValueError(f"{error}; {remedy}") from None
    if "fixed_sequence" in config:
        raise ValueError(f"{path}: up to 1.0.0rc1 a policy chose operations one by one; train experiment 2 again")
    if config.get("plan", {}).get("ppo", {}).get("stop"):
        raise ValueError(
            f"{path}: trained with --stop, which this version does not have; use it with version 0.12, or train again: "
            "bash run_experiment1.sh quick"
        )
    fields = ["prompts", "inputs", "observation", "vision_features", "net_arch", "plan", "deployment"]
    if missing := [name for name in fields + ["sequences"] * edits if name not in config]:
        raise ValueError(f"{path}: field {missing[0]} is missing; {remedy}")
    if not edits and config.get("sequences"):
        raise ValueError(f"{path}: this policy chooses operations, not prompts; {remedy}")
    return dict(config)


def load_policy(folder: Path, edits: bool = False) -> ActorCriticPolicy:
    """The policy of a `final_model` folder, rebuilt from its weights alone; raises as `read_policy_config`."""
    config = read_policy_config(folder, edits)
    vision = config["vision_features"]
    if config["observation"] != [entry.name for entry in observation_table(vision, edits)]:
        raise ValueError(f"{folder / 'config.json'}: observation: made for other observations; train the policy again")
    spaces = spaces_of(vision, len(config["sequences" if edits else "prompts"]), edits)
    zeros = np.zeros(spaces[0].shape)
    policy = ActorCriticPolicy(*spaces, lambda _: 0.0, **policy_kwargs(zeros, zeros, config["net_arch"]))
    load_weights(policy, folder / "policy.zip")
    return policy


def deployed_prompt(
    policy: ActorCriticPolicy,
    trained: dict[str, Any],
    image: np.ndarray,
    vision_features: np.ndarray | None,
    score: Callable[[int], float],
) -> int:
    """The index of the prompt that a policy chooses for a new image, uint8 (H, W, 3); `trained` is its config.json.

    `vision_features`, float32 (C,), are used only if it was trained with them; `score`, the reward network's of a
    prompt's mask, is called only if it tries several. Features of another width are a ValueError.
    """
    plan = trained["plan"]
    vision = vision_features if plan["vision_features"] else None
    context = _new_context(trained, features_of(EdgeFeatures(image), vision))

    def scores(prompts: np.ndarray) -> np.ndarray:
        return np.array([score(int(prompts[0]))])

    return int(choose_prompts(policy, [context], plan["ppo"]["max_steps"], plan["reward"] == "net", scores)[0])


def _new_context(trained: dict[str, Any], features: np.ndarray, edits: bool = False) -> PromptContext:
    """A new image, whose rewards nobody knows, for the policy with this config.json."""
    if len(features) + EPISODE_FEATURES != len(trained["observation"]):
        raise ValueError(
            "the policy was trained on a Sa2VA with features of another width; use the model of its run (with "
            "--policy, leave --model_path out)"
        )
    actions = len(trained["sequences" if edits else "prompts"])
    return PromptContext("new image", features, np.zeros(actions, dtype=np.float32), mask_features=edits)


class EditingPolicy:
    """What a run of experiment 2, whose `final_model` is given, deploys: policy, fixed sequence, or masks as they are.

    `config` is its config.json, whose `sequences` are the actions. Raises as `load_policy`.
    """

    def __init__(self, folder: Path) -> None:
        self.config, self.policy = read_policy_config(folder, edits=True), load_policy(folder, edits=True)

    @property
    def deployment(self) -> Deployment:
        """What is deployed."""
        return Deployment.from_json(self.config["deployment"])

    def sequence(self, index: int) -> Edits:
        """A sequence of operations: 0 is none, 1 the best threshold."""
        return tuple(self.config["sequences"][index])

    def deployed(self, image: np.ndarray, soft: np.ndarray, vision_features: np.ndarray | None) -> Edits:
        """The deployed sequence of a soft mask, float32 (H, W) in [0, 1], on an image, uint8 (H, W, 3).

        `vision_features`, float32 (C,), are used only if the policy was trained with them; those of another model are a
        ValueError.
        """
        if self.deployment.choice != "policy":
            return self.sequence(self.deployment.best_fixed if self.deployment.choice == "fixed" else AS_IT_IS)
        vision = vision_features if self.config["plan"]["vision_features"] else None
        context = _new_context(self.config, features_of(EdgeFeatures(image), vision, soft), edits=True)
        return self.sequence(int(choose_prompts(self.policy, [context])[0]))


def edit(image: np.ndarray, soft: np.ndarray, sequence: Edits) -> np.ndarray:
    """The soft mask, float32 (H, W) in [0, 1], of an image, uint8 (H, W, 3), after a sequence of operations."""
    return EditedImage(EdgeFeatures(image), soft).edited(sequence)
