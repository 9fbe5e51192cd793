"""PPO of a policy: environments, curves, validation, and which weights are kept."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

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
from rl_reward_network.curves import Best, Curves, over_optimised
from rl_reward_network.env.observation import EPISODE_FEATURES, bounds
from rl_reward_network.env.sa2va_finetune_env import PromptContext, Sa2VAFinetuneEnv, prompt_rewards
from rl_reward_network.ppo.policy import choose_prompts, policy_kwargs
from rl_reward_network.ppo.settings import PPOSettings
from rl_reward_network.report.statistics import known_means
from rl_reward_network.rewards.table import LEARNED, OF_LABELS, RewardName

LAST_WEIGHTS = "last_weights.zip"  # in the folder of a run whose policy went back to earlier weights
LEAST_STD = 1e-4  # of a feature's range: a feature that is constant in training must not amplify rounding noise
KEEP = "custom/val_gt_dice"  # the curve whose highest mean decides which weights are the best
AS_SET = ("learning_rate", "n_epochs", "gamma", "gae_lambda", "clip_range", "ent_coef", "vf_coef", "seed")


def train_prompt_policy(
    train_contexts: Sequence[PromptContext],
    val_contexts: Sequence[PromptContext],
    settings: PPOSettings,
    run_dir: Path,
    reward: RewardName = "net",
) -> PPO:
    """Train a policy with SB3's PPO; it ends early when the reward is over-optimised (`curves.over_optimised`).

    Writes `run_dir`/logs (TensorBoard) and metrics.jsonl, anew. If the policy went back from over-optimised weights,
    these are in `LAST_WEIGHTS`. The observations are standardised by the training images. The greedy policy is
    validated after each rollout on the validation images, if any; the stop rule uses the labelled ones.

    Raises:
        ValueError: contexts that do not fit together or to the reward.
    """

    def validate(policy: BasePolicy) -> dict[str, list[float]]:
        """Score of each validation patient, or its reward if that needs no network and no labels; Dice if labelled."""
        if not val_contexts:
            return {}
        chosen = choose_prompts(policy, val_contexts, settings.max_steps, reward == "net")
        pairs = list(zip(val_contexts, chosen.tolist(), strict=True))
        dices = [context.metrics["dice"][prompt] if context.labelled else np.nan for context, prompt in pairs]
        proxy: RewardName = "net" if reward in (*LEARNED, *OF_LABELS) else reward
        judged = [proxy != "net" or context.judged for context in val_contexts]
        values = [
            float(prompt_rewards(context, proxy)[prompt]) if known else np.nan
            for known, (context, prompt) in zip(judged, pairs, strict=True)
        ]
        groups = [context.group_id or context.sample_id for context in val_contexts]
        return {"custom/val_score": known_means(values, groups), KEEP: known_means(dices, groups)}

    venv = make_vector_env(train_contexts, settings.n_envs, settings.seed, settings.max_steps, reward)
    model = new_ppo(venv, standardised(train_contexts), settings)
    curves = Curves(run_dir, {"step": 0}, board_step=0)
    model.set_logger(Logger(str(run_dir / "logs"), [CurvesWriter(curves)]))
    validation = Validation(validate, curves, reward not in OF_LABELS)
    bar = tqdm(total=settings.whole_timesteps, desc="PPO", unit="step")
    with closing(venv), closing(curves), bar, one_thread():
        model.learn(settings.whole_timesteps, [RolloutCurves(curves, bar), validation])
        over = validation.finish()
    (run_dir / LAST_WEIGHTS).unlink(missing_ok=True)  # of a run that was killed
    if over:
        with whole_file(run_dir / LAST_WEIGHTS) as temporary:
            model.save(temporary)
        print("back to the best weights: at the end the reward still rose, but Dice on val patients had fallen")
        model.policy.load_state_dict(validation.best.weights)
    return model


def standardised(contexts: Sequence[PromptContext]) -> dict[str, Any]:
    """SB3's `policy_kwargs` for a policy that standardises by these images, except the state of the episode."""
    features = np.stack([context.features for context in contexts]).astype(np.float64)
    low, high = (side[:-EPISODE_FEATURES] for side in bounds(contexts[0].vision_features, contexts[0].mask_features))
    std = np.maximum(features.std(axis=0), LEAST_STD * (high - low))
    mean = np.append(features.mean(axis=0), np.zeros(EPISODE_FEATURES))
    return policy_kwargs(mean, np.append(std, np.ones(EPISODE_FEATURES)))


