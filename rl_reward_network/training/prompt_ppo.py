"""Step 2: PPO learns which prompt suits which image, from the table of scores that the frozen model's masks get."""

import io
import json
import math
import pickle
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import KVWriter, Logger, TensorBoardOutputFormat, filter_excluded_keys
from stable_baselines3.common.policies import ActorCriticPolicy, BasePolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from tqdm import tqdm

from rl_reward_network.artefacts import read_json, whole_folder, write_json
from rl_reward_network.env.observation import EPISODE_FEATURES, HIGH, LOW, OBSERVATION
from rl_reward_network.env.sa2va_finetune_env import PromptContext, check_contexts, start_observations
from rl_reward_network.env.vector_env import make_vector_env

NET_ARCH = (128, 64)  # hidden units of the policy, and the same again for the value
MIN_ROLLOUTS = 8  # fewer points are no curve, and fewer updates hardly move the policy
STANDARDISED_LIMIT = 10.0  # standard deviations; an odd image must not push the network where it never was


@dataclass(frozen=True)
class PromptPPOConfig:
    """Settings of PPO, named as in Stable-Baselines3."""

    total_timesteps: int = 2000
    """Prompts tried in training, over all environments; rounded up to whole rollouts."""
    n_envs: int = 2
    """Environments side by side."""
    n_steps: int = 128
    """Steps of each environment per rollout; fewer where the run would otherwise have less than 8 rollouts."""
    batch_size: int = 64
    """Largest mini-batch; a rollout is cut into equal ones."""
    n_epochs: int = 10
    """Passes over each rollout."""
    learning_rate: float = 3e-4
    """Step size of Adam."""
    gamma: float = 0.99
    """Discount; without effect while episodes have one prompt."""
    gae_lambda: float = 0.95
    """Bias-variance trade-off of the advantages; without effect while episodes have one prompt."""
    clip_range: float = 0.2
    """Largest change of an action's probability ratio that is still rewarded."""
    ent_coef: float = 0.01
    """Weight of the entropy bonus."""
    vf_coef: float = 0.5
    """Weight of the value loss."""
    max_steps: int = 1
    """Prompts per episode."""
    seed: int = 0
    """Seed of the policy's weights, the sampled actions and the order of the images."""
    device: str = "cpu"
    """Where the policy trains; the network is so small that the CPU is the fastest place."""

    def __post_init__(self) -> None:
        """Refuse settings that would fail, or silently do something else, inside a run."""
        for name in ("total_timesteps", "n_envs", "n_steps", "n_epochs", "max_steps"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "give 1 or more")
        for name in ("learning_rate", "clip_range"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "give a number above 0")
        for name in ("gamma", "gae_lambda"):
            _require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "give a number from 0 to 1")
        for name in ("ent_coef", "vf_coef", "seed"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "give 0 or more")
        rollout = self.n_steps * self.n_envs
        _require(self.batch_size >= 2, "batch_size", self.batch_size, "give 2 or more: advantages are normalised in it")
        remedy = f"give at most {rollout}, the rollout of n_steps x n_envs = {self.n_steps} x {self.n_envs}"
        _require(self.batch_size <= rollout, "batch_size", self.batch_size, remedy)
        _require(self.n_steps >= self.max_steps, "n_steps", self.n_steps, f"give max_steps = {self.max_steps} or more")
        fewest = MIN_ROLLOUTS * max(2, self.n_envs * self.max_steps)
        remedy = f"give {fewest} or more, for {MIN_ROLLOUTS} rollouts of whole episodes in each environment"
        _require(self.total_timesteps >= fewest, "total_timesteps", self.total_timesteps, remedy)

    @property
    def rollout_steps(self) -> int:
        """Steps of each environment per rollout, after shrinking to `MIN_ROLLOUTS` rollouts."""
        return min(self.n_steps, self.total_timesteps // (MIN_ROLLOUTS * self.n_envs))

    @property
    def whole_timesteps(self) -> int:
        """`total_timesteps` rounded up to whole rollouts."""
        rollout = self.rollout_steps * self.n_envs
        return math.ceil(self.total_timesteps / rollout) * rollout

    @property
    def even_batch(self) -> int:
        """Mini-batch size that cuts a rollout into equal parts of at most `batch_size`."""
        rollout = self.rollout_steps * self.n_envs
        return max(2, math.ceil(rollout / math.ceil(rollout / self.batch_size)))


def _require(holds: bool, field: str, value: object, remedy: str) -> None:
    """One wording for every refused setting."""
    if not holds:
        raise ValueError(f"{field}: got {value}; {remedy}")


class Standardise(BaseFeaturesExtractor):
    """Observations less a fixed mean, over a fixed standard deviation, clipped: part of the policy, saved with it."""

    def __init__(self, observation_space: gym.spaces.Box, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__(observation_space, features_dim=len(mean))
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32))

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        """float32 (B, D) in, the same shape out, within +-`STANDARDISED_LIMIT`."""
        standard = (observations - self.get_buffer("mean")) / self.get_buffer("std")
        return standard.clamp(-STANDARDISED_LIMIT, STANDARDISED_LIMIT)


