"""Step 2: PPO learns which prompt suits which image, from the table of scores that the frozen model's masks get."""

import json
import math
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import KVWriter, Logger, filter_excluded_keys
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from rl_reward_network.artefacts import whole_file
from rl_reward_network.env.sa2va_finetune_env import PromptContext
from rl_reward_network.env.vector_env import make_vector_env, restore_vector_state, vector_state
from rl_reward_network.prompt_policy.config import PromptPPOConfig
from rl_reward_network.prompt_policy.policy import architecture, choose_prompts
from rl_reward_network.rewards.table import RewardName
from rl_reward_network.runs.checkpoints import CHECKPOINT, load_checkpoint, save_checkpoint
from rl_reward_network.runs.stop_rule import over_optimised

CHECKPOINT_SECONDS = 1.0  # no more often: writing one takes as long as ten steps


def train_prompt_policy(
    train_contexts: Sequence[PromptContext],
    val_contexts: Sequence[PromptContext],
    config: PromptPPOConfig,
    run: Path,
    reward: RewardName = "net",
) -> PPO:
    """A trained prompt policy.

    Writes `run`/logs (TensorBoard), `run`/metrics.jsonl and, at the start of a rollout, `run`/checkpoint.pt; where that
    is there already, training goes on from it, to the very weights of a run that was never stopped. It ends early when
    the reward is over-optimised, and then has the weights of the peak.

    Args:
        train_contexts: the images PPO learns on; their features also fix the standardisation.
        val_contexts: images whose greedy result is logged per rollout, and, where labelled, watched; may be empty.
        config: settings of PPO.
        run: run folder; made when missing.
        reward: what a mask is paid, see `prompt_rewards`.

    Raises:
        ValueError: contexts that do not fit together or to the reward.
    """
    venv = make_vector_env(train_contexts, config.n_envs, config.seed, config.max_steps, reward)
    model = new_ppo(venv, train_contexts, config)
    run.mkdir(parents=True, exist_ok=True)
    state = load_checkpoint(run / CHECKPOINT)
    curves = _Curves(run, state)
    recorder = _Recorder(val_contexts, config, reward, run, curves, state)
    logger = Logger(str(run / "logs"), [curves])
    model.set_logger(logger)
    if state:
        _restore(model, state)
    try:
        with one_thread():
            model.learn(config.whole_timesteps - model.num_timesteps, recorder, reset_num_timesteps=not state)
    finally:
        recorder.close()
        logger.close()
        venv.close()
    if recorder.peak and recorder.over_optimised_at_the_end():
        model.policy.load_state_dict(recorder.peak["policy"])
        print("back to the best weights: at the end the reward still rose, but Dice on val patients had fallen")
    return model


@contextmanager
def one_thread() -> Iterator[None]:
    """Layers this small gain nothing from threads, and lose minutes to waiting where other programs use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def new_ppo(venv: Any, contexts: Sequence[PromptContext], config: PromptPPOConfig) -> PPO:
    """SB3's PPO with the standardisation of these contexts inside its policy; the CPU is the fastest place for it."""
    with warnings.catch_warnings():  # equal parts cannot always be exact
        warnings.filterwarnings("ignore", message="You have specified a mini-batch size")
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
            policy_kwargs=architecture(contexts),
            seed=config.seed,
            device="cpu",
        )


