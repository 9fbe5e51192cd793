"""What a finished run deploys, from its final_model folder: the choice of a prompt or of operations for a new image."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.policies import ActorCriticPolicy

from rl_reward_network.env.observation import EPISODE_FEATURES, EdgeFeatures, observation_table, observe_image
from rl_reward_network.env.operations import OPERATIONS, EditedImage, Operations
from rl_reward_network.env.post_process_env import spaces_of as operation_spaces
from rl_reward_network.env.sa2va_finetune_env import PromptContext
from rl_reward_network.env.sa2va_finetune_env import spaces_of as prompt_spaces
from rl_reward_network.models.sa2va.checkpoint_sa2va import refuse_unmerged
from rl_reward_network.ppo.policy import choose_operations, choose_prompts, load_network
from rl_reward_network.report.deployment import Deployment
from rl_reward_network.run import read_model_config


def policy_folder(path: Path) -> Path:
    """The final_model folder of a run of step 2, given its path or that of the run.

    Raises:
        ValueError: the folder is of a GRPO run, which has no policy.
    """
    refuse_unmerged(path)
    return path / "final_model" if (path / "final_model" / "config.json").exists() else path


def read_policy_config(folder: Path) -> dict[str, Any]:
    """config.json of a `final_model` folder of step 2.

    Raises:
        ValueError: the file or a field is missing, or the run has the action stop, which is gone; names the remedy.
    """
    names = ("prompts", "inputs", "observation", "vision_features", "net_arch", "plan", "deployment")
    config = _config(
        folder, names, "name the final_model folder of a run of this version, or train one: sa2va-rl prompts quick"
    )
    if config["plan"].get("ppo", {}).get("stop"):
        raise ValueError(
            f"{folder / 'config.json'}: trained with --stop, which this version does not have; use it with version "
            "0.12, or train again: bash run_experiment1.sh quick"
        )
    return config


def load_policy(folder: Path) -> ActorCriticPolicy:
    """The prompt policy of a `final_model` folder; nothing is unpickled.

    Raises:
        ValueError: config.json or policy.zip is missing or damaged, or the policy was trained on other observations.
    """
    config = read_policy_config(folder)
    if config["observation"] != [entry.name for entry in observation_table(config["vision_features"])]:
        raise ValueError(f"{folder / 'config.json'}: observation: made for other observations; train the policy again")
    spaces = prompt_spaces(config["vision_features"], len(config["prompts"]))
    return load_network(folder / "policy.zip", spaces, config["net_arch"])


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
    plan = trained["plan"]
    features = observe_image(image, vision_features if plan["vision_features"] else None)
    if len(features) + EPISODE_FEATURES != len(trained["observation"]):
        raise ValueError("--policy: trained on a Sa2VA with features of another width; leave --model_path out")
    context = PromptContext("new image", features, np.zeros(len(trained["prompts"]), dtype=np.float32))
    scores: Callable[[np.ndarray], np.ndarray] = lambda prompts: np.array([score(int(prompts[0]))])  # noqa: E731
    return int(choose_prompts(policy, [context], plan["ppo"]["max_steps"], plan["reward"] == "net", scores)[0])


@dataclass(frozen=True)
class PostPolicy:
    """What a run of experiment 2 deploys: the policy, the best fixed sequence, or the masks as they are.

    Args:
        config: config.json of its final_model; with `best_threshold`, `fixed_sequence` and `deployment`.
        policy: None where it is not deployed.
    """

    config: dict[str, Any]
    policy: ActorCriticPolicy | None

    @property
    def fixed(self) -> Operations:
        """The operations on every mask where the policy is not deployed: the best fixed sequence, or none."""
        choice = Deployment.from_json(self.config["deployment"]).choice
        return tuple(self.config["fixed_sequence"]) if choice == "fixed" else ()

    def operations(self, image: np.ndarray, soft: np.ndarray, vision_features: np.ndarray | None) -> Operations:
        """The operations for a mask; arguments as in `edit`.

        Raises:
            ValueError: the policy was trained with features of another model.
        """
        if self.policy is None:
            return self.fixed
        features = observe_image(image, vision_features if self.config["plan"]["vision_features"] else None)
        new = _new_image(image, soft, features)
        if len(features) + len(new.statistics(())) != len(self.config["observation"]):
            raise ValueError(
                "the policy was trained on a Sa2VA with features of another width; use the model of its run"
            )
        return choose_operations(self.policy, [new], self.config["plan"]["ppo"]["max_steps"])[0]

    def edit(self, image: np.ndarray, soft: np.ndarray, vision_features: np.ndarray | None) -> np.ndarray:
        """The soft mask after the deployed operations, float32 (H, W) in [0, 1].

        Args:
            image: uint8 (H, W, 3), RGB.
            soft: float32 (H, W) in [0, 1], Sa2VA's soft mask.
            vision_features: float32 (C,), pooled features of Sa2VA's image encoder; used only if the policy was trained
                with them.
        """
        return _new_image(image, soft).edited(self.operations(image, soft, vision_features))

    def edit_by_sequence(self, image: np.ndarray, soft: np.ndarray) -> np.ndarray:
        """The soft mask after the best fixed sequence, float32 (H, W) in [0, 1]."""
        return _new_image(image, soft).edited(tuple(self.config["fixed_sequence"]))


def _new_image(image: np.ndarray, soft: np.ndarray, features: np.ndarray | None = None) -> EditedImage:
    """A mask to be edited whose reward nobody knows."""
    return EditedImage("new image", "", EdgeFeatures(image), soft, np.zeros(0) if features is None else features)


def load_post_policy(folder: Path) -> PostPolicy:
    """What the run of a `final_model` folder deploys; nothing is unpickled.

    Raises:
        ValueError: config.json or policy.zip is missing or damaged, or the operations are of another version.
    """
    return load_policy_of_run(folder)[1]


def load_policy_of_run(folder: Path) -> tuple[ActorCriticPolicy, PostPolicy]:
    """The trained policy of experiment 2, and what is deployed; as `load_post_policy`."""
    names = ("plan", "observation", "deployment", "operations", "net_arch", "fixed_sequence", "best_threshold")
    config = _config(folder, names, "name the final_model folder of a run of sa2va-rl operations")
    if config["operations"] != list(OPERATIONS):
        raise ValueError(f"{folder / 'config.json'}: operations: of another version; train experiment 2 again")
    spaces = operation_spaces(len(config["observation"]) + len(OPERATIONS))  # progress, and the use of each but stop
    policy = load_network(folder / "policy.zip", spaces, config["net_arch"])
    deployed = Deployment.from_json(config["deployment"]).choice == "policy"
    return policy, PostPolicy(config, policy if deployed else None)


def _config(folder: Path, names: tuple[str, ...], remedy: str) -> dict[str, Any]:
    """config.json of a `final_model` folder, with all fields `names`."""
    path = folder / "config.json"
    try:
        config = read_model_config(path)
    except ValueError as error:
        raise ValueError(f"{error}; {remedy}") from None
    for name in names:
        if name not in config:
            raise ValueError(f"{path}: field {name} is missing; {remedy}")
    return config
