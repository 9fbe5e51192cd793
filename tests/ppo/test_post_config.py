"""Presets of experiment 2."""

import pytest

from rl_reward_network.ppo.post_config import COMMON, PRESETS, PostSettings, with_preset


def test_the_users_settings_replace_those_of_the_preset() -> None:
    config = with_preset(PostSettings(learning_rate=1e-4, max_steps=3), "quick", seed=7)
    assert (config.learning_rate, config.max_steps, config.seed) == (1e-4, 3, 7)
    assert config.total_timesteps == PRESETS["quick"]["total_timesteps"]
    assert config.n_envs == COMMON["n_envs"]


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="max_steps is 0"):
        with_preset(PostSettings(max_steps=0), "quick")