class _Recorder(BaseCallback):
    """Progress bar, checkpoints, and per rollout what the policy earned and would earn on the validation images."""

    def __init__(
        self,
        val_contexts: Sequence[PromptContext],
        config: PromptPPOConfig,
        reward: RewardName,
        run: Path,
        curves: "_Curves",
        state: dict[str, Any],
    ) -> None:
        super().__init__()
        self.val_contexts, self.config, self.reward, self.run, self.curves = val_contexts, config, reward, run, curves
        self.peak: dict[str, Any] | None = state.get("peak")
        self.stop, self.next_checkpoint = False, 0.0

    def _on_training_start(self) -> None:
        self.bar = tqdm(total=self.config.whole_timesteps, initial=self.model.num_timesteps, desc="PPO", unit="step")

    def _on_rollout_start(self) -> None:
        self.infos: list[dict[str, Any]] = []
        self.stop = self._over_optimised()
        if time.monotonic() < self.next_checkpoint:
            return
        assert isinstance(self.model, PPO)
        state = {**_state(self.model), "rows": self.curves.rows, "peak": self.peak}
        save_checkpoint(self.run / CHECKPOINT, state)
        self.next_checkpoint = time.monotonic() + CHECKPOINT_SECONDS

    def over_optimised_at_the_end(self) -> bool:
        """`over_optimised` with the weights the training ended with, which no rollout has seen."""
        scores, dices = self._greedy()
        return self.stop or self._over_optimised([float(np.mean(scores))], [float(np.mean(dices))])

    def _over_optimised(self, more_proxy: Sequence[float] = (), more_gold: Sequence[float] = ()) -> bool:
        """`over_optimised` on the curves so far; a reward that is the truth itself cannot be."""
        proxy, gold = (self.curves.column(tag) for tag in ("custom/val_score", "custom/val_gt_dice"))
        return self.reward in ("net", "mix") and over_optimised([*proxy, *more_proxy], [*gold, *more_gold])

    def _on_step(self) -> bool:
        self.infos += self.locals["infos"]
        return not self.stop

    def _on_rollout_end(self) -> None:
        self.bar.update(self.num_timesteps - self.bar.n)
        now = float(np.mean([episode["r"] for episode in self.model.ep_info_buffer or ()]))
        self.logger.record("custom/best_reward", max([now, *self.curves.column("custom/best_reward")]))
        self._record("custom/reward_net_score", [info["score"] for info in self.infos])
        self._record("custom/gt_dice", [info["dice"] for info in self.infos if "dice" in info])
        if len(self.val_contexts):
            self._validate()

    def _validate(self) -> None:
        """What the greedy policy gets on the validation images; keeps the weights of the best Dice."""
        scores, dices = self._greedy()
        self._record("custom/val_score", scores)
        self._record("custom/val_gt_dice", dices)
        if dices and (self.peak is None or np.mean(dices) > self.peak["dice"]):
            weights = {name: tensor.clone() for name, tensor in self.model.policy.state_dict().items()}
            self.peak = {"dice": float(np.mean(dices)), "policy": weights}

    def _greedy(self) -> tuple[list[float], list[float]]:
        """Score of each validation image under the greedy policy, and Dice of each labelled one."""
        chosen = choose_prompts(self.model.policy, self.val_contexts, self.config.max_steps, self.reward == "net")
        pairs = list(zip(self.val_contexts, chosen, strict=True))
        dices = [float(context.metrics["dice"][action]) for context, action in pairs if context.metrics]
        return [float(context.scores[action]) for context, action in pairs], dices

    def close(self) -> None:
        """Close the progress bar, which would otherwise come after the last message."""
        if hasattr(self, "bar"):
            self.bar.close()

    def _record(self, tag: str, values: Sequence[float]) -> None:
        """The mean, where there is something to average (unlabelled images have no Dice)."""
        if len(values):
            self.logger.record(tag, float(np.mean(values)))


class _Curves(KVWriter):
    """TensorBoard, and metrics.jsonl with one JSON object per rollout; numbers that are not finite are left out.

    After a resume both go on behind the checkpoint: what was written after it is dropped. Clock times are not in
    metrics.jsonl, so that equal runs give equal files.
    """

    def __init__(self, run: Path, state: dict[str, Any]) -> None:
        self.path, self.rows = run / "metrics.jsonl", list(state.get("rows", []))
        self.board = SummaryWriter(str(run / "logs"), purge_step=state.get("num_timesteps", -1) + 1)

    def column(self, tag: str) -> list[float]:
        """The values of one curve so far."""
        return [row[tag] for row in self.rows if tag in row]

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        """Add the rollout that ended at `step`."""
        for name, value in filter_excluded_keys(key_values, key_excluded, "tensorboard").items():
            self.board.add_scalar(name, value, step)
        self.board.flush()
        numbers = {name: float(value) for name, value in key_values.items() if not name.startswith("time/")}
        self.rows.append({"step": step, **{name: value for name, value in numbers.items() if math.isfinite(value)}})
        with whole_file(self.path) as temporary:
            lines = [json.dumps(row, allow_nan=False) + "\n" for row in self.rows]
            temporary.write_text("".join(lines), encoding="utf-8")

    def close(self) -> None:
        """Close the event file."""
        self.board.close()


def _state(model: PPO) -> dict[str, Any]:
    """Everything a rollout depends on, as tensors and plain numbers: SB3's own save leaves most of it out."""
    assert model.env is not None
    name, keys, *rest = tuple(np.random.get_state(legacy=True))
    return {
        "policy": model.policy.state_dict(),
        "optimizer": model.policy.optimizer.state_dict(),
        "num_timesteps": model.num_timesteps,
        "updates": model._n_updates,
        "last_obs": torch.tensor(model._last_obs),
        "episode_starts": torch.tensor(model._last_episode_starts),
        "episodes": [{"r": float(e["r"]), "l": int(e["l"])} for e in model.ep_info_buffer or ()],
        "environments": vector_state(model.env),
        "numpy": [name, torch.tensor(np.asarray(keys, dtype=np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "unwritten": {key: float(value) for key, value in model.logger.name_to_value.items()},
        "excluded": {key: list(value or ()) for key, value in model.logger.name_to_excluded.items()},
    }


def _restore(model: PPO, state: dict[str, Any]) -> None:
    """Put a model of the same settings where `_state` was taken; `learn` must not reset it."""
    assert model.env is not None
    model.policy.load_state_dict(state["policy"])
    model.policy.optimizer.load_state_dict(state["optimizer"])
    model.num_timesteps, model._n_updates = state["num_timesteps"], state["updates"]
    model._last_obs, model._last_episode_starts = state["last_obs"].numpy(), state["episode_starts"].numpy()
    episodes = [{"r": np.float32(e["r"]), "l": np.int32(e["l"])} for e in state["episodes"]]
    model.ep_info_buffer, model.ep_success_buffer = deque(episodes, maxlen=100), deque(maxlen=100)
    restore_vector_state(model.env, state["environments"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    for key, value in state["unwritten"].items():
        model.logger.record(key, value, tuple(state["excluded"][key]) or None)
