"""The policies' network, choices and files; what is deployed on a new image."""

import pickle
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_reward_network.atomic_io import write_json
from rl_reward_network.env.observation import observation_table
from rl_reward_network.env.sa2va_finetune_env import observations
from rl_reward_network.ppo.policy import choose_prompts, deployed_prompt, load_policy, read_policy_config, save_network
from rl_reward_network.ppo.train import standardised
from tests.env.test_sa2va_finetune_env import make_contexts
from tests.ppo.toys import toy_contexts, train

PLAN = {"ppo": {"max_steps": 1}, "reward": "net", "vision_features": False}
OWN = {"prompts": ["the vessel", "the rib", "the dark vessel", "the bright vessel"], "inputs": {}, "deployment": {}}


def save(trained, folder, vision=0, **more):
    names = [entry.name for entry in observation_table(vision)]
    config = {**OWN, "plan": PLAN, "observation": names, "vision_features": vision, **more}
    save_network(trained, folder, config)
    return folder


def test_observations_are_standardised_by_the_training_images(tmp_path):
    contexts = toy_contexts(20, seed=0)
    extractor = train(tmp_path, contexts).policy.features_extractor
    standard = extractor(torch.tensor(observations(contexts))).numpy()
    raw = np.stack([context.features for context in contexts]).astype(np.float64)
    varied = np.flatnonzero(raw.std(axis=0) > 1e-3)
    assert len(varied) > 15
    np.testing.assert_allclose(standard[:, varied].mean(axis=0), 0, atol=1e-3)
    np.testing.assert_allclose(standard[:, varied].std(axis=0), 1, atol=1e-3)
    np.testing.assert_array_equal(standard[:, -2:], 0)
    far = extractor(torch.tensor(observations(make_contexts(count=50))))
    assert far.abs().max() == 10, "an image unlike all others is clipped"
    contexts = make_contexts(count=30, vision=5)
    features = np.stack([context.features for context in contexts])[:, -5:]
    arguments = standardised(contexts)["features_extractor_kwargs"]
    np.testing.assert_allclose(arguments["mean"][-7:], [*features.mean(axis=0), 0, 0], rtol=1e-5)
    np.testing.assert_allclose(arguments["std"][-7:], [*features.std(axis=0), 1, 1], rtol=1e-5)


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
    with_score, without, one = Scripted(), Scripted(), Scripted()
    # image 0: 1, 2, 3; image 1: 1, then 0, 0
    assert choose_prompts(with_score, contexts, max_steps=3).tolist() == [3, 1]
    np.testing.assert_allclose(with_score.seen[2], [[2 / 3, 0.3], [2 / 3, 0.6]], rtol=1e-6)
    assert choose_prompts(without, contexts, 3, observe_scores=False).tolist() == [3, 3]
    assert all((seen[:, 1] == 0).all() for seen in without.seen)
    never = lambda tried: pytest.fail("one prompt needs no score")  # noqa: E731
    assert choose_prompts(one, contexts, score=never).tolist() == [1, 1]


def test_on_a_new_image_the_policy_tries_and_scores_as_in_training():
    image = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    names = [entry.name for entry in observation_table()]
    trained = {**OWN, "plan": {**PLAN, "ppo": {"max_steps": 3}}, "observation": names}
    policy = Scripted()
    assert deployed_prompt(policy, trained, image, None, lambda prompt: [0.0, 0.3, 0.4, 0.2][prompt]) == 2
    with pytest.raises(ValueError, match="features of another width"):
        deployed_prompt(policy, {**trained, "observation": names[:-1]}, image, None, lambda prompt: 0.0)


def test_a_saved_policy_loads_equal_without_unpickling(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    contexts = toy_contexts(8, seed=0)
    model = train(tmp_path, contexts)
    folder = save(model, tmp_path / "final_model", model="nano")
    assert read_policy_config(folder)["model"] == "nano"
    renamed = save(model, tmp_path / "rc1", plan=PLAN | {"reward": "tree"})
    assert read_policy_config(renamed)["plan"] == PLAN | {"reward": "single_tree"}
    poison_pickles(folder / "policy.zip")
    policy = load_policy(folder)
    assert not Path("poisoned").exists()
    unseen = torch.tensor(observations(toy_contexts(30, seed=2)))
    expected, loaded = (part.get_distribution(unseen).distribution.probs for part in (model.policy, policy))
    torch.testing.assert_close(loaded, expected, rtol=0, atol=0)
    np.testing.assert_array_equal(choose_prompts(policy, contexts), choose_prompts(model, contexts))
    wide = make_contexts(count=8, vision=5)
    policy = load_policy(save(train(tmp_path, wide), tmp_path / "wide", 5))
    assert policy.observation_space.shape == (37,)
    assert choose_prompts(policy, wide).shape == (8,)


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


def test_foreign_or_damaged_weights_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = save(train(tmp_path), tmp_path / "final_model")
    archive = folder / "policy.zip"
    whole = archive.read_bytes()
    with zipfile.ZipFile(archive, "w") as file, file.open("policy.pth", "w") as weights:
        torch.save({"evil": Poison()}, weights)
    for damage in (None, lambda: archive.write_bytes(whole[: len(whole) // 2]), archive.unlink):
        if damage:
            damage()
        with pytest.raises(ValueError, match=r"policy\.zip: not the weights"):
            load_policy(folder)
    assert not Path("poisoned").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"observation": ["grey_mean"]}, "observation: made for other observations"),
        ({"deployment": None}, "field deployment is missing; name the final_model folder of a run of this version"),
        ({"plan": {"ppo": {"stop": True}}}, "trained with --stop, which this version does not have"),
        (None, "file not found; name the final_model folder"),
    ],
)
def test_another_config_is_refused(tmp_path, change, message):
    config = {**OWN, "plan": PLAN, "net_arch": [4], "vision_features": 0}
    config["observation"] = [entry.name for entry in observation_table()]
    if change is not None:
        write_json(tmp_path / "config.json", {name: of for name, of in {**config, **change}.items() if of is not None})
    with pytest.raises(ValueError, match=rf"config\.json: {re.escape(message)}"):
        load_policy(tmp_path)
