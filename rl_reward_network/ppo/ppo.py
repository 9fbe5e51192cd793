"""PPO of step 2, on a table of the scores of the frozen model's masks."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.logger import Logger
from tqdm import tqdm

from rl_reward_network.artefacts import whole_file
from rl_reward_network.curves import Curves
from rl_reward_network.env.sa2va_finetune_env import PromptContext
from rl_reward_network.env.vector_env import make_vector_env
from rl_reward_network.ppo.callbacks import (
    CurvesWriter,
    RolloutCurves,
    ValidationCallback,
)
from rl_reward_network.ppo.config import PromptPPOConfig
from rl_reward_network.ppo.policy import architecture
from rl_reward_network.rewards.table import RewardName

LAST_WEIGHTS = "last_weights.zip"  # in the folder of a run whose policy went back to earlier weights


def train_prompt_policy(
    train_contexts: Sequence[PromptContext],
    val_contexts: Sequence[PromptContext],
    config: PromptPPOConfig,
    run_dir: Path,
    reward: RewardName = "net",
) -> PPO:
    """Train a prompt policy with SB3's PPO.

    Writes `run_dir`/logs (TensorBoard) and metrics.jsonl, anew if they exist. Training stops early when the reward is
    over-optimised; the policy then has the weights of the best validation Dice, and those of the last step are in
    `LAST_WEIGHTS`.

    Args:
        train_contexts: training images; the observations are standardised by their features.
        val_contexts: images for validating the greedy policy after each rollout; may be empty. The stop rule uses the
            labelled ones.
        config: settings of PPO.
        run_dir: run folder; made when missing.
        reward: reward of a mask, see `prompt_rewards`.

    Raises:
        ValueError: contexts that do not fit together or to the reward.
    """
    venv = make_vector_env(train_contexts, config.n_envs, config.seed, config.max_steps, reward, config.stop)
    model = new_ppo(venv, architecture(train_contexts, config.stop), config)
    curves = Curves(run_dir, {"step": 0}, board_step=0)
    model.set_logger(Logger(str(run_dir / "logs"), [CurvesWriter(curves)]))
    validation = ValidationCallback(val_contexts, config.max_steps, reward, curves, config.stop)
    bar = tqdm(total=config.whole_timesteps, desc="PPO", unit="step")
    with closing(venv), closing(curves), bar, one_thread():
        model.learn(config.whole_timesteps, [RolloutCurves(curves, bar), validation])
    (run_dir / LAST_WEIGHTS).unlink(missing_ok=True)  # of a run that was killed
    if validation.over_optimised():
        with whole_file(run_dir / LAST_WEIGHTS) as temporary:
            model.save(temporary)
        model.policy.load_state_dict(validation.peak["policy"])
        print("back to the best weights: at the end the reward still rose, but Dice on val patients had fallen")
    return model


def new_ppo(venv: Any, policy_kwargs: dict[str, Any], config: PromptPPOConfig) -> PPO:
    """SB3's PPO on the CPU, the fastest device for it; `policy_kwargs` are those of its policy."""
    with warnings.catch_warnings():  # mini-batches cannot always be of equal size
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
            policy_kwargs=policy_kwargs,
            seed=config.seed,
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
