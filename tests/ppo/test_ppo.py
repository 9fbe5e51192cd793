import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl_reward_network.env.observation import observe_image
from rl_reward_network.env.sa2va_finetune_env import PromptContext
from rl_reward_network.ppo.config import PromptPPOConfig
from rl_reward_network.ppo.policy import choose_prompts
from rl_reward_network.ppo.ppo import train_prompt_policy


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
    contexts = contexts or toy_contexts(8, seed=0)
    return train_prompt_policy(contexts, val, PromptPPOConfig(**{"total_timesteps": 64, **settings}), run, reward)


def curves(run):
    events = EventAccumulator(str(run / "logs")).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_ppo_learns_the_known_best_prompt_of_each_image(tmp_path):
    unseen = toy_contexts(40, seed=1)
    model = train(tmp_path, toy_contexts(40, seed=0), unseen, total_timesteps=2000)
    assert model.num_timesteps == 2000
    right = choose_prompts(model, unseen) == 2 + np.arange(40) % 2
    assert right.mean() >= 0.95
    scores = [value for _, value in curves(tmp_path)["custom/val_score"]]
    assert scores[-1] > scores[0] + 0.03


def test_equal_seeds_give_equal_policies(tmp_path):
    first, second, other = (
        train(tmp_path / name, seed=seed).policy.state_dict() for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert not all(torch.equal(value, other[name]) for name, value in first.items())


def test_longer_episodes_train_too(tmp_path):
    train(tmp_path, max_steps=3, n_envs=1, total_timesteps=96)
    assert {value for _, value in curves(tmp_path)["rollout/ep_len_mean"]} == {3}


@pytest.mark.parametrize("reward", ["net", "dice", "iou", "mix"])
def test_a_reward_made_of_labels_stays_out_of_sight(tmp_path, reward):
    model = train(tmp_path, reward=reward, total_timesteps=96, max_steps=3)
    best_score = model.rollout_buffer.observations[..., -1]
    assert (best_score.max() == 0) == (reward != "net")


def test_rewards_of_labels_pay_labels(tmp_path):
    """The reward net is wrong on purpose: it likes the prompt that names the other bar."""
    contexts = toy_contexts(40, seed=0)
    for context in contexts:
        object.__setattr__(context, "scores", context.scores[[0, 1, 3, 2]])
    right = 2 + np.arange(40) % 2
    by_net, by_dice = (
        choose_prompts(train(tmp_path / reward, contexts, reward=reward, total_timesteps=2000), contexts)
        for reward in ("net", "dice")
    )
    assert (by_dice == right).mean() >= 0.95
    assert (by_net == 5 - right).mean() >= 0.95
    with pytest.raises(ValueError, match=r"reward.*iou.*labelled"):
        train(tmp_path / "no", toy_contexts(8, 0, labelled=False), reward="iou")
    assert not (tmp_path / "no").exists()


def test_with_stop_ppo_learns_the_known_best_prompt_of_each_image(tmp_path):
    unseen = toy_contexts(40, seed=1)
    settings = {"stop": True, "max_steps": 3, "total_timesteps": 6000, "learning_rate": 1e-3}
    model = train(tmp_path, toy_contexts(40, seed=0), unseen, reward="dice", **settings)
    dices = np.stack([context.metrics["dice"] for context in unseen])
    reached = dices[np.arange(40), choose_prompts(model, unseen, 3, stop=True)].mean()
    assert reached > dices[:, 0].mean() + 0.07, "of 0.1 that can be gained"
    assert {value for _, value in curves(tmp_path)["rollout/ep_len_mean"]} != {3}, "episodes end earlier, too"


def test_contexts_that_do_not_fit_write_nothing(tmp_path):
    with pytest.raises(ValueError, match="contexts is empty"):
        train_prompt_policy([], [], PromptPPOConfig(), tmp_path)
    assert list(tmp_path.iterdir()) == []
