"""PPO of both policies: environments, curves, validation, which weights are kept, and the checkpoint."""

import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import KVWriter, Logger, filter_excluded_keys
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecEnvWrapper, VecMonitor
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn
from tqdm import tqdm

from rl_reward_network.atomic_io import whole_file
from rl_reward_network.curves import Best, Curves, load_checkpoint, over_optimised, save_checkpoint
from rl_reward_network.env.sa2va_finetune_env import PromptContext, Sa2VAFinetuneEnv, prompt_rewards
from rl_reward_network.ppo.settings import PPOSettings
from rl_reward_network.rewards.table import RewardName
from rl_reward_network.run import CHECKPOINT

LAST_WEIGHTS = "last_weights.zip"  # in the folder of a run whose policy went back to earlier weights
Weights = Literal["last", "best", "last unless over-optimised"]
CHECKPOINT_SECONDS = 1.0  # minimum time between checkpoints: writing one takes as long as ten steps


@dataclass(frozen=True)
class Task:
    """What a policy learns.

    Args:
        venv: the environments, seeded.
        policy_kwargs: SB3's, of the policy.
        validate: greedy policy -> the curves of validation, tag -> a value per patient; may be empty.
        keep: the tag of the curve whose highest mean decides which weights are the best.
        weights: which weights training ends with: the last ones, the best ones, or the last ones unless they are
            over-optimised (`curves.over_optimised`), which also ends the training.
        ends_only: whether the curve of Dice has the masks at the end of episodes only, not those of every step.
        checkpoint: whether the training can be resumed; the environments then have `state` and `restore`.
    """

    venv: VecEnv
    policy_kwargs: dict[str, Any]
    validate: Callable[[BasePolicy], dict[str, list[float]]]
    keep: str
    weights: Weights
    ends_only: bool
    checkpoint: bool


def train_ppo(task: Task, settings: PPOSettings, run_dir: Path) -> PPO:
    """Train a policy with SB3's PPO.

    Writes `run_dir`/logs (TensorBoard) and metrics.jsonl, anew unless there is a checkpoint.pt, with which training
    goes on and ends in the weights of an uninterrupted run. If the policy went back from over-optimised weights, these
    are in `LAST_WEIGHTS`.

    Args:
        task: what is learned.
        settings: of PPO.
        run_dir: run folder; made when missing.
    """
    model = new_ppo(task.venv, task.policy_kwargs, settings)
    state = load_checkpoint(run_dir / CHECKPOINT) if task.checkpoint else {}
    done = state.get("num_timesteps", 0)
    curves = Curves(run_dir, {"step": done}, board_step=done)
    model.set_logger(Logger(str(run_dir / "logs"), [CurvesWriter(curves)]))
    if state:
        restore_ppo(model, state)
    peak = state.get("peak")
    validation = Validation(task, curves, Best((peak["value"],), weights=peak["policy"]) if peak else Best())
    bar = tqdm(total=settings.whole_timesteps, initial=done, desc="PPO", unit="step")
    callbacks: list[BaseCallback] = [RolloutCurves(curves, bar, task.ends_only), validation]
    if task.checkpoint:
        callbacks.append(RolloutCheckpoint(run_dir / CHECKPOINT, validation))
    with closing(task.venv), closing(curves), bar, one_thread():
        model.learn(settings.whole_timesteps - done, callbacks, reset_num_timesteps=not state)
        over = validation.finish()
    (run_dir / LAST_WEIGHTS).unlink(missing_ok=True)  # of a run that was killed
    if over:
        with whole_file(run_dir / LAST_WEIGHTS) as temporary:
            model.save(temporary)
        print("back to the best weights: at the end the reward still rose, but Dice on val patients had fallen")
    if validation.best.weights and (over or task.weights == "best"):
        model.policy.load_state_dict(validation.best.weights)
    return model


