import json
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_sa2va_finetune_env import make_contexts

from rl_reward_network.env.observation import observe_image
from rl_reward_network.env.sa2va_finetune_env import PromptContext, start_observations
from rl_reward_network.training.prompt_ppo import PromptPPOConfig, choose_prompts, load_policy, train_prompt_policy

PROMPTS = ("the vessel", "the rib", "the dark vessel", "the bright vessel")
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
        labels = scores if labelled else None
        contexts.append(PromptContext(f"{seed}-{index}", observe_image(image), scores, labels, labels))
    return contexts


def train(run, contexts=None, val=(), **settings):
    contexts = contexts or toy_contexts(8, seed=0)
    return train_prompt_policy(contexts, val, PROMPTS, PromptPPOConfig(**{"total_timesteps": 64, **settings}), run)


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


def test_unlabelled_images_have_no_dice_curve(tmp_path):
    train(tmp_path, toy_contexts(8, 0, labelled=False), toy_contexts(4, 1, labelled=False))
    tags = set(curves(tmp_path))
    assert tags >= TAGS
    assert not any("dice" in tag for tag in tags)


def test_longer_episodes_train_too(tmp_path):
    train(tmp_path, max_steps=3, n_envs=1, total_timesteps=96)
    assert {value for _, value in curves(tmp_path)["rollout/ep_len_mean"]} == {3}


@pytest.mark.parametrize("uses_labels", [True, False])
def test_a_reward_made_of_labels_stays_out_of_sight(tmp_path, uses_labels):
    config = PromptPPOConfig(total_timesteps=96, max_steps=3)
    model = train_prompt_policy(toy_contexts(8, 0), [], PROMPTS, config, tmp_path, reward_uses_labels=uses_labels)
    best_score = model.rollout_buffer.observations[..., -1]
    assert (best_score.max() == 0) == uses_labels


@pytest.mark.parametrize("n_envs", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("total", [64, 500, 2000, 10000])
def test_rollouts_are_at_least_eight_and_batches_nearly_equal(n_envs, total):
    config = PromptPPOConfig(total_timesteps=total, n_envs=n_envs)
    rollout = config.rollout_steps * n_envs
    assert config.whole_timesteps // rollout >= 8
    assert config.whole_timesteps % rollout == 0
    assert total <= config.whole_timesteps < total + rollout
    assert 2 <= config.even_batch <= 64
    assert rollout % config.even_batch in (0, *range(config.even_batch // 2, config.even_batch))


def test_published_settings_stay_what_they_are():
    config = PromptPPOConfig(total_timesteps=10000)
    assert (config.rollout_steps, config.even_batch) == (128, 64)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_envs": 0}, "n_envs: got 0; give 1 or more"),
        ({"n_steps": -5}, "n_steps: got -5; give 1"),
        ({"total_timesteps": -1}, "total_timesteps: got -1; give 1"),
        ({"total_timesteps": 15}, "total_timesteps: got 15; give 16 or more"),
        ({"batch_size": 257}, "batch_size: got 257; give at most 256"),
        ({"batch_size": 1}, "batch_size: got 1; give 2"),
        ({"learning_rate": 0.0}, "learning_rate: got 0.0; give a number above 0"),
        ({"learning_rate": float("nan")}, "learning_rate: got nan"),
        ({"gamma": 1.1}, "gamma: got 1.1; give a number from 0 to 1"),
        ({"max_steps": 200}, "n_steps: got 128; give max_steps = 200"),
        ({"seed": -1}, "seed: got -1"),
    ],
)
def test_bad_settings_name_field_value_and_remedy(settings, message):
    with pytest.raises(ValueError, match=message):
        PromptPPOConfig(**settings)


def test_observations_are_standardised_by_the_training_images(tmp_path):
    contexts = toy_contexts(20, seed=0)
    policy = train(tmp_path, contexts).policy
    seen = policy.features_extractor(torch.tensor(start_observations(contexts))).numpy()
    raw = np.stack([context.features for context in contexts]).astype(np.float64)
    varied = np.flatnonzero(raw.std(axis=0) > 1e-3)
    assert len(varied) > 15
    np.testing.assert_allclose(seen[:, varied].mean(axis=0), 0, atol=1e-3)
    np.testing.assert_allclose(seen[:, varied].std(axis=0), 1, atol=1e-3)
    np.testing.assert_array_equal(seen[:, -2:], 0)
    far = policy.features_extractor(torch.tensor(start_observations(make_contexts(count=50))))
    assert far.abs().max() == 10, "an image unlike all others is clipped"


def test_a_saved_policy_loads_equal_without_unpickling(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    contexts = toy_contexts(8, seed=0)
    config = PromptPPOConfig(total_timesteps=64)
    model = train_prompt_policy(contexts, [], PROMPTS, config, tmp_path, {"model": "nano", "reward_net": "abc"})
    folder = tmp_path / "final_model"
    described = json.loads((folder / "config.json").read_text())
    assert (described["model"], described["prompts"], described["ppo"]["n_envs"]) == ("nano", list(PROMPTS), 2)
    poison_pickles(folder / "policy.zip")
    policy = load_policy(folder)
    assert not Path("poisoned").exists()
    observations = torch.tensor(start_observations(toy_contexts(30, seed=2)))
    expected, loaded = (part.get_distribution(observations).distribution.probs for part in (model.policy, policy))
    torch.testing.assert_close(loaded, expected, rtol=0, atol=0)
    np.testing.assert_array_equal(choose_prompts(policy, contexts), choose_prompts(model, contexts))


class Poison:
    """Writes a file when it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("poisoned"),)


def poison_pickles(archive):
    """Replace everything but the policy's weights by something that no one can unpickle unharmed."""
    with zipfile.ZipFile(archive) as file:
        weights = file.read("policy.pth")
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("policy.pth", weights)
        file.writestr("data", pickle.dumps(Poison()))


def test_a_foreign_or_damaged_policy_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(tmp_path)
    folder, archive = tmp_path / "final_model", tmp_path / "final_model" / "policy.zip"
    whole = archive.read_bytes()
    with zipfile.ZipFile(archive, "w") as file, file.open("policy.pth", "w") as weights:
        torch.save({"evil": Poison()}, weights)
    with pytest.raises(ValueError, match=r"policy\.zip: not the weights"):
        load_policy(folder)
    assert not Path("poisoned").exists()
    archive.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"policy\.zip: not the weights"):
        load_policy(folder)
    archive.unlink()
    with pytest.raises(ValueError, match=r"policy\.zip"):
        load_policy(folder)
    (folder / "config.json").write_text('{"observation": ["grey_mean"], "prompts": ["a", "b"]}')
    with pytest.raises(ValueError, match=r"config\.json: observation"):
        load_policy(folder)


def test_contexts_that_do_not_fit_the_prompts_write_nothing(tmp_path):
    with pytest.raises(ValueError, match="scores of 5 prompts; 4 prompts are named"):
        train(tmp_path, make_contexts(prompts=5))
    with pytest.raises(ValueError, match="contexts: got none"):
        train_prompt_policy([], [], PROMPTS, PromptPPOConfig(), tmp_path)
    assert list(tmp_path.iterdir()) == []
