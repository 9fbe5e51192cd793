"""The post-processing policy: how it chooses operations, and its folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.policies import ActorCriticPolicy, BasePolicy

from rl_reward_network.artefacts import read_json, whole_folder, write_json
from rl_reward_network.env.observation import observation_table, observe_image
from rl_reward_network.env.operations import OPERATIONS, STOP, GuideImage, apply_operation
from rl_reward_network.env.post_observation import mask_observation_table, observe_mask
from rl_reward_network.env.post_process_env import OBSERVATION_LIMIT, EditableMask, MaskState, observe
from rl_reward_network.ppo.policy import LEAST_STD, NET_ARCH, load_weights, policy_kwargs
from rl_reward_network.report.deployment import Deployment

Operations = tuple[int, ...]
STOP_ACTION = OPERATIONS.index(STOP)
LEAST_DEVIATION = 1e-3  # a number that is constant in training must not amplify noise


def architecture(observations: np.ndarray) -> dict[str, Any]:
    """SB3's `policy_kwargs` for a policy that standardises by these observations, float32 (N, D).

    The state of the episode (progress and operations used) is left as it is.
    """
    episode = len(OPERATIONS)  # progress, and the use of each operation but stop
    mean, std = observations.mean(axis=0), np.maximum(observations.std(axis=0), max(LEAST_DEVIATION, LEAST_STD))
    mean[-episode:], std[-episode:] = 0.0, 1.0
    return policy_kwargs(mean.tolist(), std.tolist(), NET_ARCH)


def choose_operations(policy: PPO | BasePolicy, masks: Sequence[EditableMask], max_steps: int) -> list[Operations]:
    """The most probable operations for each mask, until the policy stops or `max_steps` are reached."""
    chosen: list[Operations] = [()] * len(masks)
    running = list(range(len(masks)))
    for _ in range(max_steps):
        if not running:
            break
        batch = np.stack(
            [
                observe(masks[i].features, masks[i].state(chosen[i]).statistics, chosen[i], len(OPERATIONS), max_steps)
                for i in running
            ]
        )
        actions = policy.predict(batch, deterministic=True)[0]
        going_on = [(i, int(action)) for i, action in zip(running, actions, strict=True) if action != STOP_ACTION]
        for i, action in going_on:
            chosen[i] = (*chosen[i], action)
        running = [i for i, _ in going_on]
    return chosen


@dataclass(frozen=True)
class PostPolicy:
    """What a run deploys: the policy, the best fixed sequence, or the masks as they are.

    Args:
        config: config.json of its final_model; with `best_threshold`, `fixed_sequence` and `deployment`.
        policy: None where it is not deployed.
    """

    config: dict[str, Any]
    policy: ActorCriticPolicy | None

    @property
    def deployment(self) -> Deployment:
        """What was decided."""
        return Deployment.from_json(self.config["deployment"])

    @property
    def fixed(self) -> Operations:
        """The operations on every mask where the policy is not deployed: the best fixed sequence, or none."""
        return tuple(self.config["fixed_sequence"]) if self.deployment.choice == "fixed" else ()

    def operations(self, image: np.ndarray, soft: np.ndarray, vision_features: np.ndarray | None) -> Operations:
        """The operations for a mask; arguments as in `edit`.

        Raises:
            ValueError: the policy was trained with features of another model.
        """
        if self.policy is None:
            return self.fixed
        used = vision_features if self.config["plan"]["vision_features"] else None
        features = observe_image(image, used)
        mask = _NewMask("new image", features, GuideImage(image), soft)
        size = len(features) + len(mask_observation_table()) + len(OPERATIONS)
        if size != self.policy.observation_space.shape[0]:  # type: ignore[index]
            raise ValueError(
                "the policy was trained on a Sa2VA with features of another width; use the model of its run"
            )
        return choose_operations(self.policy, [mask], self.config["plan"]["ppo"]["max_steps"])[0]

    def edit(self, image: np.ndarray, soft: np.ndarray, vision_features: np.ndarray | None) -> np.ndarray:
        """The soft mask after the deployed operations, float32 (H, W) in [0, 1].

        Args:
            image: uint8 (H, W, 3), RGB.
            soft: float32 (H, W) in [0, 1], Sa2VA's soft mask.
            vision_features: float32 (C,), pooled features of Sa2VA's image encoder; used only if the policy was trained
                with them.
        """
        return _applied(image, soft, self.operations(image, soft, vision_features))

    def edit_by_sequence(self, image: np.ndarray, soft: np.ndarray) -> np.ndarray:
        """The soft mask after the best fixed sequence, float32 (H, W) in [0, 1]."""
        return _applied(image, soft, tuple(self.config["fixed_sequence"]))


def _applied(image: np.ndarray, soft: np.ndarray, operations: Operations) -> np.ndarray:
    guide = GuideImage(image)
    for action in operations:
        soft = apply_operation(OPERATIONS[action], guide, soft)
    return soft


@dataclass(eq=False)
class _NewMask:
    """A mask to be edited whose reward nobody knows."""

    sample_id: str
    features: np.ndarray
    guide: GuideImage
    soft: np.ndarray

    def state(self, operations: Operations) -> MaskState:
        soft = _applied(self.guide.image, self.soft, operations)
        return MaskState(observe_mask(self.guide, soft), 0.0, {})


def save_post_policy(model: PPO, folder: Path, description: dict[str, Any], vision_features: int) -> None:
    """Write the folder that `load_post_policy` reads, atomically; `description` goes into its config.json."""
    image = [entry.name for entry in observation_table(vision_features)][:-2]  # without the state of step 2's episode
    names = [*image, *(entry.name for entry in mask_observation_table())]
    network = {"observation": names, "operations": list(OPERATIONS), "net_arch": list(NET_ARCH)}
    with whole_folder(folder) as temporary:
        model.save(temporary / "policy.zip")
        write_json(temporary / "config.json", {**description, **network})


def load_post_policy(folder: Path) -> PostPolicy:
    """What the run of a `final_model` folder deploys; nothing is unpickled.

    Raises:
        ValueError: config.json or policy.zip is missing or damaged, or the operations are of another version.
    """
    return load_policy_of_run(folder)[1]


def load_policy_of_run(folder: Path) -> tuple[ActorCriticPolicy, PostPolicy]:
    """The trained policy, and what is deployed; as `load_post_policy`."""
    config = read_post_config(folder)
    if config["operations"] != list(OPERATIONS):
        raise ValueError(f"{folder / 'config.json'}: operations: of another version; train experiment 2 again")
    size = len(config["observation"]) + len(OPERATIONS)
    policy = ActorCriticPolicy(
        gym.spaces.Box(-OBSERVATION_LIMIT, OBSERVATION_LIMIT, (size,), np.float32),
        gym.spaces.Discrete(len(OPERATIONS)),
        lambda _: 0.0,
        **policy_kwargs([0.0] * size, [0.0] * size, config["net_arch"]),
    )
    load_weights(policy, folder / "policy.zip")
    deployed = Deployment.from_json(config["deployment"]).choice == "policy"
    return policy, PostPolicy(config, policy if deployed else None)


def read_post_config(folder: Path) -> dict[str, Any]:
    """config.json of a `final_model` folder of experiment 2.

    Raises:
        ValueError: the file or a field is missing; names the remedy.
    """
    path, remedy = folder / "config.json", "name the final_model folder of a run of sa2va-rl operations"
    try:
        config = read_json(path)
    except ValueError as error:
        raise ValueError(f"{error}; {remedy}") from None
    for field in ("plan", "deployment", "operations", "fixed_sequence", "best_threshold"):
        if not isinstance(config, dict) or field not in config:
            raise ValueError(f"{path}: field {field} is missing; {remedy}")
    return dict(config)
