import json
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_reward_network.env.sa2va_finetune_env import Sa2VAFinetuneEnv, observations
from rl_reward_network.ppo.policy import (
    architecture,
    choose_prompts,
    deployed_prompt,
    has_stop,
    load_policy,
    read_policy_config,
    save_policy,
    try_prompts,
    try_until_stop,
)
from tests.env.test_sa2va_finetune_env import make_contexts
from tests.ppo.test_ppo import toy_contexts, train

OWN = {"prompts": ["the vessel", "the rib", "the dark vessel", "the bright vessel"]}
OWN |= {"world": {}, "plan": {}, "deployment": {}}


def test_observations_are_standardised_by_the_training_images(tmp_path):
    contexts = toy_contexts(20, seed=0)
    policy = train(tmp_path, contexts).policy
    standard = policy.features_extractor(torch.tensor(observations(contexts))).numpy()
    raw = np.stack([context.features for context in contexts]).astype(np.float64)
    varied = np.flatnonzero(raw.std(axis=0) > 1e-3)
    assert len(varied) > 15
    np.testing.assert_allclose(standard[:, varied].mean(axis=0), 0, atol=1e-3)
    np.testing.assert_allclose(standard[:, varied].std(axis=0), 1, atol=1e-3)
    np.testing.assert_array_equal(standard[:, -2:], 0)
    far = policy.features_extractor(torch.tensor(observations(make_contexts(count=50))))
    assert far.abs().max() == 10, "an image unlike all others is clipped"


