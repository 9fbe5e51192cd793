"""Images of which the best prompt is known, and short trainings on them."""

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl_reward_network.env.observation import observe_image
from rl_reward_network.env.sa2va_finetune_env import PromptContext
from rl_reward_network.ppo.settings import PPOSettings
from rl_reward_network.ppo.train import train_prompt_policy


def toy_contexts(count, seed, labelled=True):
    """Images of one dark or one bright bar; the toy segmenter finds it best under the prompt that names it."""
    rng, contexts = np.random.default_rng(seed), []
    for index in range(count):
        bright, place = index % 2, rng.integers(15, 45)
        grey = rng.normal(128, 12, (64, 64))
        grey[:, place : place + 5] += 60 if bright else -60
        image = np.repeat(grey.clip(0, 255).astype(np.uint8)[..., None], 3, axis=2)
        scores = rng.uniform(0.3, 0.6) + rng.normal(0, 0.02, 4)  # how easy an image is hides what a prompt is worth
        scores[2 + bright] += 0.1
        scores = scores.clip(0, 1).astype(np.float32)
        metrics = {"dice": scores, "iou": scores} if labelled else {}
        contexts.append(PromptContext(f"{seed}-{index}", observe_image(image), scores, metrics))
    return contexts


def train(run, contexts=None, val=(), reward="net", **settings):
    """64 steps, unless `settings` say otherwise."""
    ppo = PPOSettings(**{"total_timesteps": 64, "learning_rate": 3e-4, **settings})
    return train_prompt_policy(contexts or toy_contexts(8, seed=0), val, ppo, run, reward)


def curves(run):
    events = EventAccumulator(str(run / "logs")).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
