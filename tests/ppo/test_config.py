"""Settings of PPO: rollouts that fit, presets under the same names, and what is refused."""

from dataclasses import asdict, fields
from typing import Any

import pytest

from rl_reward_network.ppo.config import PPOSettings, PromptPPOConfig, with_preset


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
        ({"n_envs": 0}, r"^n_envs is 0\b"),
        ({"n_steps": -5}, r"^n_steps is -5\b"),
        ({"total_timesteps": -1}, r"^total_timesteps is -1\b"),
        ({"total_timesteps": 15}, r"^total_timesteps is 15\b"),
        ({"batch_size": 257}, r"^batch_size is 257\b"),
        ({"batch_size": 1}, r"^batch_size is 1\b"),
        ({"learning_rate": 0.0}, r"^learning_rate is 0\.0\b"),
        ({"learning_rate": float("nan")}, r"^learning_rate is nan\b"),
        ({"gamma": 1.1}, r"^gamma is 1\.1\b"),
        ({"max_steps": 200}, r"^n_steps is 128\b"),
        ({"seed": -1}, r"^seed is -1\b"),
    ],
)
def test_bad_settings_name_field_value_and_remedy(settings, message):
    with pytest.raises(ValueError, match=message):
        PromptPPOConfig(**settings)


def test_a_flag_is_a_setting_and_none_is_the_presets_value() -> None:
    flags, settings = ({field.name for field in fields(kind)} for kind in (PPOSettings, PromptPPOConfig))
    assert settings - flags == {"seed"}, "the seed is a flag of the whole run"
    assert None not in asdict(with_preset(PPOSettings(), "quick")).values()


@pytest.mark.parametrize(
    ("mode", "preset", "given", "expected"),
    [
        ("quick", "default", {}, {"total_timesteps": 2000, "n_envs": 2, "learning_rate": 1e-3, "batch_size": 64}),
        ("full", "default", {}, {"total_timesteps": 10000, "n_envs": 4, "learning_rate": 3e-4, "n_steps": 128}),
        ("quick", "published", {}, {"total_timesteps": 2000, "learning_rate": 3e-4}),
        ("quick", "published", {"learning_rate": 1e-3}, {"learning_rate": 1e-3}),
        ("full", "default", {"n_envs": 2}, {"n_envs": 2, "batch_size": 64}),
        ("quick", "default", {"n_envs": 1, "n_steps": 16}, {"batch_size": 16}),
        ("quick", "default", {"n_envs": 1, "n_steps": 16, "batch_size": 8}, {"batch_size": 8}),
        ("quick", "default", {}, {"stop": False, "max_steps": 1}),
        ("quick", "default", {"stop": True}, {"stop": True, "max_steps": 5, "total_timesteps": 12000, "n_envs": 2}),
        ("full", "default", {"stop": True, "max_steps": 3}, {"max_steps": 3, "total_timesteps": 20000}),
        ("quick", "default", {"gamma": 0.5}, {"gamma": 0.5, "gae_lambda": 0.95}),
    ],
)
def test_presets_are_overridden_by_the_user(
    mode: Any, preset: Any, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = with_preset(PPOSettings(**given), mode, preset, seed=7)
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.seed == 7
