"""The environment of operations: both checkers, telescoping rewards, stop, and its state."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as check_for_sb3

from rl_reward_network import POST_ENV_ID
from rl_reward_network.env.post_process_env import STOP_ACTION, PostProcessEnv
from tests.env.edited_images import DILATE, ERODE, known_image, known_images


def make(count: int = 4, max_steps: int = 3) -> PostProcessEnv:
    return PostProcessEnv(known_images(count), max_steps)


def test_both_checkers_pass() -> None:
    check_env(make(), skip_render_check=True)
    check_for_sb3(make())


def test_it_has_an_id_and_draws_the_present_mask() -> None:
    env = gym.make(POST_ENV_ID, images=known_images(2), max_steps=1, render_mode="rgb_array")
    check_env(env.unwrapped)
    _, info = env.reset(seed=0)
    (image,) = (one for one in known_images(2) if one.sample_id == info["sample_id"])
    for operations in ((), (DILATE,)):
        if operations:
            env.step(np.int64(DILATE))
        changed = (np.asarray(env.render()) != image.guide.image).any(axis=2)
        np.testing.assert_array_equal(changed, image.mask(operations))
    with pytest.raises(ValueError, match="render_mode is 'x'"):
        PostProcessEnv(known_images(1), render_mode="x")


def test_the_return_is_the_last_reward_less_the_first() -> None:
    env = make()
    _, info = env.reset(seed=0)
    image = next(image for image in env.images if image.sample_id == info["sample_id"])
    steps = [env.step(np.int64(action)) for action in (DILATE, ERODE, DILATE)]
    rewards = [step[1] for step in steps]
    assert sum(rewards) == pytest.approx(image.worth((DILATE, ERODE, DILATE)) - image.worth(()))
    assert min(rewards) < 0 < max(rewards)
    assert [step[2] for step in steps] == [False, False, True], "the longest episode ends by itself"


def test_stop_ends_the_episode_with_the_present_mask() -> None:
    env = make()
    env.reset(seed=1)
    _, _, terminated, _, before = env.step(np.int64(DILATE))
    assert not terminated
    _, reward, terminated, truncated, info = env.step(np.int64(STOP_ACTION))
    assert (reward, terminated, truncated, info["dice"]) == (0.0, True, False, before["dice"])
    with pytest.raises(gym.error.ResetNeeded):
        env.step(np.int64(0))


def test_the_observation_holds_progress_and_use() -> None:
    env = make(max_steps=4)
    env.reset(seed=0)
    observation = env.step(np.int64(ERODE))[0]
    used = observation[-STOP_ACTION:]
    assert (observation[-STOP_ACTION - 1], used[ERODE], used.sum()) == (0.25, 0.25, 0.25)


def test_a_restored_environment_goes_on_alike() -> None:
    first, second = make(), make()
    first.reset(seed=3)
    first.step(np.int64(DILATE))
    second.reset(seed=9)
    second.restore(first.state())
    for _ in range(10):
        results = [env.step(np.int64(ERODE)) for env in (first, second)]
        assert (results[0][0] == results[1][0]).all()
        assert results[0][1:3] == results[1][1:3]
        if results[0][2]:
            assert first.reset()[1] == second.reset()[1]


def test_what_cannot_be_is_refused() -> None:
    for arguments, message in ((((), 5), "images is empty"), (([known_image(0)], 0), "max_steps is 0")):
        with pytest.raises(ValueError, match=message):
            PostProcessEnv(*arguments)
    env = make()
    env.reset(seed=0)
    with pytest.raises(ValueError, match="from 0 to 11"):
        env.step(np.int64(12))
