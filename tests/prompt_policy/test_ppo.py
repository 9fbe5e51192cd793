import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl_reward_network.env.observation import observe_image
from rl_reward_network.env.sa2va_finetune_env import PromptContext
from rl_reward_network.prompt_policy import ppo as prompt_ppo
from rl_reward_network.prompt_policy.config import PromptPPOConfig
from rl_reward_network.prompt_policy.policy import choose_prompts
from rl_reward_network.prompt_policy.ppo import train_prompt_policy

TAGS = {"rollout/ep_rew_mean", "rollout/ep_len_mean", "custom/reward_net_score", "custom/best_reward"}


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


def test_a_run_of_64_steps_has_8_rollouts_and_every_tag_from_the_first_on(tmp_path):
    val = toy_contexts(4, seed=1)
    train(tmp_path, val=val)
    tags = curves(tmp_path)
    steps = [8 * rollout for rollout in range(1, 9)]
    for tag in (*TAGS, "custom/gt_dice", "custom/val_score", "custom/val_gt_dice"):
        assert [step for step, _ in tags[tag]] == steps, tag
    assert {value for _, value in tags["rollout/ep_len_mean"]} == {1}
    raw = [value for _, value in tags["rollout/ep_rew_mean"]]
    assert min(raw) > 0.2, "the monitor sees scores, not centred rewards"
    best = [value for _, value in tags["custom/best_reward"]]
    np.testing.assert_allclose(best, np.maximum.accumulate(raw), rtol=1e-5)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == steps
    np.testing.assert_allclose([line["custom/best_reward"] for line in lines], best, rtol=1e-5)


def test_every_curve_is_explained(tmp_path):
    train(tmp_path, val=toy_contexts(4, seed=1))
    explained = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert [tag for tag in curves(tmp_path) if f"`{tag}`" not in explained] == []


def test_unlabelled_images_have_no_dice_curve(tmp_path):
    train(tmp_path, toy_contexts(8, 0, labelled=False), toy_contexts(4, 1, labelled=False))
    tags = set(curves(tmp_path))
    assert tags >= TAGS
    assert not any("dice" in tag for tag in tags)


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
    with pytest.raises(ValueError, match="reward 'iou' needs"):
        train(tmp_path / "no", toy_contexts(8, 0, labelled=False), reward="iou")
    assert not (tmp_path / "no").exists()


class Killed(Exception):
    """Stands for a process that is gone."""


@pytest.mark.parametrize(("max_steps", "rollout"), [(1, 0), (1, 5), (3, 3)])
@pytest.mark.parametrize("moment", ["_on_step", "_on_rollout_end", "_on_training_end"])
def test_a_run_that_was_cut_off_ends_in_the_same_weights_and_curves(tmp_path, monkeypatch, max_steps, rollout, moment):
    contexts, val = toy_contexts(8, 0), toy_contexts(6, 1)
    settings = {"total_timesteps": 300, "max_steps": max_steps}
    whole = train(tmp_path / "whole", contexts, val, **settings)
    monkeypatch.setattr(prompt_ppo, "CHECKPOINT_SECONDS", 0.0)
    original, calls = getattr(prompt_ppo._Recorder, moment), iter(range(10_000))

    def killed(self):
        late = len(self.curves.rows) >= rollout if moment != "_on_step" else next(calls) == 7 + 18 * rollout
        if late or moment == "_on_training_end":
            raise Killed
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(prompt_ppo._Recorder, moment, killed)
        with pytest.raises(Killed):
            train(tmp_path / "cut", contexts, val, **settings)
    np.random.seed(99)
    torch.manual_seed(99)  # another process begins anywhere
    resumed = train(tmp_path / "cut", contexts, val, **settings)
    assert resumed.num_timesteps == whole.num_timesteps
    for name, value in whole.policy.state_dict().items():
        assert torch.equal(value, resumed.policy.state_dict()[name]), name
    first, second = ((tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "cut"))
    assert first == second
    curve = curves(tmp_path / "cut")["custom/val_score"]
    assert curve == curves(tmp_path / "whole")["custom/val_score"], "nothing of the lost rollout stays on the board"


def test_an_over_optimised_run_stops_and_has_the_weights_of_its_peak(tmp_path, capsys):
    """The reward of prompt 2 rises with training while its truth is the worst on validation images."""
    contexts, val = toy_contexts(40, 0), toy_contexts(40, 1)
    for context in (*contexts, *val):
        object.__setattr__(context, "metrics", {"dice": 1 - context.scores})
    model = train(tmp_path, contexts, val, total_timesteps=6000, learning_rate=3e-4)
    assert "back to the best weights" in capsys.readouterr().out
    assert model.num_timesteps < 6000
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    gold = [row["custom/val_gt_dice"] for row in rows]
    chosen = choose_prompts(model, val)
    assert np.mean([c.metrics["dice"][a] for c, a in zip(val, chosen, strict=True)]) == pytest.approx(max(gold))
    weights = copy.deepcopy(model.policy.state_dict())
    again = train(tmp_path, contexts, val, total_timesteps=6000, learning_rate=3e-4)  # killed after the stop
    assert all(torch.equal(value, again.policy.state_dict()[name]) for name, value in weights.items())


def test_contexts_that_do_not_fit_write_nothing(tmp_path):
    with pytest.raises(ValueError, match="contexts: got none"):
        train_prompt_policy([], [], PromptPPOConfig(), tmp_path)
    assert list(tmp_path.iterdir()) == []