def new_ppo(venv: VecEnv, policy_kwargs: dict[str, Any], settings: PPOSettings) -> PPO:
    """SB3's PPO on the CPU, the fastest device for it; `policy_kwargs` are those of its policy."""
    with warnings.catch_warnings():  # mini-batches cannot always be of equal size
        warnings.filterwarnings("ignore", message="You have specified a mini-batch size")
        return PPO(
            "MlpPolicy",
            venv,
            learning_rate=settings.learning_rate,
            n_steps=settings.rollout_steps,
            batch_size=settings.even_batch,
            n_epochs=settings.n_epochs,
            gamma=settings.gamma,
            gae_lambda=settings.gae_lambda,
            clip_range=settings.clip_range,
            ent_coef=settings.ent_coef,
            vf_coef=settings.vf_coef,
            policy_kwargs=policy_kwargs,
            seed=settings.seed,
            device="cpu",
        )


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread: layers this small are no faster with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class CentredReward(VecEnvWrapper):
    """Subtracts the mean reward of the image's prompts from each reward.

    Most of the variance of the reward lies between images, not between prompts. The mean does not depend on the action,
    so the best policy stays the same. Only for episodes of one step.

    Args:
        venv: environments whose step info names the image as `sample_id`.
        means: mean reward of each image.
    """

    def __init__(self, venv: VecEnv, means: dict[str, float]) -> None:
        super().__init__(venv)
        self.means = means

    def reset(self) -> VecEnvObs:
        """The first observations."""
        return self.venv.reset()

    def step_wait(self) -> VecEnvStepReturn:
        """The step, with each reward minus the mean reward of its image."""
        observations, rewards, dones, infos = self.venv.step_wait()
        means = np.array([self.means[info["sample_id"]] for info in infos], dtype=np.float32)
        return observations, rewards - means, dones, infos


def make_vector_env(
    contexts: Sequence[PromptContext], n_envs: int, seed: int, max_steps: int = 1, reward: RewardName = "net"
) -> VecEnv:
    """`n_envs` `Sa2VAFinetuneEnv` over the same images, each with a different order (seeds `seed`, `seed` + 1, ...).

    The reward is centred per image when episodes have one prompt; `info["episode"]["r"]` and `info["score"]` stay raw.

    Raises:
        ValueError: `n_envs` < 1, or contexts that do not fit together or to the reward.
    """
    if n_envs < 1:
        raise ValueError(f"n_envs is {n_envs}, expected 1 or more")
    venv: VecEnv = VecMonitor(DummyVecEnv([lambda: Sa2VAFinetuneEnv(contexts, max_steps, reward)] * n_envs))
    if max_steps == 1:
        venv = CentredReward(venv, {c.sample_id: float(prompt_rewards(c, reward).mean()) for c in contexts})
    venv.seed(seed)
    return venv


class CurvesWriter(KVWriter):
    """Output format of SB3's logger that writes each rollout to `Curves`.

    Clock times and numbers that are not finite are left out of metrics.jsonl, so that equal runs give equal files.
    """

    def __init__(self, curves: Curves) -> None:
        self.curves = curves

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        """Add the rollout that ended at `step`."""
        self.curves.add_scalars(filter_excluded_keys(key_values, key_excluded, "tensorboard"), step)
        numbers = {name: float(value) for name, value in key_values.items() if not name.startswith("time/")}
        self.curves.add_row({"step": step, **{name: value for name, value in numbers.items() if math.isfinite(value)}})

    def close(self) -> None:
        """Close the event file."""
        self.curves.close()


class RolloutCurves(BaseCallback):
    """Logs the raw scores and Dice of each rollout, and moves the progress bar.

    Args:
        curves: the curves so far.
        bar: progress in steps of all environments.
        ends_only: as in `Task`.
    """

    def __init__(self, curves: Curves, bar: "tqdm[Any]", ends_only: bool) -> None:
        super().__init__()
        self.curves, self.bar, self.ends_only = curves, bar, ends_only

    def _on_rollout_start(self) -> None:
        self.infos: list[dict[str, Any]] = []

    def _on_step(self) -> bool:
        steps = zip(self.locals["infos"], self.locals["dones"], strict=True)
        self.infos += [info for info, done in steps if done or not self.ends_only]
        return True

    def _on_rollout_end(self) -> None:
        self.bar.update(self.num_timesteps - self.bar.n)
        if not self.ends_only:
            mean_return = float(np.mean([episode["r"] for episode in self.model.ep_info_buffer or ()]))
            self.logger.record("custom/best_reward", max([mean_return, *self.curves.column("custom/best_reward")]))
        for tag, name in (("custom/reward_net_score", "score"), ("custom/gt_dice", "dice")):
            record_mean(self, tag, [info[name] for info in self.infos if name in info])