def train_prompt_policy(
    train_contexts: Sequence[PromptContext],
    val_contexts: Sequence[PromptContext],
    prompts: Sequence[str],
    config: PromptPPOConfig,
    run: Path,
    description: dict[str, Any] | None = None,
    reward_uses_labels: bool = False,
) -> PPO:
    """A trained prompt policy; writes `run`/logs (TensorBoard), `run`/metrics.jsonl and, at the end, `run`/final_model.

    Args:
        train_contexts: the images PPO learns on; their features also fix the standardisation.
        val_contexts: images whose greedy result is logged per rollout; may be empty. They do not steer the training.
        prompts: the P prompts that the scores belong to, in their order.
        config: settings of PPO.
        run: run folder; made when missing.
        description: what else belongs to the policy (model, reward network, data fingerprint): goes into config.json.
        reward_uses_labels: the scores were made from the ground truth, so the policy must not see them.

    Raises:
        ValueError: contexts that do not fit together or to `prompts`.
    """
    for contexts in (train_contexts, val_contexts):
        if len(contexts):
            check_contexts(contexts)
            count = len(contexts[0].scores)
            _require(
                count == len(prompts), "contexts", f"scores of {count} prompts", f"{len(prompts)} prompts are named"
            )
    venv = make_vector_env(train_contexts, config.n_envs, config.seed, config.max_steps, reward_uses_labels)
    with warnings.catch_warnings():  # equal parts cannot always be exact
        warnings.filterwarnings("ignore", message="You have specified a mini-batch size")
        model = _new_ppo(venv, train_contexts, config)
    logs = run / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    logger = Logger(str(logs), [TensorBoardOutputFormat(str(logs)), _JsonLines(run / "metrics.jsonl")])
    model.set_logger(logger)
    try:
        with _one_thread():
            model.learn(config.whole_timesteps, callback=_Recorder(val_contexts, config.whole_timesteps))
    finally:
        logger.close()
        venv.close()
    _save(model, run / "final_model", prompts, config, description or {})
    return model


def choose_prompts(model: PPO | BasePolicy, contexts: Sequence[PromptContext]) -> np.ndarray:
    """int64 (N,): the most probable first prompt of each image (deterministic)."""
    actions, _ = model.predict(start_observations(contexts), deterministic=True)
    return actions.astype(np.int64)