def new_ppo(venv: VecEnv, policy_kwargs: dict[str, Any], settings: PPOSettings) -> PPO:
    """SB3's PPO on the CPU, the fastest device for it; `policy_kwargs` are those of its policy."""
    with warnings.catch_warnings():  # mini-batches cannot always be of equal size
        warnings.filterwarnings("ignore", message="You have specified a mini-batch size")
        return PPO(
            "MlpPolicy",
            venv,
            n_steps=settings.rollout_steps,
            batch_size=settings.even_batch,
            policy_kwargs=policy_kwargs,
            device="cpu",
            **{name: getattr(settings, name) for name in AS_SET},
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
    """Subtracts the mean reward of the image's prompts (image -> mean) from each reward, in episodes of one step.

    Most of the variance of the reward lies between images, not between prompts. The mean does not depend on the action,
    so the best policy stays the same.
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
    A ValueError if `n_envs` < 1, or contexts do not fit together or to the reward.
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
    """Logs the raw scores and Dice of each rollout, and moves the progress bar."""

    def __init__(self, curves: Curves, bar: "tqdm[Any]") -> None:
        super().__init__()
        self.curves, self.bar = curves, bar

    def _on_rollout_start(self) -> None:
        self.infos: list[dict[str, Any]] = []

    def _on_step(self) -> bool:
        self.infos += self.locals["infos"]
        return True

    def _on_rollout_end(self) -> None:
        self.bar.update(self.num_timesteps - self.bar.n)
        mean_return = float(np.mean([episode["r"] for episode in self.model.ep_info_buffer or ()]))
        self.logger.record("custom/best_reward", max([mean_return, *self.curves.column("custom/best_reward")]))
        for tag, name in (("custom/reward_net_score", "score"), ("custom/gt_dice", "dice")):
            record_mean(self, tag, [info[name] for info in self.infos if name in info])


class Validation(BaseCallback):
    """Logs the greedy policy on the validation images, keeps the best weights, and applies the stop rule.

    `validate`: greedy policy -> curve -> a value per patient; may be empty. `may_stop`: whether the training ends, with
    the best weights, when the reward is over-optimised.
    """

    def __init__(
        self, validate: Callable[[BasePolicy], dict[str, list[float]]], curves: Curves, may_stop: bool
    ) -> None:
        super().__init__()
        self.validate, self.curves, self.may_stop = validate, curves, may_stop
        self.best, self.stopped = Best(), False

    def _on_rollout_start(self) -> None:
        self.stopped = self._fallen({})

    def _on_step(self) -> bool:
        return not self.stopped

    def _on_rollout_end(self) -> None:
        values = self.validate(self.model.policy)
        for tag, of_images in values.items():
            record_mean(self, tag, of_images)
        if kept := values.get(KEEP):
            self.best.offer((float(np.mean(kept)),), self.num_timesteps, self.model.policy.state_dict())

    def finish(self) -> bool:
        """Validate the last update, which no rollout follows; returns whether its weights are over-optimised."""
        values = self.validate(self.model.policy)
        return bool(self.best.weights) and (self.stopped or self._fallen(values))

    def _fallen(self, values: dict[str, list[float]]) -> bool:
        """The stop rule on the curves so far and one more validation."""
        if not self.may_stop:
            return False
        proxy, gold = (self.curves.column(tag) for tag in ("custom/val_score", KEEP))
        if values.get(KEEP) and values.get("custom/val_score"):
            proxy = [*proxy, float(np.mean(values["custom/val_score"]))]
            gold = [*gold, float(np.mean(values[KEEP]))]
        return over_optimised(proxy, gold)


def record_mean(callback: BaseCallback, tag: str, values: Sequence[float]) -> None:
    """Log the mean of the values; nothing when there are none, such as Dice of unlabelled images."""
    if len(values):
        callback.logger.record(tag, float(np.mean(values)))