class Validation(BaseCallback):
    """Logs the greedy policy on the validation images, keeps the best weights, and applies the stop rule.

    Args:
        task: what is learned.
        curves: the curves so far.
        best: the best weights so far, by the mean of `Task.keep`.

    Attributes:
        stopped: whether the stop rule ended the run.
    """

    def __init__(self, task: Task, curves: Curves, best: Best) -> None:
        super().__init__()
        self.task, self.curves, self.best, self.stopped = task, curves, best, False

    def _on_rollout_start(self) -> None:
        self.stopped = self._fallen({})

    def _on_step(self) -> bool:
        return not self.stopped

    def _on_rollout_end(self) -> None:
        values = self.task.validate(self.model.policy)
        for tag, of_images in values.items():
            record_mean(self, tag, of_images)
        self._remember(values)

    def finish(self) -> bool:
        """Validate the last update, which no rollout follows; returns whether its weights are over-optimised."""
        values = self.task.validate(self.model.policy)
        if self.task.weights == "best":
            self._remember(values)
        return bool(self.best.weights) and (self.stopped or self._fallen(values))

    def _remember(self, values: dict[str, list[float]]) -> None:
        kept = values.get(self.task.keep)
        if kept:
            self.best.offer((float(np.mean(kept)),), self.num_timesteps, self.model.policy.state_dict())

    def _fallen(self, values: dict[str, list[float]]) -> bool:
        """The stop rule on the curves so far and one more validation."""
        if self.task.weights != "last unless over-optimised":
            return False
        proxy, gold = (self.curves.column(tag) for tag in ("custom/val_score", "custom/val_gt_dice"))
        if values.get("custom/val_gt_dice") and values.get("custom/val_score"):
            proxy = [*proxy, float(np.mean(values["custom/val_score"]))]
            gold = [*gold, float(np.mean(values["custom/val_gt_dice"]))]
        return over_optimised(proxy, gold)


def record_mean(callback: BaseCallback, tag: str, values: Sequence[float]) -> None:
    """Log the mean of the values; nothing when there are none, such as Dice of unlabelled images."""
    if len(values):
        callback.logger.record(tag, float(np.mean(values)))


class RolloutCheckpoint(BaseCallback):
    """Writes a checkpoint at the start of a rollout, at most one per `CHECKPOINT_SECONDS`.

    Args:
        path: the file.
        validation: its best weights are part of the checkpoint.
    """

    def __init__(self, path: Path, validation: Validation) -> None:
        super().__init__()
        self.path, self.validation, self.next_time = path, validation, 0.0

    def _on_rollout_start(self) -> None:
        if time.monotonic() < self.next_time:
            return
        assert isinstance(self.model, PPO)
        best = self.validation.best
        peak = {"value": best.score[0], "policy": best.weights}
        save_checkpoint(self.path, {**ppo_state(self.model), "peak": peak})
        self.next_time = time.monotonic() + CHECKPOINT_SECONDS

    def _on_step(self) -> bool:
        return True


def ppo_state(model: PPO) -> dict[str, Any]:
    """The state on which the next rollouts depend, as tensors and plain values.

    SB3's `save` leaves out random states, environments and the logger.
    """
    monitor = model.env
    assert isinstance(monitor, VecMonitor)
    name, keys, *rest = tuple(np.random.get_state(legacy=True))
    return {
        "policy": model.policy.state_dict(),
        "optimizer": model.policy.optimizer.state_dict(),
        "num_timesteps": model.num_timesteps,
        "updates": model._n_updates,
        "last_obs": torch.tensor(model._last_obs),
        "episode_starts": torch.tensor(model._last_episode_starts),
        "episodes": [{"r": float(e["r"]), "l": int(e["l"])} for e in model.ep_info_buffer or ()],
        "environments": monitor.env_method("state"),
        "returns": monitor.episode_returns.tolist(),
        "lengths": monitor.episode_lengths.tolist(),
        "numpy": [name, torch.tensor(np.asarray(keys, dtype=np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "unwritten": {key: float(value) for key, value in model.logger.name_to_value.items()},
        "excluded": {key: list(value or ()) for key, value in model.logger.name_to_excluded.items()},
    }


def restore_ppo(model: PPO, state: dict[str, Any]) -> None:
    """Restore the state that `ppo_state` returned, in a model of the same settings; `learn` must not reset it."""
    monitor = model.env
    assert isinstance(monitor, VecMonitor)
    model.policy.load_state_dict(state["policy"])
    model.policy.optimizer.load_state_dict(state["optimizer"])
    model.num_timesteps, model._n_updates = state["num_timesteps"], state["updates"]
    model._last_obs, model._last_episode_starts = state["last_obs"].numpy(), state["episode_starts"].numpy()
    episodes = [{"r": np.float32(e["r"]), "l": np.int32(e["l"])} for e in state["episodes"]]
    model.ep_info_buffer, model.ep_success_buffer = deque(episodes, maxlen=100), deque(maxlen=100)
    for index, environment in enumerate(state["environments"]):
        monitor.env_method("restore", environment, indices=index)
    monitor.episode_returns = np.array(state["returns"], dtype=np.float32)
    monitor.episode_lengths = np.array(state["lengths"], dtype=np.int32)
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    for key, value in state["unwritten"].items():
        model.logger.record(key, value, tuple(state["excluded"][key]) or None)
