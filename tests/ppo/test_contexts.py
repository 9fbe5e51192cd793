"""Contexts of a run, a model, or images and masks; the tables of a run on disk; the control with exchanged rewards."""

import doctest

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3 import PPO

from rl_reward_network.env import ENV_ID
from rl_reward_network.env.observation import IMAGE_FEATURES, observe_image
from rl_reward_network.env.sa2va_finetune_env import PromptContext
from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig
from rl_reward_network.ppo import contexts as contexts_file
from rl_reward_network.ppo.contexts import (
    TABLES,
    contexts_from_masks,
    contexts_from_model,
    contexts_from_run,
    exchange_rewards,
    load_tables,
    save_tables,
)
from rl_reward_network.ppo.train import make_vector_env
from rl_reward_network.rewards.table import MASK_REWARDS
from tests.ppo.test_baselines import tables

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
TRUTHS = RNG.random((2, 32, 32)) > 0.5
MASKS = np.stack([TRUTHS, ~TRUTHS, np.ones_like(TRUTHS)], axis=1)  # all right, all wrong, everything
SCORES = RNG.random((2, 3))


def entries(labelled):
    rng = np.random.default_rng(0)
    found = tables(rng.random((3, 4)), rng.random((3, 4), dtype=np.float32), labelled=labelled)
    return [
        PromptContext(
            *(table.sample_id, rng.random(IMAGE_FEATURES, dtype=np.float32) / 3),
            *(table.scores, {**(table.metrics or {}), "single_tree": rng.random(4)}, table.group_id),
            own_dice=0.25 if labelled else None,
        )
        for table in found
    ]


def test_the_example_of_the_docstring_runs():
    result = doctest.testmod(contexts_file)
    assert (result.failed, result.attempted > 5) == (0, True)


def test_contexts_of_images_masks_and_scores():
    labelled, unlabelled = contexts_from_masks(IMAGES, MASKS, SCORES, [TRUTHS[0], None])
    np.testing.assert_array_equal(labelled.features, observe_image(IMAGES[0]))
    np.testing.assert_allclose(labelled.scores, SCORES[0], rtol=1e-6)
    share = TRUTHS[0].mean()
    np.testing.assert_allclose(labelled.metrics["dice"], [1, 0, 2 * share / (1 + share)])
    np.testing.assert_allclose(labelled.metrics["iou"], [1, 0, share])
    assert unlabelled.metrics == {}
    assert [context.sample_id for context in (labelled, unlabelled)] == ["image 0", "image 1"]
    assert all(context.metrics == {} for context in contexts_from_masks(IMAGES, MASKS, SCORES))


@pytest.mark.parametrize(
    ("images", "masks", "scores", "truths", "message"),
    [
        (IMAGES, MASKS[:1], SCORES, None, r"'masks': 1"),
        (IMAGES, MASKS, SCORES, TRUTHS[:1], r"'truths': 1"),
        (IMAGES, MASKS.astype(float), SCORES, None, r"image 0: masks.*float64"),
        (IMAGES, MASKS, SCORES[:, :2], None, r"image 0: masks.*\(2,\)"),
        (IMAGES, MASKS[..., 1:], SCORES, None, r"image 0: masks.*\(\d+, \d+, \d+\)"),
        (IMAGES, MASKS, SCORES + 1, None, r"image 0: scores"),
        (IMAGES.astype(float), MASKS, SCORES, None, r"image.*float64"),
    ],
)
def test_images_and_masks_that_do_not_fit_are_named(images, masks, scores, truths, message):
    with pytest.raises(ValueError, match=message):
        contexts_from_masks(images, masks, scores, truths)


def test_contexts_of_a_model_a_reward_network_and_data_train_ppo(tiny_inputs, tmp_path):
    config = tiny_inputs.config
    network = RewardNetwork(RewardNetworkConfig(channels=(4, 4), packing=2))
    network.training_info |= {"train_groups": [], "val_groups": []}
    network.save_pretrained(tmp_path / "net")
    contexts = contexts_from_model(config, tmp_path / "net", images=2)
    assert [(len(one.scores), len(one.metrics["dice"])) for one in contexts] == [(11, 11)] * 2
    venv = make_vector_env(contexts, n_envs=2, seed=0)
    assert PPO("MlpPolicy", venv, n_steps=8, batch_size=16, device="cpu").learn(16).num_timesteps == 16
    network.training_info["train_groups"] = list(tiny_inputs.split.groups["policy"])[:1]
    network.save_pretrained(tmp_path / "leak")
    with pytest.raises(ValueError, match="was trained on 1 patients of the policy split"):
        contexts_from_model(config, tmp_path / "leak")


def test_tables_come_back_to_the_last_bit_and_play(tmp_path):
    saved = {"policy": entries(labelled=False), "val": entries(labelled=True)}
    save_tables(tmp_path / TABLES, saved)
    loaded = load_tables(tmp_path / TABLES)
    assert list(loaded) == list(saved)
    for name, expected in saved.items():
        for one, other in zip(expected, loaded[name], strict=True):
            np.testing.assert_array_equal(one.features, other.features)
            assert other.features.dtype == np.float32
            np.testing.assert_array_equal(one.scores, other.scores)
            assert (one.own_dice, one.group_id, one.labelled) == (other.own_dice, other.group_id, other.labelled)
            assert set(one.metrics) == set(other.metrics)
            for metric, values in one.metrics.items():
                np.testing.assert_array_equal(values, other.metrics[metric])
    train, val = contexts_from_run(tmp_path), contexts_from_run(str(tmp_path), split="val")
    assert not any(context.labelled for context in train)
    assert all(set(context.metrics) == {*MASK_REWARDS, "single_tree"} for context in val)
    _, info = gym.make(ENV_ID, contexts=train).reset(seed=0)
    assert info["sample_id"] in {context.sample_id for context in train}
    with pytest.raises(ValueError, match=r"split is 'reward'.*policy"):
        contexts_from_run(tmp_path, "reward")


@pytest.mark.parametrize("text", ["[]", '{"policy": [{"sample_id": "a"}]}', '{"policy": 3}', '{"policy": [[]]}', None])
def test_a_file_that_is_no_table_is_named_with_the_remedy(tmp_path, text):
    if text:
        (tmp_path / TABLES).write_text(text)
    with pytest.raises(ValueError, match=r"tables\.json: (not a table of scores .*run step 2 again|file not found)"):
        contexts_from_run(tmp_path)


def test_exchanged_rewards_are_of_another_image_and_of_the_same_set():
    images = entries(labelled=True)
    by_name = {entry.sample_id: entry for entry in images}
    control = exchange_rewards(images, seed=0)
    for image, other in zip(images, control, strict=True):
        np.testing.assert_array_equal(image.features, other.features)
        assert other.sample_id != image.sample_id
        np.testing.assert_array_equal(other.scores, by_name[other.sample_id].scores)
    assert {entry.sample_id for entry in control} == set(by_name)
    again = exchange_rewards(images, seed=0)
    assert [entry.sample_id for entry in again] == [entry.sample_id for entry in control]
    with pytest.raises(ValueError, match=r"--shuffle_rewards: 1 training image"):
        exchange_rewards(images[:1], seed=0)
