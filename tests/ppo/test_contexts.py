import doctest
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3 import PPO

from rl_reward_network.env import ENV_ID
from rl_reward_network.env.observation import observe_image
from rl_reward_network.env.vector_env import make_vector_env
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.inputs.loading import open_inputs
from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig
from rl_reward_network.ppo import contexts as contexts_file
from rl_reward_network.ppo.contexts import contexts_from_masks, contexts_from_model, contexts_from_run
from rl_reward_network.ppo.tables import TABLES, save_tables
from rl_reward_network.rewards.table import MASK_REWARDS
from tests.conftest import write_tiny_data
from tests.ppo.test_tables import entries

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
TRUTHS = RNG.random((2, 32, 32)) > 0.5
MASKS = np.stack([TRUTHS, ~TRUTHS, np.ones_like(TRUTHS)], axis=1)  # all right, all wrong, everything
SCORES = RNG.random((2, 3))


def test_the_example_of_the_docstring_runs() -> None:
    result = doctest.testmod(contexts_file)
    assert (result.failed, result.attempted > 5) == (0, True)


def test_contexts_of_images_masks_and_scores() -> None:
    labelled, unlabelled = contexts_from_masks(IMAGES, MASKS, SCORES, [TRUTHS[0], None])
    np.testing.assert_array_equal(labelled.features, observe_image(IMAGES[0]))
    np.testing.assert_allclose(labelled.scores, SCORES[0], rtol=1e-6)
    share = TRUTHS[0].mean()
    np.testing.assert_allclose(labelled.metrics["dice"], [1, 0, 2 * share / (1 + share)])
    np.testing.assert_allclose(labelled.metrics["iou"], [1, 0, share])
    assert unlabelled.metrics == {}
    assert [context.sample_id for context in (labelled, unlabelled)] == ["image 0", "image 1"]
    assert all(context.metrics == {} for context in contexts_from_masks(IMAGES, MASKS, SCORES))


def test_contexts_of_a_model_a_reward_network_and_data_train_ppo(tiny_checkpoint: Path, tmp_path: Path) -> None:
    config = RunConfig(str(tiny_checkpoint), write_tiny_data(tmp_path, images=12, size=64), tmp_path / "out", gpu=-1)
    network = RewardNetwork(RewardNetworkConfig(channels=(4, 4), packing=2))
    network.training_info |= {"train_groups": [], "val_groups": []}
    network.save_pretrained(tmp_path / "net")
    contexts = contexts_from_model(config, tmp_path / "net", images=2)
    assert len(contexts) == 2
    assert all(context.scores.shape == (11,) and context.metrics["dice"].shape == (11,) for context in contexts)
    venv = make_vector_env(contexts, n_envs=2, seed=0)
    assert PPO("MlpPolicy", venv, n_steps=8, batch_size=16, device="cpu").learn(16).num_timesteps == 16
    seen = {"train_groups": list(open_inputs(config).split.groups["policy"])[:1], "val_groups": []}
    network.training_info |= seen
    network.save_pretrained(tmp_path / "leak")
    with pytest.raises(ValueError, match="was trained on 1 patients of the policy split"):
        contexts_from_model(config, tmp_path / "leak")


def test_contexts_of_a_run_play(tmp_path: Path) -> None:
    save_tables(tmp_path / TABLES, {"policy": entries(labelled=False), "val": entries(labelled=True)})
    train, val = contexts_from_run(tmp_path), contexts_from_run(str(tmp_path), split="val")
    assert all(context.metrics == {} for context in train)
    assert all(set(context.metrics) == set(MASK_REWARDS) for context in val)
    env = gym.make(ENV_ID, contexts=train)
    _, info = env.reset(seed=0)
    assert info["sample_id"] in {context.sample_id for context in train}


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    for arguments, message in (
        ((IMAGES, MASKS[:1], SCORES), r"'masks': 1"),
        ((IMAGES, MASKS, SCORES, TRUTHS[:1]), r"'truths': 1"),
        ((IMAGES, MASKS.astype(float), SCORES), r"image 0: masks.*float64"),
        ((IMAGES, MASKS, SCORES[:, :2]), r"image 0: masks.*\(2,\)"),
        ((IMAGES, MASKS[..., 1:], SCORES), r"image 0: masks.*\(\d+, \d+, \d+\)"),
        ((IMAGES, MASKS, SCORES + 1), r"image 0: scores"),
        ((IMAGES.astype(float), MASKS, SCORES), r"image.*float64"),
    ):
        with pytest.raises(ValueError, match=message):
            contexts_from_masks(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"tables\.json"):
        contexts_from_run(tmp_path)
    save_tables(tmp_path / TABLES, {"policy": entries(labelled=False)})
    with pytest.raises(ValueError, match=r"split is 'val'.*policy"):
        contexts_from_run(tmp_path, "val")