def test_features_of_sa2va_are_standardised_too():
    contexts = make_contexts(count=30, vision=5)
    arguments = architecture(contexts)["features_extractor_kwargs"]
    features = np.stack([context.features for context in contexts])
    np.testing.assert_allclose(arguments["mean"][-7:-2], features[:, -5:].mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(arguments["std"][-7:-2], features[:, -5:].std(axis=0), rtol=1e-5)
    assert (arguments["mean"][-2:], arguments["std"][-2:]) == ([0, 0], [1, 1])


class Scripted:
    """Chooses prompts in a fixed order by progress, and prompt 0 after a best score above 0.5."""

    def __init__(self):
        self.seen = []

    def predict(self, observation, deterministic):
        assert deterministic
        self.seen.append(observation[:, -2:])
        return np.where(observation[:, -1] > 0.5, 0, np.round(observation[:, -2] * 3) + 1).astype(int), None


def test_of_several_prompts_tried_the_best_scored_is_kept():
    contexts = make_contexts(count=2)
    object.__setattr__(contexts[0], "scores", np.array([0.9, 0.3, 0.2, 0.4], np.float32))
    object.__setattr__(contexts[1], "scores", np.array([0.1, 0.6, 0.7, 0.9], np.float32))
    with_score, without = Scripted(), Scripted()
    # image 0: 1, 2, 3; image 1: 1, then 0, 0
    assert choose_prompts(with_score, contexts, max_steps=3).tolist() == [3, 1]
    np.testing.assert_allclose(with_score.seen[2], [[2 / 3, 0.3], [2 / 3, 0.6]], rtol=1e-6)
    assert choose_prompts(without, contexts, max_steps=3, observe_scores=False).tolist() == [3, 3]
    assert all((seen[:, 1] == 0).all() for seen in without.seen)
    one = try_prompts(Scripted(), contexts, lambda tried: pytest.fail("one prompt needs no score"))
    assert one.tolist() == [1, 1]


class StopsLater:
    """Chooses prompt 2, then 3, then stops; images whose first feature is negative are stopped at once."""

    def predict(self, observation, deterministic):
        assert deterministic
        current, progress = observation[:, -4:].argmax(axis=1), observation[:, -6]
        later = np.select([progress == 0, current == 2], [2, 3], default=4)
        return np.where(observation[:, 0] < 0, 4, later), None


def test_the_prompt_at_stop_is_the_last_one_tried_and_the_default_s_if_none_was():
    contexts = make_contexts(count=3)
    contexts[1].features[0] = -1
    expected = [3, 0, 3]
    assert try_until_stop(StopsLater(), contexts, max_steps=5).tolist() == expected
    assert choose_prompts(StopsLater(), contexts, max_steps=5, stop=True).tolist() == expected
    assert try_until_stop(StopsLater(), contexts, max_steps=1).tolist() == [2, 0, 2], "no prompt after max_steps"


def test_a_policy_with_stop_rolls_out_as_in_its_environment():
    contexts = make_contexts(count=5)
    env = Sa2VAFinetuneEnv(contexts, 3, "dice", stop=True)
    reached = {}
    for _ in contexts:
        observation, _ = env.reset()
        terminated = False
        while not terminated:
            (action,), _ = StopsLater().predict(observation[None], deterministic=True)
            observation, _, terminated, _, info = env.step(action)
        reached[info["sample_id"]] = info["prompt"]
    assert [reached[context.sample_id] for context in contexts] == try_until_stop(StopsLater(), contexts, 3).tolist()


def test_a_saved_policy_with_stop_loads_equal_and_needs_no_mask(tmp_path):
    contexts, image = toy_contexts(8, seed=0), np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    model = train(tmp_path, contexts, reward="dice", stop=True, max_steps=3, total_timesteps=96)
    plan = {"ppo": {"stop": True, "max_steps": 3}, "reward": "dice", "vision_features": False}
    save_policy(model, tmp_path / "final_model", {**OWN, "plan": plan})
    policy, described = load_policy(tmp_path / "final_model"), read_policy_config(tmp_path / "final_model")
    assert (policy.action_space.n, described["vision_features"]) == (5, 0)
    assert described["observation"][-1] == "present_mask_of_prompt_3"
    expected = choose_prompts(model, contexts, 3, stop=True)
    np.testing.assert_array_equal(choose_prompts(policy, contexts, 3, stop=True), expected)
    chosen = deployed_prompt(policy, described, image, None, lambda _: pytest.fail("no mask may be needed"))
    assert chosen in range(4)


def test_policies_of_runs_before_stop_have_none():
    assert not has_stop({"plan": {"ppo": {"max_steps": 3}}})
    assert not has_stop({"plan": {}})
    assert has_stop({"plan": {"ppo": {"stop": True}}})


def test_a_saved_policy_loads_equal_without_unpickling(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    contexts, folder = toy_contexts(8, seed=0), tmp_path / "final_model"
    model = train(tmp_path, contexts)
    save_policy(model, folder, {**OWN, "model": "nano"})
    described = read_policy_config(folder)
    assert (described["model"], described["vision_features"], described["observation"][0]) == ("nano", 0, "grey_mean")
    poison_pickles(folder / "policy.zip")
    policy = load_policy(folder)
    assert not Path("poisoned").exists()
    unseen = torch.tensor(observations(toy_contexts(30, seed=2)))
    expected, loaded = (part.get_distribution(unseen).distribution.probs for part in (model.policy, policy))
    torch.testing.assert_close(loaded, expected, rtol=0, atol=0)
    np.testing.assert_array_equal(choose_prompts(policy, contexts), choose_prompts(model, contexts))


def test_a_policy_with_sa2va_s_features_loads_with_the_same_observation(tmp_path):
    contexts = make_contexts(count=8, vision=5)
    save_policy(train(tmp_path, contexts), tmp_path / "final_model", OWN)
    policy = load_policy(tmp_path / "final_model")
    assert policy.observation_space.shape == (37,)
    assert choose_prompts(policy, contexts).shape == (8,)


class Poison:
    """Writes a file when it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("poisoned"),)


def poison_pickles(archive):
    """Replace everything but the weights of the policy by a pickle that writes a file when it is loaded."""
    with zipfile.ZipFile(archive) as file:
        weights = file.read("policy.pth")
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("policy.pth", weights)
        file.writestr("data", pickle.dumps(Poison()))


def test_a_foreign_or_damaged_policy_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, archive = tmp_path / "final_model", tmp_path / "final_model" / "policy.zip"
    save_policy(train(tmp_path), folder, OWN)
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
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "observation": ["grey_mean"]}))
    with pytest.raises(ValueError, match=r"config\.json: observation"):
        load_policy(folder)
    del config["deployment"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json: field deployment is missing.*train one"):
        load_policy(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json: file not found; name the final_model folder"):
        load_policy(folder)
