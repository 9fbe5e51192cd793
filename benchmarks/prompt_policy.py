"""Time saved by the mask bank, and speed of PPO on its table compared with PPO on CartPole; both sides in one run.

    python -m benchmarks.prompt_policy

1. Sa2VA's time for quick's training (every prompt once on 20 images, an empty bank) against one `predict_forward` per
   environment step (100 steps timed, scaled to quick's 2000). Beside it the whole run: training, validation and test.
2. PPO steps per second on the bank's table against Stable-Baselines3's PPO on CartPole with the same network, number of
   environments, rollout, mini-batch and passes. Timed in turn.
"""

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

from benchmarks.common import seconds
from rl_reward_network.cli.app import run
from rl_reward_network.data.items import Sample
from rl_reward_network.env.mask_bank import MaskBank
from rl_reward_network.env.observation import observe_image
from rl_reward_network.env.sa2va_finetune_env import PromptContext
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.inputs.loading import RunInputs, open_inputs
from rl_reward_network.ppo.policy import NET_ARCH
from rl_reward_network.ppo.prompts import policy_plan
from rl_reward_network.ppo.train import make_vector_env, new_ppo, one_thread, standardised, train_prompt_policy


@dataclass(frozen=True)
class Args:
    """Measure the mask bank and PPO on it."""

    inputs: tyro.conf.OmitArgPrefixes[RunConfig]
    steps: int = 100
    """Environment steps with one `predict_forward` each."""
    repeats: int = 11
    """Rounds of PPO measurements."""


def main(args: Args) -> None:
    """Measure and print."""
    inputs, plan = open_inputs(args.inputs), policy_plan("quick")
    train = inputs.pick("policy", plan.images)
    every = [*train, *inputs.pick("val", plan.val_images), *inputs.pick("test", len(inputs.samples))]
    bank = banked(inputs, train)
    single = one_per_step(inputs, train, args.steps) * plan.ppo.total_timesteps
    whole = banked(inputs, every)
    print(f"bank of {len(train)} images x {len(inputs.prompts)} prompts: {bank:.2f} s of Sa2VA")
    print(f"one predict_forward per step, {plan.ppo.total_timesteps} steps: {single:.1f} s of Sa2VA")
    print(f"ratio, training: {single / bank:.1f}x; the whole run with {len(every)} images: {whole:.1f} s")
    ppo = plan.ppo
    contexts = random_contexts(inputs, train)

    def on_cartpole() -> None:
        venv = make_vec_env("CartPole-v1", ppo.n_envs, seed=0)
        same: dict[str, Any] = {"n_steps": ppo.rollout_steps, "batch_size": ppo.even_batch, "n_epochs": ppo.n_epochs}
        same |= {"learning_rate": ppo.learning_rate, "policy_kwargs": {"net_arch": list(NET_ARCH)}}
        with one_thread():
            PPO("MlpPolicy", venv, device="cpu", seed=0, **same).learn(ppo.whole_timesteps)

    def on_the_bank() -> None:
        with one_thread():
            venv = make_vector_env(contexts, ppo.n_envs, 0)
            new_ppo(venv, standardised(contexts), ppo).learn(ppo.whole_timesteps)

    def as_step_2() -> None:
        with tempfile.TemporaryDirectory() as folder:
            train_prompt_policy(contexts, contexts, ppo, Path(folder))

    rounds = [[seconds(side) for side in (on_cartpole, on_the_bank, as_step_2)] for _ in range(args.repeats)]
    for place, name in enumerate(("CartPole", "the bank", "the bank, with validation and curves")):
        rate = ppo.whole_timesteps / statistics.median(times[place] for times in rounds)
        ratios = [times[0] / times[place] for times in rounds]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"PPO on {name}: {rate:.0f} steps/s, {statistics.median(ratios):.2f} of CartPole's ({spread})")


def banked(inputs: RunInputs, samples: list[Sample]) -> float:
    """Seconds to fill an empty bank with these samples."""
    images = [sample.load_image() for sample in samples]
    with tempfile.TemporaryDirectory() as folder:
        bank = MaskBank(Path(folder), inputs.segmenter.segment, inputs.segmenter.fingerprint, inputs.prompts)
        return seconds(lambda: bank.build(images))


def one_per_step(inputs: RunInputs, samples: list[Sample], steps: int) -> float:
    """Mean seconds of one `predict_forward`, each on a random image with a random prompt."""
    model, processor, rng = inputs.segmenter.model, inputs.segmenter.processor, np.random.default_rng(0)
    images = [sample.load_image() for sample in samples]

    def step(_: int = 0) -> None:
        image, prompt = images[rng.integers(len(images))], inputs.prompts[rng.integers(len(inputs.prompts))]
        limit = inputs.segmenter.max_new_tokens
        model.predict_forward(image=image, text="<image>" + prompt, processor=processor, max_new_tokens=limit)

    step()  # the first call of a process is slower
    return seconds(lambda: list(map(step, range(steps)))) / steps


def random_contexts(inputs: RunInputs, samples: list[Sample]) -> list[PromptContext]:
    """Contexts of the samples with random scores, on which the speed of PPO does not depend."""
    rng = np.random.default_rng(0)
    scores = rng.random((len(samples), len(inputs.prompts)), dtype=np.float32)
    answers = [(sample, sample.load_image()) for sample in samples]
    return [
        PromptContext(
            sample.sample_id, observe_image(image, inputs.bank.answer(image).vision_features), row, {"dice": row}
        )
        for (sample, image), row in zip(answers, scores, strict=True)
    ]


if __name__ == "__main__":
    run(main, Args)