def load_policy(folder: Path) -> ActorCriticPolicy:
    """The policy of a `final_model` folder, rebuilt from its weights alone: nothing is unpickled.

    Raises:
        ValueError: config.json or policy.zip is missing or damaged, or was made for other observations.
    """
    config, archive = read_json(folder / "config.json"), folder / "policy.zip"
    names = [entry.name for entry in OBSERVATION]
    if config.get("observation") != names:
        raise ValueError(f"{folder / 'config.json'}: observation: made for other observations; train the policy again")
    zeros = [0.0] * len(names)
    policy = ActorCriticPolicy(
        gym.spaces.Box(LOW, HIGH, dtype=np.float32),
        gym.spaces.Discrete(len(config["prompts"])),
        lambda _: 0.0,
        **_architecture(zeros, zeros, config["net_arch"]),
    )
    try:
        with zipfile.ZipFile(archive) as file:
            weights = torch.load(io.BytesIO(file.read("policy.pth")), map_location="cpu", weights_only=True)
        policy.load_state_dict(weights)
    except (OSError, KeyError, RuntimeError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise ValueError(f"{archive}: not the weights of this policy ({error}); train the policy again") from None
    policy.set_training_mode(False)
    return policy


@contextmanager
def _one_thread() -> Iterator[None]:
    """Layers this small gain nothing from threads, and lose minutes to waiting where other programs use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _new_ppo(venv: Any, contexts: Sequence[PromptContext], config: PromptPPOConfig) -> PPO:
    """SB3's PPO with the standardisation of these contexts inside its policy."""
    features = np.stack([context.features for context in contexts]).astype(np.float64)
    pad = [1.0] * EPISODE_FEATURES  # progress and best score are in [0, 1] already
    # a feature that is constant in training must not turn an unseen image's rounding noise into a signal
    std = np.maximum(features.std(axis=0), 1e-4 * (HIGH - LOW)[:-EPISODE_FEATURES])
    mean = [*features.mean(axis=0).tolist(), *([0.0] * EPISODE_FEATURES)]
    return PPO(
        "MlpPolicy",
        venv,
        learning_rate=config.learning_rate,
        n_steps=config.rollout_steps,
        batch_size=config.even_batch,
        n_epochs=config.n_epochs,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        clip_range=config.clip_range,
        ent_coef=config.ent_coef,
        vf_coef=config.vf_coef,
        policy_kwargs=_architecture(mean, [*std.tolist(), *pad], NET_ARCH),
        seed=config.seed,
        device=config.device,
    )


def _architecture(mean: Sequence[float], std: Sequence[float], net_arch: Sequence[int]) -> dict[str, Any]:
    """The policy's arguments: the one place that says how it is built."""
    return {
        "net_arch": list(net_arch),
        "features_extractor_class": Standardise,
        "features_extractor_kwargs": {"mean": list(mean), "std": list(std)},
    }


def _save(
    model: PPO, folder: Path, prompts: Sequence[str], config: PromptPPOConfig, description: dict[str, Any]
) -> None:
    """The folder `load_policy` reads, whole or not at all."""
    own = {
        "prompts": list(prompts),
        "observation": [entry.name for entry in OBSERVATION],
        "net_arch": list(NET_ARCH),
        "ppo": asdict(config),
    }
    with whole_folder(folder) as temporary:
        model.save(temporary / "policy.zip")
        write_json(temporary / "config.json", {**description, **own})


class _Recorder(BaseCallback):
    """Progress bar, and per rollout what the policy earned in training and would earn on the validation images."""

    def __init__(self, val_contexts: Sequence[PromptContext], total: int) -> None:
        super().__init__()
        self.val_contexts, self.total = val_contexts, total
        self.best = -math.inf

    def _on_training_start(self) -> None:
        self.bar = tqdm(total=self.total, desc="PPO", unit="step")

    def _on_rollout_start(self) -> None:
        self.infos: list[dict[str, Any]] = []

    def _on_step(self) -> bool:
        self.infos += self.locals["infos"]
        return True

    def _on_rollout_end(self) -> None:
        self.bar.update(self.num_timesteps - self.bar.n)
        self.best = max(self.best, float(np.mean([episode["r"] for episode in self.model.ep_info_buffer or ()])))
        self.logger.record("custom/best_reward", self.best)
        self._record("custom/reward_net_score", [info["score"] for info in self.infos])
        self._record("custom/gt_dice", [info["dice"] for info in self.infos if "dice" in info])
        if len(self.val_contexts):
            chosen = list(zip(self.val_contexts, choose_prompts(self.model.policy, self.val_contexts), strict=True))
            self._record("custom/val_score", [context.scores[action] for context, action in chosen])
            dices = [context.dice[action] for context, action in chosen if context.dice is not None]
            self._record("custom/val_gt_dice", dices)

    def _on_training_end(self) -> None:
        self.bar.close()

    def _record(self, tag: str, values: Sequence[float]) -> None:
        """The mean, where there is something to average (unlabelled images have no Dice)."""
        if len(values):
            self.logger.record(tag, float(np.mean(values)))


class _JsonLines(KVWriter):
    """One JSON object per rollout; numbers that are not finite are left out, since JSON has none."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a", encoding="utf-8")

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        """Append the rollout that ended at `step`."""
        numbers = {key: float(value) for key, value in filter_excluded_keys(key_values, key_excluded, "json").items()}
        line = {"step": step, **{key: value for key, value in numbers.items() if math.isfinite(value)}}
        self.file.write(json.dumps(line, allow_nan=False) + "\n")
        self.file.flush()

    def close(self) -> None:
        """Close the file."""
        self.file.close()
