"""Settings of PPO: rollouts that fit, defaults of each mode under the flags, and what is refused."""

import re
from dataclasses import asdict, replace

import pytest

from rl_reward_network.cli import operations, prompts
from rl_reward_network.flags import parse
from rl_reward_network.ppo.settings import PPOSettings, operation_settings, prompt_settings


@pytest.mark.parametrize("n_envs", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("total", [64, 500, 2000, 10000])
def test_rollouts_are_at_least_eight_and_batches_nearly_equal(n_envs, total):
    settings = PPOSettings(total_timesteps=total, n_envs=n_envs)
    rollout = settings.rollout_steps * n_envs
    assert settings.whole_timesteps // rollout >= 8
    assert settings.whole_timesteps % rollout == 0
    assert total <= settings.whole_timesteps < total + rollout
    assert 2 <= settings.even_batch <= 64
    assert rollout % settings.even_batch in (0, *range(settings.even_batch // 2, settings.even_batch))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_envs": 0}, "n_envs is 0"),
        ({"n_steps": -5}, "n_steps is -5"),
        ({"total_timesteps": -1}, "total_timesteps is -1"),
        ({"total_timesteps": 15}, "total_timesteps is 15, expected 16"),
        ({"batch_size": 1}, "batch_size is 1"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"gamma": 1.1}, "gamma is 1.1"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"max_steps": 200}, "n_steps is 128, expected 200"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_bad_settings_name_field_value_and_remedy(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        PPOSettings(**settings).of_run(seed=0)


@pytest.mark.parametrize(
    ("command", "words", "expected"),
    [
        (prompts, "quick", {"total_timesteps": 2000, "n_envs": 2, "learning_rate": 1e-3, "max_steps": 1}),
        (prompts, "full", {"total_timesteps": 10000, "n_envs": 4, "learning_rate": 3e-4, "batch_size": 64}),
        (prompts, "quick --preset published", {"total_timesteps": 2000, "learning_rate": 3e-4}),
        (prompts, "quick --preset published --learning_rate 1e-3", {"learning_rate": 1e-3}),
        (prompts, "full --n_envs 2", {"n_envs": 2, "total_timesteps": 10000, "gamma": 0.99}),
        (prompts, "full --n_envs 300", {"n_envs": 300, "total_timesteps": 10000}),
        (operations, "quick", {"total_timesteps": 24000, "n_envs": 8, "n_steps": 64, "batch_size": 128}),
        (operations, "full --learning_rate 1e-4", {"total_timesteps": 60000, "learning_rate": 1e-4, "max_steps": 5}),
    ],
)
def test_defaults_are_those_of_the_mode_and_flags_replace_them(command, words, expected):
    settings = parse(command.Args, words.split()).ppo
    assert {name: getattr(settings, name) for name in expected} == expected


def test_settings_come_back_from_json_of_this_version_and_of_others():
    for settings in (prompt_settings("full"), operation_settings("quick")):
        assert PPOSettings.from_json({**asdict(settings), "stop": False}) == settings
    assert prompt_settings("quick") == PPOSettings()
    assert prompt_settings("full").of_run(3) == replace(prompt_settings("full"), seed=3)
